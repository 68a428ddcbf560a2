"""Every table of every store keeps its size: rounds of work of every kind leave as many rows as there were before.

The store itself lists its tables, so a new one is counted automatically. Tables that no round writes to are listed
here; a new one fails the test until a round uses it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import apsw
import asyncpg
import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.types import FactArgs, MessageArgs
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.scheduling.schedule import ScheduleSpec
from flowfabric.settings import Settings
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.valkey.store import ValkeyStore
from tests.executions import create_request
from tests.scenarios.durable_function import DurableFunction, opened
from tests.scenarios.env import Env
from tests.scenarios.waits import Waits

LONG_MS = 40 * 24 * 60 * 60 * 1000  # longer than any retention
Q = "0c000000-0000-4000-8000-000000000001"
B = "0b000000-0000-4000-8000-000000000001"
KEEP = {"stream_policy": {"retention_ttl_ms": 1000}, "dedup_window_ms": 1000}
RETRIED = KEEP | {"retry_policy": {"max_retries": 2}, "quota_policy_ids": [Q]}
W: dict[str, Any] = {"worker_id": "wa", "worker_instance_id": "wa-1", "lease_ttl_ms": 30_000}
# Leases of running sweepers; and rows that the process that writes them works off at once, as a rule before a count.
MAY_BE_UNSEEN = {"ff_sweep", "ff_outbox", "ff_child_cancel"}
# On Valkey: one entry for each partition that was ever used, and at most as many as there are partitions.
REGISTRIES = {"homes", "places", "from"}
_SIZE_COMMANDS = {b"hash": "HLEN", b"zset": "ZCARD", b"set": "SCARD", b"stream": "XLEN", b"string": "EXISTS"}


class RowCounts:
    """The number of rows of each table of a store."""

    def __init__(self, store: Store, dsn: str | None) -> None:
        self._store = store
        self._dsn = dsn

    async def counts(self) -> dict[str, int]:
        if isinstance(self._store, MemoryStore):
            counts = {table.name: len(self._store._tables[table.row].rows) for table in TABLES}
            return counts | {
                "events": len(self._store._feed),
                "histories": len(self._store._history),
                "queues": len(self._store._queue_ids),
            }
        if isinstance(self._store, SQLiteStore):
            # Use the store's own library: a second one in this process would not see the locks of the first.
            with closing(apsw.Connection(str(self._store._path))) as db:
                named = [str(name) for (name,) in db.execute("select name from sqlite_schema where type = 'table'")]
                count = "select count(*) from"
                return {name: int(str(next(db.execute(f'{count} "{name}"'))[0])) for name in named}
        if isinstance(self._store, ValkeyStore):
            return await self._valkey_counts(self._store)
        db = await asyncpg.connect(self._dsn)
        try:
            named = await db.fetch("select tablename from pg_tables where schemaname = 'public'")
            counted = " union all ".join(f"select '{name}', count(*) from \"{name}\"" for (name,) in named)
            return dict(await db.fetch(counted))
        finally:
            await db.close()

    async def _valkey_counts(self, store: ValkeyStore) -> dict[str, int]:
        """Add up the sizes of the keys of all partitions by their name; the keys of tables have the tables' names."""
        counts = Counter[str]({table.name: 0 for table in TABLES})
        for node in store.client.primaries():
            for key in await node.read("KEYS", "*"):
                name = key.decode().partition("}:")[2]
                if name in REGISTRIES:
                    continue
                kind = await node.read("TYPE", key)
                if kind == b"none":  # its last row was deleted meanwhile
                    continue
                size = await node.read(_SIZE_COMMANDS[kind], key)
                counts[f"ff_{name}" if f"ff_{name}" in counts else name] += size
        return dict(counts)


@pytest.fixture
def row_counts(store: Store, request: pytest.FixtureRequest) -> RowCounts:
    is_postgres = isinstance(store, PostgresStore)
    return RowCounts(store, request.getfixturevalue("own_database") if is_postgres else None)


