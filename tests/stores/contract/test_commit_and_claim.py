"""Commit-and-claim is a commit followed by a claim: it returns what that claim would find first, and leaves the rest.

A store may claim less than it could, down to nothing. So each test claims what was left and checks both together.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from flowfabric.clock import ManualClock
from flowfabric.engine.runtime.after_commit import apply_patch
from flowfabric.model.change import Change, Guard, Insert, Patch, Upsert, template_fields
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptType
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult
from flowfabric.stores.port import Store
from tests.stores.sample_rows import (
    MAIL,
    change,
    claim_request,
    event,
    execution,
    insert_queued,
    one,
    payload,
    queued,
    write,
)

OTHER = QueueKey("mail", "gpu")
NO_TOPICS: frozenset[str] = frozenset()


async def insert_unqueued(store: Store, *names: str, **fields: Any) -> dict[str, int]:
    """Insert rows that are in no queue and return their revisions."""
    rows = [queued(name, **({"line": None} | fields)) for name in names]
    revision = await write(store, *map(Insert, rows), *(Insert(payload(name)) for name in names))
    return dict.fromkeys(names, revision)


def enqueue(name: str, revision: int, line: QueueKey = MAIL, **fields: Any) -> Change:
    """Return a change that enqueues a row if its revision is unchanged."""
    patch = Patch(Execution, (name,), {"line": line, "last_mutation_at": NOW} | fields)
    return change(patch, guards=[Guard(Execution, (name,), revision)])


def names(rows: list[Any]) -> list[str]:
    return [row.execution_id for row, _ in rows]


async def claim_all(store: Store, result: CommitAndClaimResult, request: ClaimRequest) -> list[str]:
    """Return what was claimed with the commit, and then what is still there to claim, in order."""
    left = msgspec.structs.replace(request, lease_ids=claim_request(20, prefix="later-").lease_ids)
    return names(result.rows) + names((await store.claim_rows(left)).rows)


async def test_enqueued_rows_are_claimed_once_by_position(store: Store, clock: ManualClock) -> None:
    revisions = (
        await insert_unqueued(store, "b", rank=5)
        | await insert_unqueued(store, "a", rank=7)
        | await insert_unqueued(store, "c")
    )
    request = claim_request(10)

    result = await store.commit_and_claim([enqueue(*item) for item in revisions.items()], NO_TOPICS, request)

    assert result.verdicts == [clock.now] * 3
    assert await claim_all(store, result, request) == ["c", "b", "a"]


async def test_a_row_claimed_with_the_commit_equals_a_row_claimed_separately(store: Store, clock: ManualClock) -> None:
    lives = {"first": AttemptType.INITIAL, "goes-on": None}
    revisions: dict[str, int] = {}
    for name, next_type in lives.items():
        fields = {"next_type": next_type, "next_timeout_ms": 300, "total_attempt_count": 2, "attempt_id": "old"}
        revisions |= await insert_unqueued(
            store, name, tags='{"a":"1"}', failure_reason="once", deadline_at=9, **fields
        )
    changes = [enqueue(*item) for item in revisions.items()]
    before = {name: await one(store, Execution, name) for name in lives}
    clock.now += 5
    request = claim_request(2)

    result = await store.commit_and_claim(changes, NO_TOPICS, request)

    lease_ids = {ids.lease_id: ids for ids in request.lease_ids}
    for row, content in result.rows:
        assert row.lease_id is not None
        ids = lease_ids[row.lease_id]
        fields = template_fields(request.template, before[row.execution_id], request.parameters | asdict(ids))
        assert row == apply_patch(before[row.execution_id], fields, ids.revision, clock.now)
        assert row == await one(store, Execution, row.execution_id)
        assert content == payload(row.execution_id)
    events = (await store.feed(Topic.LEASE, 0, 10)).events
    assert sorted(one.event.execution_id for one in events) == sorted(names(result.rows))
    for found in events:
        row = next(row for row, _ in result.rows if row.execution_id == found.event.execution_id)
        assert (found.event.lease, found.event.lease_id, found.event.attempt_id) == (
            "acquired",
            row.lease_id,
            row.attempt_id,
        )
        assert found.event.reason == ("claim_resumed" if lives[row.execution_id] is None else None)
    for name in names(result.rows):
        assert [one.event.lease for one in await store.history(name, Topic.LEASE, 10)] == ["acquired"]


@pytest.mark.parametrize("line", [MAIL, OTHER], ids=["the same queue", "another requested queue"])
async def test_a_queued_row_with_a_better_position_is_claimed_first(store: Store, line: QueueKey) -> None:
    revisions = await insert_unqueued(store, "late", rank=5)
    await insert_queued(store, queued("better", 1, line=line), queued("worse", 9))
    request = claim_request(1, *dict.fromkeys((MAIL, line)))

    result = await store.commit_and_claim([enqueue("late", revisions["late"])], NO_TOPICS, request)

    assert await claim_all(store, result, request) == ["better", "late", "worse"]


async def test_a_row_created_by_the_same_changes_is_claimed_first_if_its_position_is_better(store: Store) -> None:
    revisions = await insert_unqueued(store, "late", rank=5)
    new = change(Insert(queued("new", 1)), Insert(payload("new")))
    request = claim_request(1)

    result = await store.commit_and_claim([enqueue("late", revisions["late"]), new], NO_TOPICS, request)

    assert await claim_all(store, result, request) == ["new", "late"]


async def test_the_best_rows_are_claimed_if_there_are_more_than_requested(store: Store) -> None:
    revisions: dict[str, int] = {}
    for rank, name in enumerate("edcba"):
        revisions |= await insert_unqueued(store, name, rank=rank)
    request = claim_request(2)

    result = await store.commit_and_claim([enqueue(*item) for item in revisions.items()], NO_TOPICS, request)

    assert names(result.rows) in ([], ["e", "d"])
    assert await claim_all(store, result, request) == list("edcba")


@pytest.mark.parametrize("wanted", [1, 2, 3])
@pytest.mark.parametrize("stands", [[], [queued("better", -1)], [queued("worse", 9)]], ids=["alone", "better", "worse"])
async def test_a_queue_is_reported_as_empty_only_if_it_is(store: Store, wanted: int, stands: list[Execution]) -> None:
    revisions = await insert_unqueued(store, "a", "b")
    await insert_queued(store, *stands)

    result = await store.commit_and_claim(
        [enqueue(*item) for item in revisions.items()], NO_TOPICS, request := claim_request(wanted)
    )

    if result.drained:
        assert await claim_all(store, result, request) == names(result.rows)


async def test_a_refused_change_enqueues_nothing_to_claim(store: Store, clock: ManualClock) -> None:
    revisions = await insert_unqueued(store, "a", "b", "c")
    before = await one(store, Execution, "b")
    request = claim_request(3)

    result = await store.commit_and_claim(
        [enqueue("a", revisions["a"]), enqueue("b", revisions["b"] + 1000), enqueue("c", revisions["c"])],
        NO_TOPICS,
        request,
    )

    assert result.verdicts == [clock.now, None, clock.now]
    assert await claim_all(store, result, request) == ["a", "c"]
    assert await one(store, Execution, "b") == before


async def test_a_row_in_a_queue_that_was_not_requested_is_left(store: Store) -> None:
    revisions = await insert_unqueued(store, "a", "b")
    request = claim_request(5)

    result = await store.commit_and_claim(
        [enqueue("a", revisions["a"]), enqueue("b", revisions["b"], OTHER)], NO_TOPICS, request
    )

    assert await claim_all(store, result, request) == ["a"]
    assert (await one(store, Execution, "b")).line == OTHER


async def test_other_fields_that_the_change_writes_are_kept(store: Store) -> None:
    revisions = await insert_unqueued(store, "a", "b")
    request = claim_request(5)
    changes = [enqueue(name, revisions[name], priority=4, tags='{"kept":"yes"}') for name in ("a", "b")]

    result = await store.commit_and_claim(changes, NO_TOPICS, request)

    assert await claim_all(store, result, request) == ["a", "b"]
    for name in ("a", "b"):
        row = await one(store, Execution, name)
        assert (row.priority, row.tags, row.line) == (4, '{"kept":"yes"}', None)


async def test_an_input_replaced_by_the_same_change_is_the_one_that_is_returned(store: Store) -> None:
    revisions = await insert_unqueued(store, "a", "b")
    news = msgspec.structs.replace(payload("a"), input_payload=b"news")
    enqueueing = enqueue("a", revisions["a"])
    carrying = msgspec.structs.replace(enqueueing, writes=(*enqueueing.writes, Upsert(news)))
    request = claim_request(5)

    result = await store.commit_and_claim([carrying, enqueue("b", revisions["b"])], NO_TOPICS, request)

    left = await store.claim_rows(
        msgspec.structs.replace(request, lease_ids=claim_request(20, prefix="later-").lease_ids)
    )
    assert [content for _, content in result.rows + left.rows] == [news, payload("b")]


async def test_other_changes_of_the_batch_are_written_and_emitted_before_the_claim(store: Store) -> None:
    revisions = await insert_unqueued(store, "child")
    ended = await write(store, Insert(execution("parent")))
    end = change(
        Patch(Execution, ("parent",), {"completed_at": FromNow(1)}),
        *enqueue("child", 0).writes,
        guards=[Guard(Execution, ("parent",), ended), Guard(Execution, ("child",), revisions["child"])],
        events=[event("parent", lease="released", outcome="success")],
    )
    request = claim_request(1)

    result = await store.commit_and_claim([end], NO_TOPICS, request)

    assert await claim_all(store, result, request) == ["child"]
    assert (await one(store, Execution, "parent")).revision == end.id
    events = (await store.feed(Topic.LEASE, 0, 10)).events
    assert [(one.event.execution_id, one.event.lease) for one in events] == [
        ("parent", "released"),
        ("child", "acquired"),
    ]


async def test_a_queue_without_any_rows_has_nothing_to_claim(store: Store, clock: ManualClock) -> None:
    revisions = await insert_unqueued(store, "a")

    result = await store.commit_and_claim(
        [enqueue("a", revisions["a"])], NO_TOPICS, claim_request(1, QueueKey("never written"))
    )

    assert (result.verdicts, result.rows) == ([clock.now], [])
    assert (await one(store, Execution, "a")).line == MAIL


async def test_a_commit_of_no_changes_leaves_everything_as_it_is(store: Store) -> None:
    await insert_queued(store, queued("a"))
    request = claim_request(1)

    result = await store.commit_and_claim([], NO_TOPICS, request)

    assert result.verdicts == []
    assert await claim_all(store, result, request) == ["a"]


@pytest.mark.parametrize("wanted", [0, 1])
async def test_changes_that_enqueue_nothing_are_committed(store: Store, clock: ManualClock, wanted: int) -> None:
    await insert_queued(store, queued("a"))
    request = claim_request(wanted)

    result = await store.commit_and_claim([change(Insert(execution("b")))], NO_TOPICS, request)

    assert result.verdicts == [clock.now]
    assert await claim_all(store, result, request) == ["a"]
