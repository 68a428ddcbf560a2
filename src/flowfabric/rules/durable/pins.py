"""Pins: a run that ends with the version of the code it began with.

The first durable operation of a pinned task requires the version of the worker that runs it. From then on only workers
that offer this version claim the run. A person can unpin it, or move it to another version.
"""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo
from flowfabric.model.instant import NOW
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences, operator, transitions
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.scheduling import capabilities, queue

PIN = "pin:"  # the memo that names the version a run began with; it is written once


def pin_version(
    row: Execution | None, known: StepMemo | None, memo: StepMemo, *, version: str, fence: Fence, now: int
) -> Decision[StepMemo]:
    """Require the version of the holder's code from now on. One that was recorded before stays and is the answer."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if known is not None:
        return Decision(known)
    required = capabilities.with_version(row.required_capabilities, version) or ""
    if invalid := capabilities.check_offer(capabilities.split_tokens(required)):
        return refuse(invalid)
    fields = {"required_capabilities": required, "has_steps": True, "last_mutation_at": NOW}
    change = Change(
        guards=(seen(row, live(row)),),
        writes=(
            Insert(msgspec.structs.replace(memo, recorded_at=NOW)),
            Patch(Execution, (row.execution_id,), fields),
        ),
    )
    return Decision(lambda now: msgspec.structs.replace(memo, recorded_at=now), change)


def unpin(row: Execution | None, version: str | None) -> Decision[bool]:
    """Let workers of any version continue a pinned run, or those of another version; False if nothing changes.

    The current holder of a lease keeps it. A run in a ready queue moves to the queue of its new requirement.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    pinned = capabilities.pinned_version(row.required_capabilities)
    if pinned is None or pinned == version:
        return Decision(False)
    required = capabilities.with_version(row.required_capabilities, version)
    if invalid := capabilities.check_offer(capabilities.split_tokens(required or "")):
        return refuse(invalid)
    moved = msgspec.structs.replace(row, required_capabilities=required)
    if row.lifecycle_phase is LifecyclePhase.RUNNABLE and row.eligibility_state is EligibilityState.BLOCKED_BY_ROUTE:
        fields = operator.unblock_fields(moved) | {"required_capabilities": required}
        patch = transitions.transition(row, fields)
    else:
        fields = {"required_capabilities": required, "last_mutation_at": NOW}
        if row.line is not None:
            is_active = row.lifecycle_phase is LifecyclePhase.ACTIVE
            fields["line"] = queue.takeover_queue(moved) if is_active else queue.queue_of(moved)
        patch = Patch(Execution, (row.execution_id,), fields)
    details = msgspec.json.encode({"old_version": pinned, "new_version": version}).decode()
    change = Change(guards=(seen(row),), writes=(patch,), events=(operator.operator_event(row, "unpinned", details),))
    return Decision(True, change)
