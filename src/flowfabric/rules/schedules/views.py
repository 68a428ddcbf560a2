"""Schedules as shown to readers, with the last and the next instants."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.model.scheduling.schedule import PausedBy, RunTemplate, Schedule, ScheduleSpec
from flowfabric.model.states import PublicState
from flowfabric.model.view import view_of
from flowfabric.rules.schedules import recurrence
from flowfabric.rules.schedules.overlap import active_of, is_foreign, pending_of, template_of

SHOWN = 10  # last and next instants of a description


class ScheduleStatus(msgspec.Struct, frozen=True):
    """A schedule as a list shows it."""

    name: str
    namespace: str
    schedule_id: str
    task: str
    lane: str
    spec: ScheduleSpec
    created_at: int
    updated_at: int
    owner: str | None
    next_instant: int | None
    paused_at: int | None
    paused_by: PausedBy | None
    note: str | None
    running: int
    queued: int
    fired: int
    skipped: int
    missed: int
    last_instant: int | None
    last_run_id: str | None


class ScheduledRun(msgspec.Struct, frozen=True):
    """A run of a schedule."""

    execution_id: str
    state: PublicState
    created_at: int
    ended_at: int | None


class ScheduleDescription(msgspec.Struct, frozen=True):
    """A schedule with its newest runs, its next instants, and the common part of its runs."""

    status: ScheduleStatus
    template: RunTemplate
    input_payload: bytes
    next_instants: list[int]
    runs: list[ScheduledRun]


def status(row: Schedule) -> ScheduleStatus:
    """Return a schedule as a list shows it."""
    template = template_of(row)
    return view_of(
        ScheduleStatus,
        row,
        task=template.execution_kind,
        lane=template.lane_id,
        spec=recurrence.parse(row.spec).spec,
        running=len(active_of(row)),
        queued=len(pending_of(row)),
    )


def description(row: Schedule, runs: Sequence[Execution], now: int) -> ScheduleDescription:
    """Return a schedule with its newest runs; of a paused one the instants that it would have."""
    parsed = recurrence.parse(row.spec)
    upcoming: list[int] = []
    at = row.next_instant if row.next_instant is not None else parsed.next_after(max(now, row.decided_until))
    while at is not None and len(upcoming) < SHOWN:
        upcoming.append(at)
        at = parsed.next_after(at)
    shown = [
        ScheduledRun(run.execution_id, run.public_state, run.created_at, run.completed_at)
        for run in runs
        if not is_foreign(run, row)
    ]
    return ScheduleDescription(status(row), template_of(row), row.input_payload or b"", upcoming, shown)
