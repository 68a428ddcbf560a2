"""A whole graph at once: flow, members, edges and joins in one change, with the cycle check done exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.answers.flow import FlowExists, GraphCreated
from flowfabric.model.change import Change, Insert, Write, absent, from_now
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency, Flow, FlowMember, FlowState
from flowfabric.model.states import PublicState
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.create import NO_DEFAULTS, CreateExecution, PolicyDefaults, create_each
from flowfabric.rules.flow import joins
from flowfabric.rules.flow.build import RETENTION_CHECK_MS, JoinPolicy, StageEdge, new_edge, new_group
from flowfabric.rules.flow.successors import Successor, encode_successors, successor
from flowfabric.rules.scheduling import queue

MAX_NODES = 10_000
MAX_EDGES = 100_000


class CreateGraph(msgspec.Struct, frozen=True):
    """A flow as a caller wants it; `policies` are the joins that are not `all_of`, by downstream."""

    flow_id: str
    partition: int
    flow_kind: str
    namespace: str
    nodes: Sequence[CreateExecution]
    edges: Sequence[StageEdge]
    policies: Mapping[str, JoinPolicy] = {}


def check_graph(ask: CreateGraph) -> errors.FabricError | None:
    """What is wrong with a graph in itself."""
    if len(ask.nodes) > MAX_NODES:
        return errors.InvalidInput(f"nodes: {len(ask.nodes)} of them, the limit is {MAX_NODES}")
    if len(ask.edges) > MAX_EDGES:
        return errors.InvalidInput(f"edges: {len(ask.edges)} of them, the limit is {MAX_EDGES}")
    names = {node.execution_id for node in ask.nodes}
    if len(names) < len(ask.nodes):
        return errors.InvalidInput("nodes: an execution is listed twice")
    edge_ids = set()
    for edge in ask.edges:
        if edge.upstream == edge.downstream:
            return errors.SelfReferencingEdge(execution_id=edge.upstream)
        for end in (edge.upstream, edge.downstream):
            if end not in names:
                return errors.ExecutionNotInFlow(execution_id=end)
        if edge.edge_id in edge_ids:
            return errors.DependencyAlreadyExists(f"edge {edge.edge_id} is listed twice")
        edge_ids.add(edge.edge_id)
    for node in ask.nodes:
        if node.idempotency_key:
            return errors.InvalidInput(f"{node.execution_id}: a member of a graph has no idempotency key of its own")
    for downstream in ask.policies:
        if downstream not in names:
            return errors.ExecutionNotInFlow(execution_id=downstream)
    return find_cycle(ask.edges)


def find_cycle(edges: Sequence[StageEdge]) -> errors.CycleDetected | None:
    """Take away what waits for nothing until nothing is left; what remains goes round in circles."""
    waiting: dict[str, int] = defaultdict(int)
    after: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        waiting[edge.downstream] += 1
        after[edge.upstream].append(edge.downstream)
    free = [name for name in after if name not in waiting]
    while free:
        for name in after.get(free.pop(), ()):
            waiting[name] -= 1
            if not waiting[name]:
                free.append(name)
    circle = sorted(name for name, left in waiting.items() if left)
    if not circle:
        return None
    return errors.CycleDetected(f"{circle[0]} comes before itself", execution_id=circle[0])


def create_graph(
    flow: Flow | None,
    existing: Mapping[str, Execution],
    ask: CreateGraph,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[GraphCreated | FlowExists]:
    """All of it or nothing; a flow that exists in this namespace is left as it is, so that the call can be repeated."""
    if flow is not None:
        if flow.namespace != ask.namespace:
            return refuse(errors.IdInOtherNamespace(flow_id=ask.flow_id))
        return Decision(FlowExists(ask.flow_id))
    namespaces = {node.execution_id: node.namespace for node in ask.nodes} if existing else {}
    for known in existing.values():
        if known.namespace != namespaces.get(known.execution_id, ask.namespace):
            return refuse(errors.IdInOtherNamespace(execution_id=known.execution_id))
        if known.flow_id is not None:
            detail = f"already_member_of_different_flow:{known.flow_id}"
            return refuse(errors.ExecutionAlreadyInFlow(detail, execution_id=known.execution_id))
        return refuse(errors.InvalidInput(f"nodes: {known.execution_id} exists already"))
    inbound: dict[str, list[StageEdge]] = defaultdict(list)
    outbound: dict[str, list[StageEdge]] = defaultdict(list)
    for edge in ask.edges:
        inbound[edge.downstream].append(edge)
        outbound[edge.upstream].append(edge)

    writes: list[Write] = [Insert(_flow(ask))]
    not_after: list[int] = []
    not_before: list[int] = []
    born: dict[str, Execution] = {}
    for node, decision in zip(ask.nodes, create_each(ask.nodes, now, defaults=defaults), strict=True):
        if isinstance(decision.answer, errors.FabricError):
            return Decision(decision.answer)
        assert decision.change is not None
        if decision.change.not_after is not None:
            not_after.append(decision.change.not_after)
        if decision.change.not_before is not None:
            not_before.append(decision.change.not_before)
        insert, payload = decision.change.writes
        assert isinstance(insert, Insert)
        assert isinstance(insert.row, Execution)
        name = node.execution_id
        if insert.row.delay_until is not None and inbound[name]:
            return refuse(errors.InvalidInput(f"{name}: a node that waits for others cannot be delayed as well"))
        born[name] = insert.row
        writes.append(payload)
        writes.append(Insert(FlowMember(ask.flow_id, name)))
        if inbound[name] or name in ask.policies:
            applied = len(inbound[name])
            group = new_group(
                ask.flow_id,
                name,
                ask.policies.get(name, JoinPolicy()),
                staged=applied,
                n=applied,
                waiting_since=from_now(0) if applied else None,
            )
            writes.append(Insert(group))
    # Of those that wait nothing stands in line yet; where no other node does, the lane would not be listed.
    claimable = {row.line for name, row in born.items() if not inbound[name]}
    waiting = {row.line or queue.queue_of(row) for name, row in born.items() if inbound[name] or row.line is None}
    lines = {name: None if name in ask.policies else row.line for name, row in born.items()}
    for name, row in born.items():
        follow = [
            successor(
                edge.edge_id,
                edge.downstream,
                edge.kind,
                inbound=len(inbound[edge.downstream]),
                ref=edge.data_passing_ref,
                queue=lines[edge.downstream],
            )
            for edge in outbound[name]
        ]
        writes.append(Insert(_member(row, ask.flow_id, len(inbound[name]), follow)))
    for edge in ask.edges:
        writes.append(Insert(new_edge(edge)))
        ref = edge.data_passing_ref or None
        writes.append(
            Insert(
                Dependency(edge.downstream, edge.edge_id, ask.flow_id, edge.upstream, edge.kind, data_passing_ref=ref)
            )
        )
    nodes, count = len(ask.nodes), len(ask.edges)
    change = Change(
        guards=(absent(Flow, ask.flow_id),),  # an insert of a member that exists is refused by itself
        writes=tuple(writes),
        queues=tuple(sorted(waiting - claimable)),
        not_before=max(not_before, default=None),
        not_after=min(not_after, default=None),
    )
    return Decision(GraphCreated(ask.flow_id, nodes + count, nodes, count), change)


def _flow(ask: CreateGraph) -> Flow:
    nodes, edges = len(ask.nodes), len(ask.edges)
    return Flow(
        ask.flow_id,
        ask.partition,
        ask.flow_kind,
        ask.namespace,
        FlowState.OPEN,
        from_now(0),
        from_now(0),
        graph_revision=nodes + edges,
        node_count=nodes,
        edge_count=edges,
        project_at=from_now(0) if nodes else None,
        purge_check_at=from_now(RETENTION_CHECK_MS) if nodes else None,
    )


def _member(born: Execution, flow_id: str, waits_for: int, follow: list[Successor]) -> Execution:
    """The execution as a member: named by those it waits for, naming those who wait for it."""
    fields: dict[str, object] = {"flow_id": flow_id}
    if follow:
        fields["successors"] = encode_successors(follow)
    if waits_for:
        fields |= joins.waiting_fields(f"{waits_for} dep(s) unresolved")
        fields["public_state"] = PublicState.WAITING_CHILDREN
    return msgspec.structs.replace(born, **fields)
