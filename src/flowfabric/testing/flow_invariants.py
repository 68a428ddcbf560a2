"""Invariants of flows: counters equal recounts, joins follow their policy, and no node starts early.

    await check_flow_invariants(engine)         # raises InvariantBroken with every violation

Rows are read one after the other, so no operation may be in flight meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    CancelBacklog,
    Dependency,
    DependencyState,
    Edge,
    EdgeGroup,
    Flow,
    FlowMember,
    GroupState,
    JoinPolicyKind,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.rules.execution import cancel
from flowfabric.rules.flow import joins, successors
from flowfabric.testing.invariants import InvariantBroken, scan_all


async def check_flow_invariants(engine: Engine) -> None:
    """Check every row of every flow; raises `InvariantBroken`."""
    store = engine.store
    executions = {row.execution_id: row for row in await scan_all(store, Execution)}
    flows, members = await scan_all(store, Flow), await scan_all(store, FlowMember)
    edges, groups, inbound = (
        await scan_all(store, Edge),
        await scan_all(store, EdgeGroup),
        await scan_all(store, Dependency),
    )
    flagged = {(row.flow_id, row.downstream_execution_id) for row in await scan_all(store, PendingSiblingCancel)}
    broken = [
        *_broken_flows(flows, members, edges),
        *_broken_groups(groups, inbound, edges, executions, flagged),
        *_broken_successors(executions, inbound),
        *_broken_notes(executions, inbound, flagged),
        *_broken_backlogs(await scan_all(store, CancelBacklog), await scan_all(store, PendingMemberCancel)),
    ]
    if broken:
        raise InvariantBroken("\n".join(broken))


def _broken_flows(flows: Sequence[Flow], members: Sequence[FlowMember], edges: Sequence[Edge]) -> Iterator[str]:
    nodes, arrows = Counter(row.flow_id for row in members), Counter(edge.flow_id for edge in edges)
    for flow in flows:
        counted = (nodes[flow.flow_id], arrows[flow.flow_id])
        if (flow.node_count, flow.edge_count) != counted:
            yield f"flow {flow.flow_id}: {flow.node_count} nodes and {flow.edge_count} edges, counted {counted}"
        if flow.graph_revision != sum(counted):
            yield f"flow {flow.flow_id}: revision {flow.graph_revision} of {counted}"


def _broken_groups(
    groups: Sequence[EdgeGroup],
    inbound: Sequence[Dependency],
    edges: Sequence[Edge],
    executions: dict[str, Execution],
    flagged: set[tuple[str, str]],
) -> Iterator[str]:
    # By flow as well: a policy may be set for a downstream that is no member of the flow (and will never be).
    applied: dict[tuple[str, str], list[Dependency]] = defaultdict(list)
    for edge in inbound:
        applied[edge.flow_id, edge.downstream_execution_id].append(edge)
    staged = Counter((edge.flow_id, edge.downstream_execution_id) for edge in edges)
    for group in groups:
        key = (group.flow_id, group.downstream_execution_id)
        child = executions.get(group.downstream_execution_id)
        if group.staged != staged[key]:
            yield f"group of {key[1]}: {group.staged} staged edges, counted {staged[key]}"
        if child is not None:
            yield from _broken_counts(group, applied[key])
            yield from _broken_child(group, child)
        if group.cancel_siblings_pending_flag != (key in flagged):
            yield f"group of {key[1]}: flag {group.cancel_siblings_pending_flag}, listed {key in flagged}"
        if (group.waiting_since is not None) != (group.group_state is GroupState.PENDING and group.n > 0):
            yield f"group of {key[1]}: {group.group_state} and waiting since {group.waiting_since}"
        if (group.satisfied_at is not None) != (group.group_state is GroupState.SATISFIED):
            yield f"group of {key[1]}: {group.group_state}, satisfied at {group.satisfied_at}"


def _broken_counts(group: EdgeGroup, inbound: Sequence[Dependency]) -> Iterator[str]:
    name = group.downstream_execution_id
    counted: Counter[str] = Counter()
    for edge in inbound:
        if (edge.state is DependencyState.UNSATISFIED) != (edge.last_resolved_at is None):
            yield f"{name}: edge {edge.edge_id} is {edge.state} and was resolved at {edge.last_resolved_at}"
        if edge.unfolded_at is not None and (edge.outcome is None or edge.state is not DependencyState.UNSATISFIED):
            yield f"{name}: edge {edge.edge_id} is unfolded with outcome {edge.outcome} and is {edge.state}"
        if edge.state is DependencyState.UNSATISFIED or edge.outcome is None:
            continue
        if joins.satisfies(edge.dependency_kind, edge.outcome) != (edge.state is DependencyState.SATISFIED):
            yield f"{name}: edge {edge.edge_id} of kind {edge.dependency_kind} is {edge.state} after {edge.outcome}"
        bucket = "succeeded" if edge.state is DependencyState.SATISFIED else "failed"
        counted[bucket if bucket == "succeeded" or edge.outcome.value != "skipped" else "skipped"] += 1
    recount = (counted["succeeded"], counted["failed"], counted["skipped"], len(inbound))
    if recount != (group.succeeded, group.failed, group.skipped, group.n):
        yield f"{name}: {group.succeeded}/{group.failed}/{group.skipped} of {group.n}, counted {recount}"
    now = joins.evaluate(group, group.succeeded, group.failed + group.skipped)
    resolved = group.succeeded + group.failed + group.skipped
    if group.group_state is GroupState.PENDING and resolved and now is not GroupState.PENDING:
        yield f"{name}: pending with {group.succeeded}/{group.failed}/{group.skipped} of {group.n}"
    if group.group_state is GroupState.SATISFIED and not _was_met(group):
        yield f"{name}: satisfied with {group.succeeded} of {group.n} under {group.policy_variant}({group.k})"


def _was_met(group: EdgeGroup) -> bool:
    if group.policy_variant is JoinPolicyKind.ALL_OF:
        return group.succeeded == group.n
    return group.succeeded >= group.k


def _broken_child(group: EdgeGroup, child: Execution) -> Iterator[str]:
    waits = child.eligibility_state is EligibilityState.BLOCKED_BY_DEPENDENCIES
    if child.lifecycle_phase is LifecyclePhase.RUNNABLE and group.n > 0:
        if waits and group.group_state is GroupState.SATISFIED:
            yield f"{child.execution_id}: waits for dependencies that are met"
        # A node that ran before its edge was applied continues, and a replayed node runs without its dependencies; a
        # node that never started has to wait.
        untouched = child.started_at is None and child.replay_count == 0
        if not waits and untouched and group.group_state is GroupState.PENDING:
            yield f"{child.execution_id}: can start before its dependencies are met"


def _broken_successors(executions: dict[str, Execution], inbound: Sequence[Dependency]) -> Iterator[str]:
    after: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for edge in inbound:
        after[edge.upstream_execution_id].add((edge.edge_id, edge.downstream_execution_id))
    for row in executions.values():
        expected = after[row.execution_id]
        named = {(edge.edge_id, edge.execution_id) for edge in successors.named_successors(row)}
        if row.successors != successors.MANY and not expected <= named:
            yield f"{row.execution_id}: names {len(named)} successors and has {len(expected)}"


def _broken_notes(
    executions: dict[str, Execution], inbound: Sequence[Dependency], flagged: set[tuple[str, str]]
) -> Iterator[str]:
    for edge in inbound:
        upstream = executions.get(edge.upstream_execution_id)
        if upstream is None or upstream.lifecycle_phase is not LifecyclePhase.TERMINAL or edge.outcome is not None:
            continue
        # Many edges are resolved through a dispatch row, and edges of cascade-cancelled members by a reconciler.
        # Siblings that are no longer needed are counted before their group is drained.
        is_owed = upstream.successors == successors.MANY or upstream.cancelled_by == cancel.FLOW_CASCADE
        if not is_owed and (edge.flow_id, edge.downstream_execution_id) not in flagged:
            yield f"{edge.downstream_execution_id}: edge {edge.edge_id} does not know that its upstream has ended"


def _broken_backlogs(backlogs: Sequence[CancelBacklog], pending: Sequence[PendingMemberCancel]) -> Iterator[str]:
    listed = Counter(row.flow_id for row in pending)
    known = {row.flow_id: row.remaining for row in backlogs}
    if known != dict(listed):
        yield f"backlogs say {known}, counted {dict(listed)}"
