"""Rows to columns and back, told once for all stores that have columns.

An enum is kept as its member's place, a line as the small number that the store's line table gives it; everything
else is kept as it is. `FromNow` becomes its offset, and the cells say at which places the store has to add its clock.
A root that is written gets the id of the change as its revision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from flowfabric.model.event import Event
from flowfabric.model.execution import LineKey
from flowfabric.rules.change import FromNow, Insert, Patch, Put
from flowfabric.stores.base import Unstorable
from flowfabric.stores.rows import TABLES, Column, Table

LineOf = Callable[[LineKey], int]
LineAt = Callable[[int], LineKey]

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

EVENT_COLUMNS: tuple[str, ...] = Event.__struct_fields__


@cache
def members(kind: type[Enum]) -> tuple[Enum, ...]:
    """The members of an enum by their stored code."""
    return tuple(kind)


# By identity: members are singletons, their hash is slow, and equal texts of two vocabularies have different codes.
CODES: dict[int, int] = {
    id(member): code
    for table in TABLES
    for column in table.columns
    if column.is_enum
    for code, member in enumerate(members(column.kind))
}


class Cells(NamedTuple):
    """Some columns of one row as they are stored; at the places in `from_now` the store's clock has to be added."""

    columns: tuple[str, ...]
    values: list[Any]
    from_now: tuple[int, ...]

    def at(self, now: int) -> list[Any]:
        """The values as of the store's now."""
        for place in self.from_now:
            self.values[place] += now
        return self.values


class RowCodec:
    """How the rows of one table become columns and back."""

    def __init__(self, table: Table) -> None:
        names = table.column_names
        self.table = table
        self.columns = names
        self.column = {column.name: column for column in table.columns}
        self.key_places = tuple(names.index(name) for name in table.key)
        self.revision_place = names.index("revision") if table.is_root and "revision" in names else None
        self._row: Callable[..., Any] = table.row
        self._enums = [(i, members(c.kind)) for i, c in enumerate(table.columns) if c.is_enum]
        self._lines = [i for i, c in enumerate(table.columns) if c.kind is LineKey]
        self._bools = [i for i, c in enumerate(table.columns) if c.kind is bool]
        self._patches: dict[tuple[str, ...], tuple[tuple[str, ...], bool]] = {}

    def key(self, row: msgspec.Struct) -> tuple[Any, ...]:
        """The key of a row."""
        values = astuple(row)
        return tuple(values[place] for place in self.key_places)

    def decode(self, stored: Sequence[Any], line_at: LineAt) -> Any:
        """The row whose columns these are, in the order of the catalogue."""
        values = list(stored)
        for place, kinds in self._enums:
            code = values[place]
            if code is not None:
                values[place] = kinds[code]
        for place in self._lines:
            if values[place] is not None:
                values[place] = line_at(values[place])
        for place in self._bools:
            if values[place] is not None:
                values[place] = bool(values[place])
        return self._row(*values)

    def row_cells(self, write: Insert | Put, change_id: int, line_of: LineOf) -> Cells:
        """All columns of the row that is written."""
        values = list(astuple(write.row))
        if self.revision_place is not None:
            values[self.revision_place] = change_id
        return Cells(self.columns, values, _encode(values, line_of))

    def patch_cells(self, patch: Patch, change_id: int, line_of: LineOf) -> Cells:
        """The columns that a patch sets, its key left aside."""
        values = list(patch.fields.values())
        columns, adds_revision = self._shape(tuple(patch.fields))
        if adds_revision:
            values.append(change_id)
        elif self.revision_place is not None:
            values[columns.index("revision")] = change_id
        return Cells(columns, values, _encode(values, line_of))

    def _shape(self, given: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """The columns of a patch with these fields, and whether the revision was added to them."""
        shape = self._patches.get(given)
        if shape is None:
            if unknown := set(given) - set(self.columns):
                raise Unstorable(f"{self.table.name} has no column {sorted(unknown)}")
            adds = self.revision_place is not None and "revision" not in given
            shape = self._patches[given] = ((*given, "revision") if adds else given, adds)
        return shape


def _encode(values: list[Any], line_of: LineOf) -> tuple[int, ...]:
    """Encode the values in place; the places that held a `FromNow`."""
    from_now: list[int] = []
    for place, value in enumerate(values):
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is FromNow:
            values[place] = value.offset
            from_now.append(place)
        elif kind is LineKey:
            values[place] = line_of(value)
        else:
            code = CODES.get(id(value))
            if code is None:
                raise Unstorable(f"no column keeps a {kind.__name__}")
            values[place] = code
    return tuple(from_now)


_PLAIN = frozenset({int, str, bytes, bool, float, type(None)})


def encode(value: Any, line_of: LineOf) -> Any:
    """One value as its column keeps it, for a condition or a place in an order."""
    if type(value) is LineKey:
        return line_of(value)
    return CODES[id(value)] if isinstance(value, Enum) else value


CODEC: dict[type[msgspec.Struct], RowCodec] = {table.row: RowCodec(table) for table in TABLES}


def check(column: Column, value: Any) -> None:
    """Refuse a value that some store could not keep in this column."""
    if value is None:
        if not column.optional:
            raise Unstorable(f"{column.name} is not optional")
    elif type(value) is not column.kind:
        raise Unstorable(f"{column.name} does not keep a {type(value).__name__}")
    else:
        _check_plain(column.name, value)


def check_events(events: Sequence[Event]) -> None:
    """Refuse an event that some store could not keep."""
    for event in events:
        for name, value in zip(EVENT_COLUMNS, astuple(event), strict=True):
            _check_plain(name, value)


def _check_plain(name: str, value: Any) -> None:
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        raise Unstorable(f"{name} needs more than 64 bits")
    if isinstance(value, str):
        if "\0" in value:
            raise Unstorable(f"{name} contains NUL")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unstorable(f"{name} is not valid Unicode") from error
