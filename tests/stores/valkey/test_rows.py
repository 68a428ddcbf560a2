"""Rows in Valkey: the layout, the conversions, and what the functions do with cells that they do not know."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import astuple, replace

from flowfabric.clock import ManualClock
from flowfabric.ids import DEFAULT_PARTITIONS
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert
from flowfabric.model.execution import Attempt, Execution, Payload, QueueKey
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.model.suspension import Suspension
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.catalog import TABLES, Table, key_of
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.homes import home_of
from flowfabric.stores.queries import Read, Scan, Where
from flowfabric.stores.valkey.registry import VERIFY_S
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, biased_hex, integer, wide_integer
from flowfabric.stores.valkey.rows.layout import LAYOUT, UNSET_IF_FALSE
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import change, claim_request, event, execution, one, payload, queued, write

# The number of columns of each table in the first schema, and a digest of their names in the order of the layout.
_FIRST_WIDTHS = {
    "ff_exec_core": 72,
    "ff_payload": 5,
    "ff_result": 2,
    "ff_attempt": 15,
    "ff_idempotency": 3,
    "ff_sweep": 3,
    "ff_partition_config": 4,
    "ff_api_token": 10,
    "ff_keystore": 2,
    "ff_waitpoint_hmac": 3,
    "ff_suspension": 25,
    "ff_waitpoint": 17,
    "ff_signal": 13,
    "ff_remembered": 2,
    "ff_gate": 9,
    "ff_mail": 5,
    "ff_child_end": 2,
    "ff_step": 5,
    "ff_stream": 16,
    "ff_frame": 8,
    "ff_stream_summary": 5,
    "ff_flow_core": 16,
    "ff_flow_member": 0,
    "ff_edge": 5,
    "ff_edge_group": 16,
    "ff_dependency": 9,
    "ff_dispatch": 5,
    "ff_pending_cancel_groups": 2,
    "ff_cancel_backlog": 3,
    "ff_cancel_backlog_member": 0,
    "ff_flow_summary": 15,
    "ff_outbox": 6,
    "ff_budget_policy": 21,
    "ff_budget_usage": 5,
    "ff_budget_usage_by_exec": 1,
    "ff_budget_reservation": 3,
    "ff_budget_usage_dedup": 1,
    "ff_quota_policy": 9,
    "ff_quota_admitted": 4,
    "ff_quota_window": 2,
    "ff_worker_registry": 9,
    "ff_worker_registry_event": 2,
}
_FIRST_DIGEST = "dc62f83f99332a24"
WIDE = (0, -1, 1, 2**31, -(2**31), 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**62, -(2**62), 2**63 - 1, -(2**63))


def test_every_column_has_one_place() -> None:
    assert LAYOUT.keys() == {table.name for table in TABLES}
    for table in TABLES:
        places = LAYOUT[table.name]
        assert len(set(places)) == len(places)
        indexes = VALKEY_TABLES[table.row].indexes
        indexed = {name for name, index in indexes.items() if not index.key_parts}  # else it has the key
        assert set(places) == {name for name in table.column_names if name not in table.key or name in indexed}


def test_places_never_move() -> None:
    """A change of these texts means that rows of the last release can no longer be read."""
    first = {name: columns[: _FIRST_WIDTHS[name]] for name, columns in LAYOUT.items() if name in _FIRST_WIDTHS}
    text = "\n".join(f"{name} {' '.join(columns)}" for name, columns in sorted(first.items()))

    assert hashlib.sha256(text.encode()).hexdigest()[:16] == _FIRST_DIGEST


@pytest.mark.parametrize("value", WIDE)
def test_integers_of_64_bits_are_cells(value: int) -> None:
    assert integer(wide_integer(value)) == value
    assert integer(biased_hex(value)) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wide_integer(value))) == wide_integer(value)


def test_biased_integers_are_ordered_like_texts() -> None:
    assert sorted(WIDE) == sorted(WIDE, key=biased_hex)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_key_texts_are_ordered_like_keys(table: Table) -> None:
    codec = VALKEY_TABLES[table.row]
    kinds = {column.name: column.kind for column in table.columns}
    keys = [
        tuple((f"{word}{number}" if kinds[name] is str else number * 1000 - 5) for name in table.key)
        for word in ("", "a", "ab", "é", "z")
        for number in (0, 1, 3, 20, 10**12)
    ]

    texts = {key: codec.key_text(key, "{fp:0}") for key in keys}

    assert sorted(keys) == sorted(keys, key=lambda key: texts[key].encode())
    assert [codec.key(texts[key], "{fp:0}") for key in keys] == keys


@pytest.mark.parametrize("column", ["priority", "rank", "lease_epoch", "delay_until", "created_at", "deadline_at"])
async def test_every_integer_column_keeps_64_bits(vk: ValkeyStore, column: str) -> None:
    for number, value in enumerate(WIDE):
        await write(vk, Insert(execution(f"n{number:02}", **{column: value})))
        await write(vk, Patch(Execution, (f"n{number:02}",), {"tags": "patched by a function"}))

    rows = (await vk.load([Read(Execution, ())])).rows[0]
    assert [getattr(row, column) for row in rows] == list(WIDE)


async def test_positions_are_ordered_exactly_beyond_the_doubles(vk: ValkeyStore) -> None:
    ranks = [2**53 + offset for offset in (3, 1, 2, 0, -1)] + [-(2**62) - 1, -(2**62)]
    for number, rank in enumerate(ranks):
        await write(vk, Insert(queued(f"n{number}", rank)), Insert(payload(f"n{number}")))

    claimed = await vk.claim_rows(claim_request(10))

    assert [row.rank for row, _ in claimed.rows] == sorted(ranks)


async def test_revisions_that_differ_beyond_the_doubles_are_different(vk: ValkeyStore) -> None:
    revision = 2**62 + 1
    await vk.commit([Change((), (Insert(execution("a")),), id=revision)])

    verdicts = [
        await vk.commit(
            [change(Patch(Execution, ("a",), {"priority": 1}), guards=[Guard(Execution, ("a",), revision + off)])]
        )
        for off in (1, -1, 0)
    ]

    assert [verdict != [None] for verdict in verdicts] == [False, False, True]


@pytest.mark.parametrize("content", [None, b"", b"\0\xff", bytes(range(256)) * 40])
async def test_a_function_copies_bytes_that_it_does_not_read(vk: ValkeyStore, content: bytes | None) -> None:
    await write(vk, Insert(payload("a", content)))
    for policy in ("long " * 20, None, "p"):
        await write(vk, Patch(Payload, ("a",), {"policy": policy}))
        assert await one(vk, Payload, "a") == replace(payload("a", content), policy=policy)
    await write(vk, Patch(Payload, ("a",), {"input_payload": b"other"}))
    assert (await one(vk, Payload, "a")).input_payload == b"other"
    await write(vk, Patch(Payload, ("a",), {"input_payload": None}))
    assert (await one(vk, Payload, "a")).input_payload is None


async def test_the_last_cell_can_be_unset_and_set_again(vk: ValkeyStore) -> None:
    last = LAYOUT["ff_suspension"][-1]
    column = VALKEY_TABLES[Suspension].column[last]
    assert column.optional
    await write(vk, Insert(Suspension("a", 7, **{last: column.kind(7)})))
    for value in (None, column.kind(9), None, column.kind(2**60)):
        await write(vk, Patch(Suspension, ("a",), {last: value}))
        assert getattr(await one(vk, Suspension, "a"), last) == value


async def test_a_false_that_is_stored_as_unset_is_read_as_false(vk: ValkeyStore) -> None:
    for value in (False, True):
        await write(vk, Insert(execution(f"n{value}", has_mail=value)))
        assert (await one(vk, Execution, f"n{value}")).has_mail is value
        assert [row.execution_id for row in await vk.scan(Scan(Execution, (Where("has_mail", "=", value),)))] == [
            f"n{value}"
        ]
    for value in (True, False):
        await write(vk, Patch(Execution, ("nFalse",), {"has_mail": value}))
        assert (await one(vk, Execution, "nFalse")).has_mail is value


@pytest.mark.parametrize(("table", "columns"), UNSET_IF_FALSE.items())
def test_only_a_boolean_that_is_false_by_default_is_unset_if_false(table: str, columns: tuple[str, ...]) -> None:
    codec = next(one for one in VALKEY_TABLES.values() if one.table.name == table)
    defaults = {field.name: field.default for field in msgspec.structs.fields(codec.table.row)}

    assert {defaults[name] for name in columns} == {False}
    assert {codec.column[name].kind for name in columns} == {bool}


class LaterRelease:
    """Writes rows with two more columns than this release knows."""

    def __init__(self, store: ValkeyStore, row: type[msgspec.Struct], *key: Any) -> None:
        self.store = store
        self.table = VALKEY_TABLES[row]
        home = home_of(row, key, DEFAULT_PARTITIONS)
        assert home is not None
        self.home = home
        self.field = self.table.key_text(key, home)

    async def _cells(self) -> tuple[list[Any], bytes]:
        blob: bytes = await self.store.client.read(self.home, "HGET", f"{self.home}:{self.table.name}", self.field)
        if self.table.bytes_place is None:
            return msgspec.msgpack.decode(blob), b""
        length = int.from_bytes(blob[:4], "big")
        return msgspec.msgpack.decode(blob[4 : 4 + length]), blob[4 + length :]

    async def write(self, *further: Any) -> None:
        cells, content = await self._cells()
        cells = (cells + [None] * self.table.width)[: self.table.width] + list(further)
        array = msgspec.msgpack.encode(cells)
        blob = array if self.table.bytes_place is None else len(array).to_bytes(4, "big") + array + content
        await self.store.client.call(self.home, "HSET", f"{self.home}:{self.table.name}", self.field, blob)

    async def read(self) -> list[Any]:
        """Return the further cells; an unset one is nil, or false once a function has packed the row again."""
        further = (await self._cells())[0][self.table.width :]
        return [None if cell is False else cell for cell in further]


async def test_cells_of_a_later_release_are_carried_through(vk: ValkeyStore, clock: ManualClock) -> None:
    await write(vk, Insert(queued("a")), Insert(payload("a", b"\0\xff")))
    later, later_payload = LaterRelease(vk, Execution, "a"), LaterRelease(vk, Payload, "a")
    await later.write("new", 5)
    await later_payload.write(None, "x")

    await write(vk, Patch(Execution, ("a",), {"priority": 3}), Patch(Payload, ("a",), {"policy": "p"}))
    assert (await later.read(), await later_payload.read()) == (["new", 5], [None, "x"])

    await later.write("newer", None, [1])
    ((row, content),) = (await vk.claim_rows(claim_request(1, ttl=100))).rows
    assert (row.priority, content.input_payload, content.policy) == (3, b"\0\xff", "p")
    assert await later.read() == ["newer", None, [1]]

    clock.advance_ms(1)
    lease = LeaseRef("a", row.attempt_index or 0, row.attempt_id or "", row.lease_id or "", row.lease_epoch, 100)
    assert await vk.renew([lease], RENEWAL) == [clock.now + 100]
    await write(vk, Upsert(replace(row, tags="{}")), Upsert(payload("a", b"again")))
    assert (await later.read(), await later_payload.read()) == (["newer", None, [1]], [None, "x"])
    assert (await one(vk, Payload, "a")).input_payload == b"again"


async def test_a_row_of_an_earlier_release_has_the_defaults_of_later_columns(vk: ValkeyStore) -> None:
    await write(vk, Insert(execution("a")))
    table = VALKEY_TABLES[Execution]
    blob = await vk.client.read("{fp:0}", "HGET", "{fp:0}:exec_core", "a")
    cells = msgspec.msgpack.decode(blob)[: table.place["has_waits"] - 1]
    await vk.client.call("{fp:0}", "HSET", "{fp:0}:exec_core", "a", msgspec.msgpack.encode(cells))

    row = await one(vk, Execution, "a")

    assert (row.has_waits, row.has_steps) == (False, False)


@pytest.mark.parametrize("count", [1, 2000, 10_000])
async def test_a_change_of_many_rows_and_events_is_written_whole(vk: ValkeyStore, count: int) -> None:
    rows = [
        Attempt("a", n, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, 1, "lease", 1, "w", "i")
        for n in range(count)
    ]
    events = [event(f"n{n % 700}", lease="x") for n in range(count)]

    assert await vk.commit([change(*map(Insert, rows), events=events)]) != [None]

    assert len((await vk.load([Read(Attempt, ("a",))])).rows[0]) == count
    assert await vk.commit([change(Delete(Attempt, ("a",)))]) != [None]
    assert (await vk.load([Read(Attempt, ("a",))])).rows == [[]]
    assert await vk.client.read("{fp:0}", "EXISTS", "{fp:0}:attempt", "{fp:0}:attempt:k") == 0


async def test_a_row_without_its_queue_in_the_registry_is_found_again(vk: ValkeyStore) -> None:
    """The process died after its commit and before it had registered the queue and the partition."""
    name = "{fp:9}:lost"
    await vk.commit([change(Insert(queued(name, line=QueueKey("mail", "gpu"))), Insert(payload(name)))])
    await vk.client.call("{ff}", "DEL", "{ff}:places", "{ff}:homes")
    other = ValkeyStore(vk.client.address, vk.clock)
    await other.open(migrate=False)

    request = claim_request(1, QueueKey("mail", "gpu"))
    assert (await other.claim_rows(request)).rows == []
    other.registry._verified_at -= VERIFY_S  # a while later a claim that finds nothing begins the comparison
    rows: Sequence[tuple[Execution, Payload]] = ()
    async with asyncio.timeout(20):
        while not rows:
            rows = (await other.claim_rows(request)).rows
    await other.close()

    assert [row.execution_id for row, _ in rows] == [name]


async def test_rows_in_a_queue_that_the_registry_lost_are_listed_and_can_be_queued_again(vk: ValkeyStore) -> None:
    await vk.commit([change(Insert(queued("a")), Insert(payload("a")))])
    await vk.client.call("{ff}", "DEL", "{ff}:places", "{ff}:queues")
    await vk.client.call("{ff}", "INCR", "{ff}:version")
    other = ValkeyStore(vk.client.address, vk.clock)
    await other.open(migrate=False)

    assert await other.executions_in_missing_queues(10) == ["a"]
    await write(other, Patch(Execution, ("a",), {"line": QueueKey("mail")}))
    assert await other.executions_in_missing_queues(10) == []
    assert [row.execution_id for row, _ in (await other.claim_rows(claim_request(1))).rows] == ["a"]
    await other.close()


async def test_scans_read_pages(vk: ValkeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.stores.valkey.reads.scans.PAGE", 7)
    rows = [execution(f"{{fp:{n % 3}}}:{n:03}", priority=n % 5, tags="x" if n % 10 else None) for n in range(60)]
    for row in rows:
        await write(vk, Insert(row))

    found = await vk.scan(Scan(Execution, (Where("tags", "unset"),), ("priority", "execution_id")))

    expected = sorted((row.priority, row.execution_id) for row in rows if row.tags is None)
    assert [(row.priority, row.execution_id) for row in found] == expected
    assert [key_of(row)[0] for row in await vk.scan(Scan(Execution, limit=100))] == sorted(
        astuple(row)[0] for row in rows
    )
