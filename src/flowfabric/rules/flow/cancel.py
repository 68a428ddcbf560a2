"""Cancel a flow, and cancel the siblings that a fired join no longer needs.

Both are recorded first and carried out later. Cancelling a flow marks the flow row and lists the members to cancel in a
backlog; a fired group lists its remaining upstreams. The process that cancels a member acknowledges it, and reconcilers
finish what a crashed process left behind. A flow is cancelled once and its backlog only shrinks, so an empty backlog
stays empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Replayed
from flowfabric.model.answers.flow import HeaderAlreadyTerminal, HeaderCancelled, SiblingDrain, SiblingReconcile
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Write, merge_changes
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    CancelBacklog,
    CancellationPolicy,
    Dependency,
    EdgeGroup,
    Flow,
    FlowMember,
    FlowState,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import cancel, transitions
from flowfabric.rules.flow import sibling_cancel
from flowfabric.rules.flow.build import TERMINAL_FLOW_STATES, seen_flow, seen_group

GRACE_MS = 30_000
MAX_GRACE_MS = 2**53 - 1
FALLBACK_REASON = "flow_cancelled"
PENDING_PHASES = frozenset({LifecyclePhase.SUBMITTED, LifecyclePhase.RUNNABLE})


def parse_cancellation_policy(name: object) -> CancellationPolicy:
    """Parse a cancellation policy; `cancel_flow_only` is an alias of `flow_only`."""
    if name == "cancel_flow_only":
        return CancellationPolicy.FLOW_ONLY
    return validation.choice(CancellationPolicy, "cancellation_policy", name)


def check_grace(grace_ms: object) -> errors.FabricError | None:
    """Refuse a grace period that is not a whole number of milliseconds in range."""
    if isinstance(grace_ms, int) and not isinstance(grace_ms, bool) and 0 <= grace_ms <= MAX_GRACE_MS:
        return None
    return errors.InvalidGraceMs(f"grace_ms: {grace_ms!r}")


def selects(policy: CancellationPolicy, row: Execution) -> bool:
    """True if cancelling the flow with this policy also cancels the member."""
    match policy:
        case CancellationPolicy.CANCEL_ALL:
            return row.lifecycle_phase is not LifecyclePhase.TERMINAL
        case CancellationPolicy.CANCEL_PENDING:
            return row.lifecycle_phase in PENDING_PHASES
        case _:  # also for a policy of a later release: cancel too few rather than too many
            return False


def cancel_header(
    flow: Flow | None,
    members: Sequence[FlowMember],
    rows: Mapping[str, Execution],
    *,
    unread: Sequence[str] = (),
    reason: str,
    policy: CancellationPolicy,
    grace_ms: int = GRACE_MS,
) -> Decision[HeaderCancelled | HeaderAlreadyTerminal]:
    """Mark the flow as cancelled and put the members that the policy selects into its backlog.

    The state of `unread` members is unknown; they are selected only if the policy selects every member that has not
    ended.
    """
    if flow is None:
        return refuse(errors.NotFound("flow"))
    member_ids = [member.execution_id for member in members]
    if flow.public_flow_state in TERMINAL_FLOW_STATES:
        return Decision(HeaderAlreadyTerminal(flow.cancellation_policy, flow.cancel_reason, member_ids))
    selected = {name for name, row in rows.items() if selects(policy, row)}
    if policy is CancellationPolicy.CANCEL_ALL:
        selected.update(unread)
    backlog = [name for name in member_ids if name in selected]
    fields: dict[str, Any] = {
        "public_flow_state": FlowState.CANCELLED,
        "cancelled_at": NOW,
        "cancel_reason": reason,
        "cancellation_policy": policy,
        "last_mutation_at": NOW,
    }
    if not member_ids:  # a cancelled flow gets no members, so retention waits for nothing else
        fields["purge_check_at"] = FromNow(transitions.DEFAULT_RETENTION_MS)
    writes: tuple[Write, ...] = (Patch(Flow, (flow.flow_id,), fields),)
    if backlog:
        writes += (Insert(CancelBacklog(flow.flow_id, FromNow(grace_ms), len(backlog))),)
        writes += tuple(Insert(PendingMemberCancel(flow.flow_id, name)) for name in backlog)
    details = {
        "flow_id": flow.flow_id,
        "cancellation_policy": policy.value,
        "reason": reason,
        "member_count": len(member_ids),
    }
    event = Event(
        execution_id=flow.flow_id,  # the event concerns no execution, so this field names the flow
        namespace=flow.namespace,
        tags=flow.tags,
        flow_id=flow.flow_id,
        operator="flow_cancel_requested",
        details=msgspec.json.encode(details).decode(),
    )
    change = Change(guards=(seen_flow(flow),), writes=writes, events=(event,))
    return Decision(HeaderCancelled(policy, member_ids, backlog), change)


def member_reason(flow: Flow | None) -> str:
    """Return the reason that cancelled members carry."""
    return (flow.cancel_reason if flow is not None else None) or FALLBACK_REASON


def acknowledge_cancels(backlog: CancelBacklog | None, pending: Iterable[PendingMemberCancel]) -> Decision[int]:
    """Remove members from the backlog, and the backlog once it is empty; answer how many were removed."""
    acknowledged = tuple(pending)
    if backlog is None or not acknowledged:
        return Decision(0)
    left = backlog.remaining - len(acknowledged)
    key = (backlog.flow_id,)
    backlog_write: Write = Patch(CancelBacklog, key, {"remaining": left}) if left > 0 else Delete(CancelBacklog, key)
    writes = (
        backlog_write,
        *(Delete(PendingMemberCancel, (entry.flow_id, entry.execution_id)) for entry in acknowledged),
    )
    guard = Guard(CancelBacklog, key, backlog.revision)
    return Decision(len(acknowledged), Change(guards=(guard,), writes=writes))


def without_pending_cancel(
    replay: Decision[Replayed], backlog: CancelBacklog | None, pending: Iterable[PendingMemberCancel]
) -> Decision[Replayed]:
    """Return a member's replay that also removes it from the backlog, because its former run has ended."""
    removal = acknowledge_cancels(backlog, pending).change
    if replay.change is None or removal is None:
        return replay
    return Decision(replay.answer, merge_changes(replay.change, removal))


