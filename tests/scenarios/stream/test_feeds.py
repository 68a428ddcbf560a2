"""SS-062 to SS-069: subscriptions neither skip nor repeat events, and cursors resume exactly."""

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
from tests.scenarios.env import Env
from tests.scenarios.waits import Waits, named

ENDINGS: dict[str, str] = {
    "success": "Success",
    "failed": "Failure",
    "cancelled": "Cancelled",
    "expired": "Other(expired)",
}


async def create_finished(env: Env, outcome: str = "success", **options: Any) -> str:
    claim = await env.create_and_claim(**options)
    match outcome:
        case "success":
            await env.engine.complete(claim.handle)
        case "failed":
            await env.engine.fail(claim.handle, reason="no", category="permanent")
        case "cancelled":
            await env.engine.cancel_execution(claim.execution_id)
        case _:
            await env.engine.expire_execution(claim.execution_id)
    return claim.execution_id


async def drain(subscription: Subscription[Any]) -> list[Any]:
    found = []
    while (event := await subscription.next(timeout_s=0)) is not None:
        found.append(event)
    return found


@pytest.mark.spec("SS-062")
async def test_a_subscription_without_a_cursor_starts_now_and_resumes_from_its_cursor(env: Env) -> None:
    await create_finished(env)
    feed = await env.engine.subscribe_completion()

    second = await create_finished(env)
    assert [event.execution_id for event in await drain(feed)] == [second]
    assert feed.cursor
    third = await create_finished(env)
    again = await env.engine.subscribe_completion(feed.cursor)
    assert [event.execution_id for event in await drain(again)] == [third]


@pytest.mark.spec("SS-063")
async def test_every_terminal_outcome_is_on_the_completion_feed_once(env: Env, waits: Waits) -> None:
    expected = {await create_finished(env, outcome): variant for outcome, variant in ENDINGS.items()}
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
    retried = await env.create_and_claim(policy=policy)
    await env.engine.fail(retried.handle, reason="flaky")
    claim, p = await waits.create_suspended()
    await waits.send(claim.execution_id, "go", p)

    found = await env.completions()

    assert {event.execution_id: event.variant for event in found} == expected
    assert len(found) == len(expected)
    assert {event.at for event in found} == {env.now}
    assert {event.flow_id for event in found} == {None}


@pytest.mark.spec("SS-064")
async def test_the_signal_feed_reports_the_effect_of_each_signal(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    e = claim.execution_id
    await waits.send(e, "noise", pending, source="")
    await waits.suspend_on_pending(claim, pending, named("a", "b", key="kp"))
    first = await waits.send(e, "a", pending, idempotency_key="i")
    await waits.send(e, "a", pending, idempotency_key="i")
    with pytest.raises(errors.InvalidToken):
        await env.engine.deliver_signal(waits.signal_args(e, "b", pending.waitpoint_id, "k1:" + "0" * 64))
    await waits.send(e, "b", pending)

    events = await waits.signal_events(e)

    assert [event.effect for event in events] == ["Buffered", "Other(appended_to_waitpoint)", "Deduped", "Satisfied"]
    assert {event.waitpoint_id for event in events} == {pending.waitpoint_id}
    assert [event.source_identity for event in events] == [None, "ana", "ana", "ana"]
    assert events[1].signal_id == events[2].signal_id == first.signal_id  # type: ignore[union-attr]


@pytest.mark.spec("SS-065")
async def test_every_feed_filters_by_instance_tag_and_namespace(env: Env, waits: Waits) -> None:
    tagged: list[dict[str, str] | None] = [{"app.instance": "i-1"}, {"app.instance": "i-2"}, None]
    found = []
    for tags in tagged:
        claim = await env.create_and_claim(tags=tags)
        p = await waits.suspend(claim)
        await waits.send(claim.execution_id, "go", p)
        await env.engine.change_priority(claim.execution_id, 7)
        await env.engine.cancel_execution(claim.execution_id)
        found.append(claim.execution_id)
    families = (
        env.engine.subscribe_lease_history,
        env.engine.subscribe_completion,
        env.engine.subscribe_signal_delivery,
        env.engine.subscribe_operator_event,
    )
    for subscribe in families:
        one = await drain(await subscribe(FROM_THE_START, Filter(instance_tag=("app.instance", "i-1"))))
        assert {event.execution_id for event in one} == {found[0]}
        none = await subscribe(FROM_THE_START, Filter(instance_tag=("app.other", "i-1")))
        assert await drain(none) == []
        elsewhere = await subscribe(FROM_THE_START, Filter(namespace="elsewhere"))
        assert await drain(elsewhere) == []
    await env.engine.set_execution_tag(found[1], "app.instance", "i-1")
    again = await env.engine.subscribe_completion(FROM_THE_START, Filter(instance_tag=("app.instance", "i-1")))
    assert {event.execution_id for event in await drain(again)} == {found[0]}


@pytest.fixture
async def flaky(store: Store) -> FlakyStore:
    """The store with injectable faults."""
    return FlakyStore(store)


async def emit_completions(store: Store, number: int, outcome: str = "success") -> None:
    """Commit this many completion events in one change."""
    events = tuple(Event(f"e{n}", "default", outcome=outcome) for n in range(number))
    await store.commit([Change(guards=(), events=events, id=1)])


async def disconnect(subscription: Subscription[Any], flaky: FlakyStore) -> errors.StreamDisconnected:
    """Disconnect a subscription for good and return its error."""
    flaky.lose("feed", Loss.REQUEST, times=10_000)
    subscription.retry_for_s = 0.0
    with pytest.raises(errors.StreamDisconnected) as ending:
        await subscription.next(timeout_s=0)
    assert await subscription.next(timeout_s=0) is None
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)
    flaky.heal()
    return ending.value


