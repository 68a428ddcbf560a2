"""The statements by which a claim finds the rows of its queues are equivalent, also under concurrent changes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import Draft
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres import claim as taking
from tests.conftest import Rival
from tests.stores.sample_rows import claim_request, insert_queued, queued

MANY = [QueueKey("mail", fairness_key=f"tenant-{number}") for number in range(40)]
FEW = MANY[:3]
ONE = MANY[:1]

# A clock that waits while a lock is held. A statement has its snapshot when it reads the time.
PAUSE = """
create schema pause;
create function pause.clock_timestamp() returns timestamptz language plpgsql as $$
begin
    perform pg_advisory_lock_shared(7), pg_advisory_unlock_shared(7);
    return pg_catalog.clock_timestamp();
end $$;
"""


@pytest.mark.parametrize("lines", [ONE, FEW, MANY], ids=["one", "few", "many"])
@pytest.mark.parametrize("ranks", [1, 10, 100_000], ids=["one rank", "ten ranks", "all ranks differ"])
async def test_the_best_rows_of_all_queues_are_claimed_in_order(
    pg: PostgresStore, clock: ManualClock, lines: list[QueueKey], ranks: int
) -> None:
    assert len(ONE) < len(FEW) <= taking.MANY_QUEUES < len(MANY)
    chance = random.Random(ranks)
    rows = []
    for number in range(400):
        # One queue has most of the rows, some have hardly any; every fifth row is granted.
        line = lines[0] if number % 2 else chance.choice(lines)
        granted = {"granted_until": clock.now + 1} if number % 5 == 0 else {}
        rows.append(queued(f"{number:04}", chance.randrange(ranks), line=line, **granted))
    await insert_queued(pg, *chance.sample(rows, len(rows)))
    free = sorted((row.rank, row.execution_id) for row in rows if row.granted_until is None)

    claimed = []
    for number in (1, 7, 30, 200, 400):
        claimed += (await pg.claim_rows(claim_request(number, *lines, prefix=f"{number}-"))).rows

    assert [(row.rank, row.execution_id) for row, _ in claimed] == free


async def test_queues_that_were_never_written_to_are_empty(pg: PostgresStore, clock: ManualClock) -> None:
    claimed = await pg.claim_rows(claim_request(5, *MANY))

    assert (claimed.now, claimed.rows) == (clock.now, [])


@pytest.fixture
async def paused_store(database: str, rival: Rival) -> AsyncIterator[PostgresStore]:
    """A store whose claims wait, each with its snapshot, until the rival unlocks them."""
    await rival.connection.execute(PAUSE)
    await rival.connection.execute("select pg_advisory_lock(7)")
    store = PostgresStore(f"{database}?search_path=pause,pg_catalog,public")
    yield store
    await store.close()
    await rival.connection.execute("select pg_advisory_unlock_all()")
    await rival.connection.execute("drop schema pause cascade")


def four_and_others(lines: list[QueueKey]) -> list[Execution[Draft]]:
    """Return four rows of one queue, and behind them one of each other queue; reading the first reads the time."""
    four = [queued(name, rank, line=lines[0], granted_until=1) for rank, name in enumerate("abcd")]
    return four + [queued(f"in {line.fairness_key}", 10, line=line) for line in lines[1:]]


@pytest.mark.parametrize("lines", [ONE, FEW, MANY], ids=["one", "few", "many"])
async def test_a_row_that_is_changed_during_a_claim_is_claimed_once_with_its_own_lease(
    pg: PostgresStore, paused_store: PostgresStore, rival: Rival, lines: list[QueueKey]
) -> None:
    await insert_queued(pg, *four_and_others(lines))
    request = claim_request(3, *lines)

    claiming = await rival.start_blocked(paused_store.claim_rows(request))
    await rival.connection.execute("update ff_exec_core set revision = 999 where execution_id = 'b'")
    await rival.connection.execute("select pg_advisory_unlock(7)")
    rows = [row for row, _ in (await claiming).rows]

    assert [row.execution_id for row in rows] == ["a", "b", "c"]
    assert sorted(row.lease_id or "" for row in rows) == sorted(ids.lease_id for ids in request.lease_ids)
    assert {row.lease_epoch for row in rows} == {1}


@pytest.mark.parametrize("lines", [ONE, FEW, MANY], ids=["one", "few", "many"])
async def test_a_row_that_leaves_its_queue_during_a_claim_is_not_claimed(
    pg: PostgresStore, paused_store: PostgresStore, rival: Rival, lines: list[QueueKey]
) -> None:
    await insert_queued(pg, *four_and_others(lines))

    claiming = await rival.start_blocked(paused_store.claim_rows(claim_request(3, *lines)))
    await rival.connection.execute("update ff_exec_core set line = null where execution_id = 'b'")
    await rival.connection.execute("select pg_advisory_unlock(7)")

    assert [row.execution_id for row, _ in (await claiming).rows] == ["a", "c", "d"]
