"""Dependents: executions that wait for others. Applying an edge, parking, promoting, replaying a skipped one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Moved, Replayed
from flowfabric.model.answers.flow import DependencyAlreadyApplied, DependencyApplied, Eligibility
from flowfabric.model.change import (
    NOW,
    Change,
    Delete,
    Guard,
    Insert,
    Patch,
    Upsert,
    Write,
    from_now,
    merge_changes,
    seen,
)
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
from flowfabric.model.states import (
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import delay, replay, transitions
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.flow import joins
from flowfabric.rules.flow.build import JoinPolicy, new_group, seen_group
from flowfabric.rules.flow.successors import successor, with_successors
from flowfabric.rules.scheduling import queue

SKIPPED_MEMBER = "skipped_flow_member"


class ApplyDependency(msgspec.Struct, frozen=True):
    """A staged edge that its downstream shall wait for; what is unset is taken from the edge."""

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
    ask: ApplyDependency,
) -> Decision[DependencyApplied | DependencyAlreadyApplied]:
    """Let the downstream wait for the upstream. Nothing is resolved here, even when the upstream has ended."""
    if child is None:
        return refuse(errors.NotFound("execution"))
    if child.flow_id is None:
        return refuse(errors.ExecutionNotInFlow(execution_id=child.execution_id))
    if child.flow_id != ask.flow_id:
        return refuse(
            errors.ExecutionAlreadyInFlow(
                f"already_member_of_different_flow:{child.flow_id}", execution_id=child.execution_id
            )
        )
    if existing is not None:
        return Decision(DependencyAlreadyApplied())
    if edge is None:
        return refuse(errors.InvalidDependency(f"edge {ask.edge_id} is not staged"))
    if (edge.upstream_execution_id, edge.downstream_execution_id) != (ask.upstream, ask.downstream):
        return refuse(errors.InvalidDependency(f"edge {ask.edge_id} is staged between other executions"))
    if ask.kind is not None and ask.kind is not edge.dependency_kind:
        return refuse(errors.InvalidDependency(f"edge {ask.edge_id} is staged as {edge.dependency_kind.value}"))
    if upstream is None:
        return refuse(errors.InvalidDependency(f"the upstream of edge {ask.edge_id} has been removed"))

    after = with_applied_edge(group, ask)
    dependency = Dependency(
        ask.downstream,
        ask.edge_id,
        ask.flow_id,
        ask.upstream,
        edge.dependency_kind,
        data_passing_ref=ask.data_passing_ref or edge.data_passing_ref,
        # An end that has come already is noted for the reconciler, as it would have been when it came.
        outcome=upstream.terminal_outcome if _has_ended(upstream) else None,
        unfolded_at=from_now(0) if _has_ended(upstream) else None,
    )
    follows = successor(
        ask.edge_id,
        ask.downstream,
        edge.dependency_kind,
        inbound=after.n,
        ref=dependency.data_passing_ref,
        queue=queue.queue_of(child) if after.policy_variant is JoinPolicyKind.ALL_OF else None,
    )
    fields = {"successors": with_successors(upstream, [follows]), "last_mutation_at": NOW}
    unresolved = after.n - after.succeeded - after.failed - after.skipped
    writes: tuple[Write, ...] = (
        Upsert(after),
        Insert(dependency),
        Patch(Execution, (upstream.execution_id,), fields),
    )
    if must_wait(child, after):
        text = f"{unresolved} dep(s) unresolved, the last one applied is edge {ask.edge_id}"
        writes += (transitions.transition(child, joins.waiting_fields(text)),)
    guards = (seen_group(group, ask.flow_id, ask.downstream), seen(child), seen(upstream))
    return Decision(DependencyApplied(unresolved), Change(guards=guards, writes=writes))


def _has_ended(row: Execution) -> bool:
    return row.lifecycle_phase is LifecyclePhase.TERMINAL


def with_applied_edge(group: EdgeGroup | None, ask: ApplyDependency) -> EdgeGroup:
    """The group with one more edge applied: all_of that was satisfied waits again, whatever else fired stays fired."""
    if group is None:
        group = new_group(ask.flow_id, ask.downstream, JoinPolicy(), staged=1)
    fields: dict[str, Any] = {"n": group.n + 1}
    if ask.graph_revision is not None:
        fields["last_flow_graph_revision"] = ask.graph_revision
    reopens = group.policy_variant is JoinPolicyKind.ALL_OF and group.group_state is GroupState.SATISFIED
    if reopens:
        fields.update(group_state=GroupState.PENDING, satisfied_at=None)
    if reopens or (group.group_state is GroupState.PENDING and group.waiting_since is None):
        fields["waiting_since"] = from_now(0)
    return msgspec.structs.replace(group, **fields)


def must_wait(child: Execution, group: EdgeGroup) -> bool:
    """Whether a child has to wait for the edge that was applied last.

    Not when the group has fired: its policy is met, or nothing could ever set the child free again.
    """
    return (
        child.lifecycle_phase is LifecyclePhase.RUNNABLE
        and child.terminal_outcome is TerminalOutcome.NONE
        and group.group_state is GroupState.PENDING
    )


def wait_children(
    row: Execution | None, group: EdgeGroup | None, fence: Fence, source: str | None, now: int
) -> Decision[Moved]:
    """Put active work away until its dependencies are met; with none unresolved it is claimable at once.

    A group that has become impossible will never set it free, so it does not wait for that one either: it runs because
    somebody replayed it. Decided on the group too: one that fires meanwhile must not leave the execution parked.
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
    change = Change(guards=guards, writes=(joins.release_child(row),))
    return Decision(Moved(row.execution_id, PublicState.WAITING), change)