@pytest.mark.spec("SS-066")
async def test_filtered_events_advance_the_cursor(flaky: FlakyStore) -> None:
    engine = Engine(flaky)
    feed = await engine.subscribe_completion(FROM_THE_START, Filter(namespace="nobody"))
    await emit_completions(flaky, 1000)
    assert await feed.next(timeout_s=0) is None

    ending = await disconnect(feed, flaky)

    end = await flaky.feed_end()
    assert decode_cursor(ending.cursor) == end
    again = await engine.subscribe_completion(ending.cursor)
    assert await drain(again) == []


@pytest.mark.spec("SS-067")
async def test_a_disconnect_before_the_first_event_returns_a_usable_cursor(flaky: FlakyStore) -> None:
    engine = Engine(flaky)
    feed = await engine.subscribe_completion()

    ending = await disconnect(feed, flaky)
    await emit_completions(flaky, 1)

    assert ending.cursor
    assert len(await drain(await engine.subscribe_completion(ending.cursor))) == 1


@pytest.mark.spec("SS-067")
async def test_a_subscription_retries_short_outages(flaky: FlakyStore) -> None:
    feed = await Engine(flaky).subscribe_completion()
    flaky.lose("feed", Loss.REQUEST, times=3)
    await emit_completions(flaky, 2)

    assert len(await drain(feed)) == 2
    assert len(flaky.losses) == 3


@pytest.mark.spec("SS-068")
async def test_a_reader_misses_no_concurrent_commit(store: Store, clock: Any) -> None:
    env = Env(Engine(store), clock)
    feed = await env.engine.subscribe_completion()
    seen: list[str] = []

    async def listen() -> None:
        while len(seen) < 40:
            event = await feed.next(timeout_s=20)
            assert event is not None
            seen.append(event.execution_id)

    listening = asyncio.create_task(listen())
    expected = await asyncio.gather(*(create_finished(env) for _ in range(40)))
    await asyncio.wait_for(listening, 30)

    assert sorted(seen) == sorted(expected)
    assert await drain(feed) == []


async def trim(engine: Engine, clock: Any) -> None:
    clock.advance_ms(Settings().feed_retention_ms + 1)
    await emit_completions(engine.store, 1, outcome="failed")
    while await engine.trim_feed():
        pass


@pytest.mark.spec("SS-069")
async def test_a_trimmed_feed_reports_a_gap_once(store: Store, clock: Any) -> None:
    engine = Engine(store)
    feed = await engine.subscribe_completion()
    await emit_completions(store, 3)
    await trim(engine, clock)

    again = await engine.subscribe_completion(feed.cursor)
    with pytest.raises(errors.StreamBackpressure):
        await again.next(timeout_s=0)

    assert [event.outcome for event in await drain(again)] == ["failed"]
    later = await engine.subscribe_completion(again.cursor)
    await emit_completions(store, 1)
    assert len(await drain(later)) == 1


