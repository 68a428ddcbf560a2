"""When Postgres claims with a commit, and how it handles rows that others are writing."""

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
from tests.stores.contract.test_commit_and_claim import NO_TOPICS, OTHER, enqueue, insert_unqueued, names
from tests.stores.sample_rows import MAIL, change, claim_request, execution, insert_queued, one, queued


async def test_a_commit_claims_in_one_round_trip(pg: PostgresStore, clock: ManualClock) -> None:
    revisions = await insert_unqueued(pg, "a", "b")

    result = await pg.commit_and_claim([enqueue(*item) for item in revisions.items()], NO_TOPICS, claim_request(2))

    assert result.verdicts == [clock.now, clock.now]
    assert names(result.rows) == ["a", "b"]
    assert result.drained


async def test_a_single_change_is_claimed_with_its_commit(pg: PostgresStore) -> None:
    revisions = await insert_unqueued(pg, "a")

    result = await pg.commit_and_claim([enqueue("a", revisions["a"])], NO_TOPICS, claim_request(5, MAIL, OTHER))

    assert names(result.rows) == ["a"]


async def test_a_row_with_an_empty_queue_behind_it_is_claimed_beside_other_queues(pg: PostgresStore) -> None:
    await insert_queued(pg, queued("elsewhere", line=OTHER))
    revisions = await insert_unqueued(pg, "a")

    result = await pg.commit_and_claim([enqueue("a", revisions["a"])], NO_TOPICS, claim_request(1))

    assert names(result.rows) == ["a"]


def beside(*others: Change) -> list[Change]:
    return list(others)


@pytest.mark.parametrize(
    ("stands", "changes", "wanted"),
    [
        (queued("other", 9), beside(), 5),
        (queued("other", 9, granted_until=10**15), beside(), 5),
        (None, beside(change(Insert(queued("new", 9)))), 5),
        (None, beside(), 0),
    ],
    ids=["another row is queued", "a granted row is queued", "another row is queued meanwhile", "nobody wants it"],
)
async def test_otherwise_the_rows_are_left_to_a_separate_claim(
    pg: PostgresStore, clock: ManualClock, stands: Execution | None, changes: list[Change], wanted: int
) -> None:
    if stands is not None:
        await insert_queued(pg, stands)
    revisions = await insert_unqueued(pg, "a")

    result = await pg.commit_and_claim([enqueue("a", revisions["a"]), *changes], NO_TOPICS, claim_request(wanted))

    assert result == CommitAndClaimResult([clock.now] * (1 + len(changes)), [])
    assert (await one(pg, Execution, "a")).line == MAIL


@pytest.mark.parametrize(
    "fields", [{"priority": 4}, {"line": OTHER}, {"attempt_timeout_at": NOW}], ids=["outlasts", "line", "arithmetic"]
)
async def test_a_change_that_would_leave_rows_unclaimed_is_left_to_a_separate_claim(
    pg: PostgresStore, fields: Any
) -> None:
    revisions = await insert_unqueued(pg, "a")

    result = await pg.commit_and_claim([enqueue("a", revisions["a"], **fields)], NO_TOPICS, claim_request(5))

    assert result.rows == []


async def test_rows_of_different_shapes_are_left_to_a_separate_claim(pg: PostgresStore) -> None:
    revisions = await insert_unqueued(pg, "a", "b")
    changes = [enqueue("a", revisions["a"]), enqueue("b", revisions["b"], next_type=None)]

    assert (await pg.commit_and_claim(changes, NO_TOPICS, claim_request(5))).rows == []


async def test_a_batch_that_is_written_in_steps_is_left_to_a_separate_claim(
    pg: PostgresStore, clock: ManualClock
) -> None:
    revisions = await insert_unqueued(pg, "a")
    # One row, two writes: the second write needs a further statement.
    twice = change(Patch(Execution, ("x",), {"priority": 1}), Patch(Execution, ("x",), {"priority": 2}))
    await insert_queued(pg, execution("x"))

    result = await pg.commit_and_claim([enqueue("a", revisions["a"]), twice], NO_TOPICS, claim_request(5))

    assert result == CommitAndClaimResult([clock.now, clock.now], [])
    assert (await one(pg, Execution, "x")).priority == 2
    assert (await one(pg, Execution, "a")).line == MAIL


class TestARowThatOthersAreWriting:
    """The change guards columns only; the statement has its snapshot and waits for the row."""

    @pytest.fixture
    async def committing(self, pg: PostgresStore, rival: Rival) -> asyncio.Task[CommitAndClaimResult]:
        await insert_unqueued(pg, "a", eligibility_state=EligibilityState.BLOCKED_BY_DEPENDENCIES)
        like = Expected({"eligibility_state": EligibilityState.BLOCKED_BY_DEPENDENCIES, "line": None})
        put = Patch(Execution, ("a",), {"line": MAIL, "eligibility_state": EligibilityState.ELIGIBLE_NOW})
        enqueueing = change(put, guards=[Guard(Execution, ("a",), None, expected=like)])
        request = claim_request(1, eligibility_state=EligibilityState.NOT_APPLICABLE)
        await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
        return await rival.start_blocked(pg.commit_and_claim([enqueueing], NO_TOPICS, request))

    async def test_is_claimed_with_the_values_that_they_wrote(
        self, pg: PostgresStore, rival: Rival, committing: asyncio.Task[CommitAndClaimResult]
    ) -> None:
        await rival.connection.execute("update ff_exec_core set tags = '{\"theirs\":\"1\"}' where execution_id = 'a'")
        await rival.end()

        [(row, _)] = (await committing).rows
        assert (row.tags, row.lease_id, row.line) == ('{"theirs":"1"}', "lease-0", None)
        assert row == await one(pg, Execution, "a")

    async def test_is_not_claimed_if_its_columns_no_longer_match(
        self, pg: PostgresStore, rival: Rival, committing: asyncio.Task[CommitAndClaimResult]
    ) -> None:
        await rival.connection.execute("update ff_exec_core set eligibility_state = 8 where execution_id = 'a'")
        await rival.end()

        assert await committing == CommitAndClaimResult([None], [])
        row = await one(pg, Execution, "a")
        assert (row.lease_id, row.line) == (None, None)
