"""Cancelling a flow, and cancelling the siblings that a fired join no longer needs.

Both are durable promises kept by others: the header marks the flow and lists the members to cancel; a fired group
lists its remaining upstreams. Whoever cancels a member acknowledges it; what a dead process leaves behind is found in
the backlog. A flow is cancelled once and its list only shrinks, so an empty list stays empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Replayed
from flowfabric.model.answers.flow import HeaderAlreadyTerminal, HeaderCancelled, SiblingDrain, SiblingReconcile
from flowfabric.model.change import NOW, Change, Delete, FromNow, Guard, Insert, Patch, Write, from_now, merge_changes
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


def parse_cancellation_policy(given: object) -> CancellationPolicy | errors.FabricError:
    """A cancellation policy by its name; `cancel_flow_only` is another name of `flow_only`."""
    if given == "cancel_flow_only":
        return CancellationPolicy.FLOW_ONLY
    try:
        return CancellationPolicy(given)  # type: ignore[arg-type]
    except ValueError:
        return errors.InvalidInput(
            f"cancellation_policy: {validation.preview(given)} is none of {', '.join(CancellationPolicy)}"
        )


def check_grace(given: object) -> errors.FabricError | None:
    """A grace is a whole number of milliseconds."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MAX_GRACE_MS:
        return None
    return errors.InvalidGraceMs(f"grace_ms: {given!r}")


def selects(policy: CancellationPolicy, row: Execution) -> bool:
    """Whether the cancel of a flow ends this member too."""
    match policy:
        case CancellationPolicy.CANCEL_ALL:
            return row.lifecycle_phase is not LifecyclePhase.TERMINAL
        case CancellationPolicy.CANCEL_PENDING:
            return row.lifecycle_phase in PENDING_PHASES
        case _:  # also for a policy of a later release: rather too few than too many
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
    """Flip the flow to cancelled and put the members that the policy selects into its backlog.

    Of those that cannot be read nobody knows what they are doing: they are selected when that makes no difference.
    """
    if flow is None:
        return refuse(errors.NotFound("flow"))
    everyone = [member.execution_id for member in members]
    if flow.public_flow_state in TERMINAL_FLOW_STATES:
        return Decision(HeaderAlreadyTerminal(flow.cancellation_policy, flow.cancel_reason, everyone))
    wanted = {name for name, row in rows.items() if selects(policy, row)}
    if policy is CancellationPolicy.CANCEL_ALL:
        wanted.update(unread)
    chosen = [name for name in everyone if name in wanted]
    fields: dict[str, Any] = {
        "public_flow_state": FlowState.CANCELLED,
        "cancelled_at": NOW,
        "cancel_reason": reason,
        "cancellation_policy": policy,
        "last_mutation_at": NOW,
    }
    if not everyone:  # and there will be none: retention has nobody else to wait for
        fields["purge_check_at"] = FromNow(transitions.DEFAULT_RETENTION_MS)
    writes: tuple[Write, ...] = (Patch(Flow, (flow.flow_id,), fields),)
    if chosen:
        writes += (Insert(CancelBacklog(flow.flow_id, from_now(grace_ms), len(chosen))),)
        writes += tuple(Insert(PendingMemberCancel(flow.flow_id, name)) for name in chosen)
    details = {
        "flow_id": flow.flow_id,
        "cancellation_policy": policy.value,
        "reason": reason,
        "member_count": len(everyone),
    }
    event = Event(
        execution_id=flow.flow_id,  # no execution is concerned: the slot names the flow
        namespace=flow.namespace,
        tags=flow.tags,
        flow_id=flow.flow_id,
        operator="flow_cancel_requested",
        details=msgspec.json.encode(details).decode(),
    )
    change = Change(guards=(seen_flow(flow),), writes=writes, events=(event,))
    return Decision(HeaderCancelled(policy, everyone, chosen), change)


def member_reason(flow: Flow | None) -> str:
    """The reason that cancelled members carry."""
    return (flow.cancel_reason if flow is not None else None) or FALLBACK_REASON


def acknowledge_cancels(backlog: CancelBacklog | None, pending: Iterable[PendingMemberCancel]) -> Decision[int]:
    """Strike members off the backlog, and the backlog off when it is empty; how many were struck off."""
    found = tuple(pending)
    if backlog is None or not found:
        return Decision(0)
    left = backlog.remaining - len(found)
    key = (backlog.flow_id,)
    done: Write = Patch(CancelBacklog, key, {"remaining": left}) if left > 0 else Delete(CancelBacklog, key)
    writes = (done, *(Delete(PendingMemberCancel, (one.flow_id, one.execution_id)) for one in found))
    guard = Guard(CancelBacklog, key, backlog.revision)
    return Decision(len(found), Change(guards=(guard,), writes=writes))


def without_pending_cancel(
    replay: Decision[Replayed], backlog: CancelBacklog | None, pending: Iterable[PendingMemberCancel]
) -> Decision[Replayed]:
    """The replay of a member, struck off the backlog if it stands there: what the cancel was for has ended."""
    struck = acknowledge_cancels(backlog, pending).change
    if replay.change is None or struck is None:
        return replay
    return Decision(replay.answer, merge_changes(replay.change, struck))


def drop_backlog(backlog: CancelBacklog | None) -> Decision[bool]:
    """Forget a backlog with everything it lists: its flow is gone, or it lists nobody."""
    if backlog is None:
        return Decision(False)
    key = (backlog.flow_id,)
    guard = Guard(CancelBacklog, key, backlog.revision)
    return Decision(
        True, Change(guards=(guard,), writes=(Delete(CancelBacklog, key), Delete(PendingMemberCancel, key)))
    )