def drop_backlog(backlog: CancelBacklog | None) -> Decision[bool]:
    """Delete a backlog with all its entries, because its flow is gone or no entry is left."""
    if backlog is None:
        return Decision(False)
    key = (backlog.flow_id,)
    guard = Guard(CancelBacklog, key, backlog.revision)
    return Decision(
        True, Change(guards=(guard,), writes=(Delete(CancelBacklog, key), Delete(PendingMemberCancel, key)))
    )


class SiblingCancels(msgspec.Struct, frozen=True):
    """The upstreams that a fired group wants cancelled, and why.

    `revision` is the revision of the pending entry. The process that has just fired the group also knows its edges
    (`inbound`) and one upstream that has ended.
    """

    siblings: list[str]
    reason: str
    revision: int
    inbound: tuple[Dependency, ...] = ()
    ended: Execution | None = None


def siblings_to_cancel(group: EdgeGroup) -> list[str]:
    """Return the upstreams that a fired group wants cancelled."""
    return _split_ids(group.cancel_siblings_pending_members)


def sibling_cancels_of(entry: PendingSiblingCancel, group: EdgeGroup | None) -> SiblingCancels:
    """Return the siblings that a group wants cancelled, possibly none."""
    if group is None or not group.cancel_siblings_pending_flag:
        return SiblingCancels([], "", entry.revision)
    return SiblingCancels(siblings_to_cancel(group), group.cancel_siblings_reason or "", entry.revision)


def sibling_cancels_in(change: Change, key: tuple[str, str], known: Sequence[Any]) -> SiblingCancels | None:
    """Return the siblings to cancel after a change that fires the group; None if they must be loaded.

    `known` are the rows that the change was decided on. They do not suffice for a group that fires again after its
    downstream was replayed: its edges were rewritten, and siblings cancelled for the former run may not be counted yet.
    """
    child = next((row for row in known if type(row) is Execution and row.execution_id == key[1]), None)
    if child is None or child.replay_count or child.terminal_outcome is TerminalOutcome.SKIPPED:
        return None
    for write in change.writes:
        if type(write) is Patch and write.row is EdgeGroup and write.key == key:
            fields = write.fields
            if fields.get("cancel_siblings_pending_flag"):
                members, reason = fields["cancel_siblings_pending_members"], fields["cancel_siblings_reason"]
                siblings = _split_ids(members)
                edges = (row for row in known if type(row) is Dependency)
                inbound = tuple([edge for edge in edges if edge.downstream_execution_id == key[1]])
                upstreams = {edge.upstream_execution_id for edge in inbound} - set(siblings)
                ended = (row for row in known if type(row) is Execution and row.execution_id in upstreams)
                return SiblingCancels(siblings, reason or "", change.id, inbound, next(ended, None))
    return None


