"""How flows read: snapshots for callers, and the summary that is projected from the members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import NOW, Change, Patch, Upsert, from_now
from flowfabric.model.execution import Execution
from flowfabric.model.flow import EdgeGroup, Flow, FlowState, FlowSummary
from flowfabric.model.states import LifecyclePhase, PublicState
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.tags import decode_tags
from flowfabric.rules.flow.build import join_policy_of, seen_flow

FAILURE_STATES = (PublicState.FAILED, PublicState.CANCELLED, PublicState.EXPIRED)
BLOCKED_STATES = (PublicState.SUSPENDED, PublicState.DELAYED, PublicState.RATE_LIMITED, PublicState.WAITING_CHILDREN)
COUNTED = tuple(state for state in PublicState if f"members_{state.value}" in FlowSummary.__struct_fields__)


class EdgeGroupSnapshot(msgspec.Struct, frozen=True):
    """A join as people see it."""

    downstream_execution_id: str
    policy: dict[str, Any]
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: str


class FlowSnapshot(msgspec.Struct, frozen=True):
    """A flow as people see it."""

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
    """A flow as a line of a list."""

    flow_id: str
    created_at: int
    status: str


def group_snapshot(group: EdgeGroup) -> EdgeGroupSnapshot:
    """The join for a reader."""
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
    """The flow for a reader, with the joins that edges lead to."""
    policy = flow.cancellation_policy
    return FlowSnapshot(
        flow.flow_id,
        flow.flow_kind,
        flow.namespace,
        flow.public_flow_state.value,
        flow.graph_revision,
        flow.node_count,
        flow.edge_count,
        flow.created_at,
        flow.last_mutation_at,
        flow.cancelled_at,
        flow.cancel_reason,
        None if policy is None else policy.value,
        tags_of(flow),
        [group_snapshot(group) for group in groups if group.staged > 0],
    )


def tags_of(flow: Flow) -> dict[str, str]:
    """The flow's tags; a text that is no tags is corruption."""
    try:
        return decode_tags(flow.tags)
    except errors.Corruption as fault:
        raise errors.Corruption(f"tags of flow {flow.flow_id}") from fault


def flow_status(flow: Flow) -> FlowStatus:
    """The flow for a list."""
    match flow.public_flow_state:
        case FlowState.OPEN | FlowState.RUNNING | FlowState.BLOCKED:
            word = "active"
        case other:
            word = other.value
    return FlowStatus(flow.flow_id, flow.created_at, word)


def derived_state(counts: Counter[PublicState]) -> FlowState:
    """The state of a flow that follows from its members; the first that applies."""
    if all(state in _FINAL for state in counts):
        return FlowState.FAILED if any(state in counts for state in FAILURE_STATES) else FlowState.COMPLETED
    if PublicState.ACTIVE in counts:
        return FlowState.RUNNING
    if any(state in counts for state in BLOCKED_STATES):
        return FlowState.BLOCKED
    return FlowState.OPEN


_FINAL = frozenset({*FAILURE_STATES, PublicState.COMPLETED, PublicState.SKIPPED})


def project_summary(flow: Flow | None, total: int, rows: Iterable[Execution]) -> Decision[bool]:
    """Write the summary of a flow; False when the flow is gone or none of its members has a record.

    A flow all of whose members have ended needs no further looks, until it gets a new member.
    """
    if flow is None:
        return Decision(False)
    found = list(rows)
    counts = Counter(row.public_state for row in found)
    over = all(row.lifecycle_phase is LifecyclePhase.TERMINAL for row in found)
    look = Patch(Flow, (flow.flow_id,), {"project_at": None if over else NOW})
    if not found:
        if flow.project_at is None:
            return Decision(False)
        return Decision(False, Change(guards=(seen_flow(flow),), writes=(look,)))
    summary = FlowSummary(
        flow.flow_id,
        derived_state(counts),
        from_now(0),
        total,
        len(found),
        **{f"members_{state.value}": counts[state] for state in COUNTED},
    )
    writes: tuple[Any, ...] = (Upsert(summary),)
    if flow.project_at is not None:
        writes = (look, *writes)
    return Decision(True, Change(guards=(seen_flow(flow),), writes=writes))