def dependency_eligibility(row: Execution | None, group: EdgeGroup | None) -> Eligibility:
    """Whether dependencies let an execution run; the first that applies."""
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
    """Whether a replay has to reset the join that ended the last life."""
    return row is not None and row.flow_id is not None and row.terminal_outcome is TerminalOutcome.SKIPPED


def replay_skipped_member(
    row: Execution,
    group: EdgeGroup | None,
    dependencies: Sequence[Dependency],
    upstreams: Mapping[str, Execution],
) -> Decision[Replayed]:
    """Let a skipped member wait again: what was impossible is unsatisfied, what was satisfied stays so.

    An upstream that has ended is noted for the reconciler, which skips the member again if nothing else happens. If
    what is satisfied meets the policy already, the group fires and the member is claimable. If the policy asks for more
    edges than there are, the member is skipped again in the same change.
    """
    normal = replay.replay(row, branch=SKIPPED_MEMBER, groups_reset=0 if group is None else 1)
    if group is None or normal.change is None:
        return normal
    reset = [one for one in dependencies if one.state is not DependencyState.SATISFIED]
    satisfied = len(dependencies) - len(reset)
    state = joins.evaluate(group, satisfied, 0)
    if state is GroupState.IMPOSSIBLE:
        return _skipped_again(row, group)
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
    writes += tuple(_reset(one, upstreams.get(one.upstream_execution_id)) for one in reset)
    # Decided on the upstreams too: one that ends meanwhile must not find its old end still noted, and be lost. Those
    # that live are written, as when an edge is applied: an end already on its way is refused, and looks again.
    waited_for = [upstreams[name] for name in sorted({one.upstream_execution_id for one in reset} & upstreams.keys())]
    guards = (seen_group(group, *key), *map(seen, waited_for))
    writes += tuple(
        Patch(Execution, (above.execution_id,), {"last_mutation_at": NOW})
        for above in waited_for
        if not _has_ended(above)
    )
    if fires and group.on_satisfied is OnSatisfied.CANCEL_REMAINING:
        going = [name for name, above in upstreams.items() if not _has_ended(above)]
        writes = (Patch(EdgeGroup, key, fields | joins.sibling_cancel_fields(going, satisfied=True)), *writes[1:])
        writes += (Upsert(PendingSiblingCancel(*key, from_now(0))),)
    elif group.cancel_siblings_pending_flag:
        writes += (Delete(PendingSiblingCancel, key),)
    change = merge_changes(normal.change, Change(guards=guards, writes=writes))
    if fires:
        return Decision(Replayed(PublicState.WAITING), change)
    back = normal.change.writes[0]
    assert isinstance(back, Patch)
    waiting = transitions.transition(
        row, back.fields | joins.waiting_fields(f"{group.n - satisfied} dep(s) unsatisfied after replay")
    )
    change = msgspec.structs.replace(change, writes=(waiting, *change.writes[1:]))
    return Decision(Replayed(PublicState.WAITING_CHILDREN), change)


def _skipped_again(row: Execution, group: EdgeGroup) -> Decision[Replayed]:
    """The replay of a member whose join stays impossible: a life that ends as it begins.

    Group and edges stay as they are: reset and counted again, they would say the same. The one event is both the replay
    and the end. Decided on the group as well, since another edge may make the join possible.
    """
    replayed = replay.replay(row, branch=SKIPPED_MEMBER, groups_reset=0).change
    assert replayed is not None
    life = msgspec.structs.replace(
        row,
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        terminal_outcome=TerminalOutcome.NONE,
        replay_count=row.replay_count + 1,
    )
    ended = joins.skip_child(life)
    patch = ended.writes[0]
    assert isinstance(patch, Patch)
    fields = {"replay_count": life.replay_count, **replay.FORMER_LIFE_FIELDS.clear(row), **patch.fields}
    event = msgspec.structs.replace(replayed.events[0], outcome=TerminalOutcome.SKIPPED.value)
    change = Change(
        guards=(seen(row), seen_group(group, group.flow_id, group.downstream_execution_id)),
        writes=(transitions.transition(life, fields), *ended.writes[1:]),
        events=(event,),
    )
    return Decision(Replayed(PublicState.SKIPPED), change)


def _reset(one: Dependency, upstream: Execution | None) -> Patch:
    outcome = joins.current_outcome(one, upstream)
    fields = {
        "state": DependencyState.UNSATISFIED,
        "outcome": outcome,
        "last_resolved_at": None,
        "unfolded_at": None if outcome is None else NOW,
    }
    return Patch(Dependency, (one.downstream_execution_id, one.edge_id), fields)
