"""Cursors: our own are read back, empty means "from now on", and others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.cursors import FROM_NOW, FROM_THE_START, decode_cursor, encode_cursor
from flowfabric.errors import InvalidInput


def test_the_published_cursor_decodes_to_the_published_position() -> None:
    assert encode_cursor(12345) == bytes.fromhex("020000000000003039")
    assert decode_cursor(bytes.fromhex("020000000000003039")) == 12345


def test_an_empty_cursor_means_from_now_on_and_position_zero_means_everything() -> None:
    assert decode_cursor(FROM_NOW) is None
    assert decode_cursor(FROM_THE_START) == 0
    assert encode_cursor(0) == FROM_THE_START


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_position_is_read_back(position: int) -> None:
    assert decode_cursor(encode_cursor(position)) == position


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_later_positions_have_greater_cursors(one: int, other: int) -> None:
    assert (one < other) == (encode_cursor(one) < encode_cursor(other))


@pytest.mark.parametrize(
    "cursor",
    [
        bytes.fromhex("010000018bcfe56800000000000000002a"),  # the cursor of a key-value log
        b"\x02",
        b"\x02" + bytes(7),
        b"\x02" + bytes(9),
        b"\x00" + bytes(8),
        b"\x03" + bytes(8),
        b"12345",
    ],
)
def test_a_foreign_cursor_is_refused(cursor: bytes) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        decode_cursor(cursor)


@pytest.mark.parametrize("cursor", [None, "", "020000000000003039", 12345, [2]])
def test_a_value_that_is_not_bytes_is_no_cursor(cursor: Any) -> None:
    with pytest.raises(InvalidInput, match="cursor: not bytes"):
        decode_cursor(cursor)


@pytest.mark.parametrize("position", [2**63, -(2**63) - 1])
def test_a_position_beyond_64_bits_has_no_cursor(position: int) -> None:
    with pytest.raises(InvalidInput):
        encode_cursor(position)


@given(st.binary(max_size=20))
def test_any_bytes_are_a_position_or_invalid_input(cursor: bytes) -> None:
    try:
        position = decode_cursor(cursor)
    except InvalidInput:
        return
    assert (b"" if position is None else encode_cursor(position)) == cursor
