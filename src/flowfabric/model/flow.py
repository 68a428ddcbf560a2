"""Rows of a flow: the graph, the join of each execution that waits for others, and pending work.

Guarded rows are the flow, the edge group of each downstream execution, and the dependency of each applied edge. A
completion writes only the dependencies of its own edges, which nobody else writes at that time. Resolving a join then
counts all recorded outcomes of a group in one change. So a thousand members that end together never contend for one
row.

Some rows mean that work is pending: a dependency with a recorded outcome that is not counted (`unfolded_at`), a
dispatch (a completion with too many edges for its own change), a flagged group (siblings to cancel) and a cancel
backlog (members to cancel). Each has an instant and an index, so that any process can find what a dead one left behind.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant
from flowfabric.model.states import TerminalOutcome


class FlowState(StrEnum):
    """The flow row only has `open` and `cancelled`; the other states are derived and stored in its summary."""

    OPEN = "open"
    RUNNING = "running"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DependencyKind(StrEnum):
    """Which outcomes of the upstream satisfy an edge; all others make it impossible."""

    SUCCESS_ONLY = "success_only"
    FAILURE_ONLY = "failure_only"
    ANY_OUTCOME = "any_outcome"


class DependencyState(StrEnum):
    UNSATISFIED = "unsatisfied"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class JoinPolicyKind(StrEnum):
    ALL_OF = "all_of"
    ANY_OF = "any_of"
    QUORUM = "quorum"


class OnSatisfied(StrEnum):
    """What happens to the other upstreams when a group fires."""

    CANCEL_REMAINING = "cancel_remaining"
    LET_RUN = "let_run"


class GroupState(StrEnum):
    PENDING = "pending"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"
    CANCELLED = "cancelled"  # reserved, never produced


class CancellationPolicy(StrEnum):
    CANCEL_ALL = "cancel_all"
    CANCEL_PENDING = "cancel_pending"
    FLOW_ONLY = "flow_only"


class Flow(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """The flow row. Its revision fences membership and graph."""

    flow_id: str
    partition: int
    flow_kind: str
    namespace: str
    public_flow_state: FlowState
    created_at: Instant
    last_mutation_at: Instant
    graph_revision: int = 0
    node_count: int = 0
    edge_count: int = 0
    tags: str | None = None  # a JSON object with sorted keys; None for no tags
    cancelled_at: Instant | None = None
    cancel_reason: str | None = None
    cancellation_policy: CancellationPolicy | None = None
    project_at: Instant | None = None  # set while the summary has to be projected
    purge_check_at: Instant | None = None  # next retention check; unset for a flow without members
    revision: int = 0


class FlowMember(msgspec.Struct, frozen=True, gc=False):
    """An execution's membership in a flow; it stays when retention has deleted the execution."""

    flow_id: str
    execution_id: str


class Edge(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """A staged edge. It never changes; the dependency of its downstream holds the resolution."""

    flow_id: str
    edge_id: str
    upstream_execution_id: str
    downstream_execution_id: str
    dependency_kind: DependencyKind
    created_at: Instant
    data_passing_ref: str | None = None


class EdgeGroup(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """The join of one downstream execution over all its inbound edges."""

    flow_id: str
    downstream_execution_id: str
    policy_variant: JoinPolicyKind
    on_satisfied: OnSatisfied | None = None
    k: int = 0
    staged: int = 0  # inbound edges, applied or not
    n: int = 0  # inbound edges that were applied
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    group_state: GroupState = GroupState.PENDING
    satisfied_at: Instant | None = None
    waiting_since: Instant | None = None  # set while it is pending with edges applied
    cancel_siblings_pending_flag: bool = False
    cancel_siblings_pending_members: str | None = None  # joined by |
    cancel_siblings_reason: str | None = None
    last_flow_graph_revision: int | None = None
    revision: int = 0


class Dependency(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """One applied edge, stored with its downstream.

    The completion of the upstream sets `outcome` and `unfolded_at`, unless the upstream was cancelled with its flow or
    as an unneeded sibling. Resolving the join sets `state` and unsets `unfolded_at`, once. Only the replay of a skipped
    downstream resets that. An outcome that was not counted before the upstream was replayed is ignored until it ends
    again.
    """

    downstream_execution_id: str
    edge_id: str
    flow_id: str
    upstream_execution_id: str
    dependency_kind: DependencyKind
    state: DependencyState = DependencyState.UNSATISFIED
    data_passing_ref: str | None = None
    outcome: TerminalOutcome | None = None
    last_resolved_at: Instant | None = None
    unfolded_at: Instant | None = None
    revision: int = 0


class CompletionDispatch(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """The completion of an execution with many edges that are not all recorded; `after_edge` is the progress."""

    execution_id: str
    flow_id: str
    outcome: TerminalOutcome
    due_at: Instant
    after_edge: str = ""
    revision: int = 0


class PendingSiblingCancel(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """A fired group whose remaining upstreams have to be cancelled."""

    flow_id: str
    downstream_execution_id: str
    flagged_at: Instant
    revision: int = 0


class CancelBacklog(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """A cancelled flow with members still to be cancelled; from `due_at` on a reconciler handles it."""

    flow_id: str
    due_at: Instant
    remaining: int
    revision: int = 0


class PendingMemberCancel(msgspec.Struct, frozen=True, gc=False):
    """A member that the cancel of its flow selected and that is not acknowledged yet."""

    flow_id: str
    execution_id: str


class FlowSummary(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """The last projection: members by public state, and the flow state derived from them."""

    flow_id: str
    public_flow_state: FlowState
    last_summary_update_at: Instant
    total_members: int = 0
    sampled_members: int = 0  # members that retention has not deleted
    members_completed: int = 0
    members_failed: int = 0
    members_cancelled: int = 0
    members_expired: int = 0
    members_skipped: int = 0
    members_active: int = 0
    members_suspended: int = 0
    members_waiting: int = 0
    members_delayed: int = 0
    members_rate_limited: int = 0
    members_waiting_children: int = 0
