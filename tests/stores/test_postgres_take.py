"""The two ways in which a take finds the heads of its lines come to the same."""

from __future__ import annotations

import random

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.execution import LineKey
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres import take as taking
from tests.stores.samples import a_take, line_up, waiting

MANY = [LineKey("mail", fairness_key=f"tenant-{number}") for number in range(40)]
FEW = MANY[:3]


@pytest.mark.parametrize("lines", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("ranks", [1, 10, 100_000], ids=["one rank", "ten ranks", "all ranks differ"])
async def test_the_best_rows_of_all_lines_are_taken_in_order(
    pg: PostgresStore, clock: ManualClock, lines: list[LineKey], ranks: int
) -> None:
    assert len(FEW) <= taking.MANY < len(MANY)
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
        taken += (await pg.take(a_take(number, *lines, prefix=f"{number}-"))).rows

    assert [(row.rank, row.execution_id) for row, _ in taken] == free


async def test_lines_that_nobody_ever_stood_in_are_empty(pg: PostgresStore, clock: ManualClock) -> None:
    taken = await pg.take(a_take(5, *MANY))

    assert (taken.now, taken.rows) == (clock.now, [])
