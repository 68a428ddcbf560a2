"""Dependencies: let a downstream wait for an upstream, promote it when its join is satisfied, replay a skipped one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Moved, Replayed
from flowfabric.model.answers.flow import DependencyAlreadyApplied, DependencyApplied, Eligibility
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write, merge_changes, seen
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    Dependency,
    DependencyKind,
    DependencyState,
    Edge,
    EdgeGroup,
    GroupState,
    JoinPolicyKind,
    OnSatisfied,
    PendingSiblingCancel,
)
from flowfabric.model.instant import NOW, Draft
from flowfabric.model.states import (
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import delay, replay, transitions
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.flow import downstreams, joins
from flowfabric.rules.flow.build import JoinPolicy, already_in_flow, new_group, seen_group
from flowfabric.rules.flow.successors import successor, with_successors
from flowfabric.rules.scheduling import queue

SKIPPED_MEMBER = "skipped_flow_member"


class ApplyDependency(msgspec.Struct, frozen=True):
    """A staged edge that its downstream shall wait for; unset parts are taken from the edge."""

    flow_id: str
    edge_id: str
    upstream: str
    downstream: str
    kind: DependencyKind | None = None
    data_passing_ref: str | None = None
    graph_revision: int | None = None


def apply_dependency(
    child: Execution | None,
    upstream: Execution | None,
    edge: Edge | None,
    existing: Dependency | None,
    group: EdgeGroup | None,
    request: ApplyDependency,
) -> Decision[DependencyApplied | DependencyAlreadyApplied]:
    """Make the downstream wait for the upstream. Nothing is resolved here, even if the upstream has ended."""
    if child is None:
        return refuse(errors.NotFound("execution"))
    if child.flow_id is None:
        return refuse(errors.ExecutionNotInFlow(execution_id=child.execution_id))
    if child.flow_id != request.flow_id:
        return refuse(already_in_flow(child))
    if existing is not None:
        return Decision(DependencyAlreadyApplied())
    if edge is None:
        return refuse(errors.InvalidDependency(f"edge {request.edge_id} is not staged"))
    if (edge.upstream_execution_id, edge.downstream_execution_id) != (request.upstream, request.downstream):
        return refuse(errors.InvalidDependency(f"edge {request.edge_id} is staged between other executions"))
    if request.kind is not None and request.kind is not edge.dependency_kind:
        return refuse(errors.InvalidDependency(f"edge {request.edge_id} is staged as {edge.dependency_kind.value}"))
    if upstream is None:
        return refuse(errors.InvalidDependency(f"the upstream of edge {request.edge_id} has been removed"))

    updated_group = with_applied_edge(group, request)
    dependency = Dependency(
        request.downstream,
        request.edge_id,
        request.flow_id,
        request.upstream,
        edge.dependency_kind,
        data_passing_ref=request.data_passing_ref or edge.data_passing_ref,
        # If the upstream has ended, record its outcome for the reconciler, as its completion would have.
        outcome=upstream.terminal_outcome if _has_ended(upstream) else None,
        unfolded_at=NOW if _has_ended(upstream) else None,
    )
    named_successor = successor(
        request.edge_id,
        request.downstream,
        edge.dependency_kind,
        inbound=updated_group.n,
        ref=dependency.data_passing_ref,
        queue=queue.queue_of(child) if updated_group.policy_variant is JoinPolicyKind.ALL_OF else None,
    )
    fields = {"successors": with_successors(upstream, [named_successor]), "last_mutation_at": NOW}
    unresolved = updated_group.n - updated_group.succeeded - updated_group.failed - updated_group.skipped
    writes: tuple[Write, ...] = (
        Upsert(updated_group),
        Insert(dependency),
        Patch(Execution, (upstream.execution_id,), fields),
    )
    if must_wait(child, updated_group):
        text = f"{unresolved} dep(s) unresolved, the last one applied is edge {request.edge_id}"
        writes += (transitions.transition(child, downstreams.waiting_fields(text)),)
    guards = (seen_group(group, request.flow_id, request.downstream), seen(child), seen(upstream))
    return Decision(DependencyApplied(unresolved), Change(guards=guards, writes=writes))


def _has_ended(row: Execution) -> bool:
    return row.lifecycle_phase is LifecyclePhase.TERMINAL


def with_applied_edge(group: EdgeGroup | None, request: ApplyDependency) -> EdgeGroup[Draft]:
    """Return the group with one more applied edge. A satisfied all_of waits again; other fired groups stay fired."""
    before = group or new_group(request.flow_id, request.downstream, JoinPolicy(), staged=1)
    fields: dict[str, Any] = {"n": before.n + 1}
    if request.graph_revision is not None:
        fields["last_flow_graph_revision"] = request.graph_revision
    reopens = before.policy_variant is JoinPolicyKind.ALL_OF and before.group_state is GroupState.SATISFIED
    if reopens:
        fields.update(group_state=GroupState.PENDING, satisfied_at=None)
    if reopens or (before.group_state is GroupState.PENDING and before.waiting_since is None):
        fields["waiting_since"] = NOW
    return msgspec.structs.replace(before, **fields)


def must_wait(child: Execution, group: EdgeGroup[Draft]) -> bool:
    """True if the child must wait for the edge that was applied last.

    Not if the group has fired: either its policy is met, or nothing could ever release the child.
    """
    return (
        child.lifecycle_phase is LifecyclePhase.RUNNABLE
        and child.terminal_outcome is TerminalOutcome.NONE
        and group.group_state is GroupState.PENDING
    )


def wait_children(
    row: Execution | None, group: EdgeGroup | None, fence: Fence, source: str | None, now: int
) -> Decision[Moved]:
    """Release active work until its dependencies are met; with none unresolved it is claimable at once.

    An impossible group would never release it, so the execution does not wait for one; it runs because it was replayed.
    The group is guarded, because a group that fires concurrently would leave the execution waiting forever.
    """
    unresolved = group is not None and group.n > 0 and group.group_state is GroupState.PENDING
    decision = delay.defer_for_children(row, fence, source, unresolved=unresolved, now=now)
    if decision.change is None or row is None or row.flow_id is None:
        return decision
    if isinstance(decision.answer, errors.FabricError):
        return decision
    guard = seen_group(group, row.flow_id, row.execution_id)
    change = merge_changes(decision.change, Change(guards=(guard,)))
    return Decision(decision.answer, change)


def promote_blocked(row: Execution | None, group: EdgeGroup | None) -> Decision[Moved]:
    """Make an execution claimable whose dependencies are met."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return refuse(errors.NotRunnable(execution_id=row.execution_id))
    if row.eligibility_state is not EligibilityState.BLOCKED_BY_DEPENDENCIES:
        return refuse(errors.NotBlockedByDeps(execution_id=row.execution_id))
    if row.terminal_outcome is not TerminalOutcome.NONE:
        return refuse(errors.Terminal(execution_id=row.execution_id))
    if group is not None and group.n > 0 and group.group_state is not GroupState.SATISFIED:
        return refuse(errors.DepsNotSatisfied(execution_id=row.execution_id))
    guards: tuple[Guard, ...] = (seen(row),)
    if row.flow_id is not None:
        guards += (seen_group(group, row.flow_id, row.execution_id),)
    change = Change(guards=guards, writes=(downstreams.release_child(row),))
    return Decision(Moved(row.execution_id, PublicState.WAITING), change)


