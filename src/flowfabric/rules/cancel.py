"""Cancel: end an execution from outside, or as its holder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers import Cancelled, ChildrenCancelled
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency
from flowfabric.model.states import AttemptRecordState, AttemptState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.rules import lease, step, successors
from flowfabric.rules.change import Change, Decision, Form, Like, as_form, joined, live, refuse, seen, supposed
from flowfabric.rules.lease import Fence
from flowfabric.rules.policy import decode_terms

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
    if form := sibling_form(row, source, reason):
        also = successors.settled(row, TerminalOutcome.CANCELLED)
        return Decision(Cancelled(row.execution_id), Change((seen(row),), also, form=form))
    return Decision(Cancelled(row.execution_id), _ended(row, source, reason))


def leaves_no_note(row: Execution) -> bool:
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
            changes.append(_ended(child, PARENT, reason))
        elif child.terminal_outcome is not TerminalOutcome.CANCELLED:
            ended.append(name)
    cancelled = tuple(name for name in children if name not in ended)
    holds = Change((seen(parent, live(parent)),))
    return Decision(ChildrenCancelled(cancelled, tuple(ended)), joined(holds, *changes) if changes else None)


def _ended(row: Execution, source: str, reason: str) -> Change:
    return step.ended(
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


# Work that was never started, and to which nothing is attached.
UNSTARTED: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.RUNNABLE,
    "ownership_state": OwnershipState.UNOWNED,
    "attempt_state": AttemptState.PENDING_FIRST_ATTEMPT,
    "terminal_outcome": TerminalOutcome.NONE,
    "attempt_index": None,
    "stream_index": None,
    "parent_id": None,
    **{name: None for name in step.LIFE_LEAVES.names if name != "blocking_text"},
}
_known = attrgetter(*UNSTARTED)
_UNSTARTED_VALUES = tuple(UNSTARTED.values())


def sibling_form(row: Execution, source: str, reason: str) -> Form | None:
    """The cancel of a sibling that was never started: the same for all of them; None for any other cancel."""
    if source != lease.OPERATOR_OVERRIDE or reason not in SIBLING_REASONS:
        return None
    if _known(row) != _UNSTARTED_VALUES or decode_terms(row.terms).quota_policy_ids:
        return None
    return _sibling_form(step.retention_ms(row), reason, row.flow_id is not None)


# Born with another one: what is known of both by the birth of one. Who waits for it is known from its edge.
BORN = ("lane_id", "flow_id", "created_at", "terms")
AS_BORN = Like(UNSTARTED, own=(*BORN, "successors"))
_born = attrgetter(*BORN)


def cancel_unseen(
    edges: Iterable[Dependency], inbound: int, other: Execution, reason: str
) -> list[tuple[Change, Execution]]:
    """What `cancel` says of the upstreams of these edges if they are as they were born, with `other`; stores prove it.

    Each comes with the row of which that is said, where `Own` stands for what is not known. None come when they would
    need a look. `inbound` counts the edges that lead to the downstream.

    One thing is left out: the ends are not noted on the edges. The downstream's group has fired and is in no hurry to
    know of them; whoever cancels them counts them together, and their purge notes what nobody has counted.
    """
    if reason not in SIBLING_REASONS or decode_terms(other.terms).quota_policy_ids:
        return []
    kept_ms, born = step.retention_ms(other), _born(other)
    form = _sibling_form(kept_ms, reason, other.flow_id is not None)
    model = msgspec.structs.replace(_unseen_sibling(kept_ms), **dict(zip(BORN, born, strict=True)))
    found = []
    for edge in edges:
        name, waits = edge.upstream_execution_id, successors.only(edge, inbound)
        row = msgspec.structs.replace(model, execution_id=name, successors=waits)
        guard = supposed(Execution, AS_BORN, name, own=(*born, waits))
        found.append((Change((guard,), form=form), row))
    return found


@lru_cache(maxsize=256)
def _unseen_sibling(kept_ms: int) -> Execution:
    return step.unseen(UNSTARTED, kept_ms, is_member=True)


@lru_cache(maxsize=256)
def _sibling_form(kept_ms: int, reason: str, is_member: bool) -> Form:
    return as_form(_ended(step.unseen(UNSTARTED, kept_ms, is_member=is_member), lease.OPERATOR_OVERRIDE, reason))


def _revoked_by(source: str) -> str | None:
    """Who ended a lease that a cancel ended, for the lease feed: somebody else, a sweep, or the holder itself."""
    if source == SYSTEM_TIMEOUT:
        return '{"revoked_by":"reconciler"}'
    return '{"revoked_by":"operator"}' if source in SYSTEM_SOURCES or source == PARENT else None
