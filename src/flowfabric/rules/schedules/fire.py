"""Fire: decide the instants of a schedule that have come, and what the end of a run starts.

`fire` judges the row that it is given by the store's clock: by any caller, and however often, an instant is decided
once. Instants that were missed by no more than `catch_up_ms` are made up for, oldest first; older ones are counted.
What an instant does while a run of the schedule is under way is decided in `overlap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.model.change import Change, Delete, absent
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.instant import NOW
from flowfabric.model.scheduling.schedule import Overlap, PausedBy, Schedule, ScheduleSpec
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.create import NO_DEFAULTS, PolicyDefaults
from flowfabric.rules.schedules import recurrence
from flowfabric.rules.schedules.identity import jitter_ms, run_id
from flowfabric.rules.schedules.overlap import Plan, Runs, active_of, is_foreign, mark_updated, pending_of

MAX_INSTANTS = 100  # instants of one change; the next change follows at once
MAX_MISSED = 1000  # instants that one change counts as missed
MAX_NOTE_CHARS = 500
FAILED = (TerminalOutcome.FAILED.value, TerminalOutcome.EXPIRED.value)


class Fired(msgspec.Struct, frozen=True):
    """What became of the instants that had come."""

    runs: tuple[str, ...] = ()
    queued: int = 0
    skipped: int = 0
    missed: int = 0

    @property
    def decided(self) -> bool:
        """True if any instant was decided."""
        return bool(self.runs or self.queued or self.skipped or self.missed)


class DueInstants(msgspec.Struct, frozen=True):
    """Instants that have come, the number of those that are too old, and the first one that is still to be decided.

    With `has_more` there are more than one change decides, and `following` has come, too.
    """

    instants: tuple[int, ...]
    missed: int
    following: int | None
    decided_until: int
    has_more: bool = False


def due_instants(row: Schedule, now: int, *, early: bool = False) -> DueInstants:
    """Return the instants of a schedule that have come; with `early`, those whose jitter is not over, too."""
    parsed = recurrence.parse(row.spec)
    spec, at, last, missed = parsed.spec, row.next_instant, row.decided_until, 0
    instants: list[int] = []
    has_more = False
    too_old = now - spec.catch_up_ms
    while at is not None and row.paused_at is None:
        fires_at = at + jitter_ms(row.schedule_id, at, spec.jitter_ms)
        if fires_at < too_old:
            if has_more := missed >= MAX_MISSED:
                break
            if spec.every_ms is not None:  # those before are counted without a loop
                before = max(0, (too_old - spec.jitter_ms - 1 - at) // spec.every_ms)
                missed, at = missed + before, at + before * spec.every_ms
            missed += 1
        elif fires_at <= now or (early and at <= now):
            if has_more := len(instants) >= MAX_INSTANTS:
                break
            instants.append(at)
        else:
            break
        last, at = at, parsed.next_after(at)
    return DueInstants(tuple(instants), missed, at, last, has_more)


def fire(row: Schedule | None, runs: Runs, now: int, *, defaults: PolicyDefaults = NO_DEFAULTS) -> Decision[Fired]:
    """Decide the instants that have come; a schedule that is paused, deleted or not due changes nothing."""
    if row is None:
        return Decision(Fired())
    due = due_instants(row, now)
    if not due.instants and not due.missed:
        return Decision(Fired())
    plan = fired_plan(row, runs, due, now, defaults)
    fields = plan.fields() | decided_fields(row, due)
    answer = Fired(tuple(plan.created), plan.queued, plan.skipped, due.missed)
    return Decision(answer, plan.change(fields))


def fired_plan(row: Schedule, runs: Runs, due: DueInstants, now: int, defaults: PolicyDefaults) -> Plan:
    """Return the plan in which instants that have come are decided."""
    plan = Plan(row, runs, recurrence.parse(row.spec).spec.overlap, now, defaults)
    for instant in due.instants:
        plan.add(instant)
    return plan


def decided_fields(row: Schedule, due: DueInstants) -> dict[str, Any]:
    """Return the columns that move a schedule on behind instants that were decided."""
    return {
        "decided_until": due.decided_until,
        "missed": row.missed + due.missed,
        **next_fields(row.schedule_id, recurrence.parse(row.spec).spec, due.following),
    }


def next_fields(schedule_id: str, spec: ScheduleSpec, following: int | None) -> dict[str, Any]:
    """Return the columns that name the next instant, and when it fires."""
    if following is None:
        return {"next_instant": None, "next_at": None}
    return {"next_instant": following, "next_at": following + jitter_ms(schedule_id, following, spec.jitter_ms)}


def runs_to_load(row: Schedule, instants: Sequence[int] = ()) -> list[str]:
    """Return the runs that decisions on a schedule are based on: those under way, the last, those of the instants."""
    wanted = [*active_of(row), *([] if row.last_run_id is None else [row.last_run_id])]
    wanted += [run_id(row.schedule_id, instant) for instant in (*pending_of(row), *instants)]
    return list(dict.fromkeys(wanted))


def end_runs(
    row: Schedule | None,
    completions: Sequence[ChildCompletion],
    runs: Runs,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[int]:
    """Take note of runs that have ended, which lets the queue move; answer how many there were.

    A schedule that was deleted meanwhile takes no note. A failure pauses a schedule that asks for it.
    """
    if not completions:
        return Decision(0)
    deletes = tuple(Delete(ChildCompletion, (end.parent_id, end.child_id, end.life)) for end in completions)
    if row is None:
        return Decision(len(completions), Change((absent(Schedule, completions[0].parent_id),), deletes))
    spec = recurrence.parse(row.spec).spec
    overlap = Overlap.QUEUE if spec.overlap is Overlap.ALLOW else spec.overlap  # the queue is that of a backfill
    plan = Plan(row, runs, overlap, now, defaults)
    failed = [end for end in completions if end.outcome in FAILED and not is_foreign(runs.get(end.child_id), row)]
    fields: dict[str, Any] = {}
    if row.paused_at is None and spec.pause_on_failure and failed:
        fields = paused_fields(PausedBy.FAILURE, _failure_note(failed[0], runs))
    elif row.paused_at is None:
        plan.advance_queue()
    return Decision(len(completions), plan.change(plan.fields() | fields, *deletes))


def paused_fields(by: PausedBy, note: str) -> dict[str, Any]:
    """Return the columns of a schedule that is paused now."""
    paused = {"paused_at": NOW, "paused_by": by, "note": note or None, "next_at": None, "next_instant": None}
    return mark_updated(paused)


def _failure_note(end: ChildCompletion, runs: Runs) -> str:
    run = runs.get(end.child_id)
    reason = "" if run is None or not run.failure_reason else f": {run.failure_reason}"
    return f"run {end.child_id} {end.outcome}{reason}"[:MAX_NOTE_CHARS]
