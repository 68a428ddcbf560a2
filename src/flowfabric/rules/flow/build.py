"""Build a flow step by step: the flow, its members, staged edges, join policies, tags.

Every change of membership or graph writes the flow row. Two such changes therefore conflict, which keeps revisions
exact and the graph free of cycles.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.answers.flow import Added, AlreadyMember, FlowCreated, FlowExists, SetJoinPolicyResult, Staged
from flowfabric.model.change import Change, Guard, Insert, Patch, Upsert, Write, absent, seen
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    DependencyKind,
    Edge,
    EdgeGroup,
    Flow,
    FlowMember,
    FlowState,
    JoinPolicyKind,
    OnSatisfied,
)
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.view import view_of
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.tags import check_tags_size, decode_tags, encode_tags

MAX_QUORUM = 2**31 - 1
RETENTION_CHECK_MS = 60 * 60 * 1000  # delay until retention checks whether any member is left
TERMINAL_FLOW_STATES = frozenset({FlowState.CANCELLED, FlowState.COMPLETED, FlowState.FAILED})


class JoinPolicy(msgspec.Struct, frozen=True):
    """When a join fires, and what happens to the upstreams that it no longer needs."""

    variant: JoinPolicyKind = JoinPolicyKind.ALL_OF
    on_satisfied: OnSatisfied | None = None
    k: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return the policy in its wire form."""
        wire: dict[str, Any] = {"kind": self.variant.value}
        if self.variant is JoinPolicyKind.QUORUM:
            wire["k"] = self.k
        if self.on_satisfied is not None:
            wire["on_satisfied"] = self.on_satisfied.value
        return wire


def parse_join_policy(wire: object) -> JoinPolicy | errors.FabricError:
    """Parse a policy from its wire form, such as `{"kind": "quorum", "k": 2, "on_satisfied": "let_run"}`."""
    if not isinstance(wire, dict):
        return errors.InvalidInput("policy: not an object")
    kind = wire.get("kind")
    if kind == JoinPolicyKind.QUORUM:
        k = wire.get("k")
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_QUORUM:
            return errors.InvalidInput(f"policy: k must be a whole number from 1 to {MAX_QUORUM}")
    if kind in (JoinPolicyKind.ANY_OF, JoinPolicyKind.QUORUM):
        on_satisfied = wire.get("on_satisfied")
        if not isinstance(on_satisfied, str) or on_satisfied not in set(OnSatisfied):
            return errors.InvalidInput("policy: on_satisfied must be cancel_remaining or let_run")
        size = wire["k"] if kind == JoinPolicyKind.QUORUM else 1
        return JoinPolicy(JoinPolicyKind(kind), OnSatisfied(on_satisfied), size)
    if kind == JoinPolicyKind.ALL_OF:
        return JoinPolicy()
    return errors.InvalidInput(f"policy: {validation.preview(kind)} is not one of all_of, any_of, quorum")


def join_policy_of(group: EdgeGroup) -> JoinPolicy:
    """Return the policy of a group."""
    return JoinPolicy(group.policy_variant, group.on_satisfied, group.k)


def new_group(flow_id: str, downstream: str, policy: JoinPolicy, **fields: Any) -> EdgeGroup[Draft]:
    """Return a group that has counted no outcome yet."""
    return EdgeGroup(flow_id, downstream, policy.variant, policy.on_satisfied, policy.k, **fields)


def seen_flow(flow: Flow) -> Guard:
    """Return a guard on the flow as it was loaded."""
    return Guard(Flow, (flow.flow_id,), flow.revision)


def seen_group(group: EdgeGroup | None, flow_id: str, downstream: str) -> Guard:
    """Return a guard on the group as it was loaded, or on its absence."""
    return Guard(EdgeGroup, (flow_id, downstream), None if group is None else group.revision)


def create_flow(
    existing: Flow | None, flow_id: str, partition: int, flow_kind: str, namespace: str
) -> Decision[FlowCreated | FlowExists]:
    """Create a flow. A flow that exists in this namespace is left as it is, even if its kind differs."""
    if existing is not None:
        if existing.namespace != namespace:
            return refuse(errors.IdInOtherNamespace(flow_id=flow_id))
        return Decision(FlowExists(flow_id))
    flow = Flow(flow_id, partition, flow_kind, namespace, FlowState.OPEN, NOW, NOW)
    return Decision(FlowCreated(flow_id), Change(guards=(absent(Flow, flow_id),), writes=(Insert(flow),)))


def add_member(
    flow: Flow | None, row: Execution | None, member: FlowMember | None, execution_id: str
) -> Decision[Added | AlreadyMember]:
    """Make an execution of the flow's namespace a member. Adding it again changes no counter."""
    if flow is None:
        return refuse(errors.NotFound("flow"))
    if flow.public_flow_state in TERMINAL_FLOW_STATES:
        return refuse(errors.FlowAlreadyTerminal(flow_id=flow.flow_id))
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.namespace != flow.namespace:
        return refuse(errors.IdInOtherNamespace(execution_id=execution_id))
    if row.flow_id is not None and row.flow_id != flow.flow_id:
        return refuse(already_in_flow(row))
    fields: dict[str, Any] = {}
    writes: tuple[Write, ...] = ()
    if row.flow_id is None:
        # Write the flow as well, also for a former member whose id was reused: a concurrent retention that found no
        # member left must conflict.
        fields = {"purge_check_at": FromNow(RETENTION_CHECK_MS)}
        writes += (Patch(Execution, (execution_id,), {"flow_id": flow.flow_id, "last_mutation_at": NOW}),)
    if member is None:
        fields |= {
            "node_count": flow.node_count + 1,
            "graph_revision": flow.graph_revision + 1,
            "last_mutation_at": NOW,
        }
        writes += (Insert(FlowMember(flow.flow_id, execution_id)),)
    if flow.project_at is None:
        fields["project_at"] = NOW
    answer: Added | AlreadyMember
    if member is None:
        answer = Added(execution_id, flow.node_count + 1)
    else:
        answer = AlreadyMember(execution_id, flow.node_count)
        if not writes and not fields:
            return Decision(answer)
    if fields:
        writes = (Patch(Flow, (flow.flow_id,), fields), *writes)
    return Decision(answer, Change(guards=(seen_flow(flow), seen(row)), writes=writes))


