"""The feed of committed events in an order that never changes; and the registry of queues."""

from __future__ import annotations

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Insert, Patch, absent
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.port import Store
from flowfabric.stores.queries import FeedPage
from tests.stores.sample_rows import change, event, execution, queued, write


async def texts(store: Store, topic: Topic, after: int = 0, limit: int = 100) -> list[str]:
    return [found.event.details or "" for found in (await store.feed(topic, after, limit)).events]


def lease(text: str, name: str = "a") -> Event:
    return event(name, lease="acquired", details=text)


async def test_events_are_in_the_order_of_their_commits(store: Store, clock: ManualClock) -> None:
    await store.commit([change(events=[lease("1"), lease("2")]), change(events=[lease("3")])])
    clock.advance_ms(5)
    await store.commit([change(events=[lease("4")])])

    page = await store.feed(Topic.LEASE, 0, 100)
    assert [found.event.details for found in page.events] == ["1", "2", "3", "4"]
    assert [found.at for found in page.events] == [clock.now - 5] * 3 + [clock.now]
    positions = [found.position for found in page.events]
    assert positions == sorted(set(positions))
    assert positions[0] > 0


async def test_an_event_is_read_back_as_it_was_emitted(store: Store) -> None:
    full = Event(
        "a", "ns", "{}", "f", "acquired", "l", 2**62, "t", 0, "w", "i", "because", "success", "cancel", "go", "é"
    )
    await write(store, events=[full, Event("a", "ns", signal="")])

    assert (await store.feed(Topic.OPERATOR, 0, 10)).events[0].event == full
    assert (await store.feed(Topic.SIGNAL, 0, 10)).events[1].event == Event("a", "ns", signal="")


async def test_an_event_is_in_the_feed_of_each_of_its_topics(store: Store) -> None:
    await write(
        store,
        events=[
            event(lease="released", outcome="success", details="end"),
            event(operator="cancelled", details="operator"),
            event(signal="sent", details="signal"),
            event(details="none"),
        ],
    )
    assert await texts(store, Topic.LEASE) == ["end"]
    assert await texts(store, Topic.COMPLETION) == ["end"]
    assert await texts(store, Topic.OPERATOR) == ["operator"]
    assert await texts(store, Topic.SIGNAL) == ["signal"]


async def test_pages_of_a_feed_hold_every_event_once(store: Store) -> None:
    for number in range(25):
        topic = {"lease": "x"} if number % 3 else {"operator": "y"}
        await write(store, events=[event(details=str(number), **topic)])

    seen, position = list[str](), 0
    while True:
        page = await store.feed(Topic.LEASE, position, 4)
        seen += [found.event.details or "" for found in page.events]
        if not page.events:
            break
        assert page.position >= page.events[-1].position > position
        position = page.position
    assert seen == [str(number) for number in range(25) if number % 3]


async def test_reading_continues_past_events_of_other_topics(store: Store) -> None:
    await write(store, events=[lease("1")])
    page = await store.feed(Topic.OPERATOR, 0, 10)
    assert page.events == []
    assert page.position == await store.feed_end()

    await write(store, events=[lease("2"), event(operator="x", details="news")])
    assert await texts(store, Topic.OPERATOR, page.position) == ["news"]
    assert await texts(store, Topic.LEASE, page.position) == ["2"]


async def test_an_empty_feed_can_be_read(store: Store) -> None:
    end = await store.feed_end()

    assert await store.feed(Topic.LEASE, end, 10) == FeedPage([], end)
    assert await store.feed(Topic.LEASE, end, 0) == FeedPage([], end)


async def test_a_position_never_goes_back(store: Store) -> None:
    await write(store, events=[lease("1")])
    end = await store.feed_end()

    assert (await store.feed(Topic.LEASE, end, 10)).position >= end
    assert (await store.feed(Topic.LEASE, end, 0)).position == end


async def test_every_commit_after_the_end_was_read_is_behind_it(store: Store) -> None:
    await write(store, events=[lease("before")])
    end = await store.feed_end()
    await write(store, events=[lease("after")])

    assert await texts(store, Topic.LEASE, end) == ["after"]
    assert await store.feed_end() > end


async def test_a_refused_change_emits_nothing(store: Store) -> None:
    await write(store, Insert(execution("a")))

    await store.commit(
        [
            change(events=[lease("1")]),
            change(events=[lease("refused")], guards=[absent(Execution, "a")]),
            change(events=[lease("2")]),
        ]
    )
    assert await texts(store, Topic.LEASE) == ["1", "2"]


async def test_the_history_of_an_execution_holds_its_newest_events_oldest_first(store: Store) -> None:
    for number in range(5):
        await write(store, events=[lease(f"a{number}"), lease(f"b{number}", "b"), event(operator="x")])

    history = await store.history("a", Topic.LEASE, 3)
    assert [found.event.details for found in history] == ["a2", "a3", "a4"]
    assert len(await store.history("a", Topic.LEASE, 100)) == 5
    assert len(await store.history("a", Topic.OPERATOR, 100)) == 5
    assert await store.history("a", Topic.COMPLETION, 100) == []
    assert await store.history("none", Topic.LEASE, 100) == []
    assert await store.history("a", Topic.LEASE, 0) == []


