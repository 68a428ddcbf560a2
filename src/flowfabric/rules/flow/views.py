"""Views of flows: snapshots for readers, and the summary that is projected from the members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Patch, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    DependencyKind,
    Edge,
    EdgeGroup,
    Flow,
    FlowState,
    FlowSummary,
    GroupState,
    JoinPolicyKind,
)
from flowfabric.model.instant import NOW
from flowfabric.model.states import LifecyclePhase, PublicState
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.tags import decode_tags
from flowfabric.rules.flow.build import join_policy_of, seen_flow

FAILURE_STATES = (PublicState.FAILED, PublicState.CANCELLED, PublicState.EXPIRED)
BLOCKED_STATES = (PublicState.SUSPENDED, PublicState.DELAYED, PublicState.RATE_LIMITED, PublicState.WAITING_CHILDREN)
COUNTED = tuple(state for state in PublicState if f"members_{state.value}" in FlowSummary.__struct_fields__)


class EdgeGroupSnapshot(msgspec.Struct, frozen=True):
    """A join as shown to readers."""

    downstream_execution_id: str
    policy: dict[str, Any]
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: str


class FlowSnapshot(msgspec.Struct, frozen=True):
    """A flow as shown to readers."""

    flow_id: str
    flow_kind: str
    namespace: str
    public_flow_state: str
    graph_revision: int
    node_count: int
    edge_count: int
    created_at: int
    last_mutation_at: int
    cancelled_at: int | None
    cancel_reason: str | None
    cancellation_policy: str | None
    tags: dict[str, str]
    edge_groups: list[EdgeGroupSnapshot]


class FlowStatus(msgspec.Struct, frozen=True):
    """A flow as an entry of a list."""

    flow_id: str
    created_at: int
    status: str


class FlowListing(msgspec.Struct, frozen=True):
    """A flow in a list: its state and its members by public state, as last projected."""

    flow_id: str
    flow_kind: str
    namespace: str
    public_flow_state: FlowState
    created_at: int
    cancelled_at: int | None
    node_count: int
    edge_count: int
    members: dict[str, int]
    projected_at: int | None  # None before the first projection


def flow_listing(flow: Flow, summary: FlowSummary | None) -> FlowListing:
    """Return the flow as lists show it."""
    is_open = flow.public_flow_state is FlowState.OPEN
    counts = {} if summary is None else {state.value: getattr(summary, f"members_{state.value}") for state in COUNTED}
    return view_of(
        FlowListing,
        flow,
        public_flow_state=summary.public_flow_state if is_open and summary is not None else flow.public_flow_state,
        members={state: count for state, count in counts.items() if count},
        projected_at=None if summary is None else summary.last_summary_update_at,
    )


def group_snapshot(group: EdgeGroup) -> EdgeGroupSnapshot:
    """Return the join as shown to readers."""
    counted = group.succeeded + group.failed + group.skipped
    return EdgeGroupSnapshot(
        group.downstream_execution_id,
        join_policy_of(group).to_wire(),
        group.n,
        group.succeeded,
        group.failed,
        group.skipped,
        max(0, group.n - counted),
        group.group_state.value,
    )


def flow_snapshot(flow: Flow, groups: Sequence[EdgeGroup]) -> FlowSnapshot:
    """Return the flow as shown to readers, with the joins that have edges."""
    policy = flow.cancellation_policy
    return view_of(
        FlowSnapshot,
        flow,
        public_flow_state=flow.public_flow_state.value,
        cancellation_policy=None if policy is None else policy.value,
        tags=tags_of(flow),
        edge_groups=[group_snapshot(group) for group in groups if group.staged > 0],
    )


def tags_of(flow: Flow) -> dict[str, str]:
    """Return the flow's tags. Raises `Corruption` if the stored text is not valid."""
    try:
        return decode_tags(flow.tags)
    except errors.Corruption as fault:
        raise errors.Corruption(f"tags of flow {flow.flow_id}") from fault


def flow_status(flow: Flow) -> FlowStatus:
    """Return the flow as an entry of a list."""
    match flow.public_flow_state:
        case FlowState.OPEN | FlowState.RUNNING | FlowState.BLOCKED:
            status = "active"
        case other:
            status = other.value
    return FlowStatus(flow.flow_id, flow.created_at, status)


