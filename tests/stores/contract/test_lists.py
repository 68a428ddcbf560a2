"""Scans of due rows, and lists for users."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Insert, Patch, Upsert
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.model.limits.quota import QuotaRequest
from flowfabric.model.states import AttemptRecordState, AttemptType, LifecyclePhase
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Due, Scan, Where
from tests.stores.sample_rows import MAIL, execution, queued, write


def names(rows: list[Any]) -> list[str]:
    return [row.execution_id for row in rows]


async def due(store: Store, limit: int = 10, **where: Any) -> Due:
    return await store.due(Execution, "delay_until", limit=limit, **where)


async def test_a_row_is_due_from_its_instant_on(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution("a", delay_until=FromNow(50))), Insert(execution("never")))
    instant = clock.now + 50

    clock.advance_ms(49)
    assert await due(store) == Due(clock.now, [], instant)
    clock.advance_ms(1)
    found = await due(store)
    assert (found.now, names(found.rows), found.next_at) == (instant, ["a"], None)


async def test_due_rows_are_ordered_by_instant_and_then_by_key(store: Store, clock: ManualClock) -> None:
    rows = [("d", 5), ("b", 1), ("c", 3), ("a", 3), ("later", 90), ("latest", 95)]
    await write(store, *(Insert(execution(name, delay_until=FromNow(offset))) for name, offset in rows))
    clock.advance_ms(10)

    found = await due(store)
    assert names(found.rows) == ["b", "a", "c", "d"]
    assert found.next_at == clock.now + 80


async def test_no_more_due_rows_are_returned_than_requested(store: Store, clock: ManualClock) -> None:
    await write(store, *(Insert(execution(f"n{number}", delay_until=FromNow(number))) for number in range(5)))
    clock.advance_ms(3)

    assert names((await due(store, 2)).rows) == ["n0", "n1"]
    assert (await due(store, 2)).next_at == clock.now + 1
    assert (await due(store, 0)).rows == []


async def test_due_rows_can_be_filtered_by_conditions(store: Store, clock: ManualClock) -> None:
    lanes = ["x", "y"]
    rows = [execution(f"n{number}", delay_until=FromNow(number), lane_id=lanes[number % 2]) for number in range(8)]
    await write(store, *(Insert(row) for row in rows))
    clock.advance_ms(3)

    found = await due(store, where=(Where("lane_id", "=", "y"), Where("priority", "<=", 0)))
    assert names(found.rows) == ["n1", "n3"]
    assert found.next_at is not None
    assert clock.now < found.next_at <= clock.now + 2, "no row is due earlier"
    assert await due(store, where=(Where("lane_id", "in", ()),)) == Due(clock.now, [], None)


async def test_a_row_that_was_rescheduled_is_no_longer_due(store: Store, clock: ManualClock) -> None:
    await write(store, *(Insert(execution(name, delay_until=FromNow(0))) for name in "abc"))
    await write(
        store,
        Patch(Execution, ("a",), {"delay_until": None}),
        Patch(Execution, ("b",), {"delay_until": FromNow(5)}),
        Delete(Execution, ("c",)),
    )
    assert await due(store) == Due(clock.now, [], clock.now + 5)


async def test_rows_of_any_kind_can_be_due(store: Store, clock: ManualClock) -> None:
    for p in (2, 1):
        await write(store, *(Insert(IdempotencyKey(p, d, "a", clock.now + p)) for d in ("y", "x")))
    clock.advance_ms(1)

    found = await store.due(IdempotencyKey, "expires_at", limit=10)
    assert [(row.partition, row.digest) for row in found.rows] == [(1, "x"), (1, "y")]
    assert found.next_at == clock.now + 1


async def fill(store: Store) -> None:
    await write(
        store,
        Insert(execution("a", priority=1, tags="red", lifecycle_phase=LifecyclePhase.ACTIVE)),
        Insert(execution("b", priority=2, tags="red-ish", lifecycle_phase=LifecyclePhase.TERMINAL)),
        Insert(queued("c", priority=3, tags="Red")),
        Insert(queued("d", priority=4, line=QueueKey("other"))),
    )


CONDITIONS: list[tuple[Where, list[str]]] = [
    (Where("priority", "=", 2), ["b"]),
    (Where("priority", "<", 2), ["a"]),
    (Where("priority", "<=", 2), ["a", "b"]),
    (Where("priority", ">", 2), ["c", "d"]),
    (Where("priority", ">=", 2), ["b", "c", "d"]),
    (Where("priority", "in", (1, 4, 9)), ["a", "d"]),
    (Where("priority", "in", ()), []),
    (Where("tags", "set"), ["a", "b", "c"]),
    (Where("tags", "unset"), ["d"]),
    (Where("tags", "starts", "red"), ["a", "b"]),
    (Where("tags", "starts", ""), ["a", "b", "c"]),
    (Where("tags", ">", "red"), ["b"]),
    (Where("lifecycle_phase", "=", LifecyclePhase.TERMINAL), ["b"]),
    (Where("lifecycle_phase", "in", (LifecyclePhase.ACTIVE, LifecyclePhase.TERMINAL)), ["a", "b"]),
    (Where("line", "=", MAIL), ["c"]),
    (Where("line", "in", (MAIL, QueueKey("other"), QueueKey("never written"))), ["c", "d"]),
    (Where("line", "in", (MAIL, MAIL)), ["c"]),
    (Where("line", "=", QueueKey("never written")), []),
    (Where("line", "unset"), ["a", "b"]),
]


@pytest.mark.parametrize(("where", "expected"), CONDITIONS, ids=lambda value: repr(value)[:60])
async def test_a_list_holds_the_rows_that_match_a_condition(store: Store, where: Where, expected: list[str]) -> None:
    await fill(store)

    assert names(await store.scan(Scan(Execution, (where,)))) == expected


async def test_a_list_holds_only_rows_that_match_all_conditions(store: Store) -> None:
    await fill(store)

    both = (Where("priority", ">", 1), Where("tags", "starts", "red"))
    assert names(await store.scan(Scan(Execution, both))) == ["b"]
    assert names(await store.scan(Scan(Execution))) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("prefix", ["%", "_", "*", "\\", "[a", "'", "\ud7ff", "\U0010ffff", "\U0010ffff\U0010ffff"])
async def test_a_prefix_is_matched_literally(store: Store, prefix: str) -> None:
    tags = {"exact": prefix, "longer": prefix + "\U0010ffffx", "other": "xyz", "before": "x" + prefix}
    await write(store, *(Insert(execution(name, tags=text)) for name, text in tags.items()))

    assert names(await store.scan(Scan(Execution, (Where("tags", "starts", prefix),)))) == ["exact", "longer"]


async def test_a_list_has_the_requested_order_and_then_the_order_of_keys(store: Store) -> None:
    rows = [("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 0)]
    await write(store, *(Insert(execution(name, priority=priority)) for name, priority in rows))

    assert names(await store.scan(Scan(Execution, order=("priority",)))) == ["e", "b", "d", "a", "c"]
    assert names(await store.scan(Scan(Execution, order=("priority", "execution_id")))) == ["e", "b", "d", "a", "c"]


async def test_texts_are_ordered_by_their_code_points(store: Store) -> None:
    words = ["a", "B", "é", "z", "Z", "-", "\uffee", "\U0001f600", "aa", "a b", "a-b"]
    await write(store, *(Insert(execution(word)) for word in words))

    assert names(await store.scan(Scan(Execution))) == sorted(words)


async def test_a_list_continues_strictly_after_a_position(store: Store) -> None:
    rows = [("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 0)]
    await write(store, *(Insert(execution(name, priority=priority)) for name, priority in rows))

    by_both = ("priority", "execution_id")
    assert names(await store.scan(Scan(Execution, order=by_both, after=(1, "b")))) == ["d", "a", "c"]
    assert names(await store.scan(Scan(Execution, order=by_both, after=(1, "bb"), limit=2))) == ["d", "a"]
    assert names(await store.scan(Scan(Execution, order=("priority",), after=(1,)))) == ["a", "c"]
    assert names(await store.scan(Scan(Execution, order=(), after=("c",)))) == ["d", "e"]
    assert names(await store.scan(Scan(Execution, order=by_both, after=(2, "c")))) == []


async def test_a_list_has_at_most_the_requested_length(store: Store) -> None:
    await fill(store)

    assert names(await store.scan(Scan(Execution, limit=3))) == ["a", "b", "c"]
    assert names(await store.scan(Scan(Execution, limit=0))) == []


async def test_pages_of_a_list_hold_every_row_once(store: Store) -> None:
    rows = [
        Attempt(f"n{n}", n % 3, "", AttemptType.INITIAL, AttemptRecordState.CREATED, n % 4, "", 0, "", "")
        for n in range(40)
    ]
    await write(store, *(Insert(row) for row in rows))

    order, seen, after = ("started_at", "execution_id", "attempt_index"), list[Attempt](), None
    while page := await store.scan(Scan(Attempt, order=order, after=after, limit=7)):
        seen += page
        after = (page[-1].started_at, page[-1].execution_id, page[-1].attempt_index)
    assert seen == sorted(rows, key=lambda row: (row.started_at, row.execution_id, row.attempt_index))


async def test_the_window_of_a_quota_policy_is_listed_by_instant_without_the_rows_of_others(store: Store) -> None:
    def request(name: str, at: int, *, policy: str = "q", dimension: str = "", namespace: str = "n") -> Insert:
        return Insert(QuotaRequest(policy, dimension, name, at, at + 60, namespace))

    own = [request("d", 40), request("c", 30), request("b", 30), request("a", 2**53 + 1), request("old", 10)]
    await write(store, *own, request("x", 30, dimension="tokens"), request("y", 30, namespace="n2"))
    await write(store, request("z", 30, policy="q2"))

    async def window(after: int, limit: int = 10, last: tuple[int, str] | None = None) -> list[str]:
        where = [Where("quota_policy_id", "=", "q"), Where("namespace", "=", "n"), Where("dimension", "=", "")]
        where.append(Where("admitted_at", ">", after))
        order = ("admitted_at", "execution_id")
        return names(await store.scan(Scan(QuotaRequest, tuple(where), order, limit=limit, after=last)))

    assert await window(10) == ["b", "c", "d", "a"]
    assert await window(10, 2) == ["b", "c"]
    assert await window(10, 2, (30, "c")) == ["d", "a"]
    assert await window(2**53) == ["a"]
    await write(store, Delete(QuotaRequest, ("n", "q", "", "c")), Upsert(QuotaRequest("q", "", "b", 50, 60, "n")))
    assert await window(0) == ["old", "d", "b", "a"]
