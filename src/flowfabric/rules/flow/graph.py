"""Graphs: create one in a single change, with an exact cycle check; search a stored one for a cycle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.answers.flow import FlowExists, GraphCreated
from flowfabric.model.change import Change, Insert, Write, absent
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency, Edge, Flow, FlowMember, FlowState
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.states import PublicState
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.create import NO_DEFAULTS, CreateExecution, PolicyDefaults, create_each
from flowfabric.rules.flow import downstreams
from flowfabric.rules.flow.build import RETENTION_CHECK_MS, JoinPolicy, StageEdge, already_in_flow, new_edge, new_group
from flowfabric.rules.flow.successors import Successor, encode_successors, successor
from flowfabric.rules.scheduling import queue

MAX_NODES = 10_000
MAX_EDGES = 100_000
MAX_SEARCHED_NODES = 1000


class CreateGraph(msgspec.Struct, frozen=True):
    """The requested flow; `policies` are the joins that are not `all_of`, by downstream."""

    flow_id: str
    partition: int
    flow_kind: str
    namespace: str
    nodes: Sequence[CreateExecution]
    edges: Sequence[StageEdge]
    policies: Mapping[str, JoinPolicy] = {}


def check_graph(request: CreateGraph) -> errors.FabricError | None:
    """Return what is wrong with the graph itself."""
    if len(request.nodes) > MAX_NODES:
        return errors.InvalidInput(f"nodes: {len(request.nodes)} of them, the limit is {MAX_NODES}")
    if len(request.edges) > MAX_EDGES:
        return errors.InvalidInput(f"edges: {len(request.edges)} of them, the limit is {MAX_EDGES}")
    names = {node.execution_id for node in request.nodes}
    if len(names) < len(request.nodes):
        return errors.InvalidInput("nodes: an execution is listed twice")
    edge_ids = set()
    for edge in request.edges:
        if edge.upstream == edge.downstream:
            return errors.SelfReferencingEdge(execution_id=edge.upstream)
        for end in (edge.upstream, edge.downstream):
            if end not in names:
                return errors.ExecutionNotInFlow(execution_id=end)
        if edge.edge_id in edge_ids:
            return errors.DependencyAlreadyExists(f"edge {edge.edge_id} is listed twice")
        edge_ids.add(edge.edge_id)
    for node in request.nodes:
        if node.idempotency_key:
            return errors.InvalidInput(f"{node.execution_id}: a member of a graph has no idempotency key of its own")
    for downstream in request.policies:
        if downstream not in names:
            return errors.ExecutionNotInFlow(execution_id=downstream)
    return find_cycle(request.edges)


def find_cycle(edges: Sequence[StageEdge]) -> errors.CycleDetected | None:
    """Remove nodes without open dependencies until none is left (Kahn's algorithm); the rest form cycles."""
    open_edges: dict[str, int] = defaultdict(int)
    downstreams: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        open_edges[edge.downstream] += 1
        downstreams[edge.upstream].append(edge.downstream)
    ready = [name for name in downstreams if name not in open_edges]
    while ready:
        for name in downstreams.get(ready.pop(), ()):
            open_edges[name] -= 1
            if not open_edges[name]:
                ready.append(name)
    cycle = sorted(name for name, left in open_edges.items() if left)
    if not cycle:
        return None
    return errors.CycleDetected(f"{cycle[0]} comes before itself", execution_id=cycle[0])


class CycleSearch(msgspec.Struct, frozen=True):
    """A breadth-first search from the downstream of a new edge for its upstream.

    It is over when `frontier` is empty. Until then, load the edges that leave those nodes and call `continue_search`.
    """

    upstream: str
    frontier: Sequence[str]
    visited: frozenset[str]
    closes_cycle: bool = False


def start_search(request: StageEdge) -> CycleSearch:
    """Return the search that decides whether this edge would close a cycle."""
    return CycleSearch(request.upstream, [request.downstream], frozenset((request.downstream,)))


def continue_search(search: CycleSearch, edges: Iterable[Edge]) -> CycleSearch:
    """Add the edges that leave the frontier. A graph that is too large to search counts as one with a cycle."""
    reached = frozenset(edge.downstream_execution_id for edge in edges)
    visited = search.visited | reached
    if search.upstream in reached or len(visited) > MAX_SEARCHED_NODES:
        return CycleSearch(search.upstream, (), visited, closes_cycle=True)
    return CycleSearch(search.upstream, sorted(reached - search.visited), visited)


def create_graph(
    flow: Flow | None,
    existing: Mapping[str, Execution],
    request: CreateGraph,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[GraphCreated | FlowExists]:
    """Create all of it or nothing. A flow that exists in this namespace is left as it is, so the call is idempotent."""
    if flow is not None:
        if flow.namespace != request.namespace:
            return refuse(errors.IdInOtherNamespace(flow_id=request.flow_id))
        return Decision(FlowExists(request.flow_id))
    namespaces = {node.execution_id: node.namespace for node in request.nodes} if existing else {}
    for other in existing.values():
        if other.namespace != namespaces.get(other.execution_id, request.namespace):
            return refuse(errors.IdInOtherNamespace(execution_id=other.execution_id))
        if other.flow_id is not None:
            return refuse(already_in_flow(other))
        return refuse(errors.InvalidInput(f"nodes: {other.execution_id} exists already"))
    inbound: dict[str, list[StageEdge]] = defaultdict(list)
    outbound: dict[str, list[StageEdge]] = defaultdict(list)
    for edge in request.edges:
        inbound[edge.downstream].append(edge)
        outbound[edge.upstream].append(edge)

    writes: list[Write] = [Insert(_flow_row(request))]
    not_after: list[int] = []
    not_before: list[int] = []
    rows: dict[str, Execution] = {}
    for node, decision in zip(request.nodes, create_each(request.nodes, now, defaults=defaults), strict=True):
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
        rows[name] = insert.row
        writes.append(payload)
        writes.append(Insert(FlowMember(request.flow_id, name)))
        if inbound[name] or name in request.policies:
            applied = len(inbound[name])
            group = new_group(
                request.flow_id,
                name,
                request.policies.get(name, JoinPolicy()),
                staged=applied,
                n=applied,
                waiting_since=NOW if applied else None,
            )
            writes.append(Insert(group))
    # Waiting nodes are in no ready queue yet. Register their queues, so that their lanes are listed.
    claimable = {row.line for name, row in rows.items() if not inbound[name]}
    unclaimed = {row.line or queue.queue_of(row) for name, row in rows.items() if inbound[name] or row.line is None}
    release_queues = {name: None if name in request.policies else row.line for name, row in rows.items()}
    for name, row in rows.items():
        named_successors = [
            successor(
                edge.edge_id,
                edge.downstream,
                edge.kind,
                inbound=len(inbound[edge.downstream]),
                ref=edge.data_passing_ref,
                queue=release_queues[edge.downstream],
            )
            for edge in outbound[name]
        ]
        writes.append(Insert(_member_row(row, request.flow_id, len(inbound[name]), named_successors)))
    for edge in request.edges:
        writes.append(Insert(new_edge(edge)))
        ref = edge.data_passing_ref or None
        writes.append(
            Insert(
                Dependency(
                    edge.downstream, edge.edge_id, request.flow_id, edge.upstream, edge.kind, data_passing_ref=ref
                )
            )
        )
    nodes, count = len(request.nodes), len(request.edges)
    change = Change(
        guards=(absent(Flow, request.flow_id),),  # inserting an existing member fails by itself
        writes=tuple(writes),
        queues=tuple(sorted(unclaimed - claimable)),
        not_before=max(not_before, default=None),
        not_after=min(not_after, default=None),
    )
    return Decision(GraphCreated(request.flow_id, nodes + count, nodes, count), change)


def _flow_row(request: CreateGraph) -> Flow[Draft]:
    nodes, edges = len(request.nodes), len(request.edges)
    return Flow(
        request.flow_id,
        request.partition,
        request.flow_kind,
        request.namespace,
        FlowState.OPEN,
        NOW,
        NOW,
        graph_revision=nodes + edges,
        node_count=nodes,
        edge_count=edges,
        project_at=NOW if nodes else None,
        purge_check_at=FromNow(RETENTION_CHECK_MS) if nodes else None,
    )


def _member_row(
    row: Execution[Draft], flow_id: str, inbound_count: int, named_successors: list[Successor]
) -> Execution[Draft]:
    """Return the execution as a member, with its successors and its dependencies."""
    fields: dict[str, object] = {"flow_id": flow_id}
    if named_successors:
        fields["successors"] = encode_successors(named_successors)
    if inbound_count:
        fields |= downstreams.waiting_fields(f"{inbound_count} dep(s) unresolved")
        fields["public_state"] = PublicState.WAITING_CHILDREN
    return msgspec.structs.replace(row, **fields)
