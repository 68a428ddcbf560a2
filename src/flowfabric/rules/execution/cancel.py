"""Cancel: end an execution from outside, or as its holder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from flowfabric import errors
from flowfabric.model.answers.execution import Cancelled, ChildrenCancelled
from flowfabric.model.change import Change, RowTemplate, as_template, live, merge_changes, seen
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptRecordState, AttemptState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import lease, transitions
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.flow import successors

WORKER = "worker"
PARENT = "parent"
FLOW_CASCADE = "flow_cascade"
SYSTEM_TIMEOUT = "system_timeout"
SYSTEM_SOURCES = frozenset({lease.OPERATOR_OVERRIDE, FLOW_CASCADE, SYSTEM_TIMEOUT})
QUORUM_SATISFIED = "sibling_quorum_satisfied"
QUORUM_IMPOSSIBLE = "sibling_quorum_impossible"
SIBLING_REASONS = (QUORUM_SATISFIED, QUORUM_IMPOSSIBLE)


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
        return refuse(lease.not_active_error(row))
    if row.lifecycle_phase is LifecyclePhase.ACTIVE and source not in SYSTEM_SOURCES:
        if row.ownership_state is OwnershipState.LEASE_REVOKED:
            return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
        if fence.lease_id is None or fence.lease_epoch is None:
            return refuse(errors.InvalidInput("fence_required"))
        if (fence.lease_id, fence.lease_epoch) != (row.lease_id, row.lease_epoch):
            return refuse(lease.stale_lease_error(row))
        if fence.attempt_id is not None and fence.attempt_id != row.attempt_id:
            return refuse(lease.stale_lease_error(row))
    if form := sibling_cancel_template(row, source, reason):
        also = successors.outcome_writes(row, TerminalOutcome.CANCELLED)
        return Decision(Cancelled(row.execution_id), Change((seen(row),), also, template=form))
    return Decision(Cancelled(row.execution_id), cancelled_change(row, source, reason))


def may_omit_outcome(row: Execution) -> bool:
    """Whether the cancel of this execution may have said nothing on the edges that lead away from it.

    Those that its flow's cascade ended are counted by a reconciler, unneeded siblings by whoever cancelled them; but
    siblings that many wait for are never cancelled unseen.
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
    """End executions as their parent, which has to hold its lease while it does.

    One that is no child of it is refused as if it did not exist, and then nothing changes. One that has ended is left
    as it is.
    """
    if parent is None:
        return refuse(errors.NotFound("execution"))
    held = lease.resolve_fence(parent, fence, None)
    if isinstance(held, errors.FabricError):
        return refuse(held)
    if refused := lease.check_lease(parent, held, now):
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
    holds = Change((seen(parent, live(parent)),))
    return Decision(ChildrenCancelled(cancelled, tuple(ended)), merge_changes(holds, *changes) if changes else None)


def cancelled_change(row: Execution, source: str, reason: str) -> Change:
    return transitions.terminate(
        row,
        TerminalOutcome.CANCELLED,
        attempt=AttemptRecordState.ENDED_CANCELLED,
        attempt_reason=f"cancelled: {reason}",
        release_reason="cancelled",
        details=_revoked_by(source),
        records_outcome=source != FLOW_CASCADE,
        cancellation_reason=reason,
        cancelled_by=source or row.execution_id,
    )


def _revoked_by(source: str) -> str | None:
    """Who ended a lease that a cancel ended, for the lease feed: somebody else, a sweep, or the holder itself."""
    if source == SYSTEM_TIMEOUT:
        return '{"revoked_by":"reconciler"}'
    return '{"revoked_by":"operator"}' if source in SYSTEM_SOURCES or source == PARENT else None


# Work that was never started, and to which nothing is attached.
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
_known = attrgetter(*UNSTARTED_FIELDS)
_UNSTARTED_VALUES = tuple(UNSTARTED_FIELDS.values())


def sibling_cancel_template(row: Execution, source: str, reason: str) -> RowTemplate | None:
    """The cancel of a sibling that was never started: the same for all of them; None for any other cancel."""
    if source != lease.OPERATOR_OVERRIDE or reason not in SIBLING_REASONS:
        return None
    if _known(row) != _UNSTARTED_VALUES or decode_terms(row.terms).quota_policy_ids:
        return None
    return sibling_template(transitions.retention_ms(row), reason, row.flow_id is not None)


@lru_cache(maxsize=256)
def sibling_template(kept_ms: int, reason: str, is_member: bool) -> RowTemplate:
    return as_template(
        cancelled_change(
            transitions.template_row(UNSTARTED_FIELDS, kept_ms, is_member=is_member), lease.OPERATOR_OVERRIDE, reason
        )
    )
