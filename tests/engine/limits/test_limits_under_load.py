"""Limits under load: they hold with many processes, lost replies and killed workers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.limits import HardBreach, Reserved
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaPolicy, QuotaSlot
from flowfabric.model.states import LifecyclePhase
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan, Where
from flowfabric.testing import FlakyStore

B = "0b000000-0000-4000-8000-000000000001"
Q = "0c000000-0000-4000-8000-000000000001"
CAP = 3
LEASE_MS = 5000


async def define(engine: Engine, hard: int) -> None:
    await engine.create_budget(B, dimensions=["tokens"], hard_limits=[hard], soft_limits=[0])


async def used(engine: Engine) -> tuple[int, int]:
    status = await engine.get_budget_status(B)
    return status.usage.get("tokens", 0), status.breach_count


async def test_fifty_reporters_in_five_processes_never_exceed_a_hard_limit(store: Store) -> None:
    engines = [Engine(store, minter=SeededMinter(n)) for n in range(5)]
    await define(engines[0], 100)

    answers = await asyncio.gather(
        *(engines[n % 5].report_usage_admin(B, dimensions=["tokens"], deltas=[3]) for n in range(50))
    )

    breaches = sum(isinstance(answer, HardBreach) for answer in answers)
    assert (50 - breaches, await used(engines[0])) == (33, (99, 17))


@pytest.mark.parametrize("seed", range(6))
async def test_reports_whose_replies_are_lost_are_counted_once(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    flaky = FlakyStore(store, rng=chance, rate=0.25)
    engines = [Engine(flaky, minter=SeededMinter(10 * seed + n)) for n in range(3)]
    calm = Engine(store, minter=SeededMinter(99))
    await define(calm, 200)
    amounts = [chance.randrange(1, 9) for _ in range(60)]

    async def report(n: int, amount: int) -> Any:
        engine = engines[n % 3]
        if n % 4 == 0:
            return await engine.reserve_budget(B, calm.new_execution_id(), {"tokens": amount}, ttl_ms=10**6)
        return await engine.report_usage_admin(B, dimensions=["tokens"], deltas=[amount])

    answers = []
    for start in range(0, 60, 12):  # Report in waves, so that each wave has a change to lose.
        wave = list(enumerate(amounts))[start : start + 12]
        answers += await asyncio.gather(*(report(n, amount) for n, amount in wave))

    accepted = sum(
        amount for amount, answer in zip(amounts, answers, strict=True) if not isinstance(answer, HardBreach)
    )
    status = await calm.get_budget_status(B)
    assert status.usage.get("tokens", 0) + status.reserved.get("tokens", 0) == accepted <= 200
    assert status.breach_count == sum(isinstance(answer, HardBreach) for answer in answers)
    assert flaky.losses, "something was lost"
    assert any(isinstance(answer, Reserved) for answer in answers)


class WorkerPool:
    """Workers that claim, work and die at random under one quota."""

    def __init__(self, store: Store, clock: ManualClock, seed: int) -> None:
        self.store = store
        self.clock = clock
        self.chance = random.Random(seed)
        self.minters = iter(range(seed * 10_000, seed * 10_000 + 10_000))
        self.engines: list[Engine] = []
        self.office = self.new_worker()
        self.most = 0

    def new_worker(self) -> Engine:
        settings = Settings(poll_ms=10)
        self.engines.append(Engine(self.store, minter=SeededMinter(next(self.minters)), settings=settings))
        return self.engines[-1]

    async def drain(self) -> None:
        """Wait for everything that killed workers had begun or sent."""
        for engine in self.engines:
            await engine.aggregates.quotas._decisions.drain()
            await engine.runtime.commit_queue.drain()
            await engine.outbox.wait_for_deliveries()

    async def check_concurrency(self) -> None:
        """Check that no more runs than the quota allows."""
        running = await self.store.scan(Scan(Execution, (Where("lifecycle_phase", "=", LifecyclePhase.ACTIVE),)))
        self.most = max(self.most, len(running))
        assert len(running) <= CAP

    async def run_worker(self, engine: Engine, name: str) -> None:
        """Run one worker once; it may be killed at any point."""
        claimed = await engine.claim_admitted(
            "default", 2, worker_id=name, worker_instance_id=f"{name}-1", lease_ttl_ms=LEASE_MS
        )
        await self.check_concurrency()
        for one in claimed:
            if self.chance.random() < 0.3:
                continue  # The worker dies while it holds this one.
            try:
                await engine.complete(one.handle)
            except errors.FabricError:
                continue  # Too late: another worker has reclaimed it.
        await self.check_concurrency()

    async def run_round(self, number: int) -> None:
        """Run several workers concurrently and kill some of them."""
        tasks = [asyncio.create_task(self.run_worker(self.new_worker(), f"w{number}-{n}")) for n in range(3)]
        for task in tasks:
            if self.chance.random() < 0.4:
                for _ in range(self.chance.randrange(30)):
                    await asyncio.sleep(0)
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        self.clock.advance_ms(self.chance.choice((0, 1, LEASE_MS)))

    async def counters(self) -> tuple[int, int]:
        loaded = await self.office.runtime.load((Read(QuotaPolicy, ("default", Q)), Read(QuotaSlot, ("default", Q))))
        return loaded.rows[0][0].active, len(loaded.rows[1])


@pytest.mark.parametrize("seed", range(4))
async def test_no_admission_leaks_when_workers_are_killed(store: Store, clock: ManualClock, seed: int) -> None:
    pool = WorkerPool(store, clock, seed)
    office = pool.office
    await office.create_quota_policy(Q, window_seconds=60, max_requests_per_window=0, max_concurrent=CAP)
    executions = [office.new_execution_id() for _ in range(25)]
    for execution in executions:
        await office.create_execution(execution_id=execution, policy={"quota_policy_ids": [Q]})

    dies_with = await pool.new_worker().claim_admitted(
        "default", CAP + 2, worker_id="dies", worker_instance_id="dies-1", lease_ttl_ms=LEASE_MS
    )
    assert len(dies_with) == CAP, "the quota is used to the full"
    await pool.check_concurrency()

    ended: list[Execution] = []
    for number in range(1000):  # Chance may kill many workers for long; a leaked admission would never be released.
        await pool.run_round(number)
        if number % 10 == 9:
            for sweep in ("lease_expiry", "outbox_relay", "quota_reconciler", "unblock"):
                await office.sweep_once(sweep)
        ended = await store.scan(Scan(Execution, (Where("lifecycle_phase", "=", LifecyclePhase.TERMINAL),)))
        if len(ended) == len(executions):
            break

    assert len(ended) == len(executions), "all work was done"
    assert pool.most == CAP, "and never beyond"
    await pool.drain()
    clock.advance_ms(60_001)
    for sweep in ("outbox_relay", "quota_reconciler"):
        await office.sweep_once(sweep)
    assert await pool.counters() == (0, 0)
