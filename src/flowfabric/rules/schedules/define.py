"""Define, pause, resume, trigger, backfill and delete schedules.

A schedule that is declared in code is put in place again only if its definition has changed; a person's pause stays.
Instants of the old definition that have come are fired in the change that puts the new one in place, or before it if
they are more than one change decides; the new one begins with the first instant after now. So an instant that both have
fires once, and none is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.change import Change, Delete, Insert, Patch, absent
from flowfabric.model.instant import NOW
from flowfabric.model.scheduling.schedule import Overlap, PausedBy, RunTemplate, Schedule, ScheduleSpec
from flowfabric.model.states import PublicState
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.create import NO_DEFAULTS, PolicyDefaults, create
from flowfabric.rules.schedules import recurrence
from flowfabric.rules.schedules.fire import decided_fields, due_instants, fired_plan, next_fields, paused_fields
from flowfabric.rules.schedules.identity import run_id
from flowfabric.rules.schedules.overlap import (
    MAX_ACTIVE,
    MAX_QUEUED,
    Plan,
    Runs,
    mark_updated,
    run_request,
    seen_schedule,
)

PutOutcome = Literal["created", "changed", "unchanged"]
MAX_BACKFILL = 1000  # instants of one backfill


class ScheduleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that is asked for. `owner` is the application that declares it in its code."""

    schedule_id: str
    namespace: str
    name: str
    spec: ScheduleSpec
    template: RunTemplate
    input_payload: bytes = b""
    owner: str | None = None
    only_new: bool = False  # refuse to change one that exists

    @property
    def digest(self) -> str:
        """The digest of the definition. Who submits it does not belong to it."""
        template = msgspec.structs.replace(self.template, creator_identity="")
        text = msgspec.json.encode([self.spec, template, self.owner, self.input_payload], order="deterministic")
        return hashlib.sha256(text).hexdigest()[:32]


class Backfilled(msgspec.Struct, frozen=True):
    """What became of the instants of a backfill; `known` had a run before."""

    created: int = 0
    queued: int = 0
    skipped: int = 0
    known: int = 0


