"""Limits under random interleavings of many processes.

After every commit the rows are checked: nothing exceeds a hard limit or a cap, and counters equal recounts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.answers.limits import HardBreach
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import BudgetDimension
from flowfabric.model.limits.quota import QuotaPolicy, QuotaSlot
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read, Scan, Where
from flowfabric.stores.verdicts import Verdict
from flowfabric.testing.limit_invariants import check_limit_invariants
from tests.executions import new_execution

B = "0b000000-0000-4000-8000-000000000001"
Q = "0c000000-0000-4000-8000-000000000001"
HARD = 100
REPORTERS, PROCESSES = 50, 5
CAP, RATE, WINDOW_MS = 3, 4, 1000


class InterleavingStore:
    """A store that delays its callers at random and checks its rows after every commit."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self.store = store
        self.commits = 0
        self._chance = chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def try_load_now(self, reads: Sequence[Read]) -> Loaded | None:
        return None  # Every read is a load.

    async def load(self, reads: Sequence[Read]) -> Loaded:
        await self._delay()
        return await self.store.load(reads)

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        await self._delay()
        verdicts = await self.store.commit(changes, topics)
        self.commits += 1
        await self._check_rows()
        return verdicts

    async def _delay(self) -> None:
        for _ in range(self._chance.randrange(6)):
            await asyncio.sleep(0)

    async def _check_rows(self) -> None:
        loaded = await self.store.load(
            (Read(BudgetDimension, ("default", B)), Read(QuotaPolicy, ("default", Q)), Read(QuotaSlot, ("default", Q)))
        )
        for row in loaded.rows[0]:
            assert (row.usage or 0) + row.reserved <= HARD
        for policy in loaded.rows[1]:
            assert policy.active == len(loaded.rows[2]) <= CAP


