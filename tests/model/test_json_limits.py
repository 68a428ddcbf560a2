"""JSON input: the number of digits of a number is limited at any position."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric import json_limits
from flowfabric.json_limits import MAX_DIGITS, NumberTooLong

LONG = b"9" * (MAX_DIGITS + 1)
FITS = b"9" * MAX_DIGITS


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        b"-" + LONG,
        b"[1, " + LONG + b"]",
        b'{"a": "b", "c": ' + LONG + b"}",
        b'["\\\\", ' + LONG + b"]",
        b'["\\"", ' + LONG + b"]",
        b'["' + LONG + b'", ' + LONG + b"]",
        b"0." + LONG,
        b"1e" + LONG,
    ],
)
def test_a_number_with_too_many_digits_is_refused_before_it_is_parsed(text: bytes) -> None:
    with pytest.raises(NumberTooLong):
        json_limits.check_numbers(text)
    with pytest.raises(msgspec.DecodeError):
        json_limits.decode(text)


@pytest.mark.parametrize(
    "text",
    [
        FITS,
        b"[" + FITS + b"," + FITS + b"]",
        b'"' + LONG + b'"',
        b'["\\"' + LONG + b'"]',
        b'["\\\\\\"' + LONG + b'", 1]',
        b'{"' + LONG + b'": 1, "a": "' + LONG + b'"}',
        b"{}",
    ],
)
def test_digits_in_strings_and_numbers_of_allowed_length_are_parsed(text: bytes) -> None:
    assert json_limits.decode(text) == msgspec.json.decode(text)


def test_text_that_is_not_json_raises_one_kind_of_error() -> None:
    for text in (b"\xff", b'"\xff"', "\ud800", b"{", b'"' + LONG, b""):
        with pytest.raises(msgspec.DecodeError):
            json_limits.decode(text)
