"""A commit carries its wakeups to other processes, once."""

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
from flowfabric.stores.verdicts import Verdict
from tests.conftest import Rival
from tests.executions import claim_one, new_execution

LANE = "mail"


class RecordingStore(MemoryStore):
    """Records the wakeups that other processes receive, with commits and separately."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[frozenset[str]] = []
        self.sent: list[frozenset[str]] = []
        self.is_losing = False

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        done = await super().commit(changes)
        if self.is_losing:
            self.is_losing = False
            raise StoreUnavailable("lost", backend="memory", source=StoreFault.TRANSPORT, in_doubt=True)
        self.carried.append(topics)
        return done

    def notify(self, topics: frozenset[str]) -> None:
        self.sent.append(topics)


@pytest.fixture
async def recording_store() -> AsyncIterator[tuple[Engine, RecordingStore]]:
    others = RecordingStore()
    async with Engine(others) as engine:
        yield engine, others


async def create(engine: Engine) -> str:
    return await new_execution(engine, LANE)


async def claim(engine: Engine, max_wait_ms: int = 0) -> Claimed:
    return await claim_one(engine, LANE, max_wait_ms=max_wait_ms)


async def test_a_commit_carries_all_pending_wakeups(recording_store: tuple[Engine, RecordingStore]) -> None:
    engine, others = recording_store

    name = await create(engine)
    handle = (await claim(engine)).handle
    await engine.append_frame(handle, b"{}")
    await engine.complete(handle)
    await asyncio.sleep(0)

    made, framed, ended = others.carried
    assert lane_topic(LANE) in made
    assert stream_topic(name) in framed
    assert ended >= {FEED_TOPIC, completion_topic(name), stream_topic(name)}


async def test_the_wakeup_of_a_claimed_execution_is_sent_once_with_its_completion(
    recording_store: tuple[Engine, RecordingStore],
) -> None:
    engine, others = recording_store
    await create(engine)

    await engine.complete((await claim(engine)).handle)
    await engine.close()  # No wakeup is left to be sent.

    assert engine.runtime.commit_queue.pending_topics == set()
    assert others.sent == []


async def test_the_wakeups_of_a_refused_commit_stay_pending(recording_store: tuple[Engine, RecordingStore]) -> None:
    engine, _ = recording_store
    name = await create(engine)
    engine.runtime.notify({lane_topic(LANE)}, at_once=False)

    again = await engine.create_execution(execution_id=name, lane_id=LANE)

    assert isinstance(again, Duplicate)
    assert engine.runtime.commit_queue.pending_topics == {lane_topic(LANE)}


async def test_the_wakeup_of_a_change_whose_reply_was_lost_is_sent_when_the_change_is_found(
    recording_store: tuple[Engine, RecordingStore],
) -> None:
    engine, others = recording_store
    others.is_losing = True

    await create(engine)
    await asyncio.sleep(0)

    assert others.carried == []
    assert others.sent == [{lane_topic(LANE)}]
    assert engine.runtime.commit_queue.in_doubt_changes == set()


async def test_the_memory_of_changes_with_unknown_outcome_is_bounded(
    recording_store: tuple[Engine, RecordingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, others = recording_store
    monkeypatch.setattr("flowfabric.engine.runtime.commit_queue.MAX_IN_DOUBT_CHANGES", 1)
    engine.runtime.commit_queue.in_doubt_changes.add(-1)  # The outcome of this one stayed unknown.
    others.is_losing = True

    await create(engine)

    assert engine.runtime.commit_queue.in_doubt_changes == {-1}


@pytest.fixture
async def two_engines(database: str, rival: Rival) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines that listen on one database and act only on wakeups."""
    async with await open_engine(database) as one, await open_engine(database) as other:
        one.runtime.poll_interval_s = other.runtime.poll_interval_s = 60
        hints = [engine.runtime.wakeups.subscribe("up") for engine in (one, other)]
        async with asyncio.timeout(20):
            while not all(topics.done() for topics in hints):
                await rival.fetch("select pg_notify('ff_wake', '[\"up\"]'), pg_sleep(0.005)")
        yield one, other


async def test_a_claim_in_another_process_is_woken_by_the_commit(
    two_engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two_engines
    rests = asyncio.Event()

    async def waited(topics: asyncio.Future[None], timeout_s: float) -> bool:
        rests.set()
        return await wakeups.wait_for_wakeup(topics, timeout_s)

    assert isinstance(one.store, PostgresStore)
    monkeypatch.setattr(claimer, "wait_for_wakeup", waited)
    monkeypatch.setattr(one.store._notifier, "notify", lambda topics: None)
    monkeypatch.setattr(notifier, "MIN_IDLE_S", 0)  # The claim waits at once.
    monkeypatch.setattr(notifier, "MIN_IDLE_COMMITS", 0)

    async with asyncio.timeout(20):
        claiming = asyncio.create_task(claim(other, 60_000))
        await rests.wait()
        name = await create(one)

        assert (await claiming).execution_id == name
