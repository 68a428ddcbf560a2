"""Limits while worker processes are killed: caps hold, nothing is counted twice, and no admission leaks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaPolicy, QuotaSlot
from flowfabric.model.states import LifecyclePhase, OwnershipState, PublicState
from flowfabric.stores.queries import Read, Scan, Where
from flowfabric.testing.invariants import check_invariants, scan_all
from flowfabric.testing.limit_invariants import check_limit_invariants
from tests.chaos.worker import LANE, LEDGER, SCARCE, SCARCE_EACH, SPENT
from tests.chaos.worker_processes import WorkerProcess, worker_processes
from tests.executions import new_execution

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Q = "0c000000-0000-4000-8000-00000000000a"
CAP, COUNT, HARD, DEATHS = 3, 36, 100, 3
TTL_MS = 800
RUNNING = (
    Where("lifecycle_phase", "=", LifecyclePhase.ACTIVE),
    Where("ownership_state", "=", OwnershipState.LEASED),
)


async def create_limited_work(engine: Engine) -> None:
    await engine.create_quota_policy(Q, window_seconds=1, max_requests_per_window=0, max_concurrent=CAP)
    await engine.create_budget(LEDGER, dimensions=["tokens", "calls"], hard_limits=[0, 0], soft_limits=[0, 0])
    await engine.create_budget(SCARCE, dimensions=["tokens"], hard_limits=[HARD], soft_limits=[0])
    for _ in range(COUNT):
        await new_execution(engine, LANE, namespace="chaos", policy={"quota_policy_ids": [Q]})


async def reach_cap(engine: Engine) -> None:
    """Reach the cap with a worker that stops; otherwise the test would depend on chance."""
    held = await engine.claim_admitted(
        LANE, CAP + 1, worker_id="gone", worker_instance_id="gone-1", lease_ttl_ms=TTL_MS
    )
    assert len(held) == len(await engine.store.scan(Scan(Execution, RUNNING, limit=100))) == CAP


async def check_concurrency(engine: Engine) -> None:
    """Check until everything is done that no more runs than the cap allows."""
    while True:
        assert len(await engine.store.scan(Scan(Execution, RUNNING, limit=100))) <= CAP
        if await ended(engine) == COUNT:
            return
        await asyncio.sleep(0.01)


async def ended(engine: Engine) -> int:
    done = (Where("lifecycle_phase", "=", LifecyclePhase.TERMINAL),)
    return len(await engine.store.scan(Scan(Execution, done, limit=1000)))


async def kill_some(start_worker: Any, url: str) -> list[WorkerProcess]:
    """Keep three workers running; kill one after the other and replace it."""
    chance = random.Random(7)
    workers = [start_worker("spend", url, "--ttl", TTL_MS) for _ in range(3)]
    for victim in workers[:DEATHS]:
        await asyncio.to_thread(victim.wait_until, lambda: bool(victim.lines("claimed")))  # noqa: B023
        await asyncio.sleep(chance.random() * 0.05)
        await asyncio.to_thread(victim.kill)
        workers.append(start_worker("spend", url, "--ttl", TTL_MS))
    return workers


async def test_killed_workers_leave_no_slot_no_reservation_and_no_double_charge(url: str) -> None:
    async with await open_engine(url) as engine:
        await create_limited_work(engine)
        await reach_cap(engine)
        with worker_processes() as start_worker:
            sweeper = start_worker("sweep", url)
            killing = asyncio.create_task(kill_some(start_worker, url))
            async with asyncio.timeout(90):
                await check_concurrency(engine)
                workers = await killing

        assert [worker.errors for worker in (sweeper, *workers)] == [[]] * (len(workers) + 1)
        assert {row.public_state for row in await scan_all(engine.store, Execution)} == {PublicState.COMPLETED}
        async with asyncio.timeout(30):  # A reservation of a killed worker expires by itself, a slot with the window.
            while not await is_idle(engine):
                for sweep in ("outbox_relay", "quota_reconciler", "budget_reservations"):
                    await engine.sweep_once(sweep)
                await asyncio.sleep(0.05)
        ledger, scarce = await engine.get_budget_status(LEDGER), await engine.get_budget_status(SCARCE)
        assert ledger.usage == {"tokens": SPENT * COUNT, "calls": COUNT}
        assert scarce.usage == {"tokens": HARD // SCARCE_EACH * SCARCE_EACH}
        await check_limit_invariants(engine)
        await check_invariants(engine)


async def is_idle(engine: Engine) -> bool:
    loaded = await engine.runtime.load((Read(QuotaPolicy, ("default", Q)), Read(QuotaSlot, ("default", Q))))
    reserved = (await engine.get_budget_status(LEDGER)).reserved
    return loaded.rows[0][0].active == 0 and not loaded.rows[1] and not reserved
