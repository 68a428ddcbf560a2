"""Validation of text, bytes and numbers that callers pass in, before any rule sees them.

Every text must be valid Unicode without NUL, so that every store can keep it. Every number must fit 63 bits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from flowfabric import errors

E = TypeVar("E", bound=StrEnum)

MAX_TEXT_BYTES = 64 * 1024
MAX_NAME_BYTES = 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_TAGS = 256
MAX_SHOWN = 200  # characters of a value in a message
MAX_INTEGER = 2**63 - 1
MAX_DURATION_MS = 10 * 365 * 24 * 60 * 60 * 1000  # ten years; a longer lease, delay or grant is a mistake
MAX_INSTANT_MS = 253_402_300_799_999  # the end of the year 9999


def preview(value: object) -> str:
    """Return a value as shown in a message, truncated if it is long. Python refuses to print some huge numbers."""
    try:
        whole = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return whole if len(whole) <= MAX_SHOWN else f"{whole[:MAX_SHOWN]}…"


def text(name: str, value: object, *, limit: int = MAX_TEXT_BYTES) -> str:
    """Return a text that every store can keep, or raise `InvalidInput`."""
    if type(value) is str and value.isascii() and value.isprintable() and len(value) <= limit:
        return value  # the common case, checked cheaply
    if not isinstance(value, str):
        raise errors.InvalidInput(f"{name}: not a text")
    if "\x00" in value:
        raise errors.InvalidInput(f"{name}: contains NUL")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise errors.InvalidInput(f"{name}: not valid Unicode") from None
    if size > limit:
        raise errors.InvalidInput(f"{name}: {size} bytes, the limit is {limit}")
    return value if type(value) is str else str.__str__(value)  # a str enum member becomes plain text


def optional_text(name: str, value: object, *, limit: int = MAX_TEXT_BYTES) -> str | None:
    """Return a valid text or None."""
    return None if value is None else text(name, value, limit=limit)


def name(field: str, value: object) -> str:
    """Return a valid text that is short enough for a name."""
    return text(field, value, limit=MAX_NAME_BYTES)


def optional_name(field: str, value: object) -> str | None:
    """Return a valid name or None."""
    return None if value is None else text(field, value, limit=MAX_NAME_BYTES)


def choice(kind: type[E], name: str, value: object) -> E:
    """Return the member of an enum with this value, or raise `InvalidInput`, which names all of them."""
    try:
        return kind(value)  # type: ignore[arg-type]  # any value is refused that is none
    except ValueError:
        raise errors.InvalidInput(f"{name}: {preview(value)} is not one of {', '.join(kind)}") from None


def payload(name: str, value: object) -> bytes:
    """Return bytes within the size limit."""
    if type(value) is bytes:
        data = value
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    else:
        raise errors.InvalidInput(f"{name}: not bytes")
    if len(data) > MAX_PAYLOAD_BYTES:
        raise errors.PayloadTooLarge(f"{name}: {len(data)} bytes, the limit is {MAX_PAYLOAD_BYTES}")
    return data


def integer(name: str, value: object, *, least: int = -MAX_INTEGER, most: int = MAX_INTEGER) -> int:
    """Return a whole number within bounds; booleans are refused."""
    if type(value) is not int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise errors.InvalidInput(f"{name}: not a whole number")
        value = int(value)
    if not least <= value <= most:
        raise errors.InvalidInput(f"{name}: {preview(value)} is not within {least}..{most}")
    return value


def duration_ms(name: str, value: object, *, least: int = 1) -> int:
    """Return a duration in milliseconds."""
    return integer(name, value, least=least, most=MAX_DURATION_MS)


def instant_ms(name: str, value: object) -> int:
    """Return milliseconds since the epoch; earlier instants become 0."""
    return max(0, integer(name, value, most=MAX_INSTANT_MS))
