"""What a caller may hand in: sizes and shapes of free text and bytes, checked before anything else looks at them.

Every text must be one that every store can keep: valid Unicode without NUL. Every number must fit 63 bits.
"""

from __future__ import annotations

from flowfabric import errors

MAX_TEXT_BYTES = 64 * 1024
MAX_NAME_BYTES = 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_TAGS = 256
MAX_SHOWN = 200  # characters of a value in a message
MAX_INTEGER = 2**63 - 1
MAX_DURATION_MS = 10 * 365 * 24 * 60 * 60 * 1000  # ten years; a longer lease, delay or grant is a mistake
MAX_INSTANT_MS = 253_402_300_799_999  # the end of the year 9999


def preview(value: object) -> str:
    """A value as it stands in a message, of a long one the beginning; there are numbers that Python does not print."""
    try:
        whole = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return whole if len(whole) <= MAX_SHOWN else f"{whole[:MAX_SHOWN]}…"


def text(name: str, value: object, *, limit: int = MAX_TEXT_BYTES) -> str:
    """A text that every store can keep."""
    if type(value) is str and value.isascii() and value.isprintable() and len(value) <= limit:
        return value  # nearly always: the rest is for what is unusual or wrong
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
    return value if type(value) is str else str.__str__(value)  # a member of an enum is kept as the text it is


def optional_text(name: str, value: object, *, limit: int = MAX_TEXT_BYTES) -> str | None:
    """A text or nothing."""
    return None if value is None else text(name, value, limit=limit)


def payload(name: str, value: object) -> bytes:
    """Bytes to be kept as they are."""
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
    """A whole number within bounds; booleans are not numbers."""
    if type(value) is not int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise errors.InvalidInput(f"{name}: not a whole number")
        value = int(value)
    if not least <= value <= most:
        raise errors.InvalidInput(f"{name}: {preview(value)} is not within {least}..{most}")
    return value


def duration_ms(name: str, value: object, *, least: int = 1) -> int:
    """A length of time in milliseconds."""
    return integer(name, value, least=least, most=MAX_DURATION_MS)


def instant_ms(name: str, value: object) -> int:
    """Milliseconds since the epoch; ones before it are as good as its first."""
    return max(0, integer(name, value, most=MAX_INSTANT_MS))