def presumably_unstarted(flagged: SiblingCancels) -> list[Dependency]:
    """Return the edges of siblings that may still be as they were created; none if that is unknown."""
    wanted = set(flagged.siblings) if flagged.ended is not None else ()
    return [edge for edge in flagged.inbound if edge.upstream_execution_id in wanted]


def cancel_siblings_without_load(
    flagged: SiblingCancels, edges: Sequence[Dependency]
) -> list[tuple[Change, Execution]]:
    """Return cancels of upstreams that were not loaded, each with the row that is expected."""
    if flagged.ended is None:
        return []
    return sibling_cancel.cancel_without_load(edges, len(flagged.inbound), flagged.ended, flagged.reason)


def has_no_outcome(edge: Dependency) -> bool:
    """True if the edge has neither a recorded nor a counted outcome."""
    return edge.outcome is None and edge.last_resolved_at is None


def unrecorded_outcome(upstream: Execution | None) -> TerminalOutcome | None:
    """Return the outcome of an upstream that did not record it; None if it lives or records it itself."""
    if upstream is None or upstream.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return None
    return upstream.terminal_outcome if cancel.may_omit_outcome(upstream) else None


def _split_ids(members: str | None) -> list[str]:
    return members.split("|") if members else []


def drain_siblings(
    entry: PendingSiblingCancel | None, group: EdgeGroup | None, revision: int | None = None
) -> Decision[SiblingDrain]:
    """Clear the flag and the list once every sibling has been handled; the reason stays.

    With `revision`, a newer entry is left alone: its group was reset and fired again since, and its siblings are still
    to be cancelled.
    """
    if entry is None or revision not in (None, entry.revision):
        return Decision(SiblingDrain.ALREADY_DRAINED)
    answer = SiblingDrain.DRAINED_SANS_GROUP if group is None else SiblingDrain.DRAINED
    return Decision(answer, _drain_change(entry, group))


def reconcile_siblings(
    entry: PendingSiblingCancel | None,
    group: EdgeGroup | None,
    members: Mapping[str, Execution],
    inbound: Sequence[Dependency],
) -> Decision[SiblingReconcile]:
    """Finish a drain that a crash interrupted, without cancelling anything.

    A group with a running member is left alone, and so is one whose members have ended but are not counted yet.
    """
    if entry is None:
        return Decision(SiblingReconcile.NO_OP)
    if group is None or not group.cancel_siblings_pending_flag:
        return Decision(SiblingReconcile.STALE_REMOVED, _drain_change(entry, None))
    if any(row.lifecycle_phase is not LifecyclePhase.TERMINAL for row in members.values()):
        return Decision(SiblingReconcile.NO_OP)
    if any(has_no_outcome(edge) and unrecorded_outcome(members.get(edge.upstream_execution_id)) for edge in inbound):
        return Decision(SiblingReconcile.NO_OP)
    return Decision(SiblingReconcile.COMPLETED_DRAIN, _drain_change(entry, group))


def _drain_change(entry: PendingSiblingCancel, group: EdgeGroup | None) -> Change:
    """Return the change that removes the entry and, with a group, clears its list."""
    key = (entry.flow_id, entry.downstream_execution_id)
    guards: tuple[Guard, ...] = (Guard(PendingSiblingCancel, key, entry.revision),)
    writes: tuple[Write, ...] = (Delete(PendingSiblingCancel, key),)
    if group is not None:
        guards += (seen_group(group, *key),)
        fields = {"cancel_siblings_pending_flag": False, "cancel_siblings_pending_members": None}
        writes = (Patch(EdgeGroup, key, fields), *writes)
    return Change(guards=guards, writes=writes)
