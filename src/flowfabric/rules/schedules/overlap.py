"""Overlap: what an instant does while a run of its schedule is under way.

It is skipped, queued, runs beside that run or after its cancel. `Plan` collects what instants do into one change.
The schedule, its runs and the reports of their ends lie on one partition. The change is guarded by the schedule's
revision, so of two processes that fire the same instant one is refused and finds that the instant is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, assert_never

import msgspec

from flowfabric import errors
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.change import Change, Guard, Patch, Write, merge_changes
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.scheduling.schedule import Overlap, RunTemplate, Schedule
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.view import view_of
from flowfabric.rules.execution import cancel
from flowfabric.rules.execution.create import NO_DEFAULTS, CreateExecution, PolicyDefaults, create
from flowfabric.rules.schedules.identity import run_id

MAX_QUEUED = 100
MAX_ACTIVE = 100  # runs under way that a schedule counts
CANCEL_REASON = "the next run of its schedule begins"
SCHEDULE_KEY = "schedule"  # the policy of a run has here the name of its schedule and the instant

Runs = Mapping[str, Execution]  # the runs that were loaded and exist, by id


class Plan:
    """The effects of instants on a schedule; `runs` are its runs under way and those of the instants, if they exist."""

    def __init__(
        self, schedule: Schedule, runs: Runs, overlap: Overlap, now: int, defaults: PolicyDefaults = NO_DEFAULTS
    ) -> None:
        self.schedule = schedule
        self.created: dict[str, int] = {}  # instants by run, oldest first
        self.queued = 0
        self.skipped = 0
        self.known = 0  # instants that had a run before
        self.pending = pending_of(schedule)
        self.active = {name: at for name, at in active_of(schedule).items() if _is_under_way(runs.get(name))}
        self._runs, self._overlap, self._now, self._defaults = runs, overlap, now, defaults
        self._cancelled: list[Execution] = []
        last = runs.get(schedule.last_run_id or "")
        if overlap is not Overlap.ALLOW and last is not None and _is_under_way(last):  # it was replayed
            self.active.setdefault(last.execution_id, schedule.last_instant or 0)

    def add(self, instant: int) -> None:
        """Decide one instant: it gets a run, waits in the queue, or is skipped."""
        name = run_id(self.schedule.schedule_id, instant)
        if is_foreign(self._runs.get(name), self.schedule):
            self.skipped += 1
            return
        if name in self._runs or name in self.created or instant in self.pending:
            self.known += 1
            return
        if self._overlap is Overlap.ALLOW:
            self.created[name] = instant
            return
        self.advance_queue()
        if not self.active:
            self.start(name, instant)
            return
        match self._overlap:
            case Overlap.SKIP:
                self.skipped += 1
            case Overlap.QUEUE_ONE | Overlap.QUEUE:
                if len(self.pending) < (1 if self._overlap is Overlap.QUEUE_ONE else MAX_QUEUED):
                    self.pending.append(instant)
                    self.queued += 1
                else:
                    self.skipped += 1
            case Overlap.CANCEL:
                self._cancel_active()
                self.start(name, instant)
            case _:
                assert_never(self._overlap)

    def start(self, name: str, instant: int) -> None:
        """Create a run that others wait for."""
        self.created[name] = self.active[name] = instant

    def advance_queue(self) -> None:
        """Start the first run of the queue if none is under way; one whose instant has a run is skipped."""
        while self.pending and not self.active:
            instant = self.pending.pop(0)
            name = run_id(self.schedule.schedule_id, instant)
            if name not in self._runs:
                self.start(name, instant)

    def _cancel_active(self) -> None:
        for name in self.active:
            if name in self.created:  # the next instant has passed already: it need not begin
                del self.created[name]
                self.skipped += 1
            else:
                self._cancelled.append(self._runs[name])
        self.active.clear()

    def fields(self) -> dict[str, Any]:
        """Return the columns of the schedule that change."""
        row = self.schedule
        fields: dict[str, Any] = {
            "active": _text(self.active),
            "pending": _text(self.pending),
            "fired": row.fired + len(self.created),
            "skipped": row.skipped + self.skipped,
        }
        if self.created:
            fields["last_run_id"], fields["last_instant"] = list(self.created.items())[-1]
        return {name: value for name, value in fields.items() if value != getattr(row, name)}

    def change(self, fields: Mapping[str, Any], *writes: Write) -> Change:
        """Return the change that writes these columns, and creates and cancels runs."""
        row = self.schedule
        template = template_of(row)
        changes = [self._create(template, name, instant) for name, instant in self.created.items()]
        changes += [cancel.cancelled_change(run, cancel.PARENT, CANCEL_REASON) for run in self._cancelled]
        own: tuple[Write, ...] = (Patch(Schedule, (row.schedule_id,), dict(fields)),) if fields else ()
        return merge_changes(Change((seen_schedule(row),), own), *changes, Change((), writes))

    def _create(self, template: RunTemplate, name: str, instant: int) -> Change:
        ask = run_request(self.schedule, template, name, instant)
        decision = create(None, None, ask, self._now, defaults=self._defaults)
        if isinstance(decision.answer, errors.FabricError):
            raise decision.answer  # the template was checked when the schedule was defined
        assert decision.change is not None
        return decision.change


def run_request(schedule: Schedule, template: RunTemplate, name: str, instant: int) -> CreateExecution:
    """Return the request for a run of a schedule. Its policy names schedule and instant for the task's context."""
    policy = template.policy
    with suppress(msgspec.DecodeError, RecursionError):  # `create` refuses such a policy
        document = msgspec.json.decode(policy) if policy else {}
        if isinstance(document, dict):
            policy = msgspec.json.encode(document | {SCHEDULE_KEY: {"name": schedule.name, "at": instant}}).decode()
    return view_of(
        CreateExecution,
        template,
        execution_id=name,
        partition=partition_of(ExecutionId(name)),
        namespace=schedule.namespace,
        input_payload=schedule.input_payload or b"",
        policy=policy,
        parent_id=schedule.schedule_id,
    )


def seen_schedule(row: Schedule) -> Guard:
    """Return a guard on the schedule as it was loaded."""
    return Guard(Schedule, (row.schedule_id,), row.revision)


def mark_updated(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the time of the change to the columns of a change of the definition or state."""
    return {**fields, "updated_at": NOW}


def template_of(row: Schedule) -> RunTemplate:
    """Return what the runs of a schedule have in common."""
    return msgspec.json.decode(row.template, type=RunTemplate)


def active_of(row: Schedule) -> dict[str, int]:
    """Return the instants of the runs under way, by run."""
    return {} if row.active is None else msgspec.json.decode(row.active, type=dict[str, int])


def pending_of(row: Schedule) -> list[int]:
    """Return the instants whose runs wait for the end of another."""
    return [] if row.pending is None else msgspec.json.decode(row.pending, type=list[int])


def is_foreign(run: Execution | None, schedule: Schedule) -> bool:
    """True for a run that is none of the schedule, but has the id of one, or names the schedule as its parent."""
    return run is not None and (run.parent_id != schedule.schedule_id or run.namespace != schedule.namespace)


def _is_under_way(run: Execution | None) -> bool:
    return run is not None and run.lifecycle_phase is not LifecyclePhase.TERMINAL


def _text(value: Any) -> str | None:
    return msgspec.json.encode(value).decode() if value else None
