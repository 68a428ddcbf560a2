"""Expire: mark expired leases, and end executions whose attempt timed out or whose deadline passed."""

from __future__ import annotations

from flowfabric.model.answers.execution import AlreadyTerminal, Expired, MarkedExpired, NotDue, NothingToDo
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptRecordState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import fences, transitions

ATTEMPT_TIMEOUT = "attempt_timeout"
EXECUTION_DEADLINE = "execution_deadline"


def mark_lease_expired_if_due(row: Execution | None, now: int) -> Decision[MarkedExpired | NothingToDo]:
    """Mark an expired lease; otherwise answer why there was nothing to mark."""
    if row is None:
        return Decision(NothingToDo("execution_not_found"))
    if row.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return Decision(NothingToDo("not_active"))
    if row.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
        return Decision(NothingToDo("already_expired"))
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return Decision(NothingToDo("already_revoked"))
    if row.ownership_state is OwnershipState.UNOWNED:
        return Decision(NothingToDo("unowned"))
    if not fences.has_expired(row, now):
        return Decision(NothingToDo("not_yet_expired"))
    return Decision(MarkedExpired(row.execution_id), fences.mark_expired(row))


def expire(row: Execution | None, execution_id: str, reason: str) -> Decision[Expired | AlreadyTerminal]:
    """End the execution as expired. Neither the timer is checked nor a retry scheduled."""
    if row is None or row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return Decision(AlreadyTerminal(execution_id))
    return Decision(Expired(execution_id), _expired_change(row, reason))


def expire_if_due(
    row: Execution | None, execution_id: str, reason: str, now: int
) -> Decision[Expired | AlreadyTerminal | NotDue]:
    """Expire the execution if the timer is still armed and due. The sweeps use this form."""
    if row is None or row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return Decision(AlreadyTerminal(execution_id))
    due_at = row.attempt_timeout_at if reason == ATTEMPT_TIMEOUT else row.deadline_at
    if due_at is None or due_at > now:
        return Decision(NotDue(execution_id))
    change = _expired_change(row, reason)
    return Decision(Expired(execution_id), Change(change.guards, change.writes, change.events, not_before=due_at))


def _expired_change(row: Execution, reason: str) -> Change:
    return transitions.terminate(
        row,
        TerminalOutcome.EXPIRED,
        attempt=AttemptRecordState.ENDED_FAILURE,
        attempt_reason=reason,
        release_reason=f"expired:{reason}",
        suspension_reason=f"expired:{reason}",
        failure_reason=reason,
    )
