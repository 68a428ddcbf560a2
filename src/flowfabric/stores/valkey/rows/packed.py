"""Rows that are packed here instead of by a function (`lua/packed.lua`), byte for byte as a function would pack them.

Instants from now are left out of the blob, and the function inserts them. A row with a value that a function might pack
in another way is not packed here: `None` is returned and the row is interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from flowfabric.stores.valkey.rows.codec import EncodedCell, Offset, ValkeyTable, biased_hex, integer

_SCORE, _SCORE_FROM_NOW, _MEMBER, _MEMBER_FROM_NOW = 0, 1, 2, 3
_encode = msgspec.msgpack.Encoder().encode
_PLAIN = frozenset({int, str, bool})


class PackedRow(msgspec.Struct, frozen=True, gc=False):
    """A blob without its instants, these as (bytes before it, offset) pairs, and the row's index entries."""

    blob: bytes
    instants: list[int | str] | None
    entries: list[int | str]


def pack_row(table: ValkeyTable, cells: Sequence[EncodedCell]) -> PackedRow | None:
    """Pack a row; None if it must be interpreted."""
    entries = index_entries(table, cells)
    if entries is None:
        return None
    content, place = b"", table.bytes_place
    if place is not None:
        cell = cells[place - 1]
        if type(cell) is bytes:
            content, cells = cell, [*cells[: place - 1], True, *cells[place:]]
    # Beside their bytes, rows of such a table hold few different values.
    packed = pack_cells(cells) if place is None else _pack_again(table.number, tuple(cells))
    if packed is None:
        return None
    array, instants = packed
    if place is None:
        return PackedRow(array, instants, entries)
    if instants is not None:  # the length of the array is not known here
        return None
    return PackedRow(len(array).to_bytes(4, "big") + array + content, None, entries)


@lru_cache(1024)
def _pack_again(table: int, cells: tuple[EncodedCell, ...]) -> tuple[bytes, list[int | str] | None] | None:
    """Pack the cells of a row of this table, where equal cells have the same type."""
    return pack_cells(cells)


def pack_cells(cells: Sequence[EncodedCell]) -> tuple[bytes, list[int | str] | None] | None:
    """Pack cells up to the last one that is set; None if one of them is neither an integer, a text nor an instant."""
    end = len(cells)
    while end and (cells[end - 1] is None or cells[end - 1] is False):
        end -= 1
    parts = [bytes((0x90 + end,)) if end < 16 else b"\xdc" + end.to_bytes(2, "big")]
    instants, size, run = list[int | str](), len(parts[0]), list[Any]()
    for cell in cells[:end]:
        if type(cell) in _PLAIN:
            run.append(cell)
        elif cell is None:
            run.append(False)
        elif type(cell) is Offset:
            if run:
                parts.append(_joined(run))
                size += len(parts[-1])
                run = []
            instants += [size, cell.offset]
        else:
            return None
    if run:
        parts.append(_joined(run))
    return b"".join(parts), instants or None


def _joined(cells: list[Any]) -> bytes:
    """Pack cells without the head of an array."""
    return _encode(cells)[1 if len(cells) < 16 else 3 :]


def index_entries(table: ValkeyTable, cells: Sequence[EncodedCell]) -> list[int | str] | None:
    """Return what the indexes hold for a row, four values for each that holds it; None if it must be interpreted."""
    entries = list[int | str]()
    for number, index in enumerate(table.indexes.values(), 1):
        if index.place is None:
            return None  # the entry begins with a part of the key, which this row need not have to itself
        cell = cells[index.place - 1] if index.place <= len(cells) else None
        if cell is None or cell is False:
            continue
        if index.is_score:
            if type(cell) is Offset:
                entries += [number, _SCORE_FROM_NOW, cell.offset, 0]
            elif type(cell) is int or type(cell) is str:
                entries += [number, _SCORE, cell, 0]
            else:
                return None
            continue
        if type(cell) is not str:
            return None
        if index.rank_place is None:
            entries += [number, _MEMBER, f"{cell}\0", 0]
            continue
        rank = cells[index.rank_place - 1] if index.rank_place <= len(cells) else None
        if type(rank) is Offset:
            entries += [number, _MEMBER_FROM_NOW, f"{cell}\0", rank.offset]
        elif type(rank) is int or type(rank) is str:
            entries += [number, _MEMBER, f"{cell}\0{biased_hex(integer(rank))}", 0]
        else:
            return None
    return entries