def derived_state(counts: Counter[PublicState]) -> FlowState:
    """Return the flow state that follows from its members; the first case that applies."""
    if all(state in _FINAL for state in counts):
        return FlowState.FAILED if any(state in counts for state in FAILURE_STATES) else FlowState.COMPLETED
    if PublicState.ACTIVE in counts:
        return FlowState.RUNNING
    if any(state in counts for state in BLOCKED_STATES):
        return FlowState.BLOCKED
    return FlowState.OPEN


_FINAL = frozenset({*FAILURE_STATES, PublicState.COMPLETED, PublicState.SKIPPED})


def project_summary(flow: Flow | None, total: int, rows: Iterable[Execution]) -> Decision[bool]:
    """Write the summary of a flow; False if the flow is gone or none of its members exists.

    A flow whose members have all ended is not projected again until it gets a new member or one is replayed.
    """
    if flow is None:
        return Decision(False)
    members = list(rows)
    counts = Counter(row.public_state for row in members)
    has_ended = all(row.lifecycle_phase is LifecyclePhase.TERMINAL for row in members)
    next_projection = Patch(Flow, (flow.flow_id,), {"project_at": None if has_ended else NOW})
    if not members:
        if flow.project_at is None:
            return Decision(False)
        return Decision(False, Change(guards=(seen_flow(flow),), writes=(next_projection,)))
    summary = FlowSummary(
        flow.flow_id,
        derived_state(counts),
        NOW,
        total,
        len(members),
        **{f"members_{state.value}": counts[state] for state in COUNTED},
    )
    writes: tuple[Any, ...] = (Upsert(summary),)
    if flow.project_at is not None:
        writes = (next_projection, *writes)
    return Decision(True, Change(guards=(seen_flow(flow),), writes=writes))


class GraphNode(msgspec.Struct, frozen=True, array_like=True):
    """A member of a flow; its state is None if retention has deleted it."""

    execution_id: str
    execution_kind: str
    public_state: PublicState | None


class GraphLink(msgspec.Struct, frozen=True, array_like=True):
    """An edge between two nodes, by their places in the list of nodes."""

    upstream: int
    downstream: int
    dependency_kind: DependencyKind


class GraphJoin(msgspec.Struct, frozen=True, array_like=True):
    """The join of a node: how many upstreams it needs (None for all of them), the outcomes so far, and its state."""

    node: int
    policy: JoinPolicyKind
    need: int | None
    staged: int
    succeeded: int
    failed: int
    skipped: int
    group_state: GroupState


class FlowGraph(msgspec.Struct, frozen=True):
    """A whole flow. Its layout can change only when `graph_revision` does; states change without it."""

    flow_id: str
    flow_kind: str
    namespace: str
    public_flow_state: FlowState
    graph_revision: int
    created_at: int
    cancelled_at: int | None
    cancel_reason: str | None
    nodes: list[GraphNode]
    edges: list[GraphLink]
    joins: list[GraphJoin]


def flow_graph(
    flow: Flow,
    members: Sequence[str],
    edges: Iterable[Edge],
    groups: Iterable[EdgeGroup],
    executions: Mapping[str, Execution],
    kinds: Mapping[str, str],
) -> FlowGraph:
    """Return the graph of a flow; an edge whose end is no member is left out."""
    place = {name: number for number, name in enumerate(members)}
    states = {name: row.public_state for name, row in executions.items()}
    return view_of(
        FlowGraph,
        flow,
        nodes=[GraphNode(name, kinds.get(name, ""), states.get(name)) for name in members],
        edges=[
            GraphLink(place[edge.upstream_execution_id], place[edge.downstream_execution_id], edge.dependency_kind)
            for edge in edges
            if edge.upstream_execution_id in place and edge.downstream_execution_id in place
        ],
        joins=[
            view_of(
                GraphJoin,
                group,
                node=place[group.downstream_execution_id],
                policy=group.policy_variant,
                need=_needed(group),
            )
            for group in groups
            if group.staged and group.downstream_execution_id in place
        ],
    )


def _needed(group: EdgeGroup) -> int | None:
    match group.policy_variant:
        case JoinPolicyKind.ALL_OF:
            return None
        case JoinPolicyKind.ANY_OF:
            return 1
        case JoinPolicyKind.QUORUM:
            return group.k