@pytest.mark.spec("SS-069")
async def test_trimmed_events_of_other_feeds_are_no_gap(store: Store, clock: Any) -> None:
    engine = Engine(store)
    feed = await engine.subscribe_operator_event()
    await emit_completions(store, 3)
    await trim(engine, clock)

    assert await drain(await engine.subscribe_operator_event(feed.cursor)) == []
    page = await store.feed(Topic.OPERATOR, 0, 10)
    assert not page.has_gap


async def test_events_are_retained_for_seven_days(store: Store, clock: Any) -> None:
    engine = Engine(store)
    await emit_completions(store, 2)

    clock.advance_ms(7 * 24 * 3600 * 1000)
    assert await engine.trim_feed() == 0
    clock.advance_ms(1)
    assert await engine.trim_feed() == 2
    assert await engine.trim_feed() == 0


async def test_a_slow_reader_buffers_one_page_and_misses_nothing(store: Store) -> None:
    engine = Engine(store)
    feed = await engine.subscribe_completion(FROM_THE_START)
    await emit_completions(store, 5 * PAGE_SIZE + 7)

    seen = []
    while (event := await feed.next(timeout_s=0)) is not None:
        seen.append(event.position)
        assert len(feed._page) < PAGE_SIZE

    assert len(seen) == 5 * PAGE_SIZE + 7
    assert seen == sorted(set(seen))


async def test_a_cursor_resumes_after_every_single_event(store: Store) -> None:
    engine = Engine(store)
    await emit_completions(store, 5)
    whole = await drain(await engine.subscribe_completion(FROM_THE_START))

    cursor, seen = FROM_THE_START, []
    for _ in whole:
        feed = await engine.subscribe_completion(cursor)
        seen.append(await feed.next(timeout_s=0))
        cursor = feed.cursor

    assert seen == whole
    for position, event in enumerate(whole, start=1):
        assert await drain(await engine.subscribe_completion(event.cursor)) == whole[position:]


async def test_an_unreadable_event_is_reported_and_skipped(store: Store) -> None:
    bad = Event("e1", "default", signal="no_op", details="{broken")
    good = Event("e2", "default", signal="no_op", details='{"signal_id":"s"}')
    await store.commit([Change(guards=(), events=(bad, good), id=1)])
    feed = await Engine(store).subscribe_signal_delivery(FROM_THE_START)

    with pytest.raises(errors.Corruption):
        await feed.next(timeout_s=0)

    assert [event.execution_id for event in await drain(feed)] == ["e2"]


async def test_subscribe_completions_survives_a_disconnect(flaky: FlakyStore, clock: Any) -> None:
    engine = Engine(flaky)
    await emit_completions(flaky, 1)
    stream = await engine.subscribe_completions()
    await emit_completions(flaky, 1, outcome="cancelled")
    stream._subscription.retry_for_s = 0.0
    flaky.lose("feed", Loss.REQUEST)

    done = await asyncio.wait_for(anext(stream), 20)

    assert (done.outcome, done.produced_at_ms, done.payload_bytes) == ("cancelled", clock.now, None)
    with pytest.raises(errors.Unavailable) as refusal:
        await engine.subscribe_instance_tags()
    assert refusal.value.op == "subscribe_instance_tags"


@pytest.mark.parametrize("cursor", [b"\x01" + bytes(16), b"\x02" + bytes(7), b"\x07" + bytes(8), b"\x02"])
async def test_a_foreign_cursor_is_refused_by_the_subscribe_call(engine: Engine, cursor: bytes) -> None:
    subscribes: list[Callable[[bytes], Awaitable[Any]]] = [
        engine.subscribe_signal_delivery,
        engine.subscribe_completion,
    ]
    for subscribe in subscribes:
        with pytest.raises(errors.InvalidInput):
            await subscribe(cursor)


@pytest.mark.parametrize("position", [0, -1, -(2**63)])
async def test_a_cursor_at_or_before_the_first_position_replays_every_retained_event(env: Env, position: int) -> None:
    claim = await env.create_and_claim()
    await env.engine.complete(claim.handle)

    feed = await env.engine.subscribe_completion(b"\x02" + position.to_bytes(8, "big", signed=True))

    first = await feed.next(timeout_s=0)
    assert first is not None
    assert (first.execution_id, await feed.next(timeout_s=0)) == (claim.execution_id, None)
