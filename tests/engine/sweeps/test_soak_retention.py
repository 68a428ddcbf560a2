"""Retention, long form: tables and indexes do not grow under steady load, with or without a long transaction.

Executions are submitted, drained and purged after a second, under a quota and a budget, with keys and results, and in
flows. For a part of the time a transaction stays open, so that nothing dead can be vacuumed; afterwards the space is
reused and no more is added.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from time import monotonic

import asyncpg
import msgspec
import pytest

from flowfabric import Engine
from flowfabric.connector import open_engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Flow
from flowfabric.model.states import PublicState
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.queries import Scan, Where
from tests.executions import create_request
from tests.servers import postgres

pytestmark = [pytest.mark.soak, pytest.mark.serial]

PHASE_S = int(os.environ.get("FF_SOAK_PHASE_S", "60"))
KEPT_MS = 1000
BATCH = 50
FAN = 8
Q = "0c000000-0000-4000-8000-000000000001"
B = "0b000000-0000-4000-8000-000000000001"
KEEP = {"stream_policy": {"retention_ttl_ms": KEPT_MS}, "dedup_window_ms": KEPT_MS}
LIMITED = {**KEEP, "quota_policy_ids": [Q], "budget_ids": [B]}
SIZES = """
    select relname, pg_total_relation_size(oid) from pg_class
     where relkind = 'r' and relname like 'ff\\_%' and relnamespace = 'public'::regnamespace
"""


@asynccontextmanager
async def soaking_engine() -> AsyncIterator[tuple[Engine, str]]:
    """An engine with frequent sweeps, on a server with a frequent vacuum."""
    server = postgres("soak-retention")
    for setting in ("autovacuum_naptime = '1s'", "autovacuum_vacuum_cost_delay = 0"):
        server.execute(f"alter system set {setting}")
    server.execute("select pg_reload_conf()")
    name = f"soak_{os.getpid()}"
    url = server.create_database(name)
    sweeps = Sweeps(
        retention_trimmer_ms=200,
        idempotency_keys_ms=200,
        usage_keys_ms=1000,
        feed_trimmer_ms=200,
        outbox_relay_ms=500,
        quota_reconciler_ms=2000,
        batch=500,
    )
    engine = await open_engine(url, settings=Settings(sweeps=sweeps, feed_retention_ms=KEPT_MS))
    try:
        engine.start_sweeps()
        yield engine, url
    finally:
        await engine.close()
        server.drop_database(name)


async def load(engine: Engine, until: float) -> int:
    """Submit and drain until an instant; return how many executions were finished."""
    done, number = 0, 0
    while monotonic() < until:
        number += 1
        await engine.create_executions(
            create_request(
                engine.new_execution_id(),
                namespace="soak",
                input_payload=bytes(512),
                idempotency_key=f"{until}:{number}:{place}",
                policy=policy_text(limited=place % 5 == 0),
            )
            for place in range(BATCH)
        )
        while claimed := await engine.claim_admitted("default", 100, worker_id="w", worker_instance_id="w-1"):
            await asyncio.gather(*(engine.complete(one.handle, result=b"done") for one in claimed))
            done += len(claimed)
            spenders = claimed[::10]
            await asyncio.gather(*(engine.record_spend(B, one.execution_id, {"calls": 1}) for one in spenders))
            await asyncio.gather(*(engine.release_budget(B, one.execution_id) for one in spenders))
            await engine.outbox.wait_for_deliveries()
        done += await run_flow(engine)
    return done


async def run_flow(engine: Engine) -> int:
    """Run a fan-out and a join to completion; return how many members were finished."""
    flow = FlowId(engine.minter.uuid())
    first, *others, last = [mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(FAN + 2)]
    nodes = [
        create_request(name, "flows", namespace="soak", policy=policy_text(limited=False))
        for name in (first, *others, last)
    ]
    edges = [GraphEdge(first, one) for one in others] + [GraphEdge(one, last) for one in others]
    await engine.create_flow_graph(flow, nodes, edges)
    done = 0
    while done < len(nodes):
        claimed = await engine.claim_many("flows", 100, worker_id="w", worker_instance_id="w-1", max_wait_ms=1000)
        await asyncio.gather(*(engine.complete(one.handle, result=b"done") for one in claimed))
        done += len(claimed)
    return done


def policy_text(*, limited: bool) -> str:
    return msgspec.json.encode(LIMITED if limited else KEEP).decode()


async def sizes(url: str) -> dict[str, int]:
    connection = await asyncpg.connect(url)
    try:
        return dict(await connection.fetch(SIZES))
    finally:
        await connection.close()


async def phase(engine: Engine, url: str) -> tuple[float, dict[str, int]]:
    """Apply load; return the rate and the median size of each table with its indexes in the second half."""
    until = monotonic() + PHASE_S
    loading = asyncio.create_task(load(engine, until))
    seen: dict[str, list[int]] = defaultdict(list)
    await asyncio.sleep(PHASE_S / 2)
    while not loading.done():
        for name, size in (await sizes(url)).items():
            seen[name].append(size)
        await asyncio.wait({loading}, timeout=1)
    return await loading / PHASE_S, {name: int(median(found)) for name, found in seen.items()}


@asynccontextmanager
async def long_transaction(url: str) -> AsyncIterator[None]:
    """Hold a transaction open."""
    connection = await asyncpg.connect(url)
    await connection.execute("begin isolation level repeatable read")
    await connection.execute("select pg_current_xact_id(), count(*) from ff_exec_core")
    try:
        yield
    finally:
        await connection.execute("commit")
        await connection.close()


async def test_tables_and_indexes_do_not_grow_with_a_long_transaction_for_part_of_the_time() -> None:
    async with soaking_engine() as (engine, url):
        await engine.create_quota_policy(Q, window_seconds=1, max_requests_per_window=0, max_concurrent=50)
        await engine.create_budget(B, dimensions=["calls"], hard_limits=[10**9], soft_limits=[0])
        await phase(engine, url)  # Warm up until every table has its size.
        first_rate, first = await phase(engine, url)
        async with long_transaction(url):
            held_rate, held = await phase(engine, url)
        await phase(engine, url)  # Vacuum what the transaction kept.
        after_rate, after = await phase(engine, url)
        last_rate, last = await phase(engine, url)

        report = {name: (first[name], held[name], after[name], last[name]) for name in first}
        print(f"rates {first_rate:.0f} {held_rate:.0f} {after_rate:.0f} {last_rate:.0f} a second")
        for name, found in sorted(report.items(), key=lambda item: -item[1][-1])[:8]:
            print(name, *(f"{size / 2**20:.1f}" for size in found), "MiB")
        slack = 2**20  # A table that is almost empty may double.
        for name in first:
            assert last[name] <= 1.2 * after[name] + slack, f"{name} goes on growing: {report[name]}"
        assert sum(last.values()) <= 1.1 * sum(after.values())
        assert min(held_rate, last_rate) >= 0.5 * first_rate, "claims are as fast as before"
        await asyncio.sleep(2 * KEPT_MS / 1000)
        assert len(await engine.runtime.scan(Scan(Flow, limit=10_000))) < 1000, "flows go with their members"
        left = await engine.runtime.scan(
            Scan(Execution, (Where("public_state", "=", PublicState.COMPLETED),), limit=10_000)
        )
        assert len(left) < 1000, "what ended is forgotten"
