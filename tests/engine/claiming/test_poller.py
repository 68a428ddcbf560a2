"""The lane poller claims once per wakeup, and misses no work that arrives between a claim and the next wait."""

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
from tests.executions import claim_one, new_execution

ME: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
NEVER_MS = 3_600_000


@pytest.fixture
async def engine(store: Store) -> Engine:
    """An engine that relies on wakeups: its polls are too rare to find anything."""
    return Engine(store, settings=Settings(poll_ms=NEVER_MS))


@pytest.fixture
def round_trips(store: Store, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls to the store by operation."""
    counts: Counter[str] = Counter()
    for verb in ("claim_rows", "due", "scan", "queues", "load"):
        monkeypatch.setattr(store, verb, _counting(counts, verb, getattr(store, verb)))
    return counts


def _counting(counts: Counter[str], verb: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        counts[verb] += 1
        return await real(*args, **kwargs)

    return call


async def create(engine: Engine, lane_id: str = "default") -> str:
    return await new_execution(engine, lane_id)


async def test_a_claim_that_emptied_the_lane_is_followed_by_a_wait_without_a_round_trip(
    engine: Engine, round_trips: Counter[str]
) -> None:
    pull = engine.pulling(["default"], **ME)
    await pull.claim(10)
    first = await create(engine)
    assert [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)] == [first]
    round_trips.clear()

    waiting = asyncio.create_task(pull.claim(9, max_wait_ms=NEVER_MS))
    for _ in range(20):
        await asyncio.sleep(0)
    assert round_trips == {}

    second = await create(engine)
    assert [one.execution_id for one in await waiting] == [second]
    assert round_trips["claim_rows"] == 1
    pull.close()


async def test_work_that_arrives_between_two_claims_is_claimed_at_once(engine: Engine) -> None:
    pull = engine.pulling(["default", "mail"], **ME)
    first = await create(engine)
    assert [one.execution_id for one in await pull.claim(10)] == [first]
    second = await create(engine, "mail")  # No claim is waiting at this moment.
    async with asyncio.timeout(10):
        assert [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)] == [second]
    pull.close()


async def test_work_in_one_lane_causes_no_claim_in_the_others(engine: Engine, round_trips: Counter[str]) -> None:
    pull = engine.pulling(["default", "mail", "other"], **ME)
    for lane in ("default", "mail", "other"):
        await create(engine, lane)
    assert len(await pull.claim(10)) == 3
    round_trips.clear()

    made = [await create(engine, "mail") for _ in range(2)]
    claimed = await pull.claim(10, max_wait_ms=NEVER_MS)
    assert {one.execution_id for one in claimed} == set(made)
    assert round_trips == {"claim_rows": 1}
    pull.close()


async def test_a_lane_whose_wakeup_was_lost_is_polled_in_time_however_busy_another_lane_is(store: Store) -> None:
    engine = Engine(store, settings=Settings(poll_ms=50))
    pull = engine.pulling(["default", "mail"], **ME)
    await pull.claim(10)
    fire = engine.runtime.wakeups.notify
    engine.runtime.wakeups.notify = lambda topics: fire(set(topics) - {lane_topic("mail")})  # type: ignore[method-assign]
    forgotten = await create(engine, "mail")

    claimed: list[str] = []
    async with asyncio.timeout(10):
        while forgotten not in claimed:
            await create(engine)
            claimed += [one.execution_id for one in await pull.claim(10, max_wait_ms=NEVER_MS)]
    pull.close()


async def test_a_lane_whose_claim_failed_is_claimed_from_again(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = engine.pulling(["default"], **ME)
    made = await create(engine)
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


async def test_unused_lease_ids_of_a_claim_serve_the_next_claim(engine: Engine) -> None:
    await create(engine)
    pull = engine.pulling(["default"], **ME)
    [first] = await pull.claim(3)
    spare = {ids.lease_id for ids in engine.fast_claims._spare}
    assert len(spare) == 2
    assert first.lease_id not in spare

    await create(engine)
    [second] = await pull.claim(2)
    assert second.lease_id in spare
    pull.close()


async def test_a_full_claim_is_followed_by_another_claim_at_once(engine: Engine) -> None:
    made = [await create(engine) for _ in range(3)]
    pull = engine.pulling(["default"], **ME)
    async with asyncio.timeout(10):
        claimed = await pull.claim(2, max_wait_ms=NEVER_MS) + await pull.claim(2, max_wait_ms=NEVER_MS)
    assert sorted(one.execution_id for one in claimed) == sorted(made)
    pull.close()


async def test_a_waiting_claim_returns_when_the_poller_is_stopped(engine: Engine) -> None:
    pull = engine.pulling(["default"], **ME)
    go_on = True
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=NEVER_MS, go_on=lambda: go_on))
    await asyncio.sleep(0.02)
    go_on = False
    engine.wake_claims(["default"])
    async with asyncio.timeout(10):
        assert await waiting == []
    pull.close()


async def test_a_success_clears_an_earlier_failure(engine: Engine) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    e = await new_execution(engine, policy=retry)
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
def key_loads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of loads by key, with or without a round trip."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(engine.runtime, "load", _counting(counts, "load", engine.runtime.load))
    return counts


async def finish(engine: Engine) -> None:
    claimed = await claim_one(engine, **ME)
    await engine.complete(claimed.handle, result=b"done")


async def test_the_result_of_a_created_execution_is_loaded_when_it_is_notified(
    engine: Engine, key_loads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", NEVER_MS / 1000)
    made = await create(engine)
    key_loads.clear()
    waiting = asyncio.create_task(engine.await_end(made, max_wait_ms=NEVER_MS))
    await asyncio.sleep(0)
    await finish(engine)

    async with asyncio.timeout(10):
        ended = await waiting
    assert ended is not None
    assert ended.result == b"done"
    assert key_loads["load"] == 1


async def test_an_execution_that_runs_in_this_process_is_loaded_once_it_ends(
    engine: Engine, key_loads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", 0)
    made = await create(engine)
    claimed = await claim_one(engine, **ME)
    key_loads.clear()
    waiting = asyncio.create_task(engine.await_end(made, max_wait_ms=NEVER_MS))
    for _ in range(20):  # iterations of the loop, in which the first check is over
        await asyncio.sleep(0)
    await engine.complete(claimed.handle, result=b"done")

    async with asyncio.timeout(10):
        ended = await waiting
    assert ended is not None
    assert ended.result == b"done"
    assert key_loads["load"] == 1


async def test_an_execution_that_finished_before_the_wait_is_loaded_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", NEVER_MS / 1000)
    made = await create(engine)
    notified = engine.runtime.wakeups.subscribe(completion_topic(made))  # Subscribe this process to its notifications.
    await finish(engine)
    assert notified.done()

    async with asyncio.timeout(10):
        assert await engine.await_end(made, max_wait_ms=NEVER_MS) is not None


async def test_a_result_without_a_notification_is_found_by_polling(engine: Engine) -> None:
    made = await create(engine)
    fire = engine.runtime.wakeups.notify
    engine.runtime.wakeups.notify = lambda topics: fire(  # type: ignore[method-assign]
        topic for topic in topics if not topic.startswith(COMPLETION_PREFIX)
    )
    await finish(engine)

    async with asyncio.timeout(10):
        assert await engine.await_end(made, max_wait_ms=NEVER_MS) is not None


async def test_a_call_that_does_not_wait_returns_at_once_for_an_unfinished_execution(
    engine: Engine, key_loads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "FIRST_CHECK_DELAY_S", NEVER_MS / 1000)
    made = await create(engine)
    key_loads.clear()
    async with asyncio.timeout(10):
        assert await engine.await_end(made) is None
    assert key_loads["load"] == 1


async def test_the_memory_of_created_executions_that_are_never_awaited_is_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_creates, "MAX_RECENT_CREATES", 2)
    made = [await create(engine) for _ in range(3)]
    assert list(engine.recent_creates._completions) == made[1:]


async def test_a_process_that_waits_for_nothing_does_not_listen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(store, "on_notify", heard.append)
    Engine(store, settings=Settings(hears=False))
    assert heard == []
    Engine(store)
    assert len(heard) == 1