async def test_events_that_a_history_omits_do_not_count_against_its_limit(store: Store) -> None:
    await write(store, events=[event(lease="acquired")])
    for _ in range(3):
        await write(store, events=[event(lease="renewed")])
    await write(store, events=[event(lease="released", operator="replayed")])

    history = await store.history("a", Topic.LEASE, 2, "renewed")
    assert [found.event.lease for found in history] == ["acquired", "released"]
    assert [found.event.lease for found in await store.history("a", Topic.LEASE, 2)] == ["renewed", "released"]
    assert len(await store.history("a", Topic.OPERATOR, 2, "renewed")) == 1


async def test_executions_of_two_partitions_with_one_uuid_have_separate_histories(store: Store) -> None:
    names = [f"{{fp:{partition}}}:11111111-1111-4111-8111-111111111111" for partition in (3, 4)]
    for name in names:
        await write(store, events=[event(name, lease=name)])

    for name in names:
        assert [found.event.lease for found in await store.history(name, Topic.LEASE, 10)] == [name]


async def test_history_and_feed_agree(store: Store, clock: ManualClock) -> None:
    await write(store, events=[lease("1"), lease("2", "b"), lease("3")])

    fed = [found for found in (await store.feed(Topic.LEASE, 0, 10)).events if found.event.execution_id == "a"]
    history = await store.history("a", Topic.LEASE, 10)
    assert [(found.at, found.event) for found in history] == [(found.at, found.event) for found in fed]


async def test_events_outlive_their_execution(store: Store) -> None:
    await write(store, Insert(execution("a")), events=[lease("1")])
    await write(store, Delete(Execution, ("a",)))

    assert await texts(store, Topic.LEASE) == ["1"]


LINES = [
    QueueKey("mail"),
    QueueKey("mail", "", "tenant", 1),
    QueueKey("mail", "", "tenant", 2),
    QueueKey("mail", "gpu"),
    QueueKey("mail", "gpu", guarded=True),
    QueueKey("sms"),
]


async def test_every_queue_that_was_written_to_is_registered(store: Store) -> None:
    assert await store.queues() == []
    for number, line in enumerate(reversed(LINES)):
        await write(store, Insert(queued(f"n{number}", line=line)))
    await write(store, Insert(queued("again", line=LINES[0])), Insert(execution("none")))

    assert sorted(await store.queues()) == LINES
    assert sorted(await store.queues("mail")) == LINES[:5]
    assert await store.queues("sms") == [LINES[5]]
    assert await store.queues("none") == []


async def test_a_queue_stays_registered_when_it_is_empty(store: Store) -> None:
    await write(store, Insert(execution("a")))
    await write(store, Patch(Execution, ("a",), {"line": LINES[0]}))
    await write(store, Delete(Execution, ("a",)))

    assert await store.queues() == [LINES[0]]


async def test_queues_with_rows_are_distinguished_from_empty_ones(store: Store) -> None:
    for number, line in enumerate(LINES):
        await write(store, Insert(queued(f"n{number}", line=line)), Insert(queued(f"m{number}", line=line)))
    await write(store, Delete(Execution, ("n0",)), Patch(Execution, ("m0",), {"line": None}))
    await write(store, Delete(Execution, ("n3",)))
    await write(store, Patch(Execution, ("n4",), {"line": LINES[1]}), Patch(Execution, ("m4",), {"line": LINES[1]}))

    assert await store.nonempty_queues("mail") == LINES[1:4]
    assert await store.nonempty_queues("sms") == [LINES[5]]
    assert await store.nonempty_queues("none") == []


async def test_an_empty_store_has_no_queues(store: Store) -> None:
    await write(store, Insert(execution("none")))

    assert await store.nonempty_queues("mail") == []


async def test_a_change_may_register_empty_queues(store: Store) -> None:
    known, refused = change(queues=(LINES[3], LINES[5])), change(queues=(LINES[0],), not_before=2**62)
    assert (await store.commit([known, refused]))[1] is None

    assert set(await store.queues()) >= {LINES[3], LINES[5]}
    assert await store.lanes("mail", 10) == ["sms"]


@pytest.mark.parametrize(
    ("after", "limit", "expected"), [(None, 10, "abcd"), (None, 2, "ab"), ("b", 9, "cd"), ("bb", 1, "c")]
)
async def test_lanes_are_listed_in_order(store: Store, after: str | None, limit: int, expected: str) -> None:
    for lane in "cabd":
        for capability in ("", "gpu"):
            await write(store, Insert(queued(f"{lane}{capability}", line=QueueKey(lane, capability))))

    assert await store.lanes(after, limit) == list(expected)


async def test_a_position_beyond_the_feed_is_reported_and_reading_continues_at_the_end(store: Store) -> None:
    await write(store, events=[lease("before")])
    end = await store.feed_end()

    page = await store.feed(Topic.LEASE, end + 2**40, 10)

    assert page == FeedPage([], end, diverged=True)
    await write(store, events=[lease("after")])
    assert await texts(store, Topic.LEASE, page.position) == ["after"]


async def test_reading_can_continue_from_every_position_that_was_returned(store: Store, clock: ManualClock) -> None:
    places = [0, await store.feed_end()]
    for number in range(5):
        await write(store, events=[lease(str(number)), event(operator="x")])
        page = await store.feed(Topic.LEASE, places[-1], 10)
        places += [found.position for found in page.events] + [page.position, await store.feed_end()]
    clock.advance_ms(1000)
    await write(store, events=[lease("last")])
    await store.trim_feed(clock.now, 3)

    assert not any([(await store.feed(Topic.OPERATOR, place, 10)).diverged for place in places])
