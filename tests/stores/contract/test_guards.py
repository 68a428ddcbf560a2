"""A change is written if all its guards hold by the store's own clock; otherwise nothing is written."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Expected, Guard, Insert, LeaseCheck, LeaseRequirement, Patch, absent, expect
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, Result
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptType, BlockingReason
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read
from tests.stores.sample_rows import change, event, execution, one, payload, write

HELD: dict[str, Any] = {"lease_id": "lease", "lease_epoch": 3}


def seen(revision: int | None, name: str = "a", lease: LeaseCheck | None = None) -> Guard:
    return Guard(Execution, (name,), revision, lease)


def mark(name: str = "a") -> Patch:
    return Patch(Execution, (name,), {"blocking_text": "marked"})


async def is_marked(store: Store, name: str = "a") -> bool:
    return bool((await one(store, Execution, name)).blocking_text == "marked")


async def test_a_change_decided_on_the_current_revision_is_written(store: Store, clock: ManualClock) -> None:
    revision = await write(store, Insert(execution()))

    assert await store.commit([change(mark(), guards=[seen(revision)])]) == [clock.now]
    assert await is_marked(store)


async def test_a_change_decided_on_another_revision_is_refused(store: Store) -> None:
    revision = await write(store, Insert(execution()))

    assert await store.commit([change(mark(), guards=[seen(revision + 1)])]) == [None]
    assert not await is_marked(store)


async def test_a_change_decided_on_a_deleted_row_is_refused(store: Store) -> None:
    assert await store.commit([change(Insert(payload("a")), guards=[seen(1)])]) == [None]
    assert await one(store, Payload, "a") is None


async def test_the_absence_of_a_row_can_be_guarded(store: Store) -> None:
    create = [absent(Execution, "a")]

    assert await store.commit([change(Insert(execution()), guards=create)]) != [None]
    assert await store.commit([change(Insert(execution()), guards=create)]) == [None]


async def test_every_root_that_a_change_writes_gets_the_id_of_the_change(store: Store) -> None:
    first = await write(store, Insert(execution()), Insert(IdempotencyKey(0, "digest", "a", 5)))
    assert (await one(store, Execution, "a")).revision == first
    assert (await one(store, IdempotencyKey, 0, "digest")).revision == first

    second = await write(store, mark())
    assert (await one(store, Execution, "a")).revision == second
    assert (await one(store, IdempotencyKey, 0, "digest")).revision == first


async def test_writing_a_row_of_an_aggregate_leaves_the_revision_of_its_root_unchanged(store: Store) -> None:
    revision = await write(store, Insert(execution()))

    fenced = change(Insert(Result("a", b"done")), guards=[seen(revision)])
    assert await store.commit([fenced]) != [None]
    assert (await one(store, Execution, "a")).revision == revision


async def test_a_change_may_consist_of_a_guard_alone(store: Store, clock: ManualClock) -> None:
    revision = await write(store, Insert(execution()))

    assert await store.commit([change(guards=[seen(revision)])]) == [clock.now]
    assert await store.commit([change(guards=[seen(revision + 1)])]) == [None]


async def test_a_change_without_guards_is_written(store: Store, clock: ManualClock) -> None:
    assert await store.commit([change(Insert(execution()))]) == [clock.now]


@pytest.mark.parametrize(
    ("want", "early", "on_time"), [(LeaseRequirement.LIVE, True, False), (LeaseRequirement.EXPIRED, False, True)]
)
async def test_a_lease_is_live_until_its_expiry_and_expired_from_then_on(
    store: Store, clock: ManualClock, want: LeaseRequirement, early: bool, on_time: bool
) -> None:
    revision = await write(store, Insert(execution(**HELD, lease_expires_at=FromNow(100))))
    guard = seen(revision, lease=LeaseCheck(want, "lease", 3))

    clock.advance_ms(99)
    assert (await store.commit([change(guards=[guard])]) != [None]) is early
    clock.advance_ms(1)
    assert (await store.commit([change(guards=[guard])]) != [None]) is on_time


@pytest.mark.parametrize("want", LeaseRequirement)
@pytest.mark.parametrize(
    ("fields", "revision_off"),
    [({"lease_id": "other"}, 0), ({"lease_epoch": 4}, 0), ({"lease_expires_at": None}, 0), ({}, 1)],
)
async def test_a_lease_check_requires_every_field_to_match(
    store: Store, clock: ManualClock, want: LeaseRequirement, fields: dict[str, Any], revision_off: int
) -> None:
    ends = FromNow(100) if want is LeaseRequirement.LIVE else FromNow(0)
    revision = await write(store, Insert(execution(**(HELD | {"lease_expires_at": ends} | fields))))

    guard = seen(revision + revision_off, lease=LeaseCheck(want, "lease", 3))
    assert await store.commit([change(mark(), guards=[guard])]) == [None]
    assert not await is_marked(store)


async def test_a_change_is_refused_before_its_time(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution()))
    bound = clock.now

    clock.now = bound - 1
    assert await store.commit([change(mark(), not_before=bound)]) == [None]
    clock.now = bound
    assert await store.commit([change(mark(), not_before=bound)]) == [bound]


async def test_a_change_is_refused_after_its_time(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution()))
    bound = clock.now

    assert await store.commit([change(mark(), not_after=bound)]) == [bound]
    clock.now = bound + 1
    assert await store.commit([change(mark(), not_after=bound)]) == [None]


async def test_bounds_and_guards_must_all_hold(store: Store, clock: ManualClock) -> None:
    revision = await write(store, Insert(execution()))

    late = change(mark(), guards=[seen(revision)], not_after=clock.now - 1)
    wrong = change(mark(), guards=[seen(revision + 1)], not_before=clock.now)
    assert await store.commit([late]) == [None]
    assert await store.commit([wrong]) == [None]


async def test_a_refused_change_leaves_no_write_and_no_event(store: Store) -> None:
    revision = await write(store, Insert(execution()), Insert(payload("a")))
    end = await store.feed_end()

    refused = change(
        mark(),
        Insert(Result("a", b"done")),
        Delete(Payload, ("a",)),
        guards=[seen(revision + 1)],
        events=[event(outcome="success", lease="released")],
    )
    assert await store.commit([refused]) == [None]
    loaded = await store.load([Read(Execution, ("a",)), Read(Result, ("a",)), Read(Payload, ("a",))])
    assert [len(rows) for rows in loaded.rows] == [1, 0, 1]
    assert not await is_marked(store)
    assert (await store.feed(Topic.LEASE, end, 10)).events == []


async def test_a_refused_change_does_not_affect_its_neighbours(store: Store, clock: ManualClock) -> None:
    names = [f"n{number}" for number in range(10)]
    revision = await write(store, *(Insert(execution(name)) for name in names))

    batch = [
        change(
            mark(name),
            Insert(Result(name, b"")),
            guards=[seen(revision + number % 2, name)],
            events=[event(name, outcome="success")],
        )
        for number, name in enumerate(names)
    ]
    assert await store.commit(batch) == [clock.now, None] * 5
    assert [await is_marked(store, name) for name in names] == [True, False] * 5
    events = (await store.feed(Topic.COMPLETION, 0, 100)).events
    assert [one.event.execution_id for one in events] == names[::2]


@pytest.mark.parametrize("stale", ["a", "b"])
async def test_a_change_of_two_rows_is_atomic(store: Store, stale: str) -> None:
    revision = await write(store, Insert(execution("a")), Insert(execution("b")))
    both = [seen(revision, "a"), seen(revision, "b")]
    await write(store, Patch(Execution, (stale,), {"priority": 5}))

    assert await store.commit([change(mark("a"), mark("b"), guards=both)]) == [None]
    assert not await is_marked(store, "a")
    assert not await is_marked(store, "b")


async def test_one_guard_may_require_presence_and_another_absence(store: Store) -> None:
    revision = await write(store, Insert(execution("a")))

    def adopt() -> Any:
        return change(Insert(execution("b")), mark("a"), guards=[seen(revision, "a"), absent(Execution, "b")])

    assert await store.commit([adopt()]) != [None]
    assert await store.commit([adopt()]) == [None]


async def test_a_stale_owner_cannot_add_to_a_root_that_it_does_not_write(store: Store, clock: ManualClock) -> None:
    revision = await write(store, Insert(execution(**HELD, lease_expires_at=FromNow(100))))
    guard = seen(revision, lease=LeaseCheck(LeaseRequirement.LIVE, "lease", 3))
    await write(
        store, Patch(Execution, ("a",), {"lease_epoch": 4, "lease_id": "newer", "lease_expires_at": FromNow(100)})
    )

    late = Attempt("a", 0, "x", AttemptType.INITIAL, AttemptRecordState.STARTED, clock.now, "lease", 3, "w", "i")
    assert await store.commit([change(Insert(late), guards=[guard])]) == [None]
    assert await one(store, Attempt, "a", 0) is None


async def test_a_guard_compares_keys_of_several_columns(store: Store) -> None:
    revision = await write(store, Insert(IdempotencyKey(7, "digest", "a", 5)))

    assert await store.commit([change(guards=[absent(IdempotencyKey, 8, "digest")])]) != [None]
    assert await store.commit([change(guards=[absent(IdempotencyKey, 7, "digest")])]) == [None]
    assert await store.commit([change(guards=[Guard(IdempotencyKey, (7, "digest"), revision)])]) != [None]


async def test_a_commit_is_visible_to_the_next_one(store: Store) -> None:
    revision = await write(store, Insert(execution()))
    step = change(mark(), guards=[seen(revision)])

    assert await store.commit([step]) != [None]
    assert await store.commit([change(Patch(Execution, ("a",), {"completed_at": NOW}), guards=[seen(step.id)])]) != [
        None
    ]
    assert await store.commit([step]) == [None]


async def test_an_empty_batch_returns_no_verdicts(store: Store) -> None:
    assert await store.commit([]) == []


SLEEPS = Expected({"blocking_reason": BlockingReason.WAITING_FOR_BUDGET, "delay_until": 50, "tags": None})
AS_IT_SLEEPS: dict[str, Any] = {"blocking_reason": BlockingReason.WAITING_FOR_BUDGET, "delay_until": 50}


async def test_an_unloaded_row_can_be_guarded_by_its_columns(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution(**AS_IT_SLEEPS)), Insert(execution("b", **AS_IT_SLEEPS)))
    as_supposed = change(mark(), guards=[expect(Execution, SLEEPS, "a")])

    assert await store.commit([as_supposed, change(mark("b"), guards=[seen(0, "b")])]) == [clock.now, None]

    assert (await one(store, Execution, "a")).revision == as_supposed.id
    assert not await is_marked(store, "b")


@pytest.mark.parametrize(
    "otherwise",
    [{"blocking_reason": BlockingReason.NONE}, {"delay_until": 51}, {"delay_until": None}, {"tags": "{}"}],
    ids=str,
)
async def test_a_row_with_other_column_values_is_left_unchanged(store: Store, otherwise: dict[str, Any]) -> None:
    await write(store, Insert(execution(**AS_IT_SLEEPS | otherwise)), Insert(execution("b", **AS_IT_SLEEPS)))
    other = await one(store, Execution, "a")
    guards = [expect(Execution, SLEEPS, name) for name in "ab"]

    assert await store.commit([change(mark(), mark("b"), guards=guards)]) == [None]

    assert await one(store, Execution, "a") == other
    assert not await is_marked(store, "b")


@pytest.mark.parametrize("like", [SLEEPS, Expected({"tags": None})], ids=["values", "nothing but gaps"])
async def test_a_deleted_row_matches_no_column_guard(store: Store, like: Expected) -> None:
    assert await store.commit([change(Insert(payload("a")), guards=[expect(Execution, like, "a")])]) == [None]
    assert await one(store, Payload, "a") is None


async def test_columns_of_rows_that_a_change_does_not_write_can_be_guarded(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution(**AS_IT_SLEEPS)))

    assert await store.commit([change(Insert(payload("a")), guards=[expect(Execution, SLEEPS, "a")])]) == [clock.now]
    assert await one(store, Payload, "a") == payload("a")


EACH = Expected({"blocking_reason": BlockingReason.WAITING_FOR_BUDGET}, per_row=("delay_until", "tags", "deadline_at"))


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "each its own"])
async def test_column_guards_may_differ_per_root(store: Store, clock: ManualClock, alike: bool) -> None:
    holds = {name: (50 if alike else 50 + place, None) for place, name in enumerate("abc")}
    for name, (delay, tags) in holds.items():
        await write(store, Insert(execution(name, **AS_IT_SLEEPS | {"delay_until": delay, "tags": tags})))
    changes = [
        change(mark(name), guards=[expect(Execution, EACH, name, expected_values=(*own, None))])
        for name, own in holds.items()
    ]

    assert await store.commit(changes) == [clock.now] * 3
    assert [await is_marked(store, name) for name in "abc"] == [True] * 3


@pytest.mark.parametrize("own", [(51, None), (None, None), (50, "{}")], ids=str)
async def test_a_root_with_other_values_is_left_unchanged(
    store: Store, clock: ManualClock, own: tuple[Any, ...]
) -> None:
    await write(store, Insert(execution(**AS_IT_SLEEPS)), Insert(execution("b", **AS_IT_SLEEPS)))
    guards = [
        expect(Execution, EACH, "a", expected_values=(*own, None)),
        expect(Execution, EACH, "b", expected_values=(50, None, None)),
    ]

    assert await store.commit([change(mark(name), guards=[one]) for name, one in zip("ab", guards, strict=True)]) == [
        None,
        clock.now,
    ]
    assert not await is_marked(store)
