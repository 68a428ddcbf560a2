"""The row codec of Valkey: rows to key texts and blobs, and back.

**Key text.** The columns of the key joined by NUL, which no text contains, so that the order of the bytes is the order
of the keys and a prefix of a key is a prefix of the text. The id that names the partition is stored without its tag:
`{fp:7}:0190…` becomes `{0190…`. An integer becomes a letter for the number of its hexadecimal digits, and the digits.

**Blob.** A msgpack array of cells in the order of `layout.py`, cut after the last set cell. Lua has doubles only, so
an integer of 2^53 or more (or of -2^53 or less) is a text of 16 hexadecimal digits, of the value plus 2^63, and so is
every revision. A queue is the digest of its key, an enum the ordinal of its member, a boolean 0 or 1 (False is unset in
the columns `UNSET_IF_FALSE`). An unset cell is nil, or false where a function has written it.

**Bytes.** Lua cannot unpack msgpack's binary type. A table with a bytes column stores `length, cells, content`, and the
cell says whether the content is set; the functions copy the content unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import takewhile
from typing import Any

import msgspec
from msgspec.structs import astuple

from flowfabric.errors import Corruption
from flowfabric.model.event import Event
from flowfabric.model.execution import QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.stores.catalog import TABLES, Column, HomeKind, Index, Table
from flowfabric.stores.codec import CODEC, CODES, INT_MAX, INT_MIN, check_text
from flowfabric.stores.homes import HomeTag
from flowfabric.stores.valkey.rows.layout import LAYOUT, UNSET_IF_FALSE
from flowfabric.stores.verdicts import Unstorable

Cell = int | str | bool | float | None
DigestOf = Callable[[QueueKey], str]
QueueOf = Callable[[Any], QueueKey]

EXACT = 2**53  # the integers below are exact as doubles
_BIAS = 2**63
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def biased_hex(value: int) -> str:
    """Return 16 hexadecimal digits that are ordered like the integers."""
    return f"{value + _BIAS:016x}"


def wide_integer(value: int) -> int | str:
    """Return an integer as a cell."""
    return value if -EXACT < value < EXACT else biased_hex(value)


def integer(cell: Any) -> int:
    """Return the integer that a cell holds."""
    return int(cell, 16) - _BIAS if type(cell) is str else int(cell)


class Offset(msgspec.Struct, frozen=True, gc=False):
    """A cell that the store's clock completes: the instant this many milliseconds from now."""

    offset: int | str


EncodedCell = Cell | Offset | bytes