class SiblingCancels(msgspec.Struct, frozen=True):
    """The upstreams that a fired group wants cancelled, and why; `revision` is that of the entry which says so.

    Whoever has just flagged them knows the group's edges, and one of those that have ended.
    """

    siblings: list[str]
    reason: str
    revision: int
    inbound: tuple[Dependency, ...] = ()
    ended: Execution | None = None


def siblings_to_cancel(group: EdgeGroup) -> list[str]:
    """The upstreams that a fired group wants cancelled."""
    return _listed(group.cancel_siblings_pending_members)


def sibling_cancels_of(entry: PendingSiblingCancel, group: EdgeGroup | None) -> SiblingCancels:
    """What a group says of those; it may want nobody cancelled."""
    if group is None or not group.cancel_siblings_pending_flag:
        return SiblingCancels([], "", entry.revision)
    return SiblingCancels(siblings_to_cancel(group), group.cancel_siblings_reason or "", entry.revision)


def sibling_cancels_in(change: Change, key: tuple[str, str], known: Sequence[Any]) -> SiblingCancels | None:
    """What the group of this key says of those after a change that fires it; None when that does not tell.

    `known` are the rows that the change was decided on. Of a group that fires again they do not tell enough: when its
    downstream was replayed its edges were written, and siblings may have been cancelled for its former life and be
    counted by nobody.
    """
    child = next((row for row in known if type(row) is Execution and row.execution_id == key[1]), None)
    if child is None or child.replay_count or child.terminal_outcome is TerminalOutcome.SKIPPED:
        return None
    for write in change.writes:
        if type(write) is Patch and write.row is EdgeGroup and write.key == key:
            fields = write.fields
            if fields.get("cancel_siblings_pending_flag"):
                listed, reason = fields["cancel_siblings_pending_members"], fields["cancel_siblings_reason"]
                names = _listed(listed)
                edges = (row for row in known if type(row) is Dependency)
                inbound = tuple([edge for edge in edges if edge.downstream_execution_id == key[1]])
                upstreams = {one.upstream_execution_id for one in inbound} - set(names)
                ended = (row for row in known if type(row) is Execution and row.execution_id in upstreams)
                return SiblingCancels(names, reason or "", change.id, inbound, next(ended, None))
    return None


def presumably_unstarted(flagged: SiblingCancels) -> list[Dependency]:
    """The edges of those that may be as they were created; none when nothing is known of that."""
    wanted = set(flagged.siblings) if flagged.ended is not None else ()
    return [edge for edge in flagged.inbound if edge.upstream_execution_id in wanted]


def cancel_siblings_without_load(
    flagged: SiblingCancels, edges: Sequence[Dependency]
) -> list[tuple[Change, Execution]]:
    """The cancels of the upstreams of some of these edges, each with the row as it is supposed to be."""
    if flagged.ended is None:
        return []
    return sibling_cancel.cancel_without_load(edges, len(flagged.inbound), flagged.ended, flagged.reason)


def has_no_outcome(edge: Dependency) -> bool:
    """Whether no end of the upstream has been noted on this edge, or counted."""
    return edge.outcome is None and edge.last_resolved_at is None


def unrecorded_outcome(upstream: Execution | None) -> TerminalOutcome | None:
    """How the upstream of such an edge has ended; None for one that lives, or whose end will be noted by itself."""
    if upstream is None or upstream.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return None
    return upstream.terminal_outcome if cancel.may_omit_outcome(upstream) else None


def _listed(members: str | None) -> list[str]:
    return members.split("|") if members else []


def drain_siblings(
    entry: PendingSiblingCancel | None, group: EdgeGroup | None, revision: int | None = None
) -> Decision[SiblingDrain]:
    """Every sibling has been dealt with: clear flag and list, keep the reason.

    `revision` is that of the entry they were seen by: of another one, whose group was reset and has fired anew since,
    the siblings are still to be dealt with.
    """
    if entry is None or revision not in (None, entry.revision):
        return Decision(SiblingDrain.ALREADY_DRAINED)
    answer = SiblingDrain.DRAINED_SANS_GROUP if group is None else SiblingDrain.DRAINED
    return Decision(answer, _drained(entry, group))


def reconcile_siblings(
    entry: PendingSiblingCancel | None,
    group: EdgeGroup | None,
    members: Mapping[str, Execution],
    inbound: Sequence[Dependency],
) -> Decision[SiblingReconcile]:
    """Finish what a crash interrupted; cancels nobody, and leaves a group with a running member alone.

    So it does with one whose members ended a moment ago and are still to be counted.
    """
    if entry is None:
        return Decision(SiblingReconcile.NO_OP)
    if group is None or not group.cancel_siblings_pending_flag:
        return Decision(SiblingReconcile.STALE_REMOVED, _drained(entry, None))
    if any(row.lifecycle_phase is not LifecyclePhase.TERMINAL for row in members.values()):
        return Decision(SiblingReconcile.NO_OP)
    if any(has_no_outcome(edge) and unrecorded_outcome(members.get(edge.upstream_execution_id)) for edge in inbound):
        return Decision(SiblingReconcile.NO_OP)
    return Decision(SiblingReconcile.COMPLETED_DRAIN, _drained(entry, group))


def _drained(entry: PendingSiblingCancel, group: EdgeGroup | None) -> Change:
    key = (entry.flow_id, entry.downstream_execution_id)
    guards: tuple[Guard, ...] = (Guard(PendingSiblingCancel, key, entry.revision),)
    writes: tuple[Write, ...] = (Delete(PendingSiblingCancel, key),)
    if group is not None:
        guards += (seen_group(group, *key),)
        fields = {"cancel_siblings_pending_flag": False, "cancel_siblings_pending_members": None}
        writes = (Patch(EdgeGroup, key, fields), *writes)
    return Change(guards=guards, writes=writes)
