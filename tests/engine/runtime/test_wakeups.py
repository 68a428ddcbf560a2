"""Hints: a wait ends by a hint, by its time, or by being cancelled, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import Engine
from flowfabric.engine.runtime import after_commit
from flowfabric.engine.runtime.wakeups import Wakes, end_topic, waited
from flowfabric.stores.memory.store import MemoryStore


async def test_a_hint_ends_the_wait() -> None:
    wakes = Wakes()
    hint = wakes.expect("a", "b")
    wakes.fire(("b",))
    assert await waited(hint, 60)
    await asyncio.sleep(0)  # callbacks have their turn
    assert wakes.waiting("a") == 0


async def test_a_wait_ends_without_a_hint() -> None:
    wakes = Wakes()
    assert not await waited(wakes.expect("a"), 0)
    assert wakes.waiting("a") == 0


async def test_a_wait_that_is_cancelled_while_its_hint_comes_is_cancelled() -> None:
    wakes = Wakes()
    waiting = asyncio.create_task(waited(wakes.expect("a"), 60))
    await asyncio.sleep(0)
    wakes.fire(("a",))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_who_waits_for_an_end_is_woken_though_others_have_stopped_waiting() -> None:
    wakes = Wakes()
    hint, other, unheard = wakes.expect(end_topic("one")), wakes.expect(end_topic("two")), wakes.expect("end")
    other.cancel()
    wakes.fire_ends(["two"])
    await asyncio.sleep(0)  # callbacks have their turn
    wakes.fire_ends(["one", "three"])
    assert hint.done()
    await asyncio.sleep(0)
    again = wakes.expect(end_topic("one"))
    wakes.fire_ends(["one"])
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
    engine.tell({"a"})
    engine.tell({"b"})
    await asyncio.sleep(0)
    assert others.hints == [{"a", "b"}]


async def test_what_can_wait_travels_with_the_next_hint(told: tuple[Engine, Others]) -> None:
    engine, others = told
    engine.tell({"slow"}, at_once=False)
    await asyncio.sleep(0)
    assert others.hints == []
    engine.tell({"a"})
    await asyncio.sleep(after_commit.LATER_S * 2)
    assert others.hints == [{"slow", "a"}]


async def test_what_can_wait_does_not_wait_for_long(told: tuple[Engine, Others]) -> None:
    engine, others = told
    engine.tell({"slow"}, at_once=False)
    engine.tell({"as slow"}, at_once=False)
    async with asyncio.timeout(10):
        await others.heard.wait()
    assert others.hints == [{"slow", "as slow"}]


async def test_what_can_wait_is_heard_at_once_in_this_process(told: tuple[Engine, Others]) -> None:
    engine, _ = told
    hint = engine.wakes.expect("slow")
    engine.tell({"slow"}, at_once=False)
    assert hint.done()


async def test_what_was_told_by_a_commit_does_not_hurry_what_comes_after_it(
    told: tuple[Engine, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, others = told
    engine.tell({"slow"}, at_once=False)
    engine.commits.owed.clear()  # a commit has told it
    monkeypatch.setattr(after_commit, "LATER_S", 3600)

    engine.tell({"later"}, at_once=False)
    await asyncio.sleep(0.04)  # twice as long as the first one would have waited
    assert others.hints == []
    assert engine.commits.owed == {"later"}


async def test_a_claim_that_does_not_wait_asks_for_no_hint(
    told: tuple[Engine, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is written meanwhile need not be searched for whom to wake."""
    engine, _ = told
    asked: list[tuple[str, ...]] = []
    expect = engine.wakes.expect

    def noted(*topics: str) -> asyncio.Future[None]:
        asked.append(topics)
        return expect(*topics)

    monkeypatch.setattr(engine.wakes, "expect", noted)
    assert await engine.claim("mail", worker_id="w", worker_instance_id="w-1") is None
    assert asked == []
    assert await engine.claim("mail", worker_id="w", worker_instance_id="w-1", max_wait_ms=1) is None
    assert ("lane:mail",) in asked
