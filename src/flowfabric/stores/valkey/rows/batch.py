"""Changes as arguments of the function `commit` (`lua/commit.lua`): one batch for each partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.ids import PartitionCounts
from flowfabric.model.change import BulkInsert, Change, Delete, Guard, Insert, Patch, RowTemplate, Upsert
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.codec import INT_MAX, INT_MIN, READ_KEY, row_type_of
from flowfabric.stores.homes import HomeTag, home_of_change
from flowfabric.stores.valkey.rows.codec import (
    VALKEY_TABLES,
    DigestOf,
    EncodedCell,
    Offset,
    ValkeyTable,
    biased_hex,
    encode_event,
    wide_integer,
)
from flowfabric.stores.valkey.rows.packed import PackedRow, pack_row
from flowfabric.stores.valkey.rows.templates import template_form
from flowfabric.stores.verdicts import Unstorable

MAX_CHANGES = 200  # changes of one call; longer calls would block all other clients
MAX_COST = 1000  # of the writes before the last change of a call; one row costs 1
PREFIX_COST = 3  # of a deletion by prefix, which finds the rows first
_INSERT, _UPSERT, _PATCH, _DELETE, _DELETE_PREFIX, _PACKED_INSERT, _PACKED_UPSERT = 1, 2, 3, 4, 5, 6, 7
_PACKED = {_INSERT: _PACKED_INSERT, _UPSERT: _PACKED_UPSERT}
_ABSENT, _REVISION, _LEASE, _EXPECTED = 0, 1, 2, 3
_DELETIONS = (_DELETE, _DELETE_PREFIX)
_FIRST_BLOB = 4  # the number of the first blob among the arguments, as Lua counts
_encode = msgspec.msgpack.Encoder().encode


class PartitionBatch:
    """The changes of one partition, as the arguments of one call."""

    def __init__(self, home: HomeTag, digest_of: DigestOf, *, packs: bool) -> None:
        """Unless it packs, every row is interpreted by the function."""
        self.home = home
        self.ordinals: list[int] = []  # places of the changes in the whole batch
        self.cost = 0  # of the writes of all changes
        self.queues: set[QueueKey] = set()  # queues that rows were put into, or that changes register
        self._digest_of = digest_of
        self._packs = packs
        self._shapes: list[list[Any]] = []  # of packed rows
        self._changes: list[list[Any]] = []
        self._forms: list[Any] = []
        self._form_numbers: dict[RowTemplate, int] = {}
        self._blobs: list[bytes] = []
        self._tables: set[type[msgspec.Struct]] = set()
        self._has_events = False

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, ordinal: int, change: Change) -> None:
        """Add a change; raise `Unstorable` and add nothing if a value cannot be stored."""
        blobs, shapes = len(self._blobs), len(self._shapes)
        queues, tables = set[QueueKey](), set[type[msgspec.Struct]]()
        try:
            if not INT_MIN <= change.id <= INT_MAX:
                raise Unstorable("the id of a change needs more than 64 bits")
            guards = [self._guard(guard, tables) for guard in change.guards]
            if None in guards:
                return  # it expects another key than it names: refused
            writes = list[list[Any]]()
            for write in change.writes:
                tables.add(row_type_of(write))
                if isinstance(write, BulkInsert):
                    writes += self._bulk_insert(write, change.id, queues)
                else:
                    writes.append(self._write(write, change.id, queues))
            events = list[Any]()
            for event in change.events:
                key, blob = encode_event(event, self.home)
                events += [key, self._blob(blob)]
        except Unstorable:
            del self._blobs[blobs:], self._shapes[shapes:]
            raise
        form = None if change.template is None else self._form(change.template)
        bounds = [None if bound is None else wide_integer(bound) for bound in (change.not_before, change.not_after)]
        self._changes.append([*bounds, biased_hex(change.id), guards, writes, events or None, form])
        self.ordinals.append(ordinal)
        self.cost += sum(PREFIX_COST if write[0] == _DELETE_PREFIX else 1 for write in writes)
        self.queues |= queues.union(change.queues)
        self._tables |= tables
        # A deletion of an execution or a flow also removes its history.
        self._has_events = (
            self._has_events or bool(events) or form is not None or any(w[0] in _DELETIONS for w in writes)
        )

    @property
    def keys(self) -> list[str]:
        """The names of all keys that the call may touch."""
        suffixes = [suffix for row in self._tables for suffix in VALKEY_TABLES[row].suffixes]
        if self._has_events:
            suffixes += ["f", "h"]
        return [f"{self.home}:{suffix}" for suffix in suffixes] or [f"{self.home}:f"]

    def arguments(self, now: str) -> list[Any]:
        """Return the arguments of the call after its keys."""
        return [self.home, now, _encode([self._changes, self._forms, self._shapes]), *self._blobs]

    def _blob(self, content: bytes) -> int:
        self._blobs.append(content)
        return _FIRST_BLOB + len(self._blobs) - 1

    def _form(self, template: RowTemplate) -> int:
        number = self._form_numbers.get(template)
        if number is None:
            self._forms.append(template_form(template))
            number = self._form_numbers[template] = len(self._forms)
        return number

    def _guard(self, guard: Guard, tables: set[type[msgspec.Struct]]) -> list[Any] | None:
        table = VALKEY_TABLES[guard.row]
        tables.add(guard.row)
        target = [table.number, table.key_text(guard.key, self.home)]
        if guard.expected is not None:
            expected = guard.expected.fields | dict(zip(guard.expected.per_row, guard.expected_values, strict=True))
            return self._expected(table, target, guard, expected)
        if guard.revision is None:
            return [*target, _ABSENT]
        if guard.lease is None:
            return [*target, _REVISION, biased_hex(guard.revision)]
        lease = guard.lease
        return [*target, _LEASE, biased_hex(guard.revision), int(lease.requires), lease.lease_id, lease.lease_epoch]

    def _expected(
        self, table: ValkeyTable, target: list[Any], guard: Guard, expected: dict[str, Any]
    ) -> list[Any] | None:
        cells = list[Any]()
        for name, value in expected.items():
            if name in table.table.key:
                if guard.key[table.table.key.index(name)] != value:
                    return None
            elif value is None:
                cells += [table.place[name], None]
            else:
                cells += [table.place[name], table.encode_value(name, value, self._digest_of)]
        return [*target, _EXPECTED, [len(cells) // 2, *cells]]

    def _shape(self, row: PackedRow) -> int:
        self._shapes.append([self._blob(row.blob), row.instants, row.entries])
        return len(self._shapes)

    def _put(self, kind: int, table: ValkeyTable, key_text: str, cells: list[EncodedCell], revision: int) -> list[Any]:
        """Return the write of a whole row."""
        if self._packs:
            if table.revision_place is not None:
                cells[table.revision_place - 1] = biased_hex(revision)
            if (packed := pack_row(table, cells)) is not None:
                return [_PACKED[kind], table.number, key_text, self._shape(packed)]
        instants, blob = self._extract(table, cells, range(1, len(cells) + 1))
        while cells and cells[-1] is None:
            cells.pop()
        return [kind, table.number, key_text, len(cells), cells, instants, blob]

    def _bulk_insert(self, insert: BulkInsert, revision: int, queues: set[QueueKey]) -> list[list[Any]]:
        """Return the writes of similar rows: what they have in common is encoded once."""
        table, own = VALKEY_TABLES[type(insert.row)], insert.columns
        if unknown := own.keys() - set(insert.row.__struct_fields__):
            raise Unstorable(f"there is no column {sorted(unknown)}")
        common: list[EncodedCell] = [
            None if name in own else table.encode_value(name, getattr(insert.row, name), self._digest_of)
            for name in table.layout
        ]
        if type(insert.row) is Execution:
            queues.update(line for line in own.get("line", (insert.row.line,)) if line is not None)
        length, writes = len(insert), list[list[Any]]()
        shared = own.keys().isdisjoint(table.place)  # the rows differ only in their keys
        encoded = {
            name: [table.encode_value(name, value, self._digest_of) for value in values] for name, values in own.items()
        }
        keys = zip(*(own.get(name, (getattr(insert.row, name),) * length) for name in table.table.key), strict=True)
        for name in table.table.key:
            if name not in own:
                table.encode_value(name, getattr(insert.row, name), self._digest_of)
        columns = [(table.place[name] - 1, values) for name, values in encoded.items() if name in table.place]
        for ordinal, key in enumerate(keys):
            key_text = table.key_text(key, self.home)
            if shared and writes and writes[0][0] == _PACKED_INSERT:
                writes.append([_PACKED_INSERT, table.number, key_text, writes[0][3]])
                continue
            cells = common.copy()
            for place, values in columns:
                cells[place] = values[ordinal]
            writes.append(self._put(_INSERT, table, key_text, cells, revision))
        return writes

    def _write(self, write: Insert | Upsert | Patch | Delete, revision: int, queues: set[QueueKey]) -> list[Any]:
        if isinstance(write, (Insert, Upsert)):  # not a union: making one costs more than the check
            row = write.row
            table = VALKEY_TABLES[type(row)]
            key = READ_KEY[type(row)](row)
            if type(row) is Execution and row.line is not None:
                queues.add(row.line)
            cells = table.encode_row(row, self._digest_of)
            kind = _INSERT if isinstance(write, Insert) else _UPSERT
            return self._put(kind, table, table.key_text(key, self.home), cells, revision)
        table = VALKEY_TABLES[write.row]
        if isinstance(write, Delete):
            if len(write.key) == len(table.table.key):
                return [_DELETE, table.number, table.key_text(write.key, self.home)]
            return [_DELETE_PREFIX, table.number, table.prefix_text(write.key, self.home)]
        if (line := write.fields.get("line")) is not None and type(line) is QueueKey:
            queues.add(line)
        values = [table.encode_value(name, value, self._digest_of) for name, value in write.fields.items()]
        places = [table.place[name] for name in write.fields]
        instants, blob = self._extract(table, values, places)
        fields = [one for pair in zip(places, values, strict=True) for one in pair]
        unless = None if write.unless_set is None else table.place[write.unless_set]
        key_text = table.key_text(write.key, self.home)
        return [_PATCH, table.number, key_text, len(places), fields, instants, blob, unless]

    def _extract(
        self, table: ValkeyTable, cells: list[Any], places: Sequence[int]
    ) -> tuple[list[Any] | None, int | None]:
        """Replace instants and bytes by plain cells; return the instants with their places, and the bytes' number."""
        instants, blob = list[Any](), None
        for ordinal, cell in enumerate(cells):
            if type(cell) is Offset:
                instants += [places[ordinal], cell.offset]
                cells[ordinal] = None
            elif type(cell) is bytes:
                blob = self._blob(cell)
                cells[ordinal] = True
        return instants or None, blob


def partition_batches(
    changes: Sequence[Change], counts: PartitionCounts, digest_of: DigestOf, *, packs: bool = True
) -> tuple[list[PartitionBatch], dict[int, Unstorable]]:
    """Return the batches of all changes, in order, and the faults of those that cannot be stored."""
    open_batches: dict[HomeTag, PartitionBatch] = {}
    batches: list[PartitionBatch] = []
    faults: dict[int, Unstorable] = {}
    for ordinal, change in enumerate(changes):
        home = home_of_change(change, counts)
        batch = open_batches.get(home)
        if batch is None or len(batch) >= MAX_CHANGES or batch.cost >= MAX_COST:
            batch = open_batches[home] = PartitionBatch(home, digest_of, packs=packs)
            batches.append(batch)
        try:
            batch.add(ordinal, change)
        except Unstorable as fault:
            faults[ordinal] = fault
    return [batch for batch in batches if len(batch)], faults
