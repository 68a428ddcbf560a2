"""When Postgres hands over, and what of a row that others were just writing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Change, Expected, Guard, Insert, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.states import EligibilityState
from flowfabric.stores.claims import CommitAndClaimResult
from flowfabric.stores.postgres import PostgresStore
from tests.conftest import Rival
from tests.stores.contract.test_commit_and_claim import NO_HINT, OTHER, blocked, freed, names
from tests.stores.samples import MAIL, a_take, change, execution, line_up, one, waiting


async def test_it_hands_over_what_it_can_in_one_trip(pg: PostgresStore, clock: ManualClock) -> None:
    revisions = await blocked(pg, "a", "b")

    handed = await pg.commit_and_claim([freed(*item) for item in revisions.items()], NO_HINT, a_take(2))

    assert handed.verdicts == [clock.now, clock.now]
    assert names(handed.rows) == ["a", "b"]
    assert handed.drained


async def test_one_change_alone_is_handed_over_too(pg: PostgresStore) -> None:
    revisions = await blocked(pg, "a")

    handed = await pg.commit_and_claim([freed("a", revisions["a"])], NO_HINT, a_take(5, MAIL, OTHER))

    assert names(handed.rows) == ["a"]


async def test_a_row_that_nobody_waits_behind_is_handed_over_beside_other_lines(pg: PostgresStore) -> None:
    await line_up(pg, waiting("elsewhere", line=OTHER))
    revisions = await blocked(pg, "a")

    handed = await pg.commit_and_claim([freed("a", revisions["a"])], NO_HINT, a_take(1))

    assert names(handed.rows) == ["a"]


def beside(*others: Change) -> list[Change]:
    return list(others)


@pytest.mark.parametrize(
    ("stands", "changes", "wanted"),
    [
        (waiting("other", 9), beside(), 5),
        (waiting("other", 9, granted_until=10**15), beside(), 5),
        (None, beside(change(Insert(waiting("new", 9)))), 5),
        (None, beside(), 0),
    ],
    ids=["somebody stands there", "somebody granted stands there", "somebody new comes along", "nobody wants it"],
)
async def test_else_it_leaves_it_to_a_take(
    pg: PostgresStore, clock: ManualClock, stands: Execution | None, changes: list[Change], wanted: int
) -> None:
    if stands is not None:
        await line_up(pg, stands)
    revisions = await blocked(pg, "a")

    handed = await pg.commit_and_claim([freed("a", revisions["a"]), *changes], NO_HINT, a_take(wanted))

    assert handed == CommitAndClaimResult([clock.now] * (1 + len(changes)), [])
    assert (await one(pg, Execution, "a")).line == MAIL


@pytest.mark.parametrize(
    "fields", [{"priority": 4}, {"line": OTHER}, {"attempt_timeout_at": NOW}], ids=["outlasts", "line", "arithmetic"]
)
async def test_a_change_of_which_more_would_be_left_is_left_to_a_take(pg: PostgresStore, fields: Any) -> None:
    revisions = await blocked(pg, "a")

    handed = await pg.commit_and_claim([freed("a", revisions["a"], **fields)], NO_HINT, a_take(5))

    assert handed.rows == []


async def test_rows_of_different_shapes_are_left_to_a_take(pg: PostgresStore) -> None:
    revisions = await blocked(pg, "a", "b")
    changes = [freed("a", revisions["a"]), freed("b", revisions["b"], next_type=None)]

    assert (await pg.commit_and_claim(changes, NO_HINT, a_take(5))).rows == []


async def test_a_batch_that_is_written_in_steps_is_left_to_a_take(pg: PostgresStore, clock: ManualClock) -> None:
    revisions = await blocked(pg, "a")
    twice = change(
        Patch(Execution, ("x",), {"priority": 1}), Patch(Execution, ("x",), {"priority": 2})
    )  # one row, two writes: the second one goes into a further statement
    await line_up(pg, execution("x"))

    handed = await pg.commit_and_claim([freed("a", revisions["a"]), twice], NO_HINT, a_take(5))

    assert handed == CommitAndClaimResult([clock.now, clock.now], [])
    assert (await one(pg, Execution, "x")).priority == 2
    assert (await one(pg, Execution, "a")).line == MAIL


class TestARowThatOthersAreJustWriting:
    """The change asks only what the row looks like; the statement has its snapshot, and waits for the row."""

    @pytest.fixture
    async def handing(self, pg: PostgresStore, rival: Rival) -> asyncio.Task[CommitAndClaimResult]:
        await blocked(pg, "a", eligibility_state=EligibilityState.BLOCKED_BY_DEPENDENCIES)
        like = Expected({"eligibility_state": EligibilityState.BLOCKED_BY_DEPENDENCIES, "line": None})
        put = Patch(Execution, ("a",), {"line": MAIL, "eligibility_state": EligibilityState.ELIGIBLE_NOW})
        setting_free = change(put, guards=[Guard(Execution, ("a",), None, expected=like)])
        take = a_take(1, eligibility_state=EligibilityState.NOT_APPLICABLE)
        await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
        handing = asyncio.create_task(pg.commit_and_claim([setting_free], NO_HINT, take))
        await rival.blocks()
        return handing

    async def test_is_handed_over_with_what_they_wrote(
        self, pg: PostgresStore, rival: Rival, handing: asyncio.Task[CommitAndClaimResult]
    ) -> None:
        await rival.connection.execute("update ff_exec_core set tags = '{\"theirs\":\"1\"}' where execution_id = 'a'")
        await rival.end()

        [(row, _)] = (await handing).rows
        assert (row.tags, row.lease_id, row.line) == ('{"theirs":"1"}', "lease-0", None)
        assert row == await one(pg, Execution, "a")

    async def test_is_not_handed_over_when_it_looks_different_now(
        self, pg: PostgresStore, rival: Rival, handing: asyncio.Task[CommitAndClaimResult]
    ) -> None:
        await rival.connection.execute("update ff_exec_core set eligibility_state = 8 where execution_id = 'a'")
        await rival.end()

        assert await handing == CommitAndClaimResult([None], [])
        row = await one(pg, Execution, "a")
        assert (row.lease_id, row.line) == (None, None)
