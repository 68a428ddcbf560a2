"""Handing over is a commit and a take: whatever is handed is what that take would have found first, and the rest waits.

A store may hand over less than it could, down to nothing. So each test takes what was left, and looks at both together.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from flowfabric.clock import ManualClock
from flowfabric.engine.runtime.after_commit import apply_patch
from flowfabric.model.change import NOW, Change, FromNow, Guard, Insert, Patch, Upsert, template_fields
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.states import AttemptType
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult
from flowfabric.stores.port import Store
from tests.stores.samples import MAIL, a_take, change, event, execution, line_up, one, payload, waiting, write

OTHER = QueueKey("mail", "gpu")
NO_HINT: frozenset[str] = frozenset()


async def blocked(store: Store, *names: str, **fields: Any) -> dict[str, int]:
    """Rows that stand in no line yet; their revisions."""
    rows = [waiting(name, **({"line": None} | fields)) for name in names]
    revision = await write(store, *map(Insert, rows), *(Insert(payload(name)) for name in names))
    return dict.fromkeys(names, revision)


def freed(name: str, revision: int, line: QueueKey = MAIL, **fields: Any) -> Change:
    """Puts a row into a line, if it is as it was."""
    patch = Patch(Execution, (name,), {"line": line, "last_mutation_at": NOW} | fields)
    return change(patch, guards=[Guard(Execution, (name,), revision)])


def names(rows: list[Any]) -> list[str]:
    return [row.execution_id for row, _ in rows]


async def claimed(store: Store, handed: CommitAndClaimResult, take: ClaimRequest) -> list[str]:
    """What was handed over, and then what is still there to take, in the order in which they came."""
    left = msgspec.structs.replace(take, lease_ids=a_take(20, prefix="later-").lease_ids)
    return names(handed.rows) + names((await store.claim_rows(left)).rows)


async def test_what_is_put_into_a_line_is_claimed_once_by_rank(store: Store, clock: ManualClock) -> None:
    revisions = await blocked(store, "b", rank=5) | await blocked(store, "a", rank=7) | await blocked(store, "c")
    take = a_take(10)

    handed = await store.commit_and_claim([freed(*item) for item in revisions.items()], NO_HINT, take)

    assert handed.verdicts == [clock.now] * 3
    assert await claimed(store, handed, take) == ["c", "b", "a"]


async def test_a_handed_row_is_what_a_take_makes_of_it(store: Store, clock: ManualClock) -> None:
    lives = {"first": AttemptType.INITIAL, "goes-on": None}
    revisions: dict[str, int] = {}
    for name, next_type in lives.items():
        fields = {"next_type": next_type, "next_timeout_ms": 300, "total_attempt_count": 2, "attempt_id": "old"}
        revisions |= await blocked(store, name, tags='{"a":"1"}', failure_reason="once", deadline_at=9, **fields)
    changes = [freed(*item) for item in revisions.items()]
    before = {name: await one(store, Execution, name) for name in lives}
    clock.now += 5
    take = a_take(2)

    handed = await store.commit_and_claim(changes, NO_HINT, take)

    stamps = {stamp.lease_id: stamp for stamp in take.lease_ids}
    for row, content in handed.rows:
        assert row.lease_id is not None
        stamp = stamps[row.lease_id]
        fields = template_fields(take.template, before[row.execution_id], take.parameters | asdict(stamp))
        assert row == apply_patch(before[row.execution_id], fields, stamp.revision, clock.now)
        assert row == await one(store, Execution, row.execution_id)
        assert content == payload(row.execution_id)
    told = (await store.feed(Topic.LEASE, 0, 10)).events
    assert sorted(one.event.execution_id for one in told) == sorted(names(handed.rows))
    for found in told:
        row = next(row for row, _ in handed.rows if row.execution_id == found.event.execution_id)
        assert (found.event.lease, found.event.lease_id, found.event.attempt_id) == (
            "acquired",
            row.lease_id,
            row.attempt_id,
        )
        assert found.event.reason == ("claim_resumed" if lives[row.execution_id] is None else None)
    for name in names(handed.rows):
        assert [one.event.lease for one in await store.history(name, Topic.LEASE, 10)] == ["acquired"]


async def test_whoever_stands_in_line_with_a_better_rank_goes_first(store: Store) -> None:
    revisions = await blocked(store, "late", rank=5)
    await line_up(store, waiting("better", 1), waiting("worse", 9))
    take = a_take(1)

    handed = await store.commit_and_claim([freed("late", revisions["late"])], NO_HINT, take)

    assert await claimed(store, handed, take) == ["better", "late", "worse"]


async def test_whoever_stands_in_another_line_of_the_take_goes_first(store: Store) -> None:
    revisions = await blocked(store, "late", rank=5)
    await line_up(store, waiting("better", 1, line=OTHER))
    take = a_take(1, MAIL, OTHER)

    handed = await store.commit_and_claim([freed("late", revisions["late"])], NO_HINT, take)

    assert await claimed(store, handed, take) == ["better", "late"]


async def test_whoever_the_same_changes_create_goes_first_with_a_better_rank(store: Store) -> None:
    revisions = await blocked(store, "late", rank=5)
    new = change(Insert(waiting("new", 1)), Insert(payload("new")))
    take = a_take(1)

    handed = await store.commit_and_claim([freed("late", revisions["late"]), new], NO_HINT, take)

    assert await claimed(store, handed, take) == ["new", "late"]


async def test_of_more_than_are_wanted_the_best_are_claimed(store: Store) -> None:
    revisions: dict[str, int] = {}
    for rank, name in enumerate("edcba"):
        revisions |= await blocked(store, name, rank=rank)
    take = a_take(2)

    handed = await store.commit_and_claim([freed(*item) for item in revisions.items()], NO_HINT, take)

    assert names(handed.rows) in ([], ["e", "d"])
    assert await claimed(store, handed, take) == list("edcba")


@pytest.mark.parametrize("wanted", [1, 2, 3])
@pytest.mark.parametrize(
    "stands", [[], [waiting("better", -1)], [waiting("worse", 9)]], ids=["alone", "better", "worse"]
)
async def test_a_line_is_said_to_be_empty_only_when_it_is(store: Store, wanted: int, stands: list[Execution]) -> None:
    revisions = await blocked(store, "a", "b")
    await line_up(store, *stands)

    handed = await store.commit_and_claim([freed(*item) for item in revisions.items()], NO_HINT, take := a_take(wanted))

    if handed.drained:
        assert await claimed(store, handed, take) == names(handed.rows)


async def test_a_change_that_is_refused_hands_nothing_over(store: Store, clock: ManualClock) -> None:
    revisions = await blocked(store, "a", "b", "c")
    before = await one(store, Execution, "b")
    take = a_take(3)

    handed = await store.commit_and_claim(
        [freed("a", revisions["a"]), freed("b", revisions["b"] + 1000), freed("c", revisions["c"])], NO_HINT, take
    )

    assert handed.verdicts == [clock.now, None, clock.now]
    assert await claimed(store, handed, take) == ["a", "c"]
    assert await one(store, Execution, "b") == before


async def test_what_stands_in_a_line_that_is_not_asked_for_is_left(store: Store) -> None:
    revisions = await blocked(store, "a", "b")
    take = a_take(5)

    handed = await store.commit_and_claim(
        [freed("a", revisions["a"]), freed("b", revisions["b"], OTHER)], NO_HINT, take
    )

    assert await claimed(store, handed, take) == ["a"]
    assert (await one(store, Execution, "b")).line == OTHER


async def test_what_else_a_change_writes_to_the_row_is_kept(store: Store) -> None:
    revisions = await blocked(store, "a", "b")
    take = a_take(5)
    changes = [freed(name, revisions[name], priority=4, tags='{"kept":"yes"}') for name in ("a", "b")]

    handed = await store.commit_and_claim(changes, NO_HINT, take)

    assert await claimed(store, handed, take) == ["a", "b"]
    for name in ("a", "b"):
        row = await one(store, Execution, name)
        assert (row.priority, row.tags, row.line) == (4, '{"kept":"yes"}', None)


async def test_an_input_that_the_same_change_replaces_is_the_one_that_is_handed_over(store: Store) -> None:
    revisions = await blocked(store, "a", "b")
    news = msgspec.structs.replace(payload("a"), input_payload=b"news")
    setting_free = freed("a", revisions["a"])
    carrying = msgspec.structs.replace(setting_free, writes=(*setting_free.writes, Upsert(news)))
    take = a_take(5)

    handed = await store.commit_and_claim([carrying, freed("b", revisions["b"])], NO_HINT, take)

    left = await store.claim_rows(msgspec.structs.replace(take, lease_ids=a_take(20, prefix="later-").lease_ids))
    assert [content for _, content in handed.rows + left.rows] == [news, payload("b")]


async def test_changes_beside_it_are_written_and_told_before_it(store: Store) -> None:
    revisions = await blocked(store, "child")
    ended = await write(store, Insert(execution("parent")))
    end = change(
        Patch(Execution, ("parent",), {"completed_at": FromNow(1)}),
        *freed("child", 0).writes,
        guards=[Guard(Execution, ("parent",), ended), Guard(Execution, ("child",), revisions["child"])],
        events=[event("parent", lease="released", outcome="success")],
    )
    take = a_take(1)

    handed = await store.commit_and_claim([end], NO_HINT, take)

    assert await claimed(store, handed, take) == ["child"]
    assert (await one(store, Execution, "parent")).revision == end.id
    told = (await store.feed(Topic.LEASE, 0, 10)).events
    assert [(one.event.execution_id, one.event.lease) for one in told] == [
        ("parent", "released"),
        ("child", "acquired"),
    ]


async def test_a_line_that_nobody_ever_wrote_to_has_nothing_to_hand_over(store: Store, clock: ManualClock) -> None:
    revisions = await blocked(store, "a")

    handed = await store.commit_and_claim([freed("a", revisions["a"])], NO_HINT, a_take(1, QueueKey("never written")))

    assert (handed.verdicts, handed.rows) == ([clock.now], [])
    assert (await one(store, Execution, "a")).line == MAIL


async def test_no_changes_at_all_leave_everything_where_it_is(store: Store) -> None:
    await line_up(store, waiting("a"))
    take = a_take(1)

    handed = await store.commit_and_claim([], NO_HINT, take)

    assert handed.verdicts == []
    assert await claimed(store, handed, take) == ["a"]


@pytest.mark.parametrize("wanted", [0, 1])
async def test_changes_that_put_nothing_into_lines_are_just_written(
    store: Store, clock: ManualClock, wanted: int
) -> None:
    await line_up(store, waiting("a"))
    take = a_take(wanted)

    handed = await store.commit_and_claim([change(Insert(execution("b")))], NO_HINT, take)

    assert handed.verdicts == [clock.now]
    assert await claimed(store, handed, take) == ["a"]
