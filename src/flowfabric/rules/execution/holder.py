"""Operations on behalf of a handle from outside.

The engine's own operations trust their caller; these check the handle first. A handle proves its lease only if the
execution still has that lease. Cancel is also open to the last holder while its attempt is open (execution.md 4.15):
its lease may have expired without a takeover, or the attempt may be suspended or delayed.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowfabric import errors
from flowfabric.model.answers.execution import Cancelled
from flowfabric.model.change import live
from flowfabric.model.execution import Execution
from flowfabric.model.states import LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import cancel, lease
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.lease import Fence


def cancel_as_holder(row: Execution | None, fence: Fence, reason: str) -> Decision[Cancelled]:
    """Cancel for the holder of the current lease, or of the last one while its attempt is open.

    Repeating it succeeds for the holder whose attempt was cancelled, no matter who cancelled it.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        is_theirs = (fence.lease_epoch, fence.attempt_id) == (row.lease_epoch, row.attempt_id)
        if row.terminal_outcome is TerminalOutcome.CANCELLED and is_theirs:
            return Decision(Cancelled(row.execution_id))
        return refuse(lease.not_active_error(row))
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
    is_last = (fence.lease_id, fence.lease_epoch, fence.attempt_id) == (row.lease_id, row.lease_epoch, row.attempt_id)
    if not is_last or not lease.has_open_attempt(row):
        return refuse(lease.stale_lease_error(row))
    return cancel.cancel(row, fence, cancel.WORKER, reason)


def set_tags_as_holder(row: Execution | None, fence: Fence, pairs: Mapping[str, str], now: int) -> Decision[int]:
    """Upsert tags, reserved ones included, for the holder of the current lease."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := lease.check_lease(row, fence, now):
        return refused
    if invalid := tag_rules.check_tags(pairs, allow_reserved=True):
        return refuse(invalid)
    return tag_rules.set_tags(row, pairs, live(row))
