"""Trimming the feed: the oldest events are removed, nothing else changes, and the loss can be detected."""

from __future__ import annotations

from flowfabric.clock import ManualClock
from flowfabric.model.change import Change
from flowfabric.model.event import Event, Topic
from flowfabric.stores.port import Store

MANY = 10_000


async def emit(store: Store, *events: Event) -> None:
    await store.commit([Change(guards=(), events=events, id=1)])


def lease(name: str) -> Event:
    return Event(name, "n", lease="renewed")


def completion(name: str) -> Event:
    return Event(name, "n", outcome="success")


async def events_since(store: Store, topic: Topic, after: int = 0) -> list[str]:
    return [one.event.execution_id for one in (await store.feed(topic, after, MANY)).events]


async def test_only_events_before_the_instant_are_removed(store: Store, clock: ManualClock) -> None:
    await emit(store, lease("old"))
    clock.advance_ms(10)
    await emit(store, lease("new"))

    assert await store.trim_feed(clock.now - 10, MANY) == 0
    assert await store.trim_feed(clock.now, MANY) == 1
    assert await store.trim_feed(clock.now, MANY) == 0
    assert await events_since(store, Topic.LEASE) == ["new"]


async def test_an_event_that_must_stay_keeps_those_after_it(store: Store, clock: ManualClock) -> None:
    """A clock that stepped back makes later events look older; they keep their position behind the one that stays."""
    now = clock.now
    await emit(store, lease("a"))
    clock.now = now + 100
    await emit(store, lease("b"))
    clock.now = now
    await emit(store, lease("c"))

    assert await store.trim_feed(now + 50, MANY) == 1
    assert await events_since(store, Topic.LEASE) == ["b", "c"]


async def test_positions_are_never_reused(store: Store, clock: ManualClock) -> None:
    await emit(store, lease("a"))
    end = await store.feed_end()
    clock.advance_ms(1)
    await store.trim_feed(clock.now, MANY)

    assert await store.feed_end() == end
    await emit(store, lease("b"))
    assert await events_since(store, Topic.LEASE, end) == ["b"]
    assert not (await store.feed(Topic.LEASE, end, MANY)).has_gap


async def test_a_reader_learns_what_its_own_topic_lost(store: Store, clock: ManualClock) -> None:
    start = await store.feed_end()
    await emit(store, completion("a"))
    between = await store.feed_end()
    await emit(store, lease("b"))
    clock.advance_ms(1)
    await store.trim_feed(clock.now, MANY)
    await emit(store, completion("c"), lease("d"))

    lost = {
        (topic, after): (await store.feed(topic, after, MANY)).has_gap
        for topic in (Topic.COMPLETION, Topic.LEASE, Topic.SIGNAL)
        for after in (start, between)
    }

    assert {key for key, gone in lost.items() if gone} == {
        (Topic.COMPLETION, start),
        (Topic.LEASE, start),
        (Topic.LEASE, between),
    }
    assert await events_since(store, Topic.COMPLETION, start) == ["c"]


async def test_the_history_of_an_execution_omits_what_was_trimmed(store: Store, clock: ManualClock) -> None:
    await emit(store, lease("a"))
    clock.advance_ms(1)
    await store.trim_feed(clock.now, MANY)
    await emit(store, lease("a"))

    history = await store.history("a", Topic.LEASE, MANY)

    assert [one.at for one in history] == [clock.now]


async def test_a_small_limit_removes_the_oldest_first(store: Store, clock: ManualClock) -> None:
    for name in "abc":
        await emit(store, lease(name))
    clock.advance_ms(1)

    assert await store.trim_feed(clock.now, 1) == 1
    assert await events_since(store, Topic.LEASE) == ["b", "c"]


async def test_a_reader_far_behind_reaches_what_is_left(store: Store, clock: ManualClock) -> None:
    start = await store.feed_end()
    for n in range(40):
        await emit(store, *(lease(f"{n}-{m}") for m in range(60)))
    clock.advance_ms(1)
    while await store.trim_feed(clock.now, 500):
        pass
    await emit(store, lease("last"))

    page = await store.feed(Topic.LEASE, start, MANY)

    assert ([one.event.execution_id for one in page.events], page.has_gap) == (["last"], True)
