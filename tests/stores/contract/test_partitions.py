"""Rows of many partitions: what holds within each partition, and what holds across them."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, QueueKey
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan, Search, SearchPage, Where
from flowfabric.stores.verdicts import Unstorable
from tests.stores.sample_rows import MAIL, change, claim_request, event, execution, one, payload, queued

PARTITIONS = (0, 1, 7, 100, 255)
NAMES = [f"{{fp:{partition}}}:{number}" for partition in PARTITIONS for number in range(4)]


def partition_of(name: str) -> str:
    return name[: name.index("}")]


def create(name: str, rank: int = 0) -> Change:
    return change(Insert(queued(name, rank)), Insert(payload(name)), events=[event(name, lease="x")])


@pytest.fixture
async def filled(store: Store, clock: ManualClock) -> Store:
    assert await store.commit([create(name, rank) for rank, name in enumerate(NAMES)]) == [clock.now] * len(NAMES)
    return store


async def test_a_batch_writes_changes_of_many_partitions(filled: Store) -> None:
    loaded = await filled.load([Read(Execution, (name,)) for name in NAMES])

    assert [[row.execution_id for row in rows] for rows in loaded.rows] == [[name] for name in NAMES]


async def test_a_change_that_fails_leaves_the_other_partitions_alone(store: Store) -> None:
    there, bad, stale, *good = (f"{{fp:{partition}}}:a" for partition in (3, 4, 5, 3, 4, 5, 6))
    good = [f"{name}{number}" for number, name in enumerate(good)]
    await store.commit([create(there)])

    verdicts = await store.commit(
        [
            create(good[0]),
            change(Insert(execution(bad, tags="a\0b")), Insert(payload(bad))),
            create(good[1]),
            create(there),
            create(good[2]),
            change(Insert(payload(stale)), guards=[Guard(Execution, (stale,), 5)]),
            create(good[3]),
        ]
    )

    assert [type(verdict) for verdict in verdicts] == [int, Unstorable, int, type(None), int, type(None), int]
    assert [await one(store, Execution, name) is not None for name in good] == [True] * 4
    assert [await one(store, Payload, name) for name in (bad, stale)] == [None, None]


async def test_a_claim_finds_the_rows_of_all_partitions_in_order_within_each(filled: Store) -> None:
    claimed = [row.execution_id for row, _ in (await filled.claim_rows(claim_request(len(NAMES)))).rows]

    assert sorted(claimed) == sorted(NAMES)
    for partition in PARTITIONS:
        own = [name for name in claimed if name.startswith(f"{{fp:{partition}}}")]
        assert own == [name for name in NAMES if name.startswith(f"{{fp:{partition}}}")]
    assert (await filled.claim_rows(claim_request(5))).rows == []


async def test_concurrent_claims_share_the_rows_of_all_partitions(filled: Store) -> None:
    claims = await asyncio.gather(*(filled.claim_rows(claim_request(3, prefix=f"{n}-")) for n in range(10)))

    claimed = [row.execution_id for claim in claims for row, _ in claim.rows]
    assert sorted(claimed) == sorted(NAMES)


async def test_scans_are_ordered_across_partitions(filled: Store) -> None:
    by_key = await filled.scan(Scan(Execution, (), ("execution_id",), (NAMES[2],), 7))
    by_rank = await filled.scan(Scan(Execution, (Where("line", "=", MAIL),), ("rank", "execution_id"), limit=9))

    ordered = sorted(NAMES)
    after = ordered.index(NAMES[2]) + 1
    assert [row.execution_id for row in by_key] == ordered[after : after + 7]
    assert [row.execution_id for row in by_rank] == NAMES[:9]


async def test_a_search_reads_all_partitions(filled: Store) -> None:
    page = SearchPage([], (2**60, ""))
    found: list[str] = []
    while page.after is not None:
        page = await filled.search(Search((Where("rank", ">", 3),), after=page.after, limit=5, budget=6))
        found += [one.row.execution_id for one in page.found]

    assert found == sorted(NAMES[4:], reverse=True)


async def test_due_rows_of_all_partitions_are_ordered_by_instant(filled: Store, clock: ManualClock) -> None:
    names = NAMES[::-3]
    await filled.commit(
        [change(Patch(Execution, (name,), {"delay_until": FromNow(10 + at)})) for at, name in enumerate(names)]
    )
    clock.advance_ms(13)

    due = await filled.due(Execution, "delay_until", limit=10)

    assert [row.execution_id for row in due.rows] == names[:4]
    assert due.next_at == clock.now + 1


async def test_the_feed_holds_the_events_of_all_partitions_in_order_within_each(filled: Store) -> None:
    await filled.commit([change(events=[event(name, lease="y")]) for name in NAMES])
    emitted: list[tuple[str, str | None]] = []
    async with asyncio.timeout(20):
        while len(emitted) < 2 * len(NAMES):
            page = await filled.feed(Topic.LEASE, 0, 1000)
            emitted = [(found.event.execution_id, found.event.lease) for found in page.events]

    for name in NAMES:
        assert [lease for owner, lease in emitted if owner == name] == ["x", "y"]
        assert [entry.event.lease for entry in await filled.history(name, Topic.LEASE, 10)] == ["x", "y"]


async def test_nonempty_queues_are_found_in_any_partition(filled: Store) -> None:
    other = QueueKey("mail", "gpu")
    await filled.commit([change(Patch(Execution, (NAMES[-1],), {"line": other}))])
    assert await filled.nonempty_queues("mail") == [MAIL, other]

    await filled.claim_rows(claim_request(len(NAMES)))

    assert await filled.nonempty_queues("mail") == [other]
    assert await filled.queues("mail") == [MAIL, other]


async def test_a_delete_by_prefix_removes_the_rows_of_one_execution(filled: Store, clock: ManualClock) -> None:
    kept, gone = NAMES[0], NAMES[5]
    attempts = [
        Insert(Attempt(name, index, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, NOW, "lease", 1, "w", "i"))
        for name in (kept, gone)
        for index in range(3)
    ]
    await filled.commit([change(*attempts[:3]), change(*attempts[3:])])

    verdicts = await filled.commit([change(Delete(Attempt, (gone,)), Delete(Execution, (gone,)))])

    loaded = await filled.load([Read(Attempt, (kept,)), Read(Attempt, (gone,)), Read(Execution, (gone,))])
    assert verdicts == [clock.now]
    assert [len(rows) for rows in loaded.rows] == [3, 0, 0]


async def test_keys_of_two_partitions_are_different_rows(store: Store) -> None:
    await store.commit([change(Insert(IdempotencyKey(partition, "x", "a", 2**62))) for partition in PARTITIONS])

    loaded = await store.load([Read(IdempotencyKey, (7,)), Read(IdempotencyKey, (8, "x")), Read(IdempotencyKey, ())])
    assert [[row.partition for row in rows] for rows in loaded.rows] == [[7], [], [*PARTITIONS]]
