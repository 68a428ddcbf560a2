"""What a change has to tell goes to other processes with its commit, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from flowfabric import Engine
from flowfabric.connector import open_engine
from flowfabric.engine.claiming import claimer
from flowfabric.engine.runtime import wakeups
from flowfabric.engine.runtime.wakeups import FEED_TOPIC, completion_topic, lane_topic, stream_topic
from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.model.answers.execution import Claimed, Duplicate
from flowfabric.model.change import Change
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.postgres import PostgresStore, notifier
from tests.conftest import Rival

LANE = "mail"


class Others(MemoryStore):
    """The hints that other processes get: with commits, and otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[frozenset[str]] = []
        self.sent: list[frozenset[str]] = []
        self.is_losing = False

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        done = await super().commit(changes)
        if self.is_losing:
            self.is_losing = False
            raise StoreUnavailable("lost", backend="memory", source=StoreFault.TRANSPORT, in_doubt=True)
        self.carried.append(hint)
        return done

    def notify(self, topics: frozenset[str]) -> None:
        self.sent.append(topics)


@pytest.fixture
async def told() -> AsyncIterator[tuple[Engine, Others]]:
    others = Others()
    async with Engine(others) as engine:
        yield engine, others


async def created(engine: Engine) -> str:
    execution_id = engine.new_execution_id(LANE)
    await engine.create_execution(execution_id=execution_id, lane_id=LANE)
    return execution_id


async def claimed(engine: Engine, max_wait_ms: int = 0) -> Claimed:
    claimed = await engine.claim(LANE, worker_id="w", worker_instance_id="w-1", max_wait_ms=max_wait_ms)
    assert claimed is not None
    return claimed


async def test_a_commit_carries_all_that_there_is_to_tell(told: tuple[Engine, Others]) -> None:
    engine, others = told

    name = await created(engine)
    handle = (await claimed(engine)).handle
    await engine.append_frame(handle, b"{}")
    await engine.complete(handle)
    await asyncio.sleep(0)

    made, framed, ended = others.carried
    assert lane_topic(LANE) in made
    assert stream_topic(name) in framed
    assert ended >= {FEED_TOPIC, completion_topic(name), stream_topic(name)}


async def test_what_was_claimed_is_told_with_its_end_and_not_again(told: tuple[Engine, Others]) -> None:
    engine, others = told
    await created(engine)

    await engine.complete((await claimed(engine)).handle)
    await engine.close()  # nothing is left to be told

    assert engine.runtime.commit_queue.pending_topics == set()
    assert others.sent == []


async def test_what_is_told_by_a_refused_commit_is_still_owed(told: tuple[Engine, Others]) -> None:
    engine, _ = told
    name = await created(engine)
    engine.runtime.notify({lane_topic(LANE)}, at_once=False)

    again = await engine.create_execution(execution_id=name, lane_id=LANE)

    assert isinstance(again, Duplicate)
    assert engine.runtime.commit_queue.pending_topics == {lane_topic(LANE)}


async def test_a_change_whose_answer_got_lost_is_told_when_it_is_found(told: tuple[Engine, Others]) -> None:
    engine, others = told
    others.is_losing = True

    await created(engine)
    await asyncio.sleep(0)

    assert others.carried == []
    assert others.sent == [{lane_topic(LANE)}]
    assert engine.runtime.commit_queue.in_doubt_changes == set()


async def test_changes_in_doubt_are_not_remembered_without_end(
    told: tuple[Engine, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, others = told
    monkeypatch.setattr("flowfabric.engine.runtime.commit_queue.MAX_IN_DOUBT_CHANGES", 1)
    engine.runtime.commit_queue.in_doubt_changes.add(-1)  # of one that never came to light
    others.is_losing = True

    await created(engine)

    assert engine.runtime.commit_queue.in_doubt_changes == {-1}


@pytest.fixture
async def two(database: str, rival: Rival) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines that listen on one database, and look only when told to."""
    async with await open_engine(database) as one, await open_engine(database) as other:
        one.runtime.poll_interval_s = other.runtime.poll_interval_s = 60
        hints = [engine.runtime.wakeups.subscribe("up") for engine in (one, other)]
        async with asyncio.timeout(20):
            while not all(hint.done() for hint in hints):
                await rival.fetch("select pg_notify('ff_wake', '[\"up\"]'), pg_sleep(0.005)")
        yield one, other


async def test_a_claim_in_another_process_is_woken_by_the_commit_itself(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    rests = asyncio.Event()

    async def waited(hint: asyncio.Future[None], timeout_s: float) -> bool:
        rests.set()
        return await wakeups.wait_for_wakeup(hint, timeout_s)

    assert isinstance(one.store, PostgresStore)
    monkeypatch.setattr(claimer, "wait_for_wakeup", waited)
    monkeypatch.setattr(one.store._notifier, "notify", lambda topics: None)
    monkeypatch.setattr(notifier, "MIN_IDLE_S", 0)  # it comes to rest at once
    monkeypatch.setattr(notifier, "MIN_IDLE_COMMITS", 0)

    async with asyncio.timeout(20):
        claiming = asyncio.create_task(claimed(other, 60_000))
        await rests.wait()
        name = await created(one)

        assert (await claiming).execution_id == name
