"""JSON that came from outside: decoded only when none of its numbers is longer than any use has for it.

Python reads an integer in time that grows with the square of its digits, so a body full of long ones would stop the
event loop for seconds. The check is two passes over the bytes at the speed of memory.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

MAX_DIGITS: Final = 309
"""Digits in a row that a number may have: as many as the largest double needs."""

_ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_TOO_MANY = b"0" * (MAX_DIGITS + 1)


class NumberTooLong(msgspec.DecodeError):
    """A number has more than `MAX_DIGITS` digits in a row."""

    def __init__(self) -> None:
        super().__init__(f"a number has more than {MAX_DIGITS} digits")


def check_numbers(data: bytes) -> None:
    """Raise `NumberTooLong` when a number outside of strings is too long; what else is wrong is for the decoder."""
    if len(data) <= MAX_DIGITS or _TOO_MANY not in data.translate(_ZEROS):
        return
    # Digits in a string are no number. Escapes go first, so that every quote left begins or ends a string.
    plain = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    digits = plain.translate(_ZEROS)
    outside = 0
    while (found := digits.find(_TOO_MANY, outside)) >= 0:
        if plain.count(b'"', outside, found) % 2 == 0:
            raise NumberTooLong()
        if (outside := plain.find(b'"', found) + 1) == 0:
            return


def decode(data: bytes | str) -> Any:
    """The value of a JSON text; `msgspec.DecodeError` or `RecursionError` when it is none."""
    try:
        octets = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise msgspec.DecodeError("not valid Unicode") from None
    check_numbers(octets)
    try:
        return msgspec.json.decode(octets)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("not valid UTF-8") from None