class ValkeyTable:
    """The names and conversions of one table."""

    def __init__(self, table: Table, number: int) -> None:
        self.table = table
        self.number = number  # of the table in the library
        self.name = table.name.removeprefix("ff_")
        self.layout = LAYOUT[table.name]
        self.width = len(self.layout)
        self.place = {name: place for place, name in enumerate(self.layout, 1)}  # Lua counts from 1
        self._unset_if_false = {name: self.place[name] - 1 for name in UNSET_IF_FALSE.get(table.name, ())}
        self.column = {column.name: column for column in table.columns}
        self.key_columns = tuple(self.column[name] for name in table.key)
        self.bytes_place = next((self.place[c.name] for c in table.columns if c.kind is bytes), None)
        self.revision_place = self.place.get("revision") if table.is_aggregate_root else None
        self.is_listed = len(table.key) > 1 or table.name in _LISTED
        self.indexes = {index.columns[0]: ValkeyIndex(self, index) for index in table.indexes}
        home = table.home
        self._tagged = table.key.index(home[0]) if home is not None and home[1] is HomeKind.EXECUTION else None
        self.is_tagged_first = self._tagged == 0  # ordered by the tag first
        self._is_one_id = self.is_tagged_first and len(self.key_columns) == 1
        self._cell_columns = [self.column[name] for name in self.layout]
        defaults = _defaults(table)
        self.codec = CODEC[table.row]
        self._sources = [
            table.key.index(name) - len(table.key) if name in table.key else self.place[name] - 1
            for name in table.column_names
        ]
        self._plain = [
            (ordinal, self._converter(column), defaults.get(column.name))
            for ordinal, column in enumerate(table.columns)
            if column.name not in table.key and (column.kind in (int, float) or not column.optional)
        ]
        self._bytes_ordinal = next((i for i, c in enumerate(table.columns) if c.kind is bytes), None)

    @property
    def suffixes(self) -> list[str]:
        """The ends of the names of all keys that hold this table in one partition."""
        listed = [f"{self.name}:k"] if self.is_listed else []
        return [self.name, *listed, *(index.suffix for index in self.indexes.values())]

    # Keys

    def key_text(self, key: Sequence[Any], home: HomeTag | str) -> str:
        """Return the text of a key or of a key prefix; raise `Unstorable` if no row has such a key."""
        if self._is_one_id and len(key) == 1 and type(key[0]) is str:
            return check_text(self.key_columns[0].name, _without_tag(key[0], home))
        parts = []
        for ordinal, (column, value) in enumerate(zip(self.key_columns, key, strict=False)):
            if type(value) is str:
                own = _without_tag(value, home) if ordinal == self._tagged else value
                parts.append(check_text(column.name, own))
            elif type(value) is int:
                parts.append(_integer_text(value))
            elif isinstance(value, Enum):
                parts.append(_integer_text(CODES[id(value)]))
            else:
                raise Unstorable(f"{column.name} does not hold a {type(value).__name__}")
        return "\0".join(parts)

    def prefix_text(self, key: Sequence[Any], home: HomeTag | str) -> str:
        """Return the text with which the keys begin that have this prefix."""
        text = self.key_text(key, home)
        return text + "\0" if key else text

    def key(self, text: str, home: HomeTag | str) -> tuple[Any, ...]:
        """Return the key with this text."""
        parts: list[Any] = text.split("\0") if len(self.key_columns) > 1 else [text]
        for ordinal, column in enumerate(self.key_columns):
            if ordinal == self._tagged:
                if parts[ordinal].startswith("{") and "}" not in parts[ordinal]:
                    parts[ordinal] = f"{home}:{parts[ordinal][1:]}"
            elif column.kind is not str:
                parts[ordinal] = _parse_integer_text(parts[ordinal])
        return tuple(parts)

    # Cells

    def encode_value(self, name: str, value: Any, digest_of: DigestOf) -> EncodedCell:
        """Encode the value of one column; raise `Unstorable` if no store keeps it."""
        column = self.column.get(name)
        if column is None:
            raise Unstorable(f"{self.table.name} has no column {name!r}")
        cell = _encode_value(column, value, digest_of)
        return None if value is False and name in self._unset_if_false else cell

    def encode_row(self, row: msgspec.Struct, digest_of: DigestOf) -> list[EncodedCell]:
        """Encode all columns of a row but its key, in the order of the layout."""
        for column in self.key_columns:
            _encode_value(column, getattr(row, column.name), digest_of)
        cells = [_encode_value(column, getattr(row, column.name), digest_of) for column in self._cell_columns]
        for place in self._unset_if_false.values():
            cells[place] = cells[place] or None
        return cells

    def decode(self, key: Sequence[Any], blob: bytes, queue_of: QueueOf) -> Any:
        """Decode a row; raise `Corruption` if it holds an unknown enum code."""
        return self.codec.decode(self.stored(key, blob), queue_of)

    def stored(self, key: Sequence[Any], blob: bytes) -> list[Any]:
        """Return the columns of a row in the order of the catalog, with enums as codes and queues as digests."""
        content: bytes | None = None
        if self.bytes_place is not None:
            length = int.from_bytes(blob[:4], "big")
            content, blob = blob[4 + length :], blob[4 : 4 + length]
        cells = _decode(blob)
        count = len(cells)
        if count < self.width:
            cells += [None] * (self.width - count)
        elif count > self.width:
            del cells[self.width :]
        cells += key
        values = [None if cells[source] is False else cells[source] for source in self._sources]
        for ordinal, convert, default in self._plain:
            value = values[ordinal]
            if value is None:
                values[ordinal] = default
            elif convert is not None:
                values[ordinal] = convert(value)
        if self._bytes_ordinal is not None:
            values[self._bytes_ordinal] = content if values[self._bytes_ordinal] else None
        return values

    @staticmethod
    def _converter(column: Column) -> Callable[[Any], Any] | None:
        if column.kind is int:
            return integer
        return float if column.kind is float else None


class ValkeyIndex:
    """An ordered index of a table: by instant (or another integer) as a score, or by text in the members.

    The text is a column, or the beginning of the key (`key_parts` columns of it); an integer may follow, the rank.
    """

    def __init__(self, table: ValkeyTable, index: Index) -> None:
        first = table.column[index.columns[0]]
        self.columns = index.columns
        self.place = table.place.get(first.name)
        self.key_parts = 0 if self.place else len(list(takewhile(table.table.key.__contains__, index.columns)))
        if set(index.columns[: self.key_parts]) != set(table.table.key[: self.key_parts]):
            raise TypeError(f"{table.table.name}: an index begins with other columns than the key")
        self.is_score = first.kind is int
        self.suffix = f"{table.name}:{first.name}"
        after_text = index.columns[self.key_parts or 1 :]
        has_rank = not self.is_score and after_text and after_text[0] not in table.table.key
        self.rank = after_text[0] if has_rank else None
        self.rank_place = None if self.rank is None else table.place[self.rank]

    def key_text(self, member: str) -> str:
        """Return the key text that ends a member of a text index."""
        start = 0
        for _ in range(self.key_parts or 1):
            start = member.index("\0", start) + 1
        return member[start + (16 if self.rank_place is not None else 0) :]


