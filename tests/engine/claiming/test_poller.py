"""A worker's pull: it looks once when there is news, and misses nothing that comes between a look and the next wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import Engine, Settings, errors
from flowfabric.engine.operations import reads
from flowfabric.engine.runtime import recent_creates
from flowfabric.engine.runtime.wakeups import COMPLETION_PREFIX, completion_topic, lane_topic
from flowfabric.stores.port import Store

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
    for verb in ("claim_rows", "due", "scan", "queues", "load"):
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
    pull = engine.pulling(["default"], **ME)
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
    assert trips["claim_rows"] == 1
    pull.close()


async def test_work_that_comes_between_two_claims_is_not_slept_through(engine: Engine) -> None:
    pull = engine.pulling(["default", "mail"], **ME)
    first = await make(engine)
    assert [one.execution_id for one in await pull.claim(10)] == [first]
    second = await make(engine, "mail")  # nobody is waiting at this moment
    async with asyncio.timeout(10):
        assert [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)] == [second]
    pull.close()


async def test_work_in_one_lane_costs_no_look_at_the_others(engine: Engine, trips: Counter[str]) -> None:
    pull = engine.pulling(["default", "mail", "other"], **ME)
    for lane in ("default", "mail", "other"):
        await make(engine, lane)
    assert len(await pull.claim(10)) == 3
    trips.clear()

    made = [await make(engine, "mail") for _ in range(2)]
    claimed = await pull.claim(10, max_wait_ms=NEVER_MS)
    assert {one.execution_id for one in claimed} == set(made)
    assert trips == {"claim_rows": 1}
    pull.close()


async def test_a_lane_whose_hint_was_lost_is_looked_at_in_time_however_busy_another_is(store: Store) -> None:
    engine = Engine(store, settings=Settings(poll_ms=50))
    pull = engine.pulling(["default", "mail"], **ME)
    await pull.claim(10)
    fire = engine.runtime.wakeups.notify
    engine.runtime.wakeups.notify = lambda topics: fire(set(topics) - {lane_topic("mail")})  # type: ignore[method-assign]
    forgotten = await make(engine, "mail")

    claimed: list[str] = []
    async with asyncio.timeout(10):
        while forgotten not in claimed:
            await make(engine)
            claimed += [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)]
    pull.close()


async def test_a_lane_that_could_not_be_looked_at_is_looked_at_again(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = engine.pulling(["default"], **ME)
    made = await make(engine)
    with monkeypatch.context() as away:
        away.setattr(engine.claimer, "claim_available", _failing)
        with pytest.raises(errors.StoreUnavailable):
            await pull.claim(1, max_wait_ms=NEVER_MS)
    async with asyncio.timeout(10):
        [claimed] = await pull.claim(1, max_wait_ms=NEVER_MS)
    assert claimed.execution_id == made
    pull.close()


async def _failing(*_: Any) -> list[Any]:
    raise errors.StoreUnavailable("away", backend="x", source="other")


async def test_identities_that_a_claim_had_no_work_for_serve_the_next_one(engine: Engine) -> None:
    await make(engine)
    pull = engine.pulling(["default"], **ME)
    [first] = await pull.claim(3)
    spare = {stamp.lease_id for stamp in engine.fast_claims._spare}
    assert len(spare) == 2
    assert first.lease_id not in spare

    await make(engine)
    [second] = await pull.claim(2)
    assert second.lease_id in spare
    pull.close()


async def test_a_full_claim_is_followed_by_another_look_at_once(engine: Engine) -> None:
    made = [await make(engine) for _ in range(3)]
    pull = engine.pulling(["default"], **ME)
    async with asyncio.timeout(10):
        claimed = await pull.claim(2, max_wait_ms=NEVER_MS) + await pull.claim(2, max_wait_ms=NEVER_MS)
    assert sorted(one.execution_id for one in claimed) == sorted(made)
    pull.close()


async def test_it_ends_when_it_is_told_to(engine: Engine) -> None:
    pull = engine.pulling(["default"], **ME)
    go_on = True
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=NEVER_MS, go_on=lambda: go_on))
    await asyncio.sleep(0.02)
    go_on = False
    engine.wake_claims(["default"])
    async with asyncio.timeout(10):
        assert await waiting == []
    pull.close()


async def test_a_success_says_nothing_of_an_earlier_failure(engine: Engine) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    e = engine.new_execution_id()
    await engine.create_execution(execution_id=e, policy=retry)
    pull = engine.pulling(["default"], **ME)
    [first] = await pull.claim(1)
    await engine.fail(first.handle, reason="flaky")
    await engine.sweep_once("delayed_promoter")
    [second] = await pull.claim(1)
    await engine.complete(second.handle)
    ended = await engine.await_end(e)
    assert ended is not None
    assert ended.reason is None
    pull.close()


@pytest.fixture
def looks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rows were looked at by key, with a trip or without."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(engine.runtime, "load", _counting(counts, "load", engine.runtime.load))
    return counts


async def finish(engine: Engine) -> None:
    claimed = await engine.claim("default", **ME)
    assert claimed is not None
    await engine.complete(claimed.handle, result=b"done")


async def test_the_end_of_what_was_just_created_is_looked_at_when_it_is_told(
    engine: Engine, looks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", NEVER_MS / 1000)
    made = await make(engine)
    looks.clear()
    waiting = asyncio.create_task(engine.await_end(made, max_wait_ms=NEVER_MS))
    await asyncio.sleep(0)
    await finish(engine)

    async with asyncio.timeout(10):
        ended = await waiting
    assert ended is not None
    assert ended.result == b"done"
    assert looks["load"] == 1


async def test_what_ended_before_anybody_waited_is_looked_at_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", NEVER_MS / 1000)
    made = await make(engine)
    told = engine.runtime.wakeups.subscribe(completion_topic(made))  # so that this process is told of it
    await finish(engine)
    assert told.done()

    async with asyncio.timeout(10):
        assert await engine.await_end(made, max_wait_ms=NEVER_MS) is not None


async def test_an_end_that_nobody_told_of_is_found_after_a_moment(engine: Engine) -> None:
    made = await make(engine)
    fire = engine.runtime.wakeups.notify
    engine.runtime.wakeups.notify = lambda topics: fire(  # type: ignore[method-assign]
        topic for topic in topics if not topic.startswith(COMPLETION_PREFIX)
    )
    await finish(engine)

    async with asyncio.timeout(10):
        assert await engine.await_end(made, max_wait_ms=NEVER_MS) is not None


async def test_who_does_not_wait_hears_at_once_that_it_has_not_ended(
    engine: Engine, looks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", NEVER_MS / 1000)
    made = await make(engine)
    looks.clear()
    async with asyncio.timeout(10):
        assert await engine.await_end(made) is None
    assert looks["load"] == 1


async def test_what_was_created_and_never_waited_for_is_not_remembered_without_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_creates, "MAX_RECENT_CREATES", 2)
    made = [await make(engine) for _ in range(3)]
    assert list(engine.recent_creates._completions) == made[1:]


async def test_a_process_that_waits_for_nothing_does_not_listen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(store, "on_notify", heard.append)
    Engine(store, settings=Settings(hears=False))
    assert heard == []
    Engine(store)
    assert len(heard) == 1
