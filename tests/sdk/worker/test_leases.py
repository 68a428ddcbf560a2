"""Leases of a worker: the expiries that it knows, and work whose lease expires before it is begun."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Context, Engine, Fabric
from flowfabric.clock import ManualClock, StoreClockEstimate
from flowfabric.sdk.task import Task
from flowfabric.sdk.worker.heartbeat import HeldLeases
from flowfabric.sdk.worker.outcome import NOTHING_TO_REPORT, Outcome, Succeeded
from flowfabric.sdk.worker.runner import AttemptRunner
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.testing import World
from tests.executions import claim_one

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


async def test_the_expiry_of_a_lease_is_that_of_its_claim_then_of_its_renewal_then_none(store: Store) -> None:
    engine = Engine(store)
    for _ in range(2):
        await engine.create_execution(execution_id=engine.new_execution_id())
    one, other = await engine.claim_many("default", 2, lease_ttl_ms=30_000, **WORKER)
    leases = HeldLeases(lambda _: None)
    leases.add([one, other])
    assert [leases.expires_at(held.lease_id) for held in (one, other)] == [one.lease_expires_at, other.lease_expires_at]

    assert await leases.renew_all(engine, 90_000) == []
    renewed = await engine.describe_execution(one.execution_id)
    assert renewed is not None
    assert renewed.current_lease is not None
    assert leases.expires_at(one.lease_id) == renewed.current_lease.expires_at >= one.lease_expires_at + 60_000

    leases.remove([one])
    assert leases.expires_at(one.lease_id) == 0
    assert leases.expires_at(other.lease_id) >= other.lease_expires_at + 60_000


# -- leases that expire before the handler begins -----------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
async def test_a_worker_that_stalls_until_its_lease_has_expired_begins_no_handler(plain: bool) -> None:
    app = Fabric()
    epochs: list[int] = []

    async def work(ctx: Context) -> None:
        epochs.append(ctx.handle.fields.lease_epoch)

    def plain_work(ctx: Context) -> None:
        epochs.append(ctx.handle.fields.lease_epoch)

    task: Any = app.task(plain_work if plain else work)
    async with World(app) as world:
        claim = world.store.stop_after("take")
        run = await task.submit()
        await claim.reached()
        await world.advance("20s")  # the lease of 15 s expires
        claim.release()
        await run.result(60)
        await world.settle()
        assert epochs == [2], "only the claim after the lease had expired"
        engine: Any = await app.engine()
        assert engine.metrics.counter_value("ff_lease_expired_before_start") == 1
        assert [attempt.attempt_index for attempt in await run.attempts()] == [0, 1]


async def test_a_late_reply_to_the_claim_does_not_hide_that_the_lease_has_expired() -> None:
    app = Fabric()
    epochs: list[int] = []

    @app.task
    async def work(ctx: Context) -> None:
        epochs.append(ctx.handle.fields.lease_epoch)

    async with World(app) as world:
        claim = world.store.stop_after("take")
        run = await work.submit()
        await claim.reached()
        engine: Any = await app.engine()
        claimed_at = world.now_ms()
        await world.advance("20s")  # the lease of 15 s expires
        getattr(engine, "runtime", engine).estimate = StoreClockEstimate(lambda: claimed_at)  # as that reply says
        claim.release()
        await run.result(60)
        assert epochs == [2]


handlers = Fabric()
begun: list[int] = []


@handlers.task
async def work(ctx: Context) -> None:
    begun.append(ctx.attempt)


@handlers.task(isolation="process")
def separate() -> None:
    """Do nothing, in a subprocess."""


async def _outcome_after(stall_ms: int, engine: Engine, clock: ManualClock, task: Task[..., Any]) -> Outcome | None:
    """Return the outcome of an attempt whose worker stalls between its claim and the start of the handler."""
    handlers.bind(engine)
    run = await task.submit()
    claimed = await claim_one(engine, lease_ttl_ms=15_000, **WORKER)
    ended: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
    attempts = AttemptRunner(
        handlers,
        engine,
        lease_expires_at=lambda _: claimed.lease_expires_at,
        on_outcome=lambda _, outcome: ended.set_result(outcome),
        on_slot_freed=lambda: None,
    )
    clock.advance_ms(stall_ms)
    before = await engine.describe_execution(run.id)
    attempts.start([claimed])
    outcome = await ended
    attempts.close()
    assert await engine.describe_execution(run.id) == before, "nothing was written"
    handlers.unbind(None)
    return outcome


@pytest.mark.parametrize("task", [work, separate])
async def test_an_attempt_whose_lease_has_expired_is_not_begun(task: Any) -> None:
    begun.clear()
    clock = ManualClock()
    engine = Engine(MemoryStore(clock))
    assert await _outcome_after(15_000, engine, clock, task) == NOTHING_TO_REPORT
    assert not begun


async def test_a_wrong_estimate_of_the_time_prevents_no_attempt() -> None:
    begun.clear()
    clock = ManualClock()
    engine = Engine(MemoryStore(clock))
    engine.runtime.estimate = StoreClockEstimate(lambda: clock.now + 60_000)
    assert await _outcome_after(14_999, engine, clock, work) == Succeeded(b"null")
    assert begun == [0]