def put(
    row: Schedule | None,
    runs: Runs,
    request: ScheduleRequest,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[PutOutcome | None]:
    """Put a schedule in place; the same definition changes nothing, except that it ends a pause by a deploy.

    The answer is None if only instants were fired, of which there are more: put it again.
    """
    parsed = recurrence.parse_spec(request.spec)
    definition: dict[str, Any] = {
        "spec": msgspec.json.encode(request.spec).decode(),
        "template": msgspec.json.encode(request.template).decode(),
        "digest": request.digest,
        "input_payload": request.input_payload or None,
        "owner": request.owner,
    }
    drafted: Schedule[Any] = Schedule(
        schedule_id=request.schedule_id,
        namespace=request.namespace,
        name=request.name,
        created_at=NOW,
        updated_at=NOW,
        decided_until=now,
        **definition,
        **next_fields(request.schedule_id, request.spec, parsed.next_after(now)),
    )
    if unusable := _unusable_run(drafted, request.template, now, defaults):
        return refuse(unusable)
    if row is None:
        return Decision("created", Change((absent(Schedule, request.schedule_id),), (Insert(drafted),)))
    returns = row.paused_by is PausedBy.DEPLOY
    if row.digest == request.digest and not returns:
        return Decision("unchanged")
    if request.only_new and row.digest != request.digest:
        return refuse(errors.ScheduleExists(f"schedule {row.name!r} exists with another definition; delete it first"))
    due = due_instants(row, now, early=True)
    plan = fired_plan(row, runs, due, now, defaults)
    if due.has_more:
        return Decision(None, plan.change(plan.fields() | decided_fields(row, due)))
    fields = plan.fields() | decided_fields(row, due) | definition
    if row.paused_at is None or returns:
        begin = max(now, due.decided_until)
        fields |= {"decided_until": begin, "paused_at": None, "paused_by": None, "note": None}
        fields |= next_fields(row.schedule_id, request.spec, parsed.next_after(begin))
    else:
        fields |= {"next_at": None, "next_instant": None}
    return Decision("changed", plan.change(mark_updated(fields)))


def pause(row: Schedule | None, note: str) -> Decision[bool]:
    """Pause a schedule: nothing fires, and the queue rests. False if a person has paused it with this note already."""
    if row is None:
        return refuse(errors.NotFound("schedule"))
    if row.paused_by is PausedBy.PERSON and row.note == (note or None):
        return Decision(False)
    return Decision(True, _patch(row, paused_fields(PausedBy.PERSON, note)))


def retire(row: Schedule | None, owner: str, note: str, *, remove: bool) -> Decision[bool]:
    """Pause a schedule that its application no longer declares, or remove it; False if there is nothing to do."""
    if row is None or row.owner != owner:
        return Decision(False)
    if remove:
        return delete(row)
    return (
        Decision(False)
        if row.paused_at is not None
        else Decision(True, _patch(row, paused_fields(PausedBy.DEPLOY, note)))
    )


def resume(row: Schedule | None, runs: Runs, now: int, *, defaults: PolicyDefaults = NO_DEFAULTS) -> Decision[bool]:
    """Resume a schedule with its next instant; those during the pause are skipped. False if it is not paused."""
    if row is None:
        return refuse(errors.NotFound("schedule"))
    if row.paused_at is None:
        return Decision(False)
    parsed = recurrence.parse(row.spec)
    plan = Plan(row, runs, parsed.spec.overlap, now, defaults)
    plan.advance_queue()
    begin = max(now, row.decided_until)
    fields: dict[str, Any] = {"decided_until": begin, "paused_at": None, "paused_by": None, "note": None}
    fields |= next_fields(row.schedule_id, parsed.spec, parsed.next_after(begin))
    return Decision(True, plan.change(mark_updated(plan.fields() | fields)))


def trigger(
    row: Schedule | None, runs: Runs, run: str, now: int, *, defaults: PolicyDefaults = NO_DEFAULTS
) -> Decision[Created | Duplicate]:
    """Create a run now, whatever is under way; also of a paused schedule. The same run again changes nothing."""
    if row is None:
        return refuse(errors.NotFound("schedule"))
    if (existing := runs.get(run)) is not None:
        if existing.parent_id != row.schedule_id:
            return refuse(errors.ConflictError("trigger_id: in use by another run", execution_id=run))
        return Decision(Duplicate(run))
    plan = Plan(row, runs, recurrence.parse(row.spec).spec.overlap, now, defaults)
    if len(plan.active) >= MAX_ACTIVE:
        return refuse(errors.ScheduleBusy(f"{MAX_ACTIVE} runs of it are under way; wait for them, or cancel some"))
    if recurrence.parse(row.spec).spec.overlap is Overlap.ALLOW:
        plan.created[run] = now
    else:
        plan.start(run, now)
    return Decision(Created(run, PublicState.WAITING), plan.change(plan.fields()))


def backfill(
    row: Schedule | None,
    runs: Runs,
    instants: Sequence[int],
    overlap: Overlap,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[Backfilled]:
    """Create the runs of these instants; one that has its run is skipped, so a repeated backfill creates none twice."""
    if row is None:
        return refuse(errors.NotFound("schedule"))
    queues = overlap in (Overlap.QUEUE, Overlap.QUEUE_ONE)
    if queues and row.paused_at is not None:
        return refuse(errors.SchedulePaused('its queue rests: resume it first, or pass overlap="allow"'))
    plan = Plan(row, runs, overlap, now, defaults)
    for instant in instants:
        plan.add(instant)
    if overlap is Overlap.QUEUE and plan.skipped:
        return refuse(
            errors.InvalidInput(
                f"backfill: its queue holds {MAX_QUEUED} runs, and this needs {plan.skipped} more; "
                'choose a shorter time, or pass overlap="allow"'
            )
        )
    answer = Backfilled(len(plan.created), plan.queued, plan.skipped, plan.known)
    if not plan.created and plan.fields() == {}:
        return Decision(answer)
    return Decision(answer, plan.change(plan.fields()))


def backfill_instants(row: Schedule, start: int, end: int, now: int) -> list[int]:
    """Return the instants from `start` to before `end`, or raise `InvalidInput`."""
    if start >= end:
        raise errors.InvalidInput("backfill: start is not before end")
    if end > now:
        raise errors.InvalidInput("backfill: end lies in the future; the schedule fires those instants itself")
    parsed, found = recurrence.parse(row.spec), []
    at = parsed.next_after(start - 1)
    while at is not None and at < end:
        found.append(at)
        if len(found) > MAX_BACKFILL:
            raise errors.InvalidInput(f"backfill: more than {MAX_BACKFILL} instants; choose a shorter time")
        at = parsed.next_after(at)
    return found


def in_order_of_creation(rows: Sequence[Schedule]) -> list[Schedule]:
    """Return schedules of one name, which were created at the same moment: the first one stays."""
    return sorted(rows, key=lambda row: (row.created_at, row.schedule_id))


def delete(row: Schedule | None) -> Decision[bool]:
    """Delete a schedule; its runs continue. False if there is none."""
    if row is None:
        return Decision(False)
    return Decision(True, Change((seen_schedule(row),), (Delete(Schedule, (row.schedule_id,)),)))


def _patch(row: Schedule, fields: dict[str, Any]) -> Change:
    return Change((seen_schedule(row),), (Patch(Schedule, (row.schedule_id,), fields),))


def _unusable_run(
    row: Schedule[Any], template: RunTemplate, now: int, defaults: PolicyDefaults
) -> errors.FabricError | None:
    """Return what would be wrong with the runs of a schedule."""
    probe = create(None, None, run_request(row, template, run_id(row.schedule_id, now), now), now, defaults=defaults)
    return probe.answer if isinstance(probe.answer, errors.FabricError) else None
