"""Wakeups: a wait ends by a wakeup, a timeout or a cancellation, in any combination."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import Engine
from flowfabric.engine.runtime import after_commit
from flowfabric.engine.runtime.wakeups import Wakeups, completion_topic, wait_for_wakeup
from flowfabric.stores.memory.store import MemoryStore


async def test_a_wakeup_ends_the_wait() -> None:
    wakes = Wakeups()
    hint = wakes.subscribe("a", "b")
    wakes.notify(("b",))
    assert await wait_for_wakeup(hint, 60)
    await asyncio.sleep(0)  # Let the callbacks run.
    assert wakes.subscriber_count("a") == 0


async def test_a_wait_times_out_without_a_wakeup() -> None:
    wakes = Wakeups()
    assert not await wait_for_wakeup(wakes.subscribe("a"), 0)
    assert wakes.subscriber_count("a") == 0


async def test_a_wait_that_is_cancelled_while_its_wakeup_arrives_is_cancelled() -> None:
    wakes = Wakeups()
    waiting = asyncio.create_task(wait_for_wakeup(wakes.subscribe("a"), 60))
    await asyncio.sleep(0)
    wakes.notify(("a",))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_waiter_is_woken_after_other_waiters_have_left() -> None:
    wakes = Wakeups()
    hint, other, unheard = (
        wakes.subscribe(completion_topic("one")),
        wakes.subscribe(completion_topic("two")),
        wakes.subscribe("end"),
    )
    other.cancel()
    wakes.notify_completions(["two"])
    await asyncio.sleep(0)  # Let the callbacks run.
    wakes.notify_completions(["one", "three"])
    assert hint.done()
    await asyncio.sleep(0)
    again = wakes.subscribe(completion_topic("one"))
    wakes.notify_completions(["one"])
    assert again.done()
    assert not unheard.done()


class RecordingStore(MemoryStore):
    """Records the wakeups that other processes receive."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[frozenset[str]] = []
        self.heard = asyncio.Event()

    def notify(self, topics: frozenset[str]) -> None:
        self.hints.append(topics)
        self.heard.set()


@pytest.fixture
async def recording_store() -> AsyncIterator[tuple[Engine, RecordingStore]]:
    others = RecordingStore()
    async with Engine(others) as engine:
        yield engine, others


async def test_the_notifications_of_one_loop_iteration_are_sent_as_one(
    recording_store: tuple[Engine, RecordingStore],
) -> None:
    engine, others = recording_store
    engine.runtime.notify({"a"})
    engine.runtime.notify({"b"})
    await asyncio.sleep(0)
    assert others.hints == [{"a", "b"}]


async def test_a_deferred_notification_is_sent_with_the_next_one(
    recording_store: tuple[Engine, RecordingStore],
) -> None:
    engine, others = recording_store
    engine.runtime.notify({"slow"}, at_once=False)
    await asyncio.sleep(0)
    assert others.hints == []
    engine.runtime.notify({"a"})
    await asyncio.sleep(after_commit.NOTIFY_DELAY_S * 2)
    assert others.hints == [{"slow", "a"}]


async def test_a_deferred_notification_is_not_deferred_for_long(recording_store: tuple[Engine, RecordingStore]) -> None:
    engine, others = recording_store
    engine.runtime.notify({"slow"}, at_once=False)
    engine.runtime.notify({"as slow"}, at_once=False)
    async with asyncio.timeout(10):
        await others.heard.wait()
    assert others.hints == [{"slow", "as slow"}]


async def test_a_deferred_notification_wakes_its_own_process_at_once(
    recording_store: tuple[Engine, RecordingStore],
) -> None:
    engine, _ = recording_store
    hint = engine.runtime.wakeups.subscribe("slow")
    engine.runtime.notify({"slow"}, at_once=False)
    assert hint.done()


async def test_a_topic_that_was_sent_with_a_commit_does_not_shorten_the_next_deferral(
    recording_store: tuple[Engine, RecordingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, others = recording_store
    engine.runtime.notify({"slow"}, at_once=False)
    engine.runtime.commit_queue.pending_topics.clear()  # A commit has sent it.
    monkeypatch.setattr(after_commit, "NOTIFY_DELAY_S", 3600)

    engine.runtime.notify({"later"}, at_once=False)
    await asyncio.sleep(0.04)  # Twice the deferral of the first one.
    assert others.hints == []
    assert engine.runtime.commit_queue.pending_topics == {"later"}


async def test_a_claim_that_does_not_wait_subscribes_to_nothing(
    recording_store: tuple[Engine, RecordingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a commit meanwhile need not search for claims to wake."""
    engine, _ = recording_store
    store_calls: list[tuple[str, ...]] = []
    expect = engine.runtime.wakeups.subscribe

    def noted(*topics: str) -> asyncio.Future[None]:
        store_calls.append(topics)
        return expect(*topics)

    monkeypatch.setattr(engine.runtime.wakeups, "subscribe", noted)
    assert await engine.claim("mail", worker_id="w", worker_instance_id="w-1") is None
    assert store_calls == []
    assert await engine.claim("mail", worker_id="w", worker_instance_id="w-1", max_wait_ms=1) is None
    assert ("lane:mail",) in store_calls
