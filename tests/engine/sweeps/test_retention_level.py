"""Retention, short form: rounds of work that is finished and purged leave the store as large as it was.

For some rounds a transaction stays open, so that nothing can be vacuumed; the space is reused afterwards, and no more
is added. The long form, at full load and with the server's own vacuum, is a soak test.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, Result
from flowfabric.model.limits.quota import QuotaRequest, QuotaSlot
from flowfabric.model.outbox import OutboxMessage
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Scan
from flowfabric.stores.sqlite import SQLiteStore
from tests.conftest import Rival
from tests.executions import create_request

KEPT_MS = 1000
EACH = 60  # executions in a round
Q = "0c000000-0000-4000-8000-000000000001"
POLICY = {"stream_policy": {"retention_ttl_ms": KEPT_MS}, "dedup_window_ms": KEPT_MS, "quota_policy_ids": [Q]}
WARM, HELD, COOL, MORE = 4, 3, 3, 4  # rounds
SPLITS = 2 * 8192  # A page of an index may be split sooner or later.
SIZES = """
    select c.relname, pg_relation_size(c.oid) from pg_class c
     where c.relkind in ('r', 'i', 't') and c.relnamespace = 'public'::regnamespace and c.relname like 'ff\\_%'
"""
FORGETTERS = ("retention_trimmer", "idempotency_keys", "usage_keys", "feed_trimmer", "outbox_relay", "quota_reconciler")


class Rounds:
    """Work that is submitted, finished and purged."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.clock = clock
        settings = Settings(feed_retention_ms=KEPT_MS)
        self.engine = Engine(store, minter=SeededMinter(1), settings=settings)
        self.number = 0

    async def begin(self) -> None:
        await self.engine.create_quota_policy(Q, window_seconds=1, max_requests_per_window=0, max_concurrent=EACH)

    async def run_round(self) -> None:
        self.number += 1
        engine = self.engine
        await engine.create_executions(
            create_request(
                engine.new_execution_id(),
                input_payload=bytes(512),
                idempotency_key=f"{self.number}:{place}",
                policy=msgspec.json.encode(POLICY).decode(),
            )
            for place in range(EACH)
        )
        done = 0
        while claimed := await engine.claim_admitted("default", EACH, worker_id="w", worker_instance_id="w-1"):
            await asyncio.gather(*(engine.complete(one.handle, result=b"done") for one in claimed))
            done += len(claimed)
        assert done == EACH
        await engine.outbox.wait_for_deliveries()
        self.clock.advance_ms(KEPT_MS + 1)
        for sweep in FORGETTERS:
            while (await engine.sweep_once(sweep)).processed:
                pass

    async def remaining(self) -> dict[str, int]:
        """Return what is left of the finished work."""
        rows = (Execution, Payload, Result, Attempt, IdempotencyKey, QuotaSlot, QuotaRequest, OutboxMessage)
        return {row.__name__: len(await self.engine.runtime.scan(Scan(row, limit=10_000))) for row in rows}


async def test_rows_are_deleted_after_their_retention(store: Store, clock: ManualClock) -> None:
    rounds = Rounds(store, clock)
    await rounds.begin()

    for _ in range(3):
        await rounds.run_round()
        assert set((await rounds.remaining()).values()) == {0}


async def test_tables_and_indexes_do_not_grow_around_a_long_transaction(
    pg: PostgresStore, rival: Rival, clock: ManualClock
) -> None:
    rounds = Rounds(pg, clock)
    await rounds.begin()

    async def sizes_after(times: int) -> dict[str, int]:
        for _ in range(times):
            await rounds.run_round()
            await rival.fetch("vacuum")
        return dict(await rival.fetch(SIZES))

    await rival.fetch("vacuum full")  # Files of a database keep the size that earlier tests caused.
    before = await sizes_after(WARM)
    await rival.begin("select pg_current_xact_id(), count(*) from ff_exec_core")
    held = await sizes_after(HELD)
    await rival.end()
    after = await sizes_after(COOL)
    last = await sizes_after(MORE)

    written = ("ff_exec_core", "ff_payload")  # most other tables and indexes are one page
    assert sum(held[name] for name in written) > 2 * sum(before[name] for name in written), "dead rows were kept"
    grown = {name: (after[name], last[name]) for name in last if last[name] > after[name] + SPLITS}
    assert grown == {}
    assert sum(last.values()) <= sum(held.values())


async def test_the_database_file_does_not_grow_around_a_long_reader(tmp_path: Path, clock: ManualClock) -> None:
    file = tmp_path / "ff.db"
    store = SQLiteStore(file, clock)
    await store.open(migrate=True)
    rounds = Rounds(store, clock)
    await rounds.begin()
    reader = sqlite3.connect(file, isolation_level=None)

    async def pages_after(times: int) -> int:
        for _ in range(times):
            await rounds.run_round()
        with closing(sqlite3.connect(file)) as looking:
            [pages] = looking.execute("pragma page_count").fetchone()
        return int(pages)

    try:
        await pages_after(WARM)
        reader.execute("begin")
        reader.execute("select count(*) from ff_exec_core").fetchall()
        await pages_after(HELD)
        reader.execute("commit")
        after = await pages_after(COOL)
        assert await pages_after(MORE) <= after
    finally:
        reader.close()
        await store.close()


async def test_a_claim_does_not_wait_for_a_purge(pg: PostgresStore, rival: Rival) -> None:
    engine = Engine(pg, minter=SeededMinter(1))
    ended, waiting = [engine.new_execution_id() for _ in range(2)]
    for e in (ended, waiting):
        await engine.create_execution(execution_id=e)
    await engine.cancel_execution(ended)
    await rival.begin(f"delete from ff_exec_core where execution_id = '{ended}'")

    async with asyncio.timeout(10):
        claimed = await engine.claim("default", worker_id="w", worker_instance_id="w-1")

    await rival.end("rollback")
    assert claimed is not None
    assert claimed.execution_id == waiting
