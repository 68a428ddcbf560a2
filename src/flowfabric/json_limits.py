"""Decoding of JSON from outside, which refuses numbers that are too long to be useful.

Python parses an integer in time quadratic in its digits, so a body full of long numbers would block the event loop for
seconds. The check is two passes over the bytes at memory speed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

MAX_DIGITS: Final = 309
"""The largest number of consecutive digits: as many as the largest double has."""

_DIGITS_AS_ZERO = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_TOO_MANY = b"0" * (MAX_DIGITS + 1)


class NumberTooLong(msgspec.DecodeError):
    """A number has more than `MAX_DIGITS` digits in a row."""

    def __init__(self) -> None:
        super().__init__(f"a number has more than {MAX_DIGITS} digits")


def check_numbers(data: bytes) -> None:
    """Raise `NumberTooLong` if a number outside of strings is too long; other errors are left to the decoder."""
    if len(data) <= MAX_DIGITS or _TOO_MANY not in data.translate(_DIGITS_AS_ZERO):
        return
    # Digits in a string are not a number. Escapes are removed first, so that every quote begins or ends a string.
    plain = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    digits = plain.translate(_DIGITS_AS_ZERO)
    outside = 0
    while (start := digits.find(_TOO_MANY, outside)) >= 0:
        if plain.count(b'"', outside, start) % 2 == 0:
            raise NumberTooLong()
        if (outside := plain.find(b'"', start) + 1) == 0:
            return


def decode(data: bytes | str) -> Any:
    """Decode a JSON text. Raises `msgspec.DecodeError` or `RecursionError`."""
    try:
        octets = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise msgspec.DecodeError("not valid Unicode") from None
    check_numbers(octets)
    try:
        return msgspec.json.decode(octets)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("not valid UTF-8") from None
