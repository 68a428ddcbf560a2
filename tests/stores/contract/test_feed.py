"""The feed: committed facts in an order that never changes; and the lines that were ever written to."""

from __future__ import annotations

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Insert, Patch, absent
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.port import Store
from flowfabric.stores.queries import FeedPage
from tests.stores.samples import change, event, execution, waiting, write


async def texts(store: Store, topic: Topic, after: int = 0, limit: int = 100) -> list[str]:
    return [told.event.details or "" for told in (await store.feed(topic, after, limit)).events]


def lease(text: str, name: str = "a") -> Event:
    return event(name, lease="acquired", details=text)


async def test_events_come_in_the_order_in_which_they_were_committed(store: Store, clock: ManualClock) -> None:
    await store.commit([change(events=[lease("1"), lease("2")]), change(events=[lease("3")])])
    clock.advance_ms(5)
    await store.commit([change(events=[lease("4")])])

    page = await store.feed(Topic.LEASE, 0, 100)
    assert [told.event.details for told in page.events] == ["1", "2", "3", "4"]
    assert [told.at for told in page.events] == [clock.now - 5] * 3 + [clock.now]
    positions = [told.position for told in page.events]
    assert positions == sorted(set(positions))
    assert positions[0] > 0


async def test_an_event_comes_back_as_it_was_told(store: Store) -> None:
    full = Event(
        "a", "ns", "{}", "f", "acquired", "l", 2**62, "t", 0, "w", "i", "because", "success", "cancel", "go", "é"
    )
    await write(store, events=[full, Event("a", "ns", signal="")])

    assert (await store.feed(Topic.OPERATOR, 0, 10)).events[0].event == full
    assert (await store.feed(Topic.SIGNAL, 0, 10)).events[1].event == Event("a", "ns", signal="")


async def test_an_event_is_in_the_feed_of_each_topic_that_it_names(store: Store) -> None:
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
        seen += [told.event.details or "" for told in page.events]
        if not page.events:
            break
        assert page.position >= page.events[-1].position > position
        position = page.position
    assert seen == [str(number) for number in range(25) if number % 3]


async def test_reading_goes_on_past_what_belongs_to_other_topics(store: Store) -> None:
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


async def test_everything_committed_after_the_end_was_asked_for_lies_behind_it(store: Store) -> None:
    await write(store, events=[lease("before")])
    end = await store.feed_end()
    await write(store, events=[lease("after")])

    assert await texts(store, Topic.LEASE, end) == ["after"]
    assert await store.feed_end() > end


async def test_a_refused_change_tells_nothing(store: Store) -> None:
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
    assert [told.event.details for told in history] == ["a2", "a3", "a4"]
    assert len(await store.history("a", Topic.LEASE, 100)) == 5
    assert len(await store.history("a", Topic.OPERATOR, 100)) == 5
    assert await store.history("a", Topic.COMPLETION, 100) == []
    assert await store.history("none", Topic.LEASE, 100) == []
    assert await store.history("a", Topic.LEASE, 0) == []


async def test_what_a_history_leaves_out_takes_no_room_in_it(store: Store) -> None:
    await write(store, events=[event(lease="acquired")])
    for _ in range(3):
        await write(store, events=[event(lease="renewed")])
    await write(store, events=[event(lease="released", operator="replayed")])

    history = await store.history("a", Topic.LEASE, 2, "renewed")
    assert [told.event.lease for told in history] == ["acquired", "released"]
    assert [told.event.lease for told in await store.history("a", Topic.LEASE, 2)] == ["renewed", "released"]
    assert len(await store.history("a", Topic.OPERATOR, 2, "renewed")) == 1


async def test_two_partitions_may_have_the_same_uuid_and_not_the_same_history(store: Store) -> None:
    names = [f"{{fp:{partition}}}:11111111-1111-4111-8111-111111111111" for partition in (3, 4)]
    await write(store, events=[event(name, lease=name) for name in names])

    for name in names:
        assert [told.event.lease for told in await store.history(name, Topic.LEASE, 10)] == [name]


async def test_history_and_feed_tell_the_same(store: Store, clock: ManualClock) -> None:
    await write(store, events=[lease("1"), lease("2", "b"), lease("3")])

    fed = [told for told in (await store.feed(Topic.LEASE, 0, 10)).events if told.event.execution_id == "a"]
    assert await store.history("a", Topic.LEASE, 10) == fed


async def test_events_outlive_what_they_tell_of(store: Store) -> None:
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


async def test_every_line_that_was_written_to_is_remembered(store: Store) -> None:
    assert await store.queues() == []
    for number, line in enumerate(reversed(LINES)):
        await write(store, Insert(waiting(f"n{number}", line=line)))
    await write(store, Insert(waiting("again", line=LINES[0])), Insert(execution("none")))

    assert sorted(await store.queues()) == LINES
    assert sorted(await store.queues("mail")) == LINES[:5]
    assert await store.queues("sms") == [LINES[5]]
    assert await store.queues("none") == []


async def test_a_line_is_remembered_when_nothing_stands_in_it_any_more(store: Store) -> None:
    await write(store, Insert(execution("a")))
    await write(store, Patch(Execution, ("a",), {"line": LINES[0]}))
    await write(store, Delete(Execution, ("a",)))

    assert await store.queues() == [LINES[0]]


async def test_the_lines_in_which_something_stands_are_told_apart(store: Store) -> None:
    for number, line in enumerate(LINES):
        await write(store, Insert(waiting(f"n{number}", line=line)), Insert(waiting(f"m{number}", line=line)))
    await write(store, Delete(Execution, ("n0",)), Patch(Execution, ("m0",), {"line": None}))
    await write(store, Delete(Execution, ("n3",)))
    await write(store, Patch(Execution, ("n4",), {"line": LINES[1]}), Patch(Execution, ("m4",), {"line": LINES[1]}))

    assert await store.nonempty_queues("mail") == LINES[1:4]
    assert await store.nonempty_queues("sms") == [LINES[5]]
    assert await store.nonempty_queues("none") == []


async def test_nothing_stands_in_an_empty_store(store: Store) -> None:
    await write(store, Insert(execution("none")))

    assert await store.nonempty_queues("mail") == []


async def test_a_change_may_make_lines_known_in_which_nothing_stands_yet(store: Store) -> None:
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
            await write(store, Insert(waiting(f"{lane}{capability}", line=QueueKey(lane, capability))))

    assert await store.lanes(after, limit) == list(expected)


async def test_a_place_beyond_the_feed_is_told_and_reading_goes_on_at_the_end(store: Store) -> None:
    await write(store, events=[lease("before")])
    end = await store.feed_end()

    page = await store.feed(Topic.LEASE, end + 2**40, 10)

    assert page == FeedPage([], end, diverged=True)
    await write(store, events=[lease("after")])
    assert await texts(store, Topic.LEASE, page.position) == ["after"]


async def test_every_place_that_was_handed_out_can_be_gone_on_from(store: Store, clock: ManualClock) -> None:
    places = [0, await store.feed_end()]
    for number in range(5):
        await write(store, events=[lease(str(number)), event(operator="x")])
        page = await store.feed(Topic.LEASE, places[-1], 10)
        places += [told.position for told in page.events] + [page.position, await store.feed_end()]
    clock.advance_ms(1000)
    await write(store, events=[lease("last")])
    await store.trim_feed(clock.now, 3)

    assert not any([(await store.feed(Topic.OPERATOR, place, 10)).diverged for place in places])
