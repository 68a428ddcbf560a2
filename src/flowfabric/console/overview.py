"""The overview: runs that wait, run, failed or wait for people, and budgets that are nearly used up."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from flowfabric.console.approvals import Question, open_approvals
from flowfabric.console.budgets import BudgetRow, list_budget_rows
from flowfabric.console.lanes import LaneRow, lane_rows, live_workers
from flowfabric.console.pages import Ui, View, page
from flowfabric.console.runs import Filters, RunRow, run_row, search
from flowfabric.engine.types import ExecutionListing
from flowfabric.model.states import PublicState

MINUTES = 60
MAX_ENDED = 60  # each costs about 40 µs
MAX_FAILURES = 5
MAX_FAILED = 50


class OverviewPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "overview.html"
    lanes: list[LaneRow]
    waiting: int
    running: int
    at_least: list[str]  # the states of which more may exist than were counted
    workers: int
    failed: int
    failed_incomplete: bool
    ends: list[int]
    ends_of: int
    ends_incomplete: bool
    approvals: list[Question]
    hot: list[BudgetRow]
    failures: list[RunRow]
    failures_incomplete: bool
    held: dict[str, int]  # runs that wait for other code, by task


@page("")
async def show_overview(ui: Ui) -> OverviewPage:
    """Show the overview."""
    lanes, workers, approvals, budgets, held = await asyncio.gather(
        lane_rows(ui),
        live_workers(ui),
        open_approvals(ui),
        list_budget_rows(ui, ui.namespace),
        ui.engine.count_held(namespaces=ui.namespaces),
    )
    failures, failed, recent, now = await asyncio.gather(
        search(ui, Filters(state=PublicState.FAILED.value), None, MAX_FAILURES),
        search(ui, Filters(state=PublicState.FAILED.value, since="1h"), None, MAX_FAILED),
        search(ui, Filters(since="1h"), None, MAX_ENDED),
        ui.engine.ping(),
    )
    ended = [run for run in recent.executions if run.ended_at is not None]
    return OverviewPage(
        title="Overview",
        about="overview",
        lanes=lanes,
        waiting=sum(lane.waiting for lane in lanes),
        running=sum(lane.running for lane in lanes),
        at_least=sorted({state for lane in lanes for state in lane.at_least}),
        workers=len(workers),
        failed=len(failed.executions),
        failed_incomplete=failed.next_cursor is not None,
        ends=_by_minute(ended, now),
        ends_of=MAX_ENDED,
        ends_incomplete=recent.next_cursor is not None,
        approvals=approvals,
        hot=[row for row in budgets if row.is_hot][:5],
        failures=[run_row(run) for run in failures.executions],
        failures_incomplete=failures.incomplete,
        held=dict(sorted(held.items())),
    )


def _by_minute(ended: list[ExecutionListing], now: int) -> list[int]:
    minutes = [0] * MINUTES
    for run in ended:
        age = (now // 60_000) - (run.ended_at or 0) // 60_000
        if 0 <= age < MINUTES:
            minutes[MINUTES - 1 - age] += 1
    return minutes
