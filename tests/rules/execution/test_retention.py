"""Purges: rows that others still need are checked again later; frames of long streams are deleted in parts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.model.change import Delete, Guard, Patch, Upsert, seen
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, Flow, FlowState
from flowfabric.model.gate import StepMemo
from flowfabric.model.instant import FromNow
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.stream import Frame, Stream
from flowfabric.rules import retention
from flowfabric.rules.durable import lives
from flowfabric.rules.execution import replay
from flowfabric.rules.flow.build import seen_flow
from flowfabric.rules.stream.append import PAGE
from tests.rules.execution.rows import EXECUTION, NOW
from tests.rules.execution.test_guards import RUNNABLE, TERMINAL, row

A_MOMENT = retention.RECHECK_DELAY_MS
DAY_MS = 86_400_000


def ended(outcome: TerminalOutcome = TerminalOutcome.SUCCESS, **own: Any) -> Execution:
    return row(TERMINAL, terminal_outcome=outcome, completed_at=NOW - 10, **own)


def failed(purge_at: int) -> Execution:
    return ended(TerminalOutcome.FAILED, purge_at=purge_at)


OTHERS: dict[str, tuple[list[Execution], int]] = {
    "one that will go": ([failed(NOW + 50)], 50 + A_MOMENT),
    "the last of two": ([failed(NOW + 50), failed(NOW + 20)], 50 + A_MOMENT),
    "one that should have gone": ([failed(NOW - 5000)], A_MOMENT),
    "one that needs nothing": ([failed(NOW + 50), ended(purge_at=NOW + 70)], 50 + A_MOMENT),
    "one that has not ended": ([row(RUNNABLE), failed(NOW + 50)], DAY_MS),
}


@pytest.mark.parametrize(("others", "wait_ms"), OTHERS.values(), ids=OTHERS.keys())
def test_a_row_that_others_need_is_checked_again_shortly_after_they_are_purged(
    others: list[Execution], wait_ms: int
) -> None:
    decision = retention.purge(ended(purge_at=NOW - 3), NOW, others=others)

    assert decision.answer is False
    assert decision.change is not None
    assert decision.change.writes == (Patch(Execution, (EXECUTION,), {"purge_at": FromNow(wait_ms)}),)


def test_a_row_without_retention_is_not_checked_in_a_loop() -> None:
    kept = ended(purge_at=NOW - 3, terms='{"retention_ttl_ms":0}')

    decision = retention.purge(kept, NOW, others=[row(RUNNABLE)])

    assert decision.change is not None
    assert decision.change.writes == (Patch(Execution, (EXECUTION,), {"purge_at": FromNow(A_MOMENT)}),)


def stream(attempt: int, first_page: int, pages: int, revision: int = 3) -> Stream:
    """A stream that has trimmed some of its pages."""
    kept = [[first_page + n, n, 0] for n in range(pages)]
    number = (first_page + pages) * PAGE
    return Stream(EXECUTION, attempt, 1, 2, 0, number, 9, 2, first_page * PAGE + 5, str(kept), revision=revision)


def test_the_oldest_frames_of_long_streams_are_deleted_before_the_execution() -> None:
    done = ended(purge_at=NOW - 3, stream_index=1)
    streams = [stream(0, 7, 0), stream(1, 4, 3, revision=8)]

    decision = retention.purge(done, NOW, streams=streams)

    assert decision.answer == retention.RowsRemain()
    assert decision.change is not None
    assert decision.change.guards == (seen(done), Guard(Stream, (EXECUTION, 1), 8))
    upsert, *deletes = decision.change.writes
    assert deletes == [Delete(Frame, (EXECUTION, 1, 4))]
    assert isinstance(upsert, Upsert)
    assert isinstance(upsert.row, Stream)
    assert (upsert.row.pages, upsert.row.kept_from) == ("[[5,1,0],[6,2,0]]", 5 * PAGE + 1)
    assert decision.change.not_before == done.purge_at


def test_the_last_page_is_deleted_with_the_execution() -> None:
    done = ended(purge_at=NOW - 3, stream_index=1)

    decision = retention.purge(done, NOW, streams=[stream(0, 7, 0), stream(1, 4, 1)])

    assert decision.answer is True
    assert decision.change is not None
    assert Delete(Frame, (EXECUTION,)) in decision.change.writes


def test_frames_of_a_row_that_is_still_retained_are_kept() -> None:
    decision = retention.purge(ended(purge_at=NOW + 3, stream_index=0), NOW, streams=[stream(0, 0, 9)])

    assert (decision.answer, decision.change) == (False, None)


def many_steps(count: int) -> list[retention.OwnedRow]:
    return [retention.OwnedRow(StepMemo, (EXECUTION, f"step{number:03}", 0)) for number in range(count)]


def test_an_execution_that_owns_many_rows_is_purged_in_parts() -> None:
    done = ended(purge_at=NOW - 3, has_steps=True)
    owned = many_steps(retention.MAX_PURGED_ROWS + 1)

    decision = retention.purge(done, NOW, owned=owned)

    assert decision.answer == retention.RowsRemain()
    assert decision.change is not None
    assert (decision.change.guards, decision.change.not_before) == ((seen(done),), done.purge_at)
    marked, *deletes = decision.change.writes
    assert marked == Patch(Execution, (EXECUTION,), {"past_life": lives.BEING_PURGED})
    assert deletes == [Delete(StepMemo, one.key) for one in owned[:-1]]


def test_the_last_rows_are_deleted_with_the_execution() -> None:
    done = ended(purge_at=NOW - 3, has_steps=True, past_life=lives.BEING_PURGED)
    owned = many_steps(retention.MAX_PURGED_ROWS)

    decision = retention.purge(done, NOW, owned=owned)

    assert decision.answer is True
    assert decision.change is not None
    assert {Delete(StepMemo, one.key) for one in owned} <= set(decision.change.writes)
    assert {Delete(StepMemo, (EXECUTION,)), Delete(Execution, (EXECUTION,))} <= set(decision.change.writes)


def test_an_execution_that_is_purged_in_parts_is_neither_replayed_nor_made_claimable() -> None:
    failed_run = ended(TerminalOutcome.FAILED, purge_at=NOW - 3, has_steps=True)
    assert replay.replay(failed_run).change is not None

    purged = msgspec.structs.replace(failed_run, past_life=lives.BEING_PURGED)

    assert isinstance(replay.replay(purged).answer, errors.NotFound)
    assert lives.forget(lives.LifeRows(purged)).change is None


def test_a_flow_with_many_rows_is_purged_in_parts() -> None:
    flow = Flow("f", 0, "dag", "n", FlowState.OPEN, NOW - 9, NOW - 9, node_count=1, revision=4)
    owned = [retention.OwnedRow(Edge, ("f", f"edge{number}")) for number in range(retention.MAX_PURGED_ROWS + 1)]

    part, rest = (retention.purge_flow(flow, None, NOW, rows) for rows in (owned, owned[-1:]))

    assert (part.answer, rest.answer) == (retention.RowsRemain(), True)
    assert part.change is not None
    assert part.change.guards == (seen_flow(flow),)
    assert part.change.writes == tuple(Delete(Edge, one.key) for one in owned[:-1])
    assert rest.change is not None
    assert Delete(Flow, ("f",)) in rest.change.writes
