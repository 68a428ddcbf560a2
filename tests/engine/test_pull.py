"""A worker's pull: it looks once when there is news, and misses nothing that comes between a look and the next wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import Engine, Settings
from flowfabric.engine.pulling import Pull
from flowfabric.stores.base import Store

ME: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
NEVER_MS = 3_600_000


@pytest.fixture
async def engine(store: Store) -> Engine:
    """An engine that trusts its hints: nothing is found by polling."""
    return Engine(store, settings=Settings(poll_ms=NEVER_MS))


@pytest.fixture
def trips(store: Store, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the store was asked what."""
    counts: Counter[str] = Counter()
    for verb in ("take", "due", "scan", "lines"):
        monkeypatch.setattr(store, verb, _counting(counts, verb, getattr(store, verb)))
    return counts


def _counting(counts: Counter[str], verb: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        counts[verb] += 1
        return await real(*args, **kwargs)

    return call


async def make(engine: Engine, lane_id: str = "default") -> str:
    execution = engine.new_execution_id(lane_id)
    await engine.create_execution(execution_id=execution, lane_id=lane_id)
    return execution


async def test_a_claim_that_saw_the_end_is_followed_by_a_wait_and_costs_no_trip(
    engine: Engine, trips: Counter[str]
) -> None:
    pull = Pull(engine, ["default"], **ME)
    await pull.claim(10)
    first = await make(engine)
    assert [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)] == [first]
    trips.clear()

    waiting = asyncio.create_task(pull.claim(9, max_wait_ms=NEVER_MS))
    for _ in range(20):
        await asyncio.sleep(0)
    assert trips == {}

    second = await make(engine)
    assert [one.execution_id for one in await waiting] == [second]
    assert trips["take"] == 1
    pull.close()


async def test_work_that_comes_between_two_claims_is_not_slept_through(engine: Engine) -> None:
    pull = Pull(engine, ["default", "mail"], **ME)
    first = await make(engine)
    assert [one.execution_id for one in await pull.claim(10)] == [first]
    second = await make(engine, "mail")  # nobody is waiting at this moment
    async with asyncio.timeout(10):
        assert [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)] == [second]
    pull.close()


async def test_a_full_claim_is_followed_by_another_look_at_once(engine: Engine) -> None:
    made = [await make(engine) for _ in range(3)]
    pull = Pull(engine, ["default"], **ME)
    async with asyncio.timeout(10):
        claimed = await pull.claim(2, max_wait_ms=NEVER_MS) + await pull.claim(2, max_wait_ms=NEVER_MS)
    assert sorted(one.execution_id for one in claimed) == sorted(made)
    pull.close()


async def test_it_ends_when_it_is_told_to(engine: Engine) -> None:
    pull = Pull(engine, ["default"], **ME)
    go_on = True
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=NEVER_MS, go_on=lambda: go_on))
    await asyncio.sleep(0.02)
    go_on = False
    engine.nudge(["default"])
    async with asyncio.timeout(10):
        assert await waiting == []
    pull.close()


async def test_a_success_says_nothing_of_an_earlier_failure(engine: Engine) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    e = engine.new_execution_id()
    await engine.create_execution(execution_id=e, policy=retry)
    pull = Pull(engine, ["default"], **ME)
    [first] = await pull.claim(1)
    await engine.fail(first.handle, reason="flaky")
    await engine.sweep_once("delayed_promoter")
    [second] = await pull.claim(1)
    await engine.complete(second.handle)
    ended = await engine.await_end(e)
    assert ended is not None
    assert ended.reason is None
    pull.close()