@pytest.mark.parametrize("seed", range(3))
async def test_no_interleaving_of_fifty_reporters_exceeds_a_hard_limit(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    shuffled = InterleavingStore(store, chance)
    engines = [Engine(shuffled, minter=SeededMinter(10 * seed + n)) for n in range(PROCESSES)]
    await engines[0].create_budget(B, dimensions=["tokens"], hard_limits=[HARD], soft_limits=[0])

    async def reporter(n: int) -> int:
        """Report, spend, or reserve and then settle, refund or abandon; return the amount that was accepted."""
        engine, amount, e = engines[n % PROCESSES], chance.randrange(1, 9), engines[0].new_execution_id()
        match chance.choice(("report", "spend", "settle", "refund", "forget")):
            case "report":
                answer: Any = await engine.report_usage_admin(B, dimensions=["tokens"], deltas=[amount])
                return 0 if isinstance(answer, HardBreach) else amount
            case "spend":
                answer = await engine.record_spend(B, e, {"tokens": amount}, idempotency_key=e)
                again = await engines[(n + 1) % PROCESSES].record_spend(B, e, {"tokens": amount}, idempotency_key=e)
                return 0 if isinstance(answer, HardBreach) and isinstance(again, HardBreach) else amount
            case how:
                name = str(UUID(int=n))
                answer = await engine.reserve_budget(B, e, {"tokens": amount}, ttl_ms=10**6, reservation_id=name)
                if isinstance(answer, HardBreach):
                    return 0
                if how == "settle":
                    await engine.settle_budget(B, e, name, {"tokens": amount - 1})
                    return amount - 1
                if how == "refund":
                    await engine.refund_budget(B, name)
                    return 0
                return amount

    had = await asyncio.gather(*(reporter(n) for n in range(REPORTERS)))

    status = await engines[0].get_budget_status(B)
    assert status.usage.get("tokens", 0) + status.reserved.get("tokens", 0) == sum(had) <= HARD
    assert sum(had) > HARD / 2, "and not by refusing everything"
    assert shuffled.commits > PROCESSES, "they were many commits, not one"
    await check_limit_invariants(engines[0])


class WorkerPool:
    """Workers of several processes under one quota that act at random."""

    def __init__(self, store: Store, clock: ManualClock, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        self.store = InterleavingStore(store, self.chance)
        settings = Settings(poll_ms=3_600_000)
        self.engines = [Engine(self.store, minter=SeededMinter(10 * seed + n), settings=settings) for n in range(3)]
        self.held: list[tuple[Engine, Claimed]] = []
        self.admitted: list[int] = []

    async def create(self, count: int) -> None:
        engine = self.engines[0]
        await engine.create_quota_policy(
            Q, window_seconds=WINDOW_MS // 1000, max_requests_per_window=RATE, max_concurrent=CAP
        )
        for _ in range(count):
            await new_execution(engine, policy={"quota_policy_ids": [Q]})

    async def claim(self, engine: Engine) -> None:
        limit = self.chance.randrange(1, 5)
        claimed = await engine.claim_admitted(
            "default", limit, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=10**8
        )
        self.admitted += [self.clock.now] * len(claimed)
        self.held += [(engine, one) for one in claimed]

    async def finish_one(self) -> None:
        """Finish one held execution in one of the possible ways."""
        if not self.held:
            return
        engine, claimed = self.held.pop(self.chance.randrange(len(self.held)))
        match self.chance.randrange(4):
            case 0:
                await engine.fail(claimed.handle, reason="no luck", category="permanent")
            case 1:
                await self.engines[0].cancel_execution(claimed.execution_id)
            case _:
                await engine.complete(claimed.handle)

    async def running(self) -> int:
        where = (
            Where("lifecycle_phase", "=", LifecyclePhase.ACTIVE),
            Where("ownership_state", "=", OwnershipState.LEASED),
        )
        return len(await self.store.scan(Scan(Execution, where, limit=1000)))

    async def exhaust(self) -> None:
        """Reach the cap and then the rate while the clock stands still."""
        while await self.running() < CAP:
            await self.claim_concurrently()
        while len(self.admitted) < RATE:
            await self.finish_one()
            await self.claim_concurrently()

    async def claim_concurrently(self) -> None:
        await self.engines[0].sweep_once("unblock")
        await asyncio.gather(*(self.claim(engine) for engine in self.engines))

    async def close(self) -> None:
        for engine in self.engines:
            engine.unblocker.cancel_window_timers()
            await engine.outbox.wait_for_deliveries()


@pytest.mark.parametrize("seed", range(2))
async def test_rate_and_concurrency_hold_in_every_window(store: Store, clock: ManualClock, seed: int) -> None:
    pool, count = WorkerPool(store, clock, seed), 20
    await pool.create(count)
    await pool.exhaust()

    most = CAP
    for _ in range(1000):
        acts = [pool.claim(engine) for engine in pool.engines if pool.chance.random() < 0.8]
        acts += [pool.finish_one() for _ in range(pool.chance.randrange(4))]
        for outcome in await asyncio.gather(*acts, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, errors.FabricError):
                raise outcome
        most = max(most, await pool.running())
        if len(pool.admitted) == count and not pool.held:
            break
        clock.advance_ms(pool.chance.choice((0, 1, 50, 90, 333)))
        if pool.chance.random() < 0.5:
            await pool.engines[0].sweep_once("unblock")
    await pool.close()

    assert len(pool.admitted) == count, "all of it ran"
    assert most == CAP, "the cap was never exceeded"
    busiest = max(sum(end - WINDOW_MS < at <= end for at in pool.admitted) for end in pool.admitted)
    assert busiest == RATE, "nor was the rate"
    for sweep in ("outbox_relay", "quota_reconciler"):
        await pool.engines[0].sweep_once(sweep)
    await check_limit_invariants(pool.engines[0])
    [policy] = (await store.load((Read(QuotaPolicy, ("default", Q)),))).rows[0]
    assert policy.active == 0, "what ended gave its slot back"