class Rounds:
    """Work of every kind that is finished and purged."""

    def __init__(self, store: Store, clock: ManualClock, row_counts: RowCounts) -> None:
        # Nothing is dispatched, so that pending dispatches can be counted before they are processed.
        settings = Settings(feed_retention_ms=1000, dispatch=False)
        self.engine = Engine(store, minter=SeededMinter(1), settings=settings)
        self.clock = clock
        self.counting = row_counts
        self.env = Env(self.engine, clock)
        self.waits = Waits(self.env)
        self.peaks: dict[str, int] = {}
        self.number = 0

    async def begin(self) -> None:
        engine = self.engine
        await engine.ensure_partitions()
        await engine.make_api_token("t", ["work"])
        await engine.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
        await engine.create_quota_policy(Q, window_seconds=1, max_requests_per_window=100, max_concurrent=100)
        await engine.create_budget(B, dimensions=["calls"], hard_limits=[10**9], soft_limits=[0])
        await engine.set_lane_spread("spread", 2)

    async def count(self) -> dict[str, int]:
        counts = await self.counting.counts()
        self.peaks = {name: max(count, self.peaks.get(name, 0)) for name, count in counts.items()}
        return counts

    async def run_round(self) -> dict[str, int]:
        """Run one round and return the number of rows after it."""
        self.number += 1
        await self.engine.register_worker(
            worker_id="wa", worker_instance_id="wa-1", lanes=["default"], liveness_ttl_ms=5000
        )
        await self.plain()
        await self.function()
        await self.schedule()
        await self.spending()
        await self.flow()
        await self.cancelled_flow()
        await self.engine.start_operation("cancel", {"lane_id": "nowhere"}, reason="none of them is needed")
        await self.count()
        for _ in range(4):
            for sweep in self.engine.sweeper().sweeps:
                while (await self.engine.sweep_once(sweep)).processed and sweep not in ("flow_projector", "unblock"):
                    await self.count()
            await self.count()
            self.clock.advance_ms(LONG_MS)
        return await self.count()

    async def finish(self, held: Claimed) -> None:
        await self.engine.complete(held.handle, result=b"done")

    async def plain(self) -> None:
        """A key, a quota, a retry, a result."""
        engine = self.engine
        await engine.create_execution(
            execution_id=engine.new_execution_id(),
            input_payload=b"in",
            idempotency_key=f"k{self.number}",
            policy=RETRIED,
        )
        [held] = await engine.claim_admitted("default", 1, **W)
        await engine.fail(held.handle, reason="once")
        self.clock.advance_ms(10_000)
        await engine.sweep_once("delayed_promoter")
        [held] = await engine.claim_admitted("default", 1, **W)
        await self.count()
        await self.finish(held)

    async def function(self) -> None:
        """A step, output, a fact, a gate with a vote, a message, an ask, a child."""
        held = await self.env.create_and_claim(policy=KEEP)
        function = DurableFunction(self.env, self.waits, held.execution_id, held)
        await self.engine.record_step(held.handle, "s", 0, b"1")
        await self.engine.set_fact(held.handle, FactArgs(name="total", value=b"1", place="total", count=1))
        await self.engine.append_frame(held.handle, b"line")
        await self.engine.append_frame(held.handle, b'{"a": 1}', mode="summary")
        child = await self.env.create(parent_id=held.execution_id, policy=KEEP)
        running = await self.env.grant_and_claim(child, "wc")
        gate = opened(await function.approval("ok", "ana"))
        await function.receive("steer it")
        await function.send(b"left", "other", idempotency_key=f"m{self.number}")
        question = MessageArgs(execution_id=held.execution_id, mailbox="ask", message_id=self.engine.minter.uuid())
        await self.engine.ask(question)
        await function.vote(gate, "ana", idempotency_key=f"v{self.number}")
        await self.count()
        await self.finish(running)
        await self.count()
        await self.finish(held)

    async def schedule(self) -> None:
        """A schedule that fires once and is deleted."""
        run = create_request(
            self.engine.new_execution_id(),
            "nightly",
            execution_kind="report",
            policy='{"stream_policy": {"retention_ttl_ms": 1000}}',
        )
        await self.engine.put_schedule("nightly", ScheduleSpec(every_ms=60_000), run)
        self.clock.advance_ms(60_000)
        await self.engine.sweep_once("schedules")
        await self.count()
        [held] = await self.engine.claim_many("nightly", 1, **W)
        await self.finish(held)
        assert await self.engine.delete_schedule("nightly")

    async def spending(self) -> None:
        held = await self.env.create_and_claim(policy=KEEP)
        await self.engine.record_spend(B, held.execution_id, {"calls": 1}, idempotency_key=f"s{self.number}")
        await self.engine.reserve_budget(B, held.execution_id, {"calls": 2}, ttl_ms=1000)
        await self.count()
        await self.engine.release_budget(B, held.execution_id)
        await self.finish(held)

    async def graph(self, names: str, edges: list[str], **given: Any) -> tuple[FlowId, dict[str, str]]:
        engine, flow = self.engine, FlowId(self.engine.minter.uuid())
        ids: dict[str, str] = {name: mint_for_flow(flow, engine.partitions, engine.minter) for name in names}
        nodes = [
            create_request(ids[name], "flows", policy='{"stream_policy": {"retention_ttl_ms": 1000}}') for name in names
        ]
        policies = {ids[name]: policy for name, policy in given.items()}
        pairs = [GraphEdge(ids[edge[0]], ids[edge[1]]) for edge in edges]
        await engine.create_flow_graph(flow, nodes, pairs, policies=policies)
        return flow, ids

    async def flow(self) -> None:
        """A join that cancels its other upstreams, and an outcome with many edges."""
        first = {"kind": "any_of", "on_satisfied": "cancel_remaining"}
        flow, ids = await self.graph("abcdef", ["ac", "bc", "cd", "ce", "cf"], c=first)
        for limit in (1, 10, 10):
            for held in await self.engine.claim_many("flows", limit, **W):
                await self.finish(held)
            await self.count()
            await self.engine.cascade_completion(ids["a"])
            await self.engine.cascade_completion(ids["b"])
            await self.count()
            for sweep in ("edge_cancel_dispatcher", "completion_dispatch", "flow_projector"):
                await self.engine.sweep_once(sweep)
        assert (await self.engine.describe_flow(flow)) is not None

    async def cancelled_flow(self) -> None:
        flow, _ = await self.graph("ab", ["ab"])
        await self.engine.cancel_flow_header(flow, grace_ms=0)
        await self.count()


async def test_every_table_of_every_store_keeps_its_size(
    store: Store, clock: ManualClock, row_counts: RowCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 2)
    monkeypatch.setattr("flowfabric.rules.bulk_operation.RETENTION_MS", 1000)
    rounds = Rounds(store, clock, row_counts)
    await rounds.begin()
    await rounds.run_round()
    before = await rounds.run_round()

    for _ in range(3):
        after = await rounds.run_round()
        grown = {name: (before.get(name), count) for name, count in after.items() if count != before.get(name)}
        assert grown == {}

    assert {table.name for table in TABLES if not rounds.peaks[table.name]} <= MAY_BE_UNSEEN
