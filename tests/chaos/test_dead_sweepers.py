"""A killed process held a sweep: what falls due afterwards is late by at most one interval of the sweep.

All instants are of the store's clock. The same work without a kill, in the same run, shows the delay of this machine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.engine.types import TimeoutOnly
from flowfabric.model.deployment import SweepLease
from flowfabric.model.limits.budget import Budget
from flowfabric.model.suspension import Suspension
from flowfabric.server.lifecycle import seed_signing_key
from flowfabric.server.settings import ServerSettings
from flowfabric.stores.queries import Scan
from tests.chaos.test_sweepers import ME, wait_until
from tests.chaos.worker import QUICK
from tests.chaos.worker_processes import WorkerProcess, worker_processes
from tests.executions import suspend_args

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

INTERVAL_MS = QUICK.sweeps.suspension_timeout_ms
AHEAD_MS = INTERVAL_MS * 7 // 4  # long enough that the holder of the sweep schedules the instant

Done = Callable[[], Awaitable[int | None]]


async def suspend(engine: Engine) -> tuple[int, Done]:
    """Create a suspension with a timeout; return the timeout and a function that returns when it closed."""
    await engine.create_execution(execution_id=engine.new_execution_id())
    [held] = await engine.claim_many("default", 1, **ME, lease_ttl_ms=60_000)
    now = await engine.ping()
    await engine.suspend(held.handle, suspend_args(now, TimeoutOnly(), timeout_at=now + AHEAD_MS))

    async def closed_at() -> int | None:
        [row] = [row for row in await every(engine, Suspension) if row.execution_id == held.execution_id]
        at: int | None = row.closed_at
        return at

    return now + AHEAD_MS, closed_at


async def allot(engine: Engine) -> tuple[int, Done]:
    """Create a budget that resets; return the reset time and a function that returns when it was reset."""
    name = str(uuid.uuid4())
    await engine.create_budget(name, dimensions=["calls"], hard_limits=[1], soft_limits=[0], reset_interval_ms=AHEAD_MS)

    async def row() -> Budget:
        [found] = [row for row in await every(engine, Budget) if row.budget_id.endswith(name)]
        assert isinstance(found, Budget)
        return found

    async def reset_at() -> int | None:
        return (await row()).last_reset_at

    due_at = (await row()).next_reset_at
    assert due_at is not None
    return due_at, reset_at


async def every(engine: Engine, row: type[Any]) -> list[Any]:
    found: list[Any] = await engine.runtime.scan(Scan(row, limit=100))
    return found


async def lateness_ms(due_at: int, done_at: Done) -> int:
    """Return how long after its due time something was done."""

    async def is_done() -> bool:
        return await done_at() is not None

    await wait_until(is_done)
    at = await done_at()
    assert at is not None
    return at - due_at


async def holder(engine: Engine, sweep: str, workers: dict[str, WorkerProcess], *, not_before: int) -> WorkerProcess:
    """Return the process that holds the sweep and keeps holding it."""
    found: list[WorkerProcess] = []

    async def is_held() -> bool:
        [lease] = [row for row in await every(engine, SweepLease) if row.sweep == sweep]
        now = await engine.ping()
        if now >= not_before and lease.lease_until - now >= INTERVAL_MS // 4:
            found.append(workers[lease.holder])
        return bool(found)

    await wait_until(is_held)
    return found[0]


@pytest.mark.parametrize(("sweep", "plan"), [("suspension_timeout", suspend), ("budget_reset", allot)])
async def test_work_due_after_the_death_of_the_holder_is_late_by_one_interval_at_most(
    url: str, sweep: str, plan: Callable[[Engine], Awaitable[tuple[int, Done]]]
) -> None:
    async with await open_engine(url) as engine:
        await seed_signing_key(engine, ServerSettings())
        with worker_processes() as start_worker:
            workers: dict[str, WorkerProcess] = {}
            for _ in range(2):
                sweeper = start_worker("sweep", url)
                await asyncio.to_thread(sweeper.wait_until, lambda: bool(sweeper.lines("sweeping")))  # noqa: B023
                workers[sweeper.lines("sweeping")[0][0]] = sweeper
            usual_ms = await lateness_ms(*await plan(engine))

            due_at, done_at = await plan(engine)
            victim = await holder(engine, sweep, workers, not_before=due_at - INTERVAL_MS * 3 // 4)
            await asyncio.to_thread(victim.kill)
            assert await engine.ping() < due_at, "it was killed before the instant came"
            late_ms = await lateness_ms(due_at, done_at)

        assert late_ms <= INTERVAL_MS + usual_ms
        assert [worker.errors for worker in workers.values()] == [[], []]
