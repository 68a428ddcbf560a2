"""SS-062 to SS-069: subscriptions neither skip nor repeat, and a cursor goes on exactly where it stood."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.cursors import FROM_THE_START, decode_cursor
from flowfabric.engine.engine import Engine
from flowfabric.engine.streams.subscription import PAGE_SIZE, Subscription
from flowfabric.model.change import Change
from flowfabric.model.event import Event, Topic
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.play import Play
from tests.scenarios.waits import Waits, named

ENDINGS: dict[str, str] = {
    "success": "Success",
    "failed": "Failure",
    "cancelled": "Cancelled",
    "expired": "Other(expired)",
}


async def ended(play: Play, outcome: str = "success", **given: Any) -> str:
    held = await play.claimed(**given)
    match outcome:
        case "success":
            await play.engine.complete(held.handle)
        case "failed":
            await play.engine.fail(held.handle, reason="no", category="permanent")
        case "cancelled":
            await play.engine.cancel_execution(held.execution_id)
        case _:
            await play.engine.expire_execution(held.execution_id)
    return held.execution_id


async def everything(subscription: Subscription[Any]) -> list[Any]:
    found = []
    while (event := await subscription.next(timeout_s=0)) is not None:
        found.append(event)
    return found


@pytest.mark.spec("SS-062")
async def test_tail_from_now(play: Play) -> None:
    await ended(play)
    feed = await play.engine.subscribe_completion()

    second = await ended(play)
    assert [news.execution_id for news in await everything(feed)] == [second]
    assert feed.cursor
    third = await ended(play)
    again = await play.engine.subscribe_completion(feed.cursor)
    assert [news.execution_id for news in await everything(again)] == [third]


@pytest.mark.spec("SS-063")
async def test_completion_outcomes(play: Play, waits: Waits) -> None:
    expected = {await ended(play, outcome): variant for outcome, variant in ENDINGS.items()}
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
    retried = await play.claimed(policy=policy)
    await play.engine.fail(retried.handle, reason="flaky")
    held, p = await waits.suspended()
    await waits.send(held.execution_id, "go", p)

    found = await play.completions()

    assert {news.execution_id: news.variant for news in found} == expected
    assert len(found) == len(expected)
    assert {news.at for news in found} == {play.now}
    assert {news.flow_id for news in found} == {None}


@pytest.mark.spec("SS-064")
async def test_signal_delivery_effects(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    await waits.send(e, "noise", pending, source="")
    await waits.on_pending(held, pending, named("a", "b", key="kp"))
    first = await waits.send(e, "a", pending, idempotency_key="i")
    await waits.send(e, "a", pending, idempotency_key="i")
    with pytest.raises(errors.InvalidToken):
        await play.engine.deliver_signal(waits.signal(e, "b", pending.waitpoint_id, "k1:" + "0" * 64))
    await waits.send(e, "b", pending)

    told = await waits.signals_told(e)

    assert [news.effect for news in told] == ["Buffered", "Other(appended_to_waitpoint)", "Deduped", "Satisfied"]
    assert {news.waitpoint_id for news in told} == {pending.waitpoint_id}
    assert [news.source_identity for news in told] == [None, "ana", "ana", "ana"]
    assert told[1].signal_id == told[2].signal_id == first.signal_id  # type: ignore[union-attr]


@pytest.mark.spec("SS-065")
async def test_instance_tag_filter(play: Play, waits: Waits) -> None:
    tagged: list[dict[str, str] | None] = [{"app.instance": "i-1"}, {"app.instance": "i-2"}, None]
    found = []
    for tags in tagged:
        held = await play.claimed(tags=tags)
        p = await waits.suspend(held)
        await waits.send(held.execution_id, "go", p)
        await play.engine.change_priority(held.execution_id, 7)
        await play.engine.cancel_execution(held.execution_id)
        found.append(held.execution_id)
    families = (
        play.engine.subscribe_lease_history,
        play.engine.subscribe_completion,
        play.engine.subscribe_signal_delivery,
        play.engine.subscribe_operator_event,
    )
    for subscribe in families:
        one = await everything(await subscribe(FROM_THE_START, Filter(instance_tag=("app.instance", "i-1"))))
        assert {news.execution_id for news in one} == {found[0]}
        none = await subscribe(FROM_THE_START, Filter(instance_tag=("app.other", "i-1")))
        assert await everything(none) == []
        elsewhere = await subscribe(FROM_THE_START, Filter(namespace="elsewhere"))
        assert await everything(elsewhere) == []
    await play.engine.set_execution_tag(found[1], "app.instance", "i-1")
    again = await play.engine.subscribe_completion(FROM_THE_START, Filter(instance_tag=("app.instance", "i-1")))
    assert {news.execution_id for news in await everything(again)} == {found[0]}


@pytest.fixture
async def wire(store: Store) -> FlakyStore:
    """The store behind a wire that can be cut."""
    return FlakyStore(store)


async def tell(store: Store, number: int, outcome: str = "success") -> None:
    """Commit so many completions in as few changes as they need."""
    events = tuple(Event(f"e{n}", "default", outcome=outcome) for n in range(number))
    await store.commit([Change(guards=(), events=events, id=1)])


async def cut(subscription: Subscription[Any], wire: FlakyStore) -> errors.StreamDisconnected:
    """The connection is lost for good; what the subscription ends with."""
    wire.lose("feed", Loss.REQUEST, times=10_000)
    subscription.retry_for_s = 0.0
    with pytest.raises(errors.StreamDisconnected) as ending:
        await subscription.next(timeout_s=0)
    assert await subscription.next(timeout_s=0) is None
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)
    wire.heal()
    return ending.value


@pytest.mark.spec("SS-066")
async def test_filtered_events_advance_the_cursor(wire: FlakyStore) -> None:
    engine = Engine(wire)
    feed = await engine.subscribe_completion(FROM_THE_START, Filter(namespace="nobody"))
    await tell(wire, 1000)
    assert await feed.next(timeout_s=0) is None

    ending = await cut(feed, wire)

    end = await wire.feed_end()
    assert decode_cursor(ending.cursor) == end
    again = await engine.subscribe_completion(ending.cursor)
    assert await everything(again) == []


@pytest.mark.spec("SS-067")
async def test_disconnect_before_first_event(wire: FlakyStore) -> None:
    engine = Engine(wire)
    feed = await engine.subscribe_completion()

    ending = await cut(feed, wire)
    await tell(wire, 1)

    assert ending.cursor
    assert len(await everything(await engine.subscribe_completion(ending.cursor))) == 1


@pytest.mark.spec("SS-067")
async def test_a_store_that_comes_back_is_not_noticed(wire: FlakyStore) -> None:
    feed = await Engine(wire).subscribe_completion()
    wire.lose("feed", Loss.REQUEST, times=3)
    await tell(wire, 2)

    assert len(await everything(feed)) == 2
    assert len(wire.losses) == 3


@pytest.mark.spec("SS-068")
async def test_no_committer_is_too_late_for_a_reader(store: Store, clock: Any) -> None:
    play = Play(Engine(store), clock)
    feed = await play.engine.subscribe_completion()
    seen: list[str] = []

    async def listen() -> None:
        while len(seen) < 40:
            news = await feed.next(timeout_s=20)
            assert news is not None
            seen.append(news.execution_id)

    listening = asyncio.create_task(listen())
    expected = await asyncio.gather(*(ended(play) for _ in range(40)))
    await asyncio.wait_for(listening, 30)

    assert sorted(seen) == sorted(expected)
    assert await everything(feed) == []


async def trimmed(engine: Engine, clock: Any) -> None:
    clock.advance_ms(Settings().feed_retention_ms + 1)
    await tell(engine.store, 1, outcome="failed")
    while await engine.trim_feed():
        pass


@pytest.mark.spec("SS-069")
async def test_gap_notice(store: Store, clock: Any) -> None:
    engine = Engine(store)
    feed = await engine.subscribe_completion()
    await tell(store, 3)
    await trimmed(engine, clock)

    again = await engine.subscribe_completion(feed.cursor)
    with pytest.raises(errors.StreamBackpressure):
        await again.next(timeout_s=0)

    assert [news.outcome for news in await everything(again)] == ["failed"]
    later = await engine.subscribe_completion(again.cursor)
    await tell(store, 1)
    assert len(await everything(later)) == 1


@pytest.mark.spec("SS-069")
async def test_what_other_feeds_lost_is_no_gap(store: Store, clock: Any) -> None:
    engine = Engine(store)
    feed = await engine.subscribe_operator_event()
    await tell(store, 3)
    await trimmed(engine, clock)

    assert await everything(await engine.subscribe_operator_event(feed.cursor)) == []
    page = await store.feed(Topic.OPERATOR, 0, 10)
    assert not page.has_gap


async def test_events_are_kept_for_seven_days(store: Store, clock: Any) -> None:
    engine = Engine(store)
    await tell(store, 2)

    clock.advance_ms(7 * 24 * 3600 * 1000)
    assert await engine.trim_feed() == 0
    clock.advance_ms(1)
    assert await engine.trim_feed() == 2
    assert await engine.trim_feed() == 0


async def test_a_slow_reader_holds_one_page_and_loses_nothing(store: Store) -> None:
    engine = Engine(store)
    feed = await engine.subscribe_completion(FROM_THE_START)
    await tell(store, 5 * PAGE_SIZE + 7)

    seen = []
    while (news := await feed.next(timeout_s=0)) is not None:
        seen.append(news.position)
        assert len(feed._page) < PAGE_SIZE

    assert len(seen) == 5 * PAGE_SIZE + 7
    assert seen == sorted(set(seen))


async def test_a_cursor_goes_on_after_every_single_event(store: Store) -> None:
    engine = Engine(store)
    await tell(store, 5)
    whole = await everything(await engine.subscribe_completion(FROM_THE_START))

    cursor, seen = FROM_THE_START, []
    for _ in whole:
        feed = await engine.subscribe_completion(cursor)
        seen.append(await feed.next(timeout_s=0))
        cursor = feed.cursor

    assert seen == whole
    for place, news in enumerate(whole, start=1):
        assert await everything(await engine.subscribe_completion(news.cursor)) == whole[place:]


async def test_an_event_that_cannot_be_read_is_told_and_passed(store: Store) -> None:
    bad = Event("e1", "default", signal="no_op", details="{broken")
    good = Event("e2", "default", signal="no_op", details='{"signal_id":"s"}')
    await store.commit([Change(guards=(), events=(bad, good), id=1)])
    feed = await Engine(store).subscribe_signal_delivery(FROM_THE_START)

    with pytest.raises(errors.Corruption):
        await feed.next(timeout_s=0)

    assert [news.execution_id for news in await everything(feed)] == ["e2"]


async def test_the_older_completion_stream_goes_on_through_everything(wire: FlakyStore, clock: Any) -> None:
    engine = Engine(wire)
    await tell(wire, 1)
    stream = await engine.subscribe_completions()
    await tell(wire, 1, outcome="cancelled")
    stream._subscription.retry_for_s = 0.0
    wire.lose("feed", Loss.REQUEST)

    done = await asyncio.wait_for(anext(stream), 20)

    assert (done.outcome, done.produced_at_ms, done.payload_bytes) == ("cancelled", clock.now, None)
    with pytest.raises(errors.Unavailable) as refusal:
        await engine.subscribe_instance_tags()
    assert refusal.value.op == "subscribe_instance_tags"


@pytest.mark.parametrize("cursor", [b"\x01" + bytes(16), b"\x02" + bytes(7), b"\x07" + bytes(8), b"\x02"])
async def test_a_foreign_cursor_is_refused_by_the_call_itself(engine: Engine, cursor: bytes) -> None:
    subscribes: list[Callable[[bytes], Awaitable[Any]]] = [
        engine.subscribe_signal_delivery,
        engine.subscribe_completion,
    ]
    for subscribe in subscribes:
        with pytest.raises(errors.InvalidInput):
            await subscribe(cursor)


@pytest.mark.parametrize("position", [0, -1, -(2**63)])
async def test_a_cursor_at_or_before_the_first_place_replays_everything_that_is_kept(play: Play, position: int) -> None:
    held = await play.claimed()
    await play.engine.complete(held.handle)

    feed = await play.engine.subscribe_completion(b"\x02" + position.to_bytes(8, "big", signed=True))

    first = await feed.next(timeout_s=0)
    assert first is not None
    assert (first.execution_id, await feed.next(timeout_s=0)) == (held.execution_id, None)
