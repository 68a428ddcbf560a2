"""Operator actions, which need no lease: revoke, change priority, block, unblock."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Blocked, Changed, NothingToDo, Revoked, Unblocked
from flowfabric.model.change import Change, Patch, lease_event, seen
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences, transitions
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import queue

ELIGIBILITY_OF_REASON = {
    BlockingReason.WAITING_FOR_BUDGET: EligibilityState.BLOCKED_BY_BUDGET,
    BlockingReason.WAITING_FOR_QUOTA: EligibilityState.BLOCKED_BY_QUOTA,
    BlockingReason.WAITING_FOR_CAPABLE_WORKER: EligibilityState.BLOCKED_BY_ROUTE,
    BlockingReason.PAUSED_BY_OPERATOR: EligibilityState.BLOCKED_BY_OPERATOR,
    BlockingReason.PAUSED_BY_POLICY: EligibilityState.BLOCKED_BY_LANE_STATE,
}

UNBLOCKABLE = frozenset(
    {
        EligibilityState.BLOCKED_BY_BUDGET,
        EligibilityState.BLOCKED_BY_QUOTA,
        EligibilityState.BLOCKED_BY_ROUTE,
        EligibilityState.BLOCKED_BY_OPERATOR,
    }
)

EXPECTABLE = frozenset(
    {
        BlockingReason.WAITING_FOR_BUDGET,
        BlockingReason.WAITING_FOR_QUOTA,
        BlockingReason.WAITING_FOR_CAPABLE_WORKER,
    }
)


def revoke_lease(
    row: Execution | None, expected_lease_id: str, worker_instance_id: str, reason: str
) -> Decision[Revoked | NothingToDo]:
    """Revoke a lease at once. The execution stays active until it is reclaimed, cancelled or expired."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.ACTIVE:
        if worker_instance_id:
            return refuse(fences.not_active_error(row))
        return Decision(NothingToDo("no_active_lease"))
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return Decision(NothingToDo("already_revoked"))
    if row.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
        return Decision(NothingToDo("already_expired"))
    if row.ownership_state is not OwnershipState.LEASED:
        return refuse(errors.NoActiveLease(execution_id=row.execution_id))
    if worker_instance_id and worker_instance_id != row.worker_instance_id:
        return Decision(NothingToDo("different_worker_instance_id"))
    if expected_lease_id and expected_lease_id != row.lease_id:
        return refuse(fences.stale_lease_error(row))
    fields = {
        "ownership_state": OwnershipState.LEASE_REVOKED,
        "blocking_reason": BlockingReason.WAITING_FOR_WORKER,
        "blocking_text": f"lease revoked: {reason}",
        "attempt_state": AttemptState.ATTEMPT_INTERRUPTED,
        "lease_revoked_at": NOW,
        "lease_revoke_reason": reason,
        "lease_expires_at": None,
        "last_mutation_at": NOW,
        "line": queue.takeover_queue(row),
    }
    change = Change(
        guards=(seen(row),),
        writes=(Patch(Execution, (row.execution_id,), fields),),
        events=(lease_event(row, "revoked", reason=reason),),
    )
    return Decision(Revoked(row.lease_id or "", row.lease_epoch), change)


def change_priority(row: Execution | None, priority: int) -> Decision[Changed]:
    """Change the priority of a claimable execution; its age is kept, in a later life the age of that life."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if not is_eligible(row):
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    priority, terms = queue.clamp_priority(priority), decode_terms(row.terms)
    fields = {
        "priority": priority,
        "rank": queue.queued_at(row, terms) + queue.position_offset(priority, terms),
        "last_mutation_at": NOW,
    }
    details = msgspec.json.encode({"old_priority": row.priority, "new_priority": priority}).decode()
    change = Change(
        guards=(seen(row),),
        writes=(Patch(Execution, (row.execution_id,), fields),),
        events=(operator_event(row, "priority_changed", details),),
    )
    return Decision(Changed(row.execution_id), change)


def block(row: Execution | None, reason: str, detail: str, on: str = "") -> Decision[Blocked]:
    """Make a claimable execution unclaimable for a named reason; `on` is the budget or quota policy that blocks it.

    An execution that waits for a capable worker stays in its ready queue: a worker with the capabilities may claim it
    at once.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(fences.not_active_error(row))
    if not is_eligible(row):
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    reasons = {key.value: key for key in ELIGIBILITY_OF_REASON}
    if reason not in reasons:
        return refuse(errors.InvalidBlockingReason(reason))
    blocking = reasons[reason]
    fields: dict[str, object] = {
        "eligibility_state": ELIGIBILITY_OF_REASON[blocking],
        "blocking_reason": blocking,
        "blocking_text": detail or None,
        "blocked_on": queue.blocked_list_key(row, blocking, on),
        "blocked_at": NOW,
    }
    if blocking is BlockingReason.WAITING_FOR_CAPABLE_WORKER:
        fields["blocked_on"] = queue.blocked_on_key(blocking, row.lane_id)
    else:
        fields["line"] = None
    change = Change(guards=(seen(row),), writes=(transitions.transition(row, fields),))
    return Decision(Blocked(row.execution_id, reason), change)


def unblock(row: Execution | None, expected_reason: str | None) -> Decision[Unblocked]:
    """Make a blocked execution claimable again at its original position."""
    if expected_reason and expected_reason not in {reason.value for reason in EXPECTABLE}:
        return refuse(errors.InvalidBlockingReason(expected_reason))
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE or row.eligibility_state not in UNBLOCKABLE:
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    if expected_reason and row.blocking_reason != expected_reason:
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    change = Change(guards=(seen(row),), writes=(transitions.transition(row, unblock_fields(row)),))
    return Decision(Unblocked(row.execution_id), change)


def unblock_fields(row: Execution) -> dict[str, Any]:
    """Return the columns that make a blocked row claimable again, with the remaining time of its attempt."""
    return queue.enqueue_fields(row, row.attempt_state) | {"next_timeout_ms": row.next_timeout_ms}


def is_eligible(row: Execution) -> bool:
    """True if the execution waits only for a worker."""
    return row.lifecycle_phase is LifecyclePhase.RUNNABLE and row.eligibility_state is EligibilityState.ELIGIBLE_NOW


def operator_event(row: Execution, name: str, details: str, *, lease_name: str | None = None) -> Event:
    """Return an event of the operator feed; with `lease_name` it also appears in the lease history."""
    return Event(
        execution_id=row.execution_id,
        namespace=row.namespace,
        tags=row.tags,
        flow_id=row.flow_id,
        lease=lease_name,
        operator=name,
        details=details,
    )