def dependency_eligibility(row: Execution | None, group: EdgeGroup | None) -> Eligibility:
    """Return whether dependencies let an execution run; the first case that applies."""
    if row is None:
        return Eligibility.NOT_FOUND
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return Eligibility.NOT_RUNNABLE
    if row.ownership_state is not OwnershipState.UNOWNED:
        return Eligibility.OWNED
    if row.terminal_outcome is not TerminalOutcome.NONE:
        return Eligibility.TERMINAL
    if group is not None and group.group_state is GroupState.IMPOSSIBLE:
        return Eligibility.IMPOSSIBLE
    if group is not None and group.group_state is GroupState.PENDING and group.n > 0:
        return Eligibility.BLOCKED_BY_DEPENDENCIES
    return Eligibility.ELIGIBLE


def is_skipped_member(row: Execution | None) -> bool:
    """True if a replay has to reset the join that skipped the execution."""
    return row is not None and row.flow_id is not None and row.terminal_outcome is TerminalOutcome.SKIPPED


def replay_skipped_member(
    row: Execution,
    group: EdgeGroup | None,
    dependencies: Sequence[Dependency],
    upstreams: Mapping[str, Execution],
) -> Decision[Replayed]:
    """Replay a skipped member: impossible edges become unsatisfied again, satisfied edges stay satisfied.

    The outcome of an upstream that has ended is recorded for the reconciler, which skips the member again unless
    something changes. If the satisfied edges meet the policy, the group fires and the member is claimable. If the
    policy needs more edges than exist, the member is skipped again in the same change.
    """
    normal = replay.replay(row, branch=SKIPPED_MEMBER, groups_reset=0 if group is None else 1)
    if group is None or normal.change is None:
        return normal
    reset = [edge for edge in dependencies if edge.state is not DependencyState.SATISFIED]
    satisfied = len(dependencies) - len(reset)
    state = joins.evaluate(group, satisfied, 0)
    if state is GroupState.IMPOSSIBLE:
        return _skip_again(row, group)
    fires = state is GroupState.SATISFIED
    fields: dict[str, Any] = {
        "succeeded": satisfied,
        "failed": 0,
        "skipped": 0,
        "group_state": GroupState.SATISFIED if fires else GroupState.PENDING,
        "satisfied_at": NOW if fires else None,
        "waiting_since": None if fires else NOW,
        "cancel_siblings_pending_flag": False,
        "cancel_siblings_pending_members": None,
    }
    key = (group.flow_id, group.downstream_execution_id)
    writes: tuple[Write, ...] = (Patch(EdgeGroup, key, fields),)
    writes += tuple(_reset_dependency(edge, upstreams.get(edge.upstream_execution_id)) for edge in reset)
    # Guard the upstreams too: one that ends concurrently would find its old outcome still recorded, and its new one
    # would be lost. Living upstreams are written, as when an edge is applied, so that a completion in flight conflicts
    # and is decided again.
    waited_for = [upstreams[name] for name in sorted({edge.upstream_execution_id for edge in reset} & upstreams.keys())]
    guards = (seen_group(group, *key), *map(seen, waited_for))
    writes += tuple(
        Patch(Execution, (upstream.execution_id,), {"last_mutation_at": NOW})
        for upstream in waited_for
        if not _has_ended(upstream)
    )
    if fires and group.on_satisfied is OnSatisfied.CANCEL_REMAINING:
        running = [name for name, upstream in upstreams.items() if not _has_ended(upstream)]
        writes = (Patch(EdgeGroup, key, fields | joins.sibling_cancel_fields(running, satisfied=True)), *writes[1:])
        writes += (Upsert(PendingSiblingCancel(*key, NOW)),)
    elif group.cancel_siblings_pending_flag:
        writes += (Delete(PendingSiblingCancel, key),)
    change = merge_changes(normal.change, Change(guards=guards, writes=writes))
    if fires:
        return Decision(Replayed(PublicState.WAITING), change)
    enqueue = normal.change.writes[0]
    assert isinstance(enqueue, Patch)
    waiting = transitions.transition(
        row, enqueue.fields | downstreams.waiting_fields(f"{group.n - satisfied} dep(s) unsatisfied after replay")
    )
    change = msgspec.structs.replace(change, writes=(waiting, *change.writes[1:]))
    return Decision(Replayed(PublicState.WAITING_CHILDREN), change)


