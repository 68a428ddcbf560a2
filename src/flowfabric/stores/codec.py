"""Rows to columns and back, told once for all stores that have columns.

An enum is kept as its member's place, a line as the small number that the store's line table gives it, `FromNow` as the
instant that it means; everything else is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import astuple

from flowfabric.errors import Corruption
from flowfabric.model.change import BulkInsert, Delete, FromNow, Patch, RowWrite, Write
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.catalog import TABLES, Column, Table
from flowfabric.stores.port import Unstorable
from flowfabric.stores.queries import Scan, UnreadableRow

QueueEncoder = Callable[[QueueKey], int]
QueueDecoder = Callable[[int], QueueKey]

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

EVENT_COLUMNS: tuple[str, ...] = Event.__struct_fields__


def members_by_code(kind: type[Enum]) -> dict[int, Enum]:
    """The members of an enum by their stored code. Not a list: what is less than nothing would count from its end."""
    return dict(enumerate(kind))


# By identity: members are singletons, their hash is slow, and equal texts of two vocabularies have different codes.
CODES: dict[int, int] = {
    id(member): code
    for table in TABLES
    for column in table.columns
    if column.is_enum
    for code, member in members_by_code(column.kind).items()
}


class RowCodec:
    """How the rows of one table become columns and back."""

    def __init__(self, table: Table) -> None:
        names = table.column_names
        self.table = table
        self.columns = names
        self.column = {column.name: column for column in table.columns}
        self.key_ordinals = tuple(names.index(name) for name in table.key)
        self.revision_ordinal = names.index("revision") if table.is_aggregate_root and "revision" in names else None
        self._row: Callable[..., Any] = table.row
        self._enums = [(i, members_by_code(c.kind)) for i, c in enumerate(table.columns) if c.is_enum]
        self._lines = [i for i, c in enumerate(table.columns) if c.kind is QueueKey]
        self._bools = [i for i, c in enumerate(table.columns) if c.kind is bool]

    def key(self, row: msgspec.Struct) -> tuple[Any, ...]:
        """The key of a row."""
        values = astuple(row)
        return tuple(values[place] for place in self.key_ordinals)

    def decode(self, stored: Sequence[Any], line_at: QueueDecoder) -> Any:
        """The row whose columns these are, in the order of the catalogue; `Corruption` for a code of no member."""
        values = list(stored)
        try:
            for place, kinds in self._enums:
                code = values[place]
                if code is not None:
                    values[place] = kinds[code]
        except KeyError as fault:
            raise self._unreadable(stored) from fault
        for place in self._lines:
            if values[place] is not None:
                values[place] = line_at(values[place])
        for place in self._bools:
            if values[place] is not None:
                values[place] = bool(values[place])
        return self._row(*values)

    def decode_scanned(self, scan: Scan, stored: Sequence[Any], line_at: QueueDecoder) -> Any:
        """The same for a row of a list; of a tolerant one, `Unreadable` in place of a row that cannot be read."""
        if not scan.tolerant:
            return self.decode(stored, line_at)
        try:
            return self.decode(stored, line_at)
        except Corruption as fault:
            values = dict(zip(self.columns, stored, strict=True))
            return UnreadableRow(tuple(values[name] for name in scan.full_order), fault)

    def _unreadable(self, stored: Sequence[Any]) -> Corruption:
        wrong = next(place for place, kinds in self._enums if (stored[place] or 0) not in kinds)
        name = self.table.name.removeprefix("ff_")
        return Corruption(f"{name}: {self.columns[wrong]}: {stored[wrong]} stands for nothing")


def decode_counts(by: Sequence[str], found: Iterable[Sequence[Any]]) -> dict[tuple[Any, ...], int]:
    """Counts by the values of an execution's columns, of which the stores keep codes; each ends with its number.

    A code of no member is left out: who reads that execution is told.
    """
    columns = [CODEC[Execution].column[name] for name in by]
    kinds = [(place, members_by_code(column.kind)) for place, column in enumerate(columns) if column.is_enum]
    counts: dict[tuple[Any, ...], int] = {}
    for *values, count in found:
        if all(values[place] in codes for place, codes in kinds):
            for place, codes in kinds:
                values[place] = codes[values[place]]
            counts[tuple(values)] = count
    return counts


def encode_column(values: Sequence[Any], line_of: QueueEncoder, now: int) -> Sequence[Any]:
    """The values that many rows have for one column, as they are stored at `now`.

    A column at a time, because most columns hold one value, or nothing that needs encoding, and that is quickly seen.
    """
    if values.count(values[0]) == len(values):
        return encode_row(values[:1], line_of, now) * len(values)
    kinds = set(map(type, values))
    if kinds <= _TEXT:
        if str in kinds and "\0" in "".join(filter(None, values)):
            raise Unstorable("a text contains NUL")
        return values
    if kinds <= STORED_AS_IS:
        return values
    if FromNow in kinds:
        values = [value.offset + now if type(value) is FromNow else value for value in values]
    elif all(issubclass(kind, Enum) for kind in kinds):
        return [*map(CODES.__getitem__, map(id, values))]
    return [value if type(value) in STORED_AS_IS else encode(value, line_of) for value in values]


def encode_row(values: Sequence[Any], line_of: QueueEncoder, now: int) -> list[Any]:
    """The same for the columns of a row that is written alone: looking at each column costs more than it saves."""
    encoded = []
    for value in values:
        kind = type(value)
        if kind is FromNow:
            value = value.offset + now
        elif kind is str:
            if "\0" in value:
                raise Unstorable("a text contains NUL")
        elif kind not in _BARE:
            value = encode(value, line_of)
        encoded.append(value)
    return encoded


_TEXT = frozenset({str, type(None)})
_BARE = frozenset({int, type(None), bytes, bool, float})
STORED_AS_IS = _TEXT | _BARE  # types whose values every column of theirs keeps as they are


def encode(value: Any, line_of: QueueEncoder) -> Any:
    """One value as its column keeps it."""
    if type(value) in STORED_AS_IS:
        return value
    if type(value) is QueueKey:
        return line_of(value)
    code = CODES.get(id(value))
    if code is None:
        raise Unstorable(f"no column keeps a {type(value).__name__}")
    return code


def refuse_queue(line: QueueKey) -> int:
    """Where no line may be named."""
    raise Unstorable(f"no line may stand here: {line}")


CODEC: dict[type[msgspec.Struct], RowCodec] = {table.row: RowCodec(table) for table in TABLES}


def _key_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda row: (get(row),)


_KEY = {table.row: _key_of(table.key) for table in TABLES}


# By type, not by instance: a look at the class alone costs a tenth, and every write of a batch is asked.


def row_type_of(write: Write) -> type[msgspec.Struct]:
    """The kind of row that is written."""
    row: Any = write.row
    return row if type(write) is Patch or type(write) is Delete else type(row)


def target(write: Write) -> tuple[type[msgspec.Struct], tuple[Any, ...]]:
    """The row that is written, as a guard would name it."""
    if type(write) is Patch or type(write) is Delete:
        return write.row, write.key
    row: Any = write.row
    return type(row), _KEY[type(row)](row)


def expand_bulk_inserts(writes: Sequence[Write]) -> Sequence[RowWrite]:
    """The writes with copies told row by row, for whoever has no shorter way."""
    found: list[RowWrite] = []
    for write in writes:
        if isinstance(write, BulkInsert):
            found += write.inserts()
        else:
            found.append(write)
    return found


def bulk_insert_columns(copies: BulkInsert, change_id: int) -> list[Sequence[Any]]:
    """What each column of such rows holds: a value a row, or a single one where all of them are alike."""
    codec, own = CODEC[type(copies.row)], copies.columns
    if unknown := own.keys() - codec.column.keys():
        raise Unstorable(f"{codec.table.name} has no column {sorted(unknown)}")
    columns = [own.get(name, (value,)) for name, value in zip(codec.columns, astuple(copies.row), strict=True)]
    if codec.revision_ordinal is not None:
        columns[codec.revision_ordinal] = (change_id,)
    return columns


def check_value(column: Column, value: Any) -> None:
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