def already_in_flow(row: Execution) -> errors.ExecutionAlreadyInFlow:
    """Return the refusal for an execution that is a member of another flow."""
    return errors.ExecutionAlreadyInFlow(
        f"already_member_of_different_flow:{row.flow_id}", execution_id=row.execution_id
    )


class StageEdge(msgspec.Struct, frozen=True, gc=False):
    """A requested edge; `expected_graph_revision=None` skips the revision check."""

    flow_id: str
    edge_id: str
    upstream: str
    downstream: str
    kind: DependencyKind
    data_passing_ref: str | None
    expected_graph_revision: int | None


def stage_edge(
    flow: Flow | None,
    existing: Edge | None,
    members: tuple[FlowMember | None, FlowMember | None],
    group: EdgeGroup | None,
    request: StageEdge,
    *,
    closes_cycle: bool,
) -> Decision[Staged]:
    """Add an edge to the graph. The downstream does not wait for it until the edge is applied."""
    if request.upstream == request.downstream:
        return refuse(errors.SelfReferencingEdge(execution_id=request.upstream))
    if flow is None:
        return refuse(errors.NotFound("flow"))
    if flow.public_flow_state in TERMINAL_FLOW_STATES:
        return refuse(errors.FlowAlreadyTerminal(flow_id=flow.flow_id))
    expected = request.expected_graph_revision
    if expected is not None and expected != flow.graph_revision:
        return refuse(errors.StaleGraphRevision(expected=expected, actual=flow.graph_revision))
    for member, execution_id in zip(members, (request.upstream, request.downstream), strict=True):
        if member is None:
            return refuse(errors.ExecutionNotInFlow(execution_id=execution_id))
    if closes_cycle:
        return refuse(errors.CycleDetected(f"{request.upstream} already comes after {request.downstream}"))
    if existing is not None:
        return refuse(errors.DependencyAlreadyExists(existing=edge_snapshot(existing)))
    revision = flow.graph_revision + 1
    fields = {"graph_revision": revision, "edge_count": flow.edge_count + 1, "last_mutation_at": NOW}
    key = (request.flow_id, request.downstream)
    group_write: Write = (
        Insert(new_group(*key, JoinPolicy(), staged=1))
        if group is None
        else Patch(EdgeGroup, key, {"staged": group.staged + 1})
    )
    change = Change(
        guards=(seen_flow(flow), seen_group(group, *key)),
        writes=(Patch(Flow, (flow.flow_id,), fields), group_write, Insert(new_edge(request))),
    )
    return Decision(Staged(request.edge_id, revision), change)


class EdgeSnapshot(msgspec.Struct, frozen=True):
    """An edge as shown to readers. Its state never changes; the dependency row holds the resolution."""

    edge_id: str
    flow_id: str
    upstream_execution_id: str
    downstream_execution_id: str
    dependency_kind: str
    data_passing_ref: str | None
    created_at: int
    satisfaction_condition: str = "all_required"
    edge_state: str = "pending"
    created_by: str = "engine"


def edge_snapshot(edge: Edge) -> EdgeSnapshot:
    """Return the edge as shown to readers."""
    return view_of(EdgeSnapshot, edge, dependency_kind=edge.dependency_kind.value)


def new_edge(request: StageEdge) -> Edge[Draft]:
    """Return the row of a staged edge."""
    ref = request.data_passing_ref or None
    return Edge(request.flow_id, request.edge_id, request.upstream, request.downstream, request.kind, NOW, ref)


def set_join_policy(
    flow: Flow | None, group: EdgeGroup | None, flow_id: str, downstream: str, policy: JoinPolicy
) -> Decision[SetJoinPolicyResult]:
    """Set the join policy of a downstream while no edge into it is staged; it need not be a member yet."""
    if flow is None:
        return refuse(errors.NotFound("flow"))
    if partition_of(ExecutionId(downstream)) != flow.partition:
        return refuse(errors.InvalidInput(f"partition mismatch: {downstream} is not on {flow.partition}, as its flow"))
    if group is not None and group.staged > 0:
        return refuse(
            errors.InvalidInput(f"edge_group_policy_already_fixed: {group.staged} edge(s) lead to {downstream}")
        )
    if group is not None and join_policy_of(group) == policy:
        return Decision(SetJoinPolicyResult.ALREADY_SET)
    group_write = Upsert(new_group(flow_id, downstream, policy))
    # Guard the flow as well: a join must not outlive a flow that retention removes concurrently.
    guards = (seen_flow(flow), seen_group(group, flow_id, downstream))
    return Decision(SetJoinPolicyResult.SET, Change(guards=guards, writes=(group_write,)))


def set_flow_tag(flow: Flow | None, key: str, value: str) -> Decision[None]:
    """Set one tag of a flow."""
    if flow is None:
        return refuse(errors.NotFound("flow"))
    merged = decode_tags(flow.tags) | {key: value}
    if too_large := check_tags_size(merged):
        return refuse(too_large)
    fields = {"tags": encode_tags(merged), "last_mutation_at": NOW}
    return Decision(None, Change(guards=(seen_flow(flow),), writes=(Patch(Flow, (flow.flow_id,), fields),)))
