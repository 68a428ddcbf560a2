"""Claims beside a transaction that keeps dead index entries alive: bounded work, and no row is missed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Insert
from flowfabric.model.execution import Execution
from flowfabric.stores.postgres import PostgresStore, dead_entries
from flowfabric.stores.postgres.dead_entries import (
    BLOAT_THRESHOLD,
    ENTRIES_PER_S,
    HIGHEST,
    LOWEST,
    SLICE_ENTRIES,
    BloatedQueue,
    DeadEntries,
)
from flowfabric.stores.postgres.queue_ids import queue_id
from tests.stores.sample_rows import MAIL, claim_request, execution, insert_queued, one, payload, queued, write

TASKS = 3000
BATCH = 20


class CountingFloors(DeadEntries):
    """Records how many index entries each claim stepped over, as the server counted them."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[int] = []

    def record_scan(
        self, keys: Any, part: Any, entries: int, found: int, floor: Any, *, is_slice_wanted: bool = False
    ) -> None:
        self.entries.append(entries)
        super().record_scan(keys, part, entries, found, floor, is_slice_wanted=is_slice_wanted)


@pytest.fixture
async def snapshot_holder(database: str) -> AsyncIterator[Any]:
    """A connection with an idle transaction that holds a snapshot."""
    connection: Any = await asyncpg.connect(database)
    await connection.execute("begin isolation level repeatable read")
    await connection.fetch("select count(*) from ff_exec_core")
    yield connection
    await connection.close()


@pytest.fixture
async def counted(pg: PostgresStore) -> CountingFloors:
    pg._dead_entries = CountingFloors()
    return pg._dead_entries


async def enqueue(store: PostgresStore, clock: ManualClock, start: int, count: int = BATCH) -> None:
    """Create work at positions that follow the clock."""
    rows = [queued(f"{start + number:06}", clock.now) for number in range(count)]
    await insert_queued(store, *rows)


async def drain(store: PostgresStore, clock: ManualClock, tasks: int, start: int = 0) -> None:
    """Enqueue and claim this many, and claim once more after each batch, as a worker does."""
    for first in range(start, start + tasks, BATCH):
        clock.advance_ms(50)
        await enqueue(store, clock, first)
        assert len((await store.claim_rows(claim_request(BATCH, MAIL))).rows) == BATCH
        await store.claim_rows(claim_request(1, MAIL))


@pytest.mark.slow
async def test_a_claim_steps_over_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: Any, counted: CountingFloors
) -> None:
    await drain(pg, clock, TASKS)

    assert max(counted.entries) <= BLOAT_THRESHOLD + 2 * SLICE_ENTRIES + 5 * BATCH
    half = len(counted.entries) // 2
    # Without the bound it would be three times as many, and grow.
    assert sum(counted.entries[half:]) < 2 * sum(counted.entries[:half])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, -(10**12)], ids=["an old position", "a higher priority"])
async def test_a_row_that_is_enqueued_before_the_floor_is_claimed_within_one_round(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: Any, counted: CountingFloors, rank: int
) -> None:
    await drain(pg, clock, TASKS)
    assert counted.may_hide_rows([queue_id(MAIL)])
    await insert_queued(pg, queued("returned", rank))

    round_of = len(counted._queues[queue_id(MAIL)].slices)
    found = list[str]()
    for _ in range(round_of + 1):
        counted._allowance = ENTRIES_PER_S  # as time passes
        found = [row.execution_id for row, _ in (await pg.claim_rows(claim_request(1, MAIL))).rows]
        if found:
            break
    assert found == ["returned"]


@pytest.mark.slow
async def test_claims_read_from_the_head_again_when_the_transaction_has_ended(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: Any, counted: CountingFloors
) -> None:
    await drain(pg, clock, TASKS)
    await snapshot_holder.execute("rollback")
    await snapshot_holder.execute("vacuum ff_exec_core")  # as autovacuum does after a while

    for _ in range(100):
        counted._allowance = ENTRIES_PER_S
        await pg.claim_rows(claim_request(1, MAIL))
        if not counted.may_hide_rows([queue_id(MAIL)]):
            break
    assert not counted.may_hide_rows([queue_id(MAIL)])


