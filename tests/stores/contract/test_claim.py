"""`claim_rows` claims the heads of queues in one step: the order, the resulting rows, and the events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Insert, Patch
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.instant import Draft, FromNow
from flowfabric.model.states import AttemptType, LifecyclePhase, OwnershipState
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.claims import ClaimedRows
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where
from tests.stores.sample_rows import (
    CLAIM_PATCH,
    MAIL,
    claim_request,
    execution,
    insert_queued,
    one,
    payload,
    queued,
    write,
)

OTHER, THIRD = QueueKey("mail", "gpu"), QueueKey("mail", "", "tenant", 2)


def names(claimed: ClaimedRows) -> list[str]:
    return [row.execution_id for row, _ in claimed.rows]


async def test_rows_are_claimed_by_position_and_then_by_id(store: Store) -> None:
    await insert_queued(store, queued("c", 5), queued("b", 7), queued("a", 7), queued("d", -3), queued("e", 6))

    assert names(await store.claim_rows(claim_request(3))) == ["d", "c", "e"]
    assert names(await store.claim_rows(claim_request(3))) == ["a", "b"]
    assert names(await store.claim_rows(claim_request(3))) == []


async def test_several_queues_are_merged_by_position(store: Store) -> None:
    for number in range(30):
        line = (MAIL, OTHER, THIRD)[number % 3]
        await insert_queued(store, queued(f"n{number:02}", number // 2, line=line))

    claimed = await store.claim_rows(claim_request(20, MAIL, OTHER, THIRD))
    assert names(claimed) == [f"n{number:02}" for number in range(20)]
    claimed = await store.claim_rows(claim_request(20, THIRD, OTHER, MAIL))
    assert names(claimed) == [f"n{number:02}" for number in range(20, 30)]


async def test_rows_of_equal_position_in_several_queues_are_claimed_by_id(store: Store) -> None:
    for name, line in zip("fedcba", (MAIL, OTHER, THIRD) * 2, strict=True):
        await insert_queued(store, queued(name, 5, line=line))

    for expected in ("a", "bc", "def"):
        assert names(await store.claim_rows(claim_request(len(expected), MAIL, THIRD, OTHER))) == list(expected)


async def test_many_queues_can_be_claimed_from_at_once(store: Store) -> None:
    lines = [QueueKey("mail", f"cap-{number:02}") for number in range(64)]
    await insert_queued(store, *(queued(f"n{number:02}", 64 - number, line=line) for number, line in enumerate(lines)))

    assert names(await store.claim_rows(claim_request(5, *lines))) == ["n63", "n62", "n61", "n60", "n59"]


async def test_only_the_requested_queues_are_claimed_from(store: Store) -> None:
    await insert_queued(store, queued("a", 1, line=OTHER), queued("b", 2), execution("none", rank=0))

    assert names(await store.claim_rows(claim_request(10, MAIL))) == ["b"]
    assert names(await store.claim_rows(claim_request(10, QueueKey("never written"), OTHER))) == ["a"]


async def test_a_queue_listed_twice_is_one_queue(store: Store) -> None:
    await insert_queued(store, queued("a", 1), queued("b", 2))

    assert names(await store.claim_rows(claim_request(10, MAIL, MAIL))) == ["a", "b"]


async def test_a_claim_from_empty_queues_returns_nothing(store: Store, clock: ManualClock) -> None:
    await insert_queued(store, queued("a"))

    assert await store.claim_rows(claim_request(10, QueueKey("never written"))) == ClaimedRows(clock.now, [])
    assert await store.claim_rows(claim_request(0)) == ClaimedRows(clock.now, [])
    assert (await store.feed(Topic.LEASE, 0, 10)).events == []


async def test_a_claimed_row_starts_an_attempt(store: Store, clock: ManualClock) -> None:
    await insert_queued(store, queued("a", 4, next_type=AttemptType.RETRY, next_timeout_ms=70, total_attempt_count=2))
    before = await one(store, Execution, "a")
    clock.advance_ms(5)
    request = claim_request(1, ttl=100)
    ((row, _),) = (await store.claim_rows(request)).rows

    ids = request.lease_ids[0]
    assert row == msgspec.structs.replace(
        before,
        **CLAIM_PATCH,
        lease_id=ids.lease_id,
        worker_id="worker",
        worker_instance_id="worker-1",
        lease_epoch=1,
        lease_acquired_at=clock.now,
        lease_renewed_at=clock.now,
        lease_expires_at=clock.now + 100,
        current_lane="mail",
        attempt_id=ids.attempt_id,
        attempt_type=AttemptType.RETRY,
        attempt_index=2,
        total_attempt_count=3,
        attempt_started_at=clock.now,
        attempt_resumed_at=None,
        started_at=clock.now,
        attempt_timeout_at=clock.now + 70,
        last_transition_at=clock.now,
        last_mutation_at=clock.now,
        revision=ids.revision,
    )
    assert await one(store, Execution, "a") == row


async def test_a_row_without_a_next_type_continues_its_attempt(store: Store, clock: ManualClock) -> None:
    running: dict[str, Any] = {
        "attempt_id": "same",
        "attempt_index": 1,
        "attempt_type": AttemptType.REPLAY,
        "attempt_started_at": 11,
        "total_attempt_count": 2,
        "started_at": 10,
        "attempt_timeout_at": 5,
        "lease_epoch": 4,
    }
    await insert_queued(store, queued("a", next_type=None, **running))
    clock.advance_ms(5)
    ((row, _),) = (await store.claim_rows(claim_request(1))).rows

    kept = {name: getattr(row, name) for name in running}
    assert kept == running | {"attempt_timeout_at": None, "lease_epoch": 5}
    assert row.attempt_resumed_at == clock.now
    assert await one(store, Execution, "a") == row


async def test_a_new_attempt_clears_the_resume_time_of_the_last_one(store: Store) -> None:
    await insert_queued(store, queued("a", attempt_resumed_at=9, started_at=3))
    ((row, _),) = (await store.claim_rows(claim_request(1))).rows

    assert (row.attempt_resumed_at, row.started_at) == (None, 3)


async def test_new_and_continued_attempts_are_claimed_together(store: Store) -> None:
    await insert_queued(
        store,
        *(queued(f"n{number}", number, next_type=(AttemptType.INITIAL, None)[number % 2]) for number in range(6)),
    )
    claimed = await store.claim_rows(claim_request(6))

    assert [row.total_attempt_count for row, _ in claimed.rows] == [1, 0] * 3
    events = (await store.feed(Topic.LEASE, 0, 10)).events
    assert [one.event.reason for one in events] == [None, "claim_resumed"] * 3


async def test_lease_ids_are_assigned_in_order_of_position(store: Store) -> None:
    await insert_queued(store, queued("a", 3), queued("b", 1), queued("c", 2))
    request = claim_request(5)
    claimed = await store.claim_rows(request)

    assert names(claimed) == ["b", "c", "a"]
    given = [(row.lease_id, row.attempt_id, row.revision) for row, _ in claimed.rows]
    assert given == [(ids.lease_id, ids.attempt_id, ids.revision) for ids in request.lease_ids[:3]]


async def test_each_claimed_row_emits_an_event(store: Store, clock: ManualClock) -> None:
    await insert_queued(
        store, queued("a", 1, tags='{"k":"v"}', flow_id="flow"), queued("b", 2, next_type=None, attempt_index=3)
    )
    clock.advance_ms(5)
    request = claim_request(2)
    await store.claim_rows(request)

    first, second = (await store.feed(Topic.LEASE, 0, 10)).events
    assert first.at == second.at == clock.now
    assert first.event == Event(
        execution_id="a",
        namespace="default",
        tags='{"k":"v"}',
        flow_id="flow",
        lease="acquired",
        lease_id=request.lease_ids[0].lease_id,
        lease_epoch=1,
        attempt_id=request.lease_ids[0].attempt_id,
        attempt_index=0,
        worker_id="worker",
        worker_instance_id="worker-1",
    )
    assert (second.event.lease, second.event.reason) == ("acquired", "claim_resumed")
    assert (second.event.attempt_index, second.event.attempt_id) == (3, None)


async def test_a_row_with_a_grant_is_skipped_until_the_grant_expires(store: Store, clock: ManualClock) -> None:
    await insert_queued(store, queued("granted", 1, granted_until=FromNow(50)), queued("free", 2))

    clock.advance_ms(49)
    assert names(await store.claim_rows(claim_request(1))) == ["free"]
    assert names(await store.claim_rows(claim_request(1))) == []
    clock.advance_ms(1)
    assert names(await store.claim_rows(claim_request(1))) == ["granted"]


async def test_rows_behind_many_grants_are_claimed(store: Store) -> None:
    granted = [queued(f"g{number:02}", number, granted_until=FromNow(1)) for number in range(60)]
    await insert_queued(store, *granted, queued("free", 100))

    assert names(await store.claim_rows(claim_request(2))) == ["free"]


@pytest.mark.parametrize("contents", [[None, b""], [b"a\0b", b"\xff\xfe", None, b"", b"\0" * 9], [b"x" * 70_000] * 3])
async def test_payloads_are_returned_exactly(store: Store, contents: list[bytes | None]) -> None:
    expected = [payload(f"n{number}", content) for number, content in enumerate(contents)]
    for number, row in enumerate(expected):
        await write(store, Insert(queued(row.execution_id, number)), Insert(row))

    claimed = await store.claim_rows(claim_request(10))
    assert [given for _, given in claimed.rows] == expected
    assert all(type(given) is Payload for _, given in claimed.rows)


async def test_texts_are_returned_exactly(store: Store) -> None:
    odd = '{"quote\\"":"\\u0000 \\\\ \'\U0001f600\u2028\x01"}'
    await insert_queued(store, queued("a", tags=odd, lineage="", rank=-(2**62), deadline_at=2**63 - 1))
    ((row, _),) = (await store.claim_rows(claim_request(1))).rows

    assert (row.tags, row.lineage, row.rank, row.deadline_at) == (odd, "", -(2**62), 2**63 - 1)


def full(name: str, rank: int) -> Execution[Draft]:
    """Return a queued row with a value in every column."""
    row = queued(name, rank)
    odd: dict[str, Any] = {
        column.name: {int: rank + 7, str: f"{column.name}-{name}", bool: True}[column.kind]
        for column in TABLE[Execution].columns
        if column.kind in (int, str, bool) and getattr(row, column.name) in (None, False)
    }
    return msgspec.structs.replace(row, **odd | {"granted_until": None})


@pytest.mark.parametrize("many", [3, 200])
async def test_a_claimed_row_is_returned_with_all_its_columns_whatever_its_neighbours_hold(
    store: Store, many: int
) -> None:
    rows = [full(f"n{n:03}", n) if n % 3 == 1 else queued(f"n{n:03}", n) for n in range(many)]
    rows[-1] = msgspec.structs.replace(rows[-1], progress_pct=0, failure_reason="")
    await insert_queued(store, *rows)

    claimed = await store.claim_rows(claim_request(many))

    assert [row for row, _ in claimed.rows] == [await one(store, Execution, row.execution_id) for row in rows]
    for before, (after, _) in zip(rows, claimed.rows, strict=True):
        kept = ("flow_id", "lineage", "deadline_at", "cancelled_by", "progress_pct", "failure_reason", "has_steps")
        assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]


@pytest.mark.parametrize("length", [1, 36])
async def test_claimed_rows_that_are_alike_are_returned_with_their_own_ids_and_payloads(
    store: Store, length: int
) -> None:
    texts = ["", "", "lease-1", "", "other", ""]  # also the id of one of the claims
    rows = [queued(f"n{number}", tags=text) for number, text in enumerate(texts)]
    payloads = [payload(row.execution_id, None if number == 3 else b"%d" % number) for number, row in enumerate(rows)]
    await write(store, *map(Insert, rows), *map(Insert, payloads))
    request = claim_request(10, prefix="x" * (length - 1))

    claimed = await store.claim_rows(request)

    for number, (row, own) in enumerate(claimed.rows):
        ids = request.lease_ids[number]
        assert (row.lease_id, row.attempt_id, row.revision) == (ids.lease_id, ids.attempt_id, ids.revision)
        assert row == await one(store, Execution, f"n{number}")
        assert own == payloads[number]
    assert len({id(row) for row, _ in claimed.rows}) == len(rows)


async def test_a_claimed_row_can_be_enqueued_again(store: Store) -> None:
    await insert_queued(store, queued("a"))
    await store.claim_rows(claim_request(1))
    await write(store, Patch(Execution, ("a",), {"line": OTHER, "next_type": AttemptType.RETRY}))

    assert names(await store.claim_rows(claim_request(1, MAIL))) == []
    ((row, _),) = (await store.claim_rows(claim_request(1, OTHER, lifecycle_phase=LifecyclePhase.ACTIVE))).rows
    assert (row.lease_epoch, row.attempt_index, row.attempt_type) == (2, 1, AttemptType.RETRY)


async def test_the_rows_of_a_lost_reply_are_found_by_their_leases(store: Store) -> None:
    await insert_queued(store, *(queued(f"n{number}", number) for number in range(5)))
    await store.claim_rows(claim_request(2, prefix="mine-"))
    await store.claim_rows(claim_request(2, prefix="others-"))

    held = ("mine-lease-0", "mine-lease-1", "mine-lease-2")
    found = await store.scan(
        Scan(
            Execution,
            (Where("lease_id", "in", held), Where("ownership_state", "=", OwnershipState.LEASED)),
            order=("lease_id",),
        )
    )
    assert [(row.execution_id, row.lease_id) for row in found] == [("n0", "mine-lease-0"), ("n1", "mine-lease-1")]
