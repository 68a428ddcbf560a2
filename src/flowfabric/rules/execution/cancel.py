"""Cancel: end an execution as its lease holder, its parent, an operator or the system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from flowfabric import errors
from flowfabric.model.answers.execution import Cancelled, ChildrenCancelled
from flowfabric.model.change import (
    Change,
    Delete,
    Guard,
    RowTemplate,
    Write,
    as_template,
    live,
    merge_changes,
    seen,
)
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCancel
from flowfabric.model.states import AttemptRecordState, AttemptState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences, lease, transitions
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.flow import successors

WORKER = "worker"
PARENT = "parent"
KEY = "key"  # a later submit with the same key
FLOW_CASCADE = "flow_cascade"
SYSTEM_TIMEOUT = "system_timeout"
SYSTEM_SOURCES = frozenset({fences.OPERATOR_OVERRIDE, FLOW_CASCADE, SYSTEM_TIMEOUT})
QUORUM_SATISFIED = "sibling_quorum_satisfied"
QUORUM_IMPOSSIBLE = "sibling_quorum_impossible"
SIBLING_REASONS = (QUORUM_SATISFIED, QUORUM_IMPOSSIBLE)


def cancel(row: Execution | None, fence: Fence, source: str, reason: str) -> Decision[Cancelled]:
    """End the execution as cancelled.

    Active work needs the current fence unless a system source asks. After a lease has expired its last holder may still
    cancel, as long as no other worker took over. Cancelling a cancelled execution succeeds and changes nothing; any
    other terminal outcome is refused with `execution_not_active`.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        if row.terminal_outcome is TerminalOutcome.CANCELLED:
            return Decision(Cancelled(row.execution_id))
        return refuse(fences.not_active_error(row))
    if row.lifecycle_phase is LifecyclePhase.ACTIVE and source not in SYSTEM_SOURCES:
        if row.ownership_state is OwnershipState.LEASE_REVOKED:
            return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
        if fence.lease_id is None or fence.lease_epoch is None:
            return refuse(errors.InvalidInput("fence_required"))
        if (fence.lease_id, fence.lease_epoch) != (row.lease_id, row.lease_epoch):
            return refuse(fences.stale_lease_error(row))
        if fence.attempt_id is not None and fence.attempt_id != row.attempt_id:
            return refuse(fences.stale_lease_error(row))
    if template := sibling_cancel_template(row, source, reason):
        outcome_writes = successors.outcome_writes(row, TerminalOutcome.CANCELLED)
        return Decision(Cancelled(row.execution_id), Change((seen(row),), outcome_writes, template=template))
    return Decision(Cancelled(row.execution_id), cancelled_change(row, source, reason))


def may_omit_outcome(row: Execution) -> bool:
    """True if cancelling this execution may have skipped the outcome on its outgoing edges.

    The dependency reconciler records the outcome of members that a flow cascade cancelled; the canceller of an unneeded
    sibling records it for that sibling. Siblings with many successors always record it themselves.
    """
    unseen = row.cancellation_reason in SIBLING_REASONS and row.successors != successors.MANY
    return unseen or row.cancelled_by == FLOW_CASCADE


def cancel_children(
    parent: Execution | None,
    fence: Fence,
    children: Mapping[str, Execution | None],
    reason: str,
    now: int,
) -> Decision[ChildrenCancelled]:
    """Cancel executions on behalf of their parent, which must hold its lease.

    An id that is not a child of the parent is refused as not found, and then nothing changes. Children that have ended
    are left as they are; `ended` lists those with another outcome than cancelled.
    """
    if parent is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_fence(parent, fence, None, now):
        return refused
    ended: list[str] = []
    changes: list[Change] = []
    for name, child in children.items():
        if child is None or child.parent_id != parent.execution_id:
            return refuse(errors.NotFound("execution", execution_id=name))
        if child.lifecycle_phase is not LifecyclePhase.TERMINAL:
            changes.append(cancelled_change(child, PARENT, reason))
        elif child.terminal_outcome is not TerminalOutcome.CANCELLED:
            ended.append(name)
    cancelled = tuple(name for name in children if name not in ended)
    parent_guard = Change((seen(parent, live(parent)),))
    return Decision(
        ChildrenCancelled(cancelled, tuple(ended)), merge_changes(parent_guard, *changes) if changes else None
    )