@pytest.mark.slow
async def test_an_expired_lease_beside_dead_entries_is_found(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: Any, counted: CountingFloors
) -> None:
    """Every claim looks for expired leases in a separate index."""
    rows = [execution(f"{number:06}", lease_expires_at=clock.now + number) for number in range(2 * BLOAT_THRESHOLD)]
    await write(pg, *map(Insert, rows), *(Insert(payload(row.execution_id)) for row in rows))
    clock.advance_ms(3 * BLOAT_THRESHOLD)
    connection: Any = await asyncpg.connect(pg._pool.dsn)
    await connection.execute("update ff_exec_core set lease_expires_at = null")
    await connection.close()
    for _ in range(5):
        assert (await pg.due(Execution, "lease_expires_at", limit=10)).rows == []
    assert counted.entries[0] > BLOAT_THRESHOLD
    assert counted.entries[-1] < BLOAT_THRESHOLD
    late = execution("late", lease_expires_at=clock.now + 5)
    await write(pg, Insert(late), Insert(execution("old", lease_expires_at=1)))
    clock.advance_ms(10)

    found = set[str]()
    for _ in range(50):
        counted._allowance = ENTRIES_PER_S
        found |= {row.execution_id for row in (await pg.due(Execution, "lease_expires_at", limit=10)).rows}
    assert found == {"late", "old"}
    assert (await one(pg, Execution, "late")).lease_expires_at is not None


@pytest.mark.slow
@pytest.mark.parametrize("locked", [0, 250], ids=["alone", "beside a slow claim"])
async def test_a_claim_beside_dead_entries_returns_nothing_only_if_nothing_is_claimable(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: Any, counted: CountingFloors, locked: int
) -> None:
    """A backlog of many batches is claimed to the end, also while another transaction has locked its first rows."""
    await drain(pg, clock, TASKS)
    assert counted.may_hide_rows([queue_id(MAIL)])
    backlog = 40 * BATCH
    names = [f"backlog-{number:04}" for number in range(backlog)]
    await insert_queued(pg, *(queued(name, clock.now + number) for number, name in enumerate(names, 1)))
    clock.advance_ms(backlog + 1000)
    other: Any = await asyncpg.connect(pg._pool.dsn)
    await other.execute("begin")
    await other.fetch("select 1 from ff_exec_core where line is not null order by rank limit $1 for update", locked)

    claimed = list[str]()
    while rows := (await pg.claim_rows(claim_request(BATCH, MAIL))).rows:
        claimed += [row.execution_id for row, _ in rows]
    await other.close()

    assert sorted(claimed) == names[locked:]


@pytest.mark.parametrize("seed", range(20))
def test_slices_and_the_part_behind_the_floor_cover_the_whole_queue(seed: int) -> None:
    chance = random.Random(seed)
    known = BloatedQueue((10**12, ""), 5000)
    for _ in range(200):
        if chance.random() < 0.5:
            known.raise_floor((known.floor[0] + chance.randint(-5, 500), chance.choice("abc")), chance.randint(0, 800))
        else:
            known.begin_round()
            known.record_read(known.slices[0], chance.randint(0, 3 * SLICE_ENTRIES))
        parts = sorted((part.low, part.high) for part in known.slices)
        ends = [LOWEST, *(high for _, high in parts)]
        assert [low for low, _ in parts] == ends[:-1]
        assert ends[-1] == known.floor
    assert known.floor < HIGHEST


def test_a_process_does_not_exceed_its_quota_of_reads_before_its_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(dead_entries, "monotonic", lambda: now)
    entries = DeadEntries()
    entries.record_scan([1], None, BLOAT_THRESHOLD + 1, 0, (10**12, ""))
    read = 0
    for _ in range(1000):
        _, part = entries.ranges_to_read([1])
        if part is not None:
            read += SLICE_ENTRIES
            entries.record_scan([1], part, SLICE_ENTRIES, 0, (10**12, ""))
    assert ENTRIES_PER_S <= read <= ENTRIES_PER_S + SLICE_ENTRIES

    now += 1.0
    assert entries.ranges_to_read([1])[1] is not None
