"""The ways in which a take finds the rows of its lines come to the same, also while others change them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import Draft
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres import claim as taking
from tests.conftest import Rival
from tests.stores.samples import a_take, line_up, waiting

MANY = [QueueKey("mail", fairness_key=f"tenant-{number}") for number in range(40)]
FEW = MANY[:3]
ONE = MANY[:1]

# A clock that does not answer while someone holds a lock. A statement has its snapshot when it asks for the time.
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
async def test_the_best_rows_of_all_lines_are_taken_in_order(
    pg: PostgresStore, clock: ManualClock, lines: list[QueueKey], ranks: int
) -> None:
    assert len(ONE) < len(FEW) <= taking.MANY_QUEUES < len(MANY)
    dice = random.Random(ranks)
    rows = []
    for number in range(400):
        # One line has most of the rows, some have hardly any; every fifth row is granted to someone.
        line = lines[0] if number % 2 else dice.choice(lines)
        granted = {"granted_until": clock.now + 1} if number % 5 == 0 else {}
        rows.append(waiting(f"{number:04}", dice.randrange(ranks), line=line, **granted))
    await line_up(pg, *dice.sample(rows, len(rows)))
    free = sorted((row.rank, row.execution_id) for row in rows if row.granted_until is None)

    taken = []
    for number in (1, 7, 30, 200, 400):
        taken += (await pg.claim_rows(a_take(number, *lines, prefix=f"{number}-"))).rows

    assert [(row.rank, row.execution_id) for row, _ in taken] == free


async def test_lines_that_nobody_ever_stood_in_are_empty(pg: PostgresStore, clock: ManualClock) -> None:
    taken = await pg.claim_rows(a_take(5, *MANY))

    assert (taken.now, taken.rows) == (clock.now, [])


@pytest.fixture
async def paused(database: str, rival: Rival) -> AsyncIterator[PostgresStore]:
    """A store whose takes wait, each with its snapshot, until the rival unlocks them."""
    await rival.connection.execute(PAUSE)
    await rival.connection.execute("select pg_advisory_lock(7)")
    store = PostgresStore(f"{database}?search_path=pause,pg_catalog,public")
    yield store
    await store.close()
    await rival.connection.execute("select pg_advisory_unlock_all()")
    await rival.connection.execute("drop schema pause cascade")


def four_and_others(lines: list[QueueKey]) -> list[Execution[Draft]]:
    """Four rows of one line, and behind them one of each other line; whoever comes to the first asks for the time."""
    four = [waiting(name, rank, line=lines[0], granted_until=1) for rank, name in enumerate("abcd")]
    return four + [waiting(f"in {line.fairness_key}", 10, line=line) for line in lines[1:]]


@pytest.mark.parametrize("lines", [ONE, FEW, MANY], ids=["one", "few", "many"])
async def test_a_row_that_is_changed_under_a_take_is_taken_once_with_a_stamp_of_its_own(
    pg: PostgresStore, paused: PostgresStore, rival: Rival, lines: list[QueueKey]
) -> None:
    await line_up(pg, *four_and_others(lines))
    take = a_take(3, *lines)

    taking_them = asyncio.create_task(paused.claim_rows(take))
    await rival.blocks()
    await rival.connection.execute("update ff_exec_core set revision = 999 where execution_id = 'b'")
    await rival.connection.execute("select pg_advisory_unlock(7)")
    rows = [row for row, _ in (await taking_them).rows]

    assert [row.execution_id for row in rows] == ["a", "b", "c"]
    assert sorted(row.lease_id or "" for row in rows) == sorted(stamp.lease_id for stamp in take.lease_ids)
    assert {row.lease_epoch for row in rows} == {1}


@pytest.mark.parametrize("lines", [ONE, FEW, MANY], ids=["one", "few", "many"])
async def test_a_row_that_leaves_its_line_under_a_take_is_not_taken(
    pg: PostgresStore, paused: PostgresStore, rival: Rival, lines: list[QueueKey]
) -> None:
    await line_up(pg, *four_and_others(lines))

    taking_them = asyncio.create_task(paused.claim_rows(a_take(3, *lines)))
    await rival.blocks()
    await rival.connection.execute("update ff_exec_core set line = null where execution_id = 'b'")
    await rival.connection.execute("select pg_advisory_unlock(7)")

    assert [row.execution_id for row, _ in (await taking_them).rows] == ["a", "c", "d"]
