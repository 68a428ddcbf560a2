"""Cancel: end an execution from outside, or as its holder."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.model.answers import Cancelled
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptRecordState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules import lease, step
from flowfabric.rules.change import Decision, refuse
from flowfabric.rules.lease import Fence

WORKER = "worker"
FLOW_CASCADE = "flow_cascade"
SYSTEM_TIMEOUT = "system_timeout"
SYSTEM_SOURCES = frozenset({lease.OPERATOR_OVERRIDE, FLOW_CASCADE, SYSTEM_TIMEOUT})


def cancel(row: Execution | None, fence: Fence, source: str, reason: str) -> Decision[Cancelled]:
    """End the execution as cancelled, whatever it was doing.

    Active work is fenced unless a system source asks; an expired lease that nobody took over still counts as its
    last holder's. Cancelling again succeeds and changes nothing; any other end is `execution_not_active`.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        if row.terminal_outcome is TerminalOutcome.CANCELLED:
            return Decision(Cancelled(row.execution_id))
        return refuse(lease.not_active(row))
    if row.lifecycle_phase is LifecyclePhase.ACTIVE and source not in SYSTEM_SOURCES:
        if row.ownership_state is OwnershipState.LEASE_REVOKED:
            return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
        if fence.lease_id is None or fence.lease_epoch is None:
            return refuse(errors.InvalidInput("fence_required"))
        if (fence.lease_id, fence.lease_epoch) != (row.lease_id, row.lease_epoch):
            return refuse(lease.stale(row))
        if fence.attempt_id is not None and fence.attempt_id != row.attempt_id:
            return refuse(lease.stale(row))
    change = step.ended(
        row,
        TerminalOutcome.CANCELLED,
        attempt=AttemptRecordState.ENDED_CANCELLED,
        attempt_reason=f"cancelled: {reason}",
        released="cancelled",
        details=_revoked_by(source),
        settles=source != FLOW_CASCADE,
        cancellation_reason=reason,
        cancelled_by=source or row.execution_id,
    )
    return Decision(Cancelled(row.execution_id), change)


def _revoked_by(source: str) -> str | None:
    """What the lease feed says of a lease that a cancel ended: an operator's doing, a sweep's, or the holder's own."""
    if source == SYSTEM_TIMEOUT:
        return '{"revoked_by":"reconciler"}'
    return '{"revoked_by":"operator"}' if source in SYSTEM_SOURCES else None