def cancel_abandoned(
    parent: Execution | None, pending: ChildCancel | None, children: Sequence[Execution], *, more: bool
) -> Decision[int]:
    """Cancel children of a parent that was cancelled or has expired; answer how many.

    Detached children are left alone. A parent that was replayed meanwhile keeps its children. Without `more` children
    to come, nothing is pending any longer.
    """
    if pending is None:
        return Decision(0)
    is_over = parent is None or parent.lifecycle_phase is LifecyclePhase.TERMINAL
    abandoned = [
        child
        for child in children
        if is_over
        and child.parent_id == pending.parent_id
        and child.lifecycle_phase is not LifecyclePhase.TERMINAL
        and not decode_terms(child.terms).detached
    ]
    outcome = "cancelled" if parent is None else parent.terminal_outcome.value
    changes = [cancelled_change(child, PARENT, f"its parent was {outcome}") for child in abandoned]
    own: tuple[Write, ...] = () if more and is_over else (Delete(ChildCancel, (pending.parent_id,)),)
    if not changes and not own:
        return Decision(0)
    guards: tuple[Guard, ...] = (Guard(ChildCancel, (pending.parent_id,), pending.revision),)
    if parent is not None:
        guards += (seen(parent),)
    return Decision(len(abandoned), merge_changes(Change(guards, own), *changes))


def cancelled_change(row: Execution, source: str, reason: str) -> Change:
    """Return the change that ends a row as cancelled. A flow cascade leaves the successors to the reconciler."""
    return transitions.terminate(
        row,
        TerminalOutcome.CANCELLED,
        attempt=AttemptRecordState.ENDED_CANCELLED,
        attempt_reason=f"cancelled: {reason}",
        release_reason="cancelled",
        details=_revocation_details(source),
        records_outcome=source != FLOW_CASCADE,
        cancellation_reason=reason,
        cancelled_by=source or row.execution_id,
    )


def _revocation_details(source: str) -> str | None:
    """Return the event details that say who revoked the lease; None if the holder itself cancelled."""
    if source == SYSTEM_TIMEOUT:
        return '{"revoked_by":"reconciler"}'
    return '{"revoked_by":"operator"}' if source in SYSTEM_SOURCES or source in (PARENT, KEY) else None


# Columns of a row that was never started and has no stream, parent, suspension or grant.
UNSTARTED_FIELDS: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.RUNNABLE,
    "ownership_state": OwnershipState.UNOWNED,
    "attempt_state": AttemptState.PENDING_FIRST_ATTEMPT,
    "terminal_outcome": TerminalOutcome.NONE,
    "attempt_index": None,
    "stream_index": None,
    "parent_id": None,
    **{name: None for name in transitions.LIFE_FIELDS.names if name != "blocking_text"},
}
_unstarted_values = attrgetter(*UNSTARTED_FIELDS)
_UNSTARTED_VALUES = tuple(UNSTARTED_FIELDS.values())


def sibling_cancel_template(row: Execution, source: str, reason: str) -> RowTemplate | None:
    """Return the shared template for cancelling a sibling that never started; None for any other cancel."""
    if source != fences.OPERATOR_OVERRIDE or reason not in SIBLING_REASONS:
        return None
    if _unstarted_values(row) != _UNSTARTED_VALUES or decode_terms(row.terms).quota_policy_ids:
        return None
    return sibling_template(transitions.retention_ms(row), reason, row.flow_id is not None)


@lru_cache(maxsize=256)
def sibling_template(retention_ms: int, reason: str, is_member: bool) -> RowTemplate:
    """Build the template of such a cancel. It is the same for all rows with these three properties."""
    return as_template(
        cancelled_change(
            transitions.template_row(UNSTARTED_FIELDS, retention_ms, is_member=is_member),
            fences.OPERATOR_OVERRIDE,
            reason,
        )
    )


def cancel_as_holder(row: Execution | None, fence: Fence, reason: str) -> Decision[Cancelled]:
    """Cancel for the holder of the current lease, or of the last one while its attempt is open.

    The lease may have expired without a takeover, or the attempt may be suspended or delayed (execution.md 4.15).
    Repeating it succeeds for the holder whose attempt was cancelled, no matter who cancelled it.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        is_theirs = (fence.lease_epoch, fence.attempt_id) == (row.lease_epoch, row.attempt_id)
        if row.terminal_outcome is TerminalOutcome.CANCELLED and is_theirs:
            return Decision(Cancelled(row.execution_id))
        return refuse(fences.not_active_error(row))
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
    is_last = (fence.lease_id, fence.lease_epoch, fence.attempt_id) == (row.lease_id, row.lease_epoch, row.attempt_id)
    if not is_last or not lease.has_open_attempt(row):
        return refuse(fences.stale_lease_error(row))
    return cancel(row, fence, WORKER, reason)