def _without_tag(execution_id: str, home: HomeTag | str) -> str:
    """Return an execution id in the form that key texts of its partition contain."""
    size = len(home)
    is_tagged = execution_id.startswith(home) and execution_id[size : size + 1] == ":"
    return "{" + execution_id[size + 1 :] if is_tagged else execution_id


def _encode_value(column: Column, value: Any, digest_of: DigestOf) -> EncodedCell:
    kind = type(value)
    if kind is str:
        if column.kind is not str:
            raise Unstorable(f"{column.name} does not hold a text")
        if "\0" in value or not value.isascii():
            return check_text(column.name, value)
        return value  # type: ignore[no-any-return]
    if value is None:
        if not column.optional:
            raise Unstorable(f"{column.name} is not optional")
        return None
    if kind is int:
        if column.kind is not int:
            raise Unstorable(f"{column.name} does not hold an integer")
        if -EXACT < value < EXACT:
            return biased_hex(value) if column.name == "revision" else value
        if not INT_MIN <= value <= INT_MAX:
            raise Unstorable(f"{column.name} needs more than 64 bits")
        return biased_hex(value)
    if kind is FromNow:
        if column.kind is not int:
            raise Unstorable(f"{column.name} does not hold an instant")
        if not INT_MIN <= value.offset <= INT_MAX:
            raise Unstorable(f"{column.name} needs more than 64 bits")
        return Offset(wide_integer(value.offset))
    if kind is not column.kind:
        raise Unstorable(f"{column.name} does not hold a {kind.__name__}")
    if kind is QueueKey:
        return digest_of(value)
    if issubclass(kind, Enum):
        return CODES[id(value)]
    if kind is bool:
        return int(value)
    return value  # type: ignore[no-any-return]


def _integer_text(value: int) -> str:
    if value < 0:
        if value < INT_MIN:
            raise Unstorable("a key needs more than 64 bits")
        return "-" + biased_hex(value)
    if value > INT_MAX:
        raise Unstorable("a key needs more than 64 bits")
    digits = f"{value:x}"
    return chr(0x60 + len(digits)) + digits


def _parse_integer_text(text: str) -> int:
    return integer(text[1:]) if text[0] == "-" else int(text[1:], 16)


def _defaults(table: Table) -> Mapping[str, Any]:
    """Return the defaults of the columns that cannot be unset, for rows that an earlier release wrote."""
    fields = msgspec.structs.fields(table.row)
    required = {column.name: column for column in table.columns if not column.optional}
    return {
        field.name: CODES.get(id(field.default), field.default)
        for field in fields
        if field.name in required and field.default is not msgspec.NODEFAULT
    }


_LISTED = {"ff_exec_core", "ff_flow_core", "ff_api_token", "ff_cancel_backlog", "ff_sweep", "ff_partition_config"}

VALKEY_TABLES: dict[type[msgspec.Struct], ValkeyTable] = {
    table.row: ValkeyTable(table, number) for number, table in enumerate(TABLES, 1)
}


# Events

EVENT_COLUMNS = Event.__struct_fields__
EVENT_PLACE = {name: place for place, name in enumerate(EVENT_COLUMNS, 1)}
_EVENT_INTEGERS = tuple(i for i, name in enumerate(EVENT_COLUMNS) if name in ("lease_epoch", "attempt_index"))


def event_key(execution_id: str, home: HomeTag | str) -> str:
    """Return the text under which the history of an execution, or of a flow, is kept."""
    return _without_tag(execution_id, home)


def encode_event(event: Event, home: HomeTag | str) -> tuple[str, bytes]:
    """Return the history key and the blob of an event; raise `Unstorable` if no store keeps it."""
    values: list[Any] = list(astuple(event))
    for name, value in zip(EVENT_COLUMNS, values, strict=True):
        if type(value) is str:
            check_text(name, value)
    for ordinal in _EVENT_INTEGERS:
        if values[ordinal] is not None:
            if not INT_MIN <= values[ordinal] <= INT_MAX:
                raise Unstorable(f"{EVENT_COLUMNS[ordinal]} needs more than 64 bits")
            values[ordinal] = wide_integer(values[ordinal])
    values[0] = event_key(event.execution_id, home)
    while values[-1] is None:
        values.pop()
    return values[0], _encode(values)


def decode_event(blob: bytes, home: HomeTag | str) -> Event:
    """Decode an event; cells that a later release appended are ignored."""
    try:
        values: list[Any] = [None if value is False else value for value in _decode(blob)[: len(EVENT_COLUMNS)]]
    except msgspec.DecodeError as error:
        raise Corruption("feed: an event cannot be decoded") from error
    for ordinal in _EVENT_INTEGERS:
        if len(values) > ordinal and values[ordinal] is not None:
            values[ordinal] = integer(values[ordinal])
    if values[0].startswith("{") and "}" not in values[0]:
        values[0] = f"{home}:{values[0][1:]}"
    return Event(*values)
