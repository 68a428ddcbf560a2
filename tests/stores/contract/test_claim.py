"""A take claims the heads of lines in one step: who is first, what becomes of the rows, what is told."""

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
from tests.stores.samples import BECOMES, MAIL, a_take, execution, line_up, one, payload, waiting, write

OTHER, THIRD = QueueKey("mail", "gpu"), QueueKey("mail", "", "tenant", 2)


def names(taken: ClaimedRows) -> list[str]:
    return [row.execution_id for row, _ in taken.rows]


async def test_rows_are_taken_by_rank_and_then_by_id(store: Store) -> None:
    await line_up(store, waiting("c", 5), waiting("b", 7), waiting("a", 7), waiting("d", -3), waiting("e", 6))

    assert names(await store.claim_rows(a_take(3))) == ["d", "c", "e"]
    assert names(await store.claim_rows(a_take(3))) == ["a", "b"]
    assert names(await store.claim_rows(a_take(3))) == []


async def test_several_lines_are_merged_by_rank(store: Store) -> None:
    for number in range(30):
        line = (MAIL, OTHER, THIRD)[number % 3]
        await line_up(store, waiting(f"n{number:02}", number // 2, line=line))

    taken = await store.claim_rows(a_take(20, MAIL, OTHER, THIRD))
    assert names(taken) == [f"n{number:02}" for number in range(20)]
    taken = await store.claim_rows(a_take(20, THIRD, OTHER, MAIL))
    assert names(taken) == [f"n{number:02}" for number in range(20, 30)]


async def test_rows_of_equal_rank_in_several_lines_are_taken_by_id(store: Store) -> None:
    for name, line in zip("fedcba", (MAIL, OTHER, THIRD) * 2, strict=True):
        await line_up(store, waiting(name, 5, line=line))

    for expected in ("a", "bc", "def"):
        assert names(await store.claim_rows(a_take(len(expected), MAIL, THIRD, OTHER))) == list(expected)


async def test_many_lines_can_be_asked_at_once(store: Store) -> None:
    lines = [QueueKey("mail", f"cap-{number:02}") for number in range(64)]
    await line_up(store, *(waiting(f"n{number:02}", 64 - number, line=line) for number, line in enumerate(lines)))

    assert names(await store.claim_rows(a_take(5, *lines))) == ["n63", "n62", "n61", "n60", "n59"]


async def test_only_the_lines_asked_for_are_taken_from(store: Store) -> None:
    await line_up(store, waiting("a", 1, line=OTHER), waiting("b", 2), execution("none", rank=0))

    assert names(await store.claim_rows(a_take(10, MAIL))) == ["b"]
    assert names(await store.claim_rows(a_take(10, QueueKey("never written"), OTHER))) == ["a"]


async def test_a_line_named_twice_is_one_line(store: Store) -> None:
    await line_up(store, waiting("a", 1), waiting("b", 2))

    assert names(await store.claim_rows(a_take(10, MAIL, MAIL))) == ["a", "b"]


async def test_nothing_is_taken_from_nothing(store: Store, clock: ManualClock) -> None:
    await line_up(store, waiting("a"))

    assert await store.claim_rows(a_take(10, QueueKey("never written"))) == ClaimedRows(clock.now, [])
    assert await store.claim_rows(a_take(0)) == ClaimedRows(clock.now, [])
    assert (await store.feed(Topic.LEASE, 0, 10)).events == []


async def test_a_taken_row_begins_an_attempt(store: Store, clock: ManualClock) -> None:
    await line_up(store, waiting("a", 4, next_type=AttemptType.RETRY, next_timeout_ms=70, total_attempt_count=2))
    before = await one(store, Execution, "a")
    clock.advance_ms(5)
    take = a_take(1, ttl=100)
    ((row, _),) = (await store.claim_rows(take)).rows

    stamp = take.lease_ids[0]
    assert row == msgspec.structs.replace(
        before,
        **BECOMES,
        lease_id=stamp.lease_id,
        worker_id="worker",
        worker_instance_id="worker-1",
        lease_epoch=1,
        lease_acquired_at=clock.now,
        lease_renewed_at=clock.now,
        lease_expires_at=clock.now + 100,
        current_lane="mail",
        attempt_id=stamp.attempt_id,
        attempt_type=AttemptType.RETRY,
        attempt_index=2,
        total_attempt_count=3,
        attempt_started_at=clock.now,
        attempt_resumed_at=None,
        started_at=clock.now,
        attempt_timeout_at=clock.now + 70,
        last_transition_at=clock.now,
        last_mutation_at=clock.now,
        revision=stamp.revision,
    )
    assert await one(store, Execution, "a") == row


async def test_a_row_without_a_next_type_goes_on_with_its_attempt(store: Store, clock: ManualClock) -> None:
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
    await line_up(store, waiting("a", next_type=None, **running))
    clock.advance_ms(5)
    ((row, _),) = (await store.claim_rows(a_take(1))).rows

    kept = {name: getattr(row, name) for name in running}
    assert kept == running | {"attempt_timeout_at": None, "lease_epoch": 5}
    assert row.attempt_resumed_at == clock.now
    assert await one(store, Execution, "a") == row


async def test_a_fresh_attempt_forgets_when_the_last_one_was_resumed(store: Store) -> None:
    await line_up(store, waiting("a", attempt_resumed_at=9, started_at=3))
    ((row, _),) = (await store.claim_rows(a_take(1))).rows

    assert (row.attempt_resumed_at, row.started_at) == (None, 3)


async def test_fresh_and_continuing_rows_are_taken_together(store: Store) -> None:
    await line_up(
        store,
        *(waiting(f"n{number}", number, next_type=(AttemptType.INITIAL, None)[number % 2]) for number in range(6)),
    )
    taken = await store.claim_rows(a_take(6))

    assert [row.total_attempt_count for row, _ in taken.rows] == [1, 0] * 3
    told = (await store.feed(Topic.LEASE, 0, 10)).events
    assert [one.event.reason for one in told] == [None, "claim_resumed"] * 3


async def test_stamps_are_given_out_in_rank_order(store: Store) -> None:
    await line_up(store, waiting("a", 3), waiting("b", 1), waiting("c", 2))
    take = a_take(5)
    taken = await store.claim_rows(take)

    assert names(taken) == ["b", "c", "a"]
    given = [(row.lease_id, row.attempt_id, row.revision) for row, _ in taken.rows]
    assert given == [(stamp.lease_id, stamp.attempt_id, stamp.revision) for stamp in take.lease_ids[:3]]


async def test_each_taken_row_is_told_of(store: Store, clock: ManualClock) -> None:
    await line_up(
        store, waiting("a", 1, tags='{"k":"v"}', flow_id="flow"), waiting("b", 2, next_type=None, attempt_index=3)
    )
    clock.advance_ms(5)
    take = a_take(2)
    await store.claim_rows(take)

    first, second = (await store.feed(Topic.LEASE, 0, 10)).events
    assert first.at == second.at == clock.now
    assert first.event == Event(
        execution_id="a",
        namespace="default",
        tags='{"k":"v"}',
        flow_id="flow",
        lease="acquired",
        lease_id=take.lease_ids[0].lease_id,
        lease_epoch=1,
        attempt_id=take.lease_ids[0].attempt_id,
        attempt_index=0,
        worker_id="worker",
        worker_instance_id="worker-1",
    )
    assert (second.event.lease, second.event.reason) == ("acquired", "claim_resumed")
    assert (second.event.attempt_index, second.event.attempt_id) == (3, None)


async def test_a_row_under_a_grant_is_passed_over_until_the_grant_ends(store: Store, clock: ManualClock) -> None:
    await line_up(store, waiting("granted", 1, granted_until=FromNow(50)), waiting("free", 2))

    clock.advance_ms(49)
    assert names(await store.claim_rows(a_take(1))) == ["free"]
    assert names(await store.claim_rows(a_take(1))) == []
    clock.advance_ms(1)
    assert names(await store.claim_rows(a_take(1))) == ["granted"]


async def test_rows_behind_many_grants_are_found(store: Store) -> None:
    granted = [waiting(f"g{number:02}", number, granted_until=FromNow(1)) for number in range(60)]
    await line_up(store, *granted, waiting("free", 100))

    assert names(await store.claim_rows(a_take(2))) == ["free"]


@pytest.mark.parametrize("contents", [[None, b""], [b"a\0b", b"\xff\xfe", None, b"", b"\0" * 9], [b"x" * 70_000] * 3])
async def test_payloads_come_with_the_rows_exactly(store: Store, contents: list[bytes | None]) -> None:
    expected = [payload(f"n{number}", content) for number, content in enumerate(contents)]
    for number, row in enumerate(expected):
        await write(store, Insert(waiting(row.execution_id, number)), Insert(row))

    taken = await store.claim_rows(a_take(10))
    assert [given for _, given in taken.rows] == expected
    assert all(type(given) is Payload for _, given in taken.rows)


async def test_texts_come_with_the_rows_exactly(store: Store) -> None:
    odd = '{"quote\\"":"\\u0000 \\\\ \'\U0001f600\u2028\x01"}'
    await line_up(store, waiting("a", tags=odd, lineage="", rank=-(2**62), deadline_at=2**63 - 1))
    ((row, _),) = (await store.claim_rows(a_take(1))).rows

    assert (row.tags, row.lineage, row.rank, row.deadline_at) == (odd, "", -(2**62), 2**63 - 1)


def full(name: str, rank: int) -> Execution[Draft]:
    """A row in line that has something in every column."""
    row = waiting(name, rank)
    odd: dict[str, Any] = {
        column.name: {int: rank + 7, str: f"{column.name}-{name}", bool: True}[column.kind]
        for column in TABLE[Execution].columns
        if column.kind in (int, str, bool) and getattr(row, column.name) in (None, False)
    }
    return msgspec.structs.replace(row, **odd | {"granted_until": None})


@pytest.mark.parametrize("many", [3, 200])
async def test_a_taken_row_comes_with_all_that_it_holds_whatever_its_neighbours_hold(store: Store, many: int) -> None:
    rows = [full(f"n{n:03}", n) if n % 3 == 1 else waiting(f"n{n:03}", n) for n in range(many)]
    rows[-1] = msgspec.structs.replace(rows[-1], progress_pct=0, failure_reason="")
    await line_up(store, *rows)

    taken = await store.claim_rows(a_take(many))

    assert [row for row, _ in taken.rows] == [await one(store, Execution, row.execution_id) for row in rows]
    for before, (after, _) in zip(rows, taken.rows, strict=True):
        kept = ("flow_id", "lineage", "deadline_at", "cancelled_by", "progress_pct", "failure_reason", "has_steps")
        assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]


async def test_a_taken_row_can_be_put_back_in_line(store: Store) -> None:
    await line_up(store, waiting("a"))
    await store.claim_rows(a_take(1))
    await write(store, Patch(Execution, ("a",), {"line": OTHER, "next_type": AttemptType.RETRY}))

    assert names(await store.claim_rows(a_take(1, MAIL))) == []
    ((row, _),) = (await store.claim_rows(a_take(1, OTHER, lifecycle_phase=LifecyclePhase.ACTIVE))).rows
    assert (row.lease_epoch, row.attempt_index, row.attempt_type) == (2, 1, AttemptType.RETRY)


async def test_the_rows_of_a_lost_answer_are_found_by_their_leases(store: Store) -> None:
    await line_up(store, *(waiting(f"n{number}", number) for number in range(5)))
    await store.claim_rows(a_take(2, prefix="mine-"))
    await store.claim_rows(a_take(2, prefix="others-"))

    held = ("mine-lease-0", "mine-lease-1", "mine-lease-2")
    found = await store.scan(
        Scan(
            Execution,
            (Where("lease_id", "in", held), Where("ownership_state", "=", OwnershipState.LEASED)),
            order=("lease_id",),
        )
    )
    assert [(row.execution_id, row.lease_id) for row in found] == [("n0", "mine-lease-0"), ("n1", "mine-lease-1")]
