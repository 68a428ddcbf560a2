"""The row codec: converts rows to columns and back, for all stores that have columns.

An enum is stored as the ordinal of its member, a queue as its id in the store's queue table, and `FromNow` as an
instant. Everything else is stored as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import astuple

from flowfabric.errors import Corruption
from flowfabric.model.change import BulkInsert, Change, Delete, Patch, RowWrite, Write, at
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.stores.catalog import TABLE, TABLES, Column, Table
from flowfabric.stores.queries import Scan, UnreadableRow
from flowfabric.stores.verdicts import Unstorable

QueueEncoder = Callable[[QueueKey], int]
QueueDecoder = Callable[[int], QueueKey]

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

EVENT_COLUMNS: tuple[str, ...] = Event.__struct_fields__


def members_by_code(kind: type[Enum]) -> dict[int, Enum]:
    """Return the members of an enum by their stored code. A dict, because a negative code must not index a list."""
    return dict(enumerate(kind))


# By identity: members are singletons, their hash is slow, and equal texts of two enums have different codes.
CODES: dict[int, int] = {
    id(member): code
    for table in TABLES
    for column in table.columns
    if column.is_enum
    for code, member in members_by_code(column.kind).items()
}


class RowCodec:
    """Converts the rows of one table to columns and back."""

    def __init__(self, table: Table) -> None:
        names = table.column_names
        self.table = table
        self.columns = names
        self.column = {column.name: column for column in table.columns}
        self.key_ordinals = tuple(names.index(name) for name in table.key)
        self.revision_ordinal = names.index("revision") if table.is_aggregate_root and "revision" in names else None
        self._row: Callable[..., Any] = table.row
        self._enums = [(i, members_by_code(c.kind)) for i, c in enumerate(table.columns) if c.is_enum]
        self._queues = [i for i, c in enumerate(table.columns) if c.kind is QueueKey]
        self._bools = [i for i, c in enumerate(table.columns) if c.kind is bool]

    def key(self, row: msgspec.Struct) -> tuple[Any, ...]:
        """Return the key of a row."""
        values = astuple(row)
        return tuple(values[ordinal] for ordinal in self.key_ordinals)

    def decode(self, stored: Sequence[Any], decode_queue: QueueDecoder) -> Any:
        """Decode a row from its columns, in the order of the catalog; raise `Corruption` for an unknown enum code."""
        values = list(stored)
        try:
            for ordinal, members in self._enums:
                code = values[ordinal]
                if code is not None:
                    values[ordinal] = members[code]
        except KeyError as error:
            raise self._corruption(stored) from error
        for ordinal in self._queues:
            if values[ordinal] is not None:
                values[ordinal] = decode_queue(values[ordinal])
        for ordinal in self._bools:
            if values[ordinal] is not None:
                values[ordinal] = bool(values[ordinal])
        return self._row(*values)

    def decode_scanned(self, scan: Scan, stored: Sequence[Any], decode_queue: QueueDecoder) -> Any:
        """Decode a row of a scan; a tolerant scan gets an `UnreadableRow` for a row that cannot be decoded."""
        if not scan.tolerant:
            return self.decode(stored, decode_queue)
        try:
            return self.decode(stored, decode_queue)
        except Corruption as error:
            values = dict(zip(self.columns, stored, strict=True))
            return UnreadableRow(tuple(values[name] for name in scan.full_order), error)

    def _corruption(self, stored: Sequence[Any]) -> Corruption:
        wrong = next(ordinal for ordinal, members in self._enums if (stored[ordinal] or 0) not in members)
        name = self.table.name.removeprefix("ff_")
        return Corruption(f"{name}: {self.columns[wrong]}: {stored[wrong]} is not a known code")


def decode_counts(group_by: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[tuple[Any, ...], int]:
    """Decode rows of (value of each column…, count), where the values are columns of executions.

    Rows with an unknown enum code are omitted; a load of such an execution reports the corruption.
    """
    columns = [CODEC[Execution].column[name] for name in group_by]
    members = [(ordinal, members_by_code(column.kind)) for ordinal, column in enumerate(columns) if column.is_enum]
    counts: dict[tuple[Any, ...], int] = {}
    for *values, count in rows:
        if all(values[ordinal] in codes for ordinal, codes in members):
            for ordinal, codes in members:
                values[ordinal] = codes[values[ordinal]]
            counts[tuple(values)] = count
    return counts


def encode_column(values: Sequence[Any], encode_queue: QueueEncoder, now: int) -> Sequence[Any]:
    """Encode one column of many rows, at the store's time `now`.

    Whole columns are encoded because most of them hold one value, or only values that are stored as they are, and that
    is quick to detect.
    """
    if values.count(values[0]) == len(values):
        return encode_row(values[:1], encode_queue, now) * len(values)
    types = set(map(type, values))
    if types <= _TEXT:
        if str in types and "\0" in "".join(filter(None, values)):
            raise Unstorable("a text contains NUL")
        return values
    if types <= STORED_AS_IS:
        return values
    if FromNow in types:
        values = [value.offset + now if type(value) is FromNow else value for value in values]
    elif all(issubclass(kind, Enum) for kind in types):
        return [*map(CODES.__getitem__, map(id, values))]
    return [value if type(value) in STORED_AS_IS else encode(value, encode_queue) for value in values]


def encode_row(values: Sequence[Any], encode_queue: QueueEncoder, now: int) -> list[Any]:
    """Encode the columns of a single row."""
    encoded = []
    for value in values:
        kind = type(value)
        if kind is FromNow:
            value = value.offset + now
        elif kind is str:
            if "\0" in value:
                raise Unstorable("a text contains NUL")
        elif kind not in _NO_ENCODING:
            value = encode(value, encode_queue)
        encoded.append(value)
    return encoded


_TEXT = frozenset({str, type(None)})
_NO_ENCODING = frozenset({int, type(None), bytes, bool, float})
STORED_AS_IS = _TEXT | _NO_ENCODING


def encode(value: Any, encode_queue: QueueEncoder) -> Any:
    """Encode one value; raise `Unstorable` for a type that no column holds."""
    if type(value) in STORED_AS_IS:
        return value
    if type(value) is QueueKey:
        return encode_queue(value)
    code = CODES.get(id(value))
    if code is None:
        raise Unstorable(f"no column holds a {type(value).__name__}")
    return code


def refuse_queue(queue: QueueKey) -> int:
    """Raise `Unstorable`: the encoder for values that must not be queues."""
    raise Unstorable(f"a queue is not allowed here: {queue}")


CODEC: dict[type[msgspec.Struct], RowCodec] = {table.row: RowCodec(table) for table in TABLES}


def _key_reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda row: (get(row),)


READ_KEY = {table.row: _key_reader(table.key) for table in TABLES}  # the function that returns the key of a row


# This is a hot path: `type(...) is` costs a tenth of `isinstance` here.


def row_type_of(write: Write) -> type[msgspec.Struct]:
    """Return the type of the written row."""
    row: Any = write.row
    return row if type(write) is Patch or type(write) is Delete else type(row)


def target(write: Write) -> tuple[type[msgspec.Struct], tuple[Any, ...]]:
    """Return the type and key of the written row, as a guard names it."""
    if type(write) is Patch or type(write) is Delete:
        return write.row, write.key
    row: Any = write.row
    return type(row), READ_KEY[type(row)](row)


def expand_bulk_inserts(writes: Sequence[Write]) -> Sequence[RowWrite]:
    """Return the writes with bulk inserts replaced by single inserts."""
    expanded: list[RowWrite] = []
    for write in writes:
        if isinstance(write, BulkInsert):
            expanded += write.inserts()
        else:
            expanded.append(write)
    return expanded


def bulk_insert_columns(insert: BulkInsert, change_id: int) -> list[Sequence[Any]]:
    """Return the columns of a bulk insert: one value per row, or a single value where all rows agree."""
    codec, listed = CODEC[type(insert.row)], insert.columns
    if unknown := listed.keys() - codec.column.keys():
        raise Unstorable(f"{codec.table.name} has no column {sorted(unknown)}")
    columns = [listed.get(name, (value,)) for name, value in zip(codec.columns, astuple(insert.row), strict=True)]
    if codec.revision_ordinal is not None:
        columns[codec.revision_ordinal] = (change_id,)
    return columns


def _check_value(column: Column, value: Any) -> None:
    if value is None:
        if not column.optional:
            raise Unstorable(f"{column.name} is not optional")
    elif type(value) is not column.kind:
        raise Unstorable(f"{column.name} does not hold a {type(value).__name__}")
    else:
        _check_range(column.name, value)


def check_change(change: Change, now: int) -> None:
    """Raise `Unstorable` if some store cannot keep a value that this change writes or emits at this time."""
    for write in change.writes:
        if isinstance(write, Delete):
            continue
        column_of = CODEC[row_type_of(write)].column
        if isinstance(write, BulkInsert):
            columns = dict(zip(column_of, bulk_insert_columns(write, change.id), strict=True))
        elif isinstance(write, Patch):
            columns = {name: (value,) for name, value in write.fields.items()}
        else:
            columns = {name: (value,) for name, value in zip(column_of, astuple(write.row), strict=True)}
        if unknown := columns.keys() - column_of.keys():
            raise Unstorable(f"{TABLE[row_type_of(write)].name} has no column {sorted(unknown)}")
        for name, values in columns.items():
            for value in values:
                _check_value(column_of[name], at(value, now))
    for event in change.events:
        for name, value in zip(EVENT_COLUMNS, astuple(event), strict=True):
            _check_range(name, value)


def _check_range(name: str, value: Any) -> None:
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        raise Unstorable(f"{name} needs more than 64 bits")
    if isinstance(value, str):
        check_text(name, value)


def check_text(name: str, value: str) -> str:
    """Return a text that every store can keep, or raise `Unstorable`."""
    if "\0" in value:
        raise Unstorable(f"{name} contains NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unstorable(f"{name} is not valid Unicode") from error
    return value
