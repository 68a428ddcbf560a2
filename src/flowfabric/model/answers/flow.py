"""Answers of operations on flows."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from flowfabric.model.flow import CancellationPolicy


class FlowCreated(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "Created"
    flow_id: str


class FlowExists(msgspec.Struct, frozen=True):
    """The flow exists; the rest of the request was not checked."""

    variant: ClassVar[str] = "AlreadySatisfied"

    flow_id: str


class GraphCreated(msgspec.Struct, frozen=True):
    """A flow was created with all its members and edges."""

    flow_id: str
    graph_revision: int
    node_count: int
    edge_count: int


class Added(msgspec.Struct, frozen=True):
    execution_id: str
    new_node_count: int


class AlreadyMember(msgspec.Struct, frozen=True):
    execution_id: str
    node_count: int


class Staged(msgspec.Struct, frozen=True):
    edge_id: str
    new_graph_revision: int


class DependencyApplied(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "Applied"
    unsatisfied_count: int


class DependencyAlreadyApplied(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "AlreadyApplied"


class SetJoinPolicyResult(StrEnum):
    SET = "set"
    ALREADY_SET = "already_set"


class Resolution(StrEnum):
    """The effect of one upstream's completion on one join."""

    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"
    PENDING = "pending"
    ALREADY_RESOLVED = "already_resolved"


class CascadeOutcome(msgspec.Struct, frozen=True):
    """Edges that a cascade resolved, and skipped descendants whose own edges it continued with."""

    resolved: int
    cascaded_children: int
    synchronous: bool = True


class Eligibility(StrEnum):
    """Whether an execution's dependencies let it run; the first case that applies."""

    NOT_FOUND = "not_found"
    NOT_RUNNABLE = "not_runnable"
    OWNED = "owned"
    TERMINAL = "terminal"
    IMPOSSIBLE = "impossible"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    ELIGIBLE = "eligible"


class FlowCancelled(msgspec.Struct, frozen=True):
    """The flow is cancelled, and so is every member that the policy selected."""

    variant: ClassVar[str] = "Cancelled"

    cancellation_policy: CancellationPolicy
    member_execution_ids: list[str]


class CancellationScheduled(msgspec.Struct, frozen=True):
    """The flow is cancelled; its members are being cancelled."""

    cancellation_policy: CancellationPolicy
    member_count: int
    member_execution_ids: list[str]


class PartiallyCancelled(msgspec.Struct, frozen=True):
    """The flow is cancelled; cancelling some members failed and will be retried."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: list[str]
    failed_member_execution_ids: list[str]


class HeaderCancelled(msgspec.Struct, frozen=True):
    """The flow is now cancelled; the selected members are in its backlog."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: list[str]
    selected_execution_ids: list[str]


class HeaderAlreadyTerminal(msgspec.Struct, frozen=True):
    """The flow was cancelled before; nothing changed."""

    stored_cancellation_policy: CancellationPolicy | None
    stored_cancel_reason: str | None
    member_execution_ids: list[str]


class SiblingDrain(StrEnum):
    DRAINED = "drained"
    ALREADY_DRAINED = "already_drained"
    DRAINED_SANS_GROUP = "drained_sans_group"


class SiblingReconcile(StrEnum):
    NO_OP = "no_op"
    STALE_REMOVED = "sremmed_stale"
    COMPLETED_DRAIN = "completed_drain"


class MemberCancelResult(StrEnum):
    """The result of cancelling one member."""

    CANCELLED = "cancelled"
    ALREADY_TERMINAL = "already_terminal"
    NOT_FOUND = "not_found"
