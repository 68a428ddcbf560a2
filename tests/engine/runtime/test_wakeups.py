"""Hints: a wait ends by a hint, by its time, or by being cancelled, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import Engine
from flowfabric.engine.runtime import after_commit
from flowfabric.engine.runtime.wakeups import Wakeups, completion_topic, wait_for_wakeup
from flowfabric.stores.memory.store import MemoryStore


async def test_a_hint_ends_the_wait() -> None:
    wakes = Wakeups()
    hint = wakes.subscribe("a", "b")
    wakes.notify(("b",))
    assert await wait_for_wakeup(hint, 60)
    await asyncio.sleep(0)  # callbacks have their turn
    assert wakes.subscriber_count("a") == 0


async def test_a_wait_ends_without_a_hint() -> None:
    wakes = Wakeups()
    assert not await wait_for_wakeup(wakes.subscribe("a"), 0)
    assert wakes.subscriber_count("a") == 0


async def test_a_wait_that_is_cancelled_while_its_hint_comes_is_cancelled() -> None:
    wakes = Wakeups()
    waiting = asyncio.create_task(wait_for_wakeup(wakes.subscribe("a"), 60))
    await asyncio.sleep(0)
    wakes.notify(("a",))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_who_waits_for_an_end_is_woken_though_others_have_stopped_waiting() -> None:
    wakes = Wakeups()
    hint, other, unheard = (
        wakes.subscribe(completion_topic("one")),
        wakes.subscribe(completion_topic("two")),
        wakes.subscribe("end"),
    )
    other.cancel()
    wakes.notify_completions(["two"])
    await asyncio.sleep(0)  # callbacks have their turn
    wakes.notify_completions(["one", "three"])
    assert hint.done()
    await asyncio.sleep(0)
    again = wakes.subscribe(completion_topic("one"))
    wakes.notify_completions(["one"])
    assert again.done()
    assert not unheard.done()


class Others(MemoryStore):
    """The hints that other processes get."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[frozenset[str]] = []
        self.heard = asyncio.Event()

    def notify(self, topics: frozenset[str]) -> None:
        self.hints.append(topics)
        self.heard.set()


@pytest.fixture
async def told() -> AsyncIterator[tuple[Engine, Others]]:
    others = Others()
    async with Engine(others) as engine:
        yield engine, others


async def test_what_one_turn_brings_about_is_one_hint(told: tuple[Engine, Others]) -> None:
    engine, others = told
    engine.runtime.notify({"a"})
    engine.runtime.notify({"b"})
    await asyncio.sleep(0)
    assert others.hints == [{"a", "b"}]


async def test_what_can_wait_travels_with_the_next_hint(told: tuple[Engine, Others]) -> None:
    engine, others = told
    engine.runtime.notify({"slow"}, at_once=False)
    await asyncio.sleep(0)
    assert others.hints == []
    engine.runtime.notify({"a"})
    await asyncio.sleep(after_commit.NOTIFY_DELAY_S * 2)
    assert others.hints == [{"slow", "a"}]


async def test_what_can_wait_does_not_wait_for_long(told: tuple[Engine, Others]) -> None:
    engine, others = told
    engine.runtime.notify({"slow"}, at_once=False)
    engine.runtime.notify({"as slow"}, at_once=False)
    async with asyncio.timeout(10):
        await others.heard.wait()
    assert others.hints == [{"slow", "as slow"}]


async def test_what_can_wait_is_heard_at_once_in_this_process(told: tuple[Engine, Others]) -> None:
    engine, _ = told
    hint = engine.runtime.wakeups.subscribe("slow")
    engine.runtime.notify({"slow"}, at_once=False)
    assert hint.done()


async def test_what_was_told_by_a_commit_does_not_hurry_what_comes_after_it(
    told: tuple[Engine, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, others = told
    engine.runtime.notify({"slow"}, at_once=False)
    engine.runtime.commit_queue.pending_topics.clear()  # a commit has told it
    monkeypatch.setattr(after_commit, "NOTIFY_DELAY_S", 3600)

    engine.runtime.notify({"later"}, at_once=False)
    await asyncio.sleep(0.04)  # twice as long as the first one would have waited
    assert others.hints == []
    assert engine.runtime.commit_queue.pending_topics == {"later"}


async def test_a_claim_that_does_not_wait_asks_for_no_hint(
    told: tuple[Engine, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is written meanwhile need not be searched for whom to wake."""
    engine, _ = told
    asked: list[tuple[str, ...]] = []
    expect = engine.runtime.wakeups.subscribe

    def noted(*topics: str) -> asyncio.Future[None]:
        asked.append(topics)
        return expect(*topics)

    monkeypatch.setattr(engine.runtime.wakeups, "subscribe", noted)
    assert await engine.claim("mail", worker_id="w", worker_instance_id="w-1") is None
    assert asked == []
    assert await engine.claim("mail", worker_id="w", worker_instance_id="w-1", max_wait_ms=1) is None
    assert ("lane:mail",) in asked