def _skip_again(row: Execution, group: EdgeGroup) -> Decision[Replayed]:
    """Return the replay of a member whose join stays impossible: it ends in the same change.

    Group and edges stay as they are, since counting them again would give the same result. One event is both the replay
    and the completion. The group is guarded, because another edge may make the join possible.
    """
    replayed = replay.replay(row, branch=SKIPPED_MEMBER, groups_reset=0).change
    assert replayed is not None
    replayed_row = msgspec.structs.replace(
        row,
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        terminal_outcome=TerminalOutcome.NONE,
        replay_count=row.replay_count + 1,
    )
    ended = downstreams.skip_child(replayed_row)
    patch = ended.writes[0]
    assert isinstance(patch, Patch)
    fields = {"replay_count": replayed_row.replay_count, **replay.FORMER_LIFE_FIELDS.clear(row), **patch.fields}
    event = msgspec.structs.replace(replayed.events[0], outcome=TerminalOutcome.SKIPPED.value)
    change = Change(
        guards=(seen(row), seen_group(group, group.flow_id, group.downstream_execution_id)),
        writes=(transitions.transition(replayed_row, fields), *ended.writes[1:]),
        events=(event,),
    )
    return Decision(Replayed(PublicState.SKIPPED), change)


def _reset_dependency(dependency: Dependency, upstream: Execution | None) -> Patch:
    outcome = joins.current_outcome(dependency, upstream)
    fields = {
        "state": DependencyState.UNSATISFIED,
        "outcome": outcome,
        "last_resolved_at": None,
        "unfolded_at": None if outcome is None else NOW,
    }
    return Patch(Dependency, (dependency.downstream_execution_id, dependency.edge_id), fields)
