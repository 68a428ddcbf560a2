"""What time does: leases lapse, attempts time out, deadlines pass."""

from __future__ import annotations

from flowfabric.model.answers.execution import AlreadyTerminal, Expired, MarkedExpired, NotDue, NothingToDo
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptRecordState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import lease, transitions

ATTEMPT_TIMEOUT = "attempt_timeout"
EXECUTION_DEADLINE = "execution_deadline"


def mark_lease_expired_if_due(row: Execution | None, now: int) -> Decision[MarkedExpired | NothingToDo]:
    """Mark a lapsed lease; says why there was nothing to mark."""
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
    if not lease.has_expired(row, now):
        return Decision(NothingToDo("not_yet_expired"))
    return Decision(MarkedExpired(row.execution_id), lease.mark_expired(row))


def expire(row: Execution | None, execution_id: str, reason: str) -> Decision[Expired | AlreadyTerminal]:
    """End the execution as expired, without asking whether it was due and without a retry."""
    if row is None or row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return Decision(AlreadyTerminal(execution_id))
    return Decision(Expired(execution_id), _expired_change(row, reason))


def expire_if_due(
    row: Execution | None, execution_id: str, reason: str, now: int
) -> Decision[Expired | AlreadyTerminal | NotDue]:
    """The sweep's form: the same, when the timer is still armed and its time has come."""
    if row is None or row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return Decision(AlreadyTerminal(execution_id))
    instant = row.attempt_timeout_at if reason == ATTEMPT_TIMEOUT else row.deadline_at
    if instant is None or instant > now:
        return Decision(NotDue(execution_id))
    change = _expired_change(row, reason)
    return Decision(Expired(execution_id), Change(change.guards, change.writes, change.events, not_before=instant))


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
