"""The pace of limited work: a released quota admits the next execution without a scan."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.limits import unblocker
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.limits import QuotaPolicyCreated
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.testing.flaky_store import FlakyStore
from tests.executions import create_request
from tests.scenarios.waits import until

Q = "0c000000-0000-4000-8000-000000000001"
JOB_MS = 100
CAP = 10


@pytest.fixture
async def engine(store: Store) -> Engine:
    """An engine without sweeps, whose polls are too rare to help."""
    return Engine(store, minter=SeededMinter(1), settings=Settings(poll_ms=3_600_000))


async def limited(engine: Engine, count: int, **limits: int) -> None:
    """Create this many executions under one quota."""
    numbers: dict[str, Any] = {"window_seconds": 60, "max_requests_per_window": 0, "max_concurrent": 0} | limits
    assert await engine.create_quota_policy(Q, **numbers) == QuotaPolicyCreated(Q)
    policy = f'{{"quota_policy_ids": ["{Q}"]}}'
    await engine.create_executions(create_request(engine.new_execution_id(), policy=policy) for _ in range(count))


async def pull(engine: Engine, limit: int, wait_ms: int = 0) -> list[Any]:
    return await engine.claim_admitted(
        "default", limit, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=60_000, max_wait_ms=wait_ms
    )


async def test_jobs_of_100_ms_under_a_concurrency_of_10_run_at_100_a_second(engine: Engine, clock: ManualClock) -> None:
    await limited(engine, 100, max_concurrent=CAP)
    start = clock.now
    done = 0

    while claimed := await pull(engine, 50):
        assert len(claimed) == CAP, "every slot is in use"
        clock.advance_ms(JOB_MS)
        await asyncio.gather(*(engine.complete(one.handle) for one in claimed))
        # Completions release the quota and releases wake claims: nothing else causes progress in this test.
        await engine.outbox.wait_for_deliveries()
        done += len(claimed)

    assert (done, clock.now - start) == (100, 1000)


@pytest.mark.parametrize("poll_ms", [None, 200], ids=["in this process", "in another process"])
async def test_a_waiting_worker_is_woken_by_the_release(engine: Engine, store: Store, poll_ms: int | None) -> None:
    await limited(engine, 3, max_concurrent=1)
    [first] = await pull(engine, 5)
    waits = engine
    if poll_ms is not None:
        waits = Engine(store, minter=SeededMinter(2), settings=Settings(poll_ms=poll_ms))
    waiting = asyncio.create_task(pull(waits, 5, wait_ms=60_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()

    async with asyncio.timeout(10):  # The next poll of this process is an hour away.
        await engine.complete(first.handle)
        [second] = await waiting

    assert second.execution_id != first.execution_id


async def test_a_rate_window_admits_its_limit_and_no_more(engine: Engine, clock: ManualClock) -> None:
    await limited(engine, 40, window_seconds=1, max_requests_per_window=10)
    admitted: Counter[int] = Counter()

    for _ in range(100):
        await engine.sweep_once("unblock")
        claimed = await pull(engine, 50)
        admitted[clock.now] += len(claimed)
        await asyncio.gather(*(engine.complete(one.handle) for one in claimed))
        clock.advance_ms(JOB_MS)

    instants = [now for now, count in admitted.items() for _ in range(count)]
    assert len(instants) == 40
    for end in instants:
        assert sum(end - 1000 < now <= end for now in instants) <= 10, "in no window"


async def test_a_rate_window_that_opens_while_the_store_is_unavailable_is_checked_again(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unblocker, "MAX_RECHECK_MS", 10)
    monkeypatch.setattr(StoreBackoff.__init__, "__defaults__", (0.01,))  # The store is unavailable for long.
    wire = FlakyStore(store)
    engine = Engine(wire, minter=SeededMinter(1), settings=Settings(poll_ms=3_600_000))
    await limited(engine, 2, window_seconds=1, max_requests_per_window=1)
    [first] = await pull(engine, 5)
    wire.go_down()
    engine.unblocker.schedule_quota_unblock(NamespacedId(DEFAULT_NAMESPACE, Q), 0)
    await until(lambda: "cannot compute when" in caplog.text)

    wire.heal()
    clock.advance_ms(1000)
    async with asyncio.timeout(10):  # The next poll is an hour away.
        [second] = await pull(engine, 5, wait_ms=60_000)

    assert second.execution_id != first.execution_id
    assert not [record for record in caplog.records if record.name == "asyncio"], "no task failed unheard"
    engine.unblocker.cancel_window_timers()


async def test_fifty_reporters_cost_two_round_trips(store: Store) -> None:
    trips: Counter[str] = Counter()

    class CountingStore:
        def __getattr__(self, name: str) -> Any:
            if name in ("load", "commit"):
                trips[name] += 1
            return getattr(store, name)

    engine = Engine(CountingStore(), minter=SeededMinter(1))
    budget = "0b000000-0000-4000-8000-000000000001"
    await engine.create_budget(budget, dimensions=["tokens"], hard_limits=[10**6], soft_limits=[0])
    trips.clear()

    await asyncio.gather(*(engine.report_usage_admin(budget, dimensions=["tokens"], deltas=[n]) for n in range(50)))

    assert trips["load"] + trips["commit"] <= 4
    assert (await engine.get_budget_status(budget)).usage == {"tokens": sum(range(50))}
