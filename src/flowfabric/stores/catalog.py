"""The catalog of tables: names, keys, homes, aggregate roots and indexes, defined once for all stores.

An *aggregate root* has a revision and can be guarded; every other row belongs to a root. Columns and their types come
from the record types. Stores derive their statements from the catalog, and a test compares it with each store's schema.
"""

from __future__ import annotations

import types
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from flowfabric.model.bulk_operation import BulkOperation
from flowfabric.model.deployment import Deployment, SweepLease
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, Result
from flowfabric.model.flow import (
    CancelBacklog,
    CompletionDispatch,
    Dependency,
    Edge,
    EdgeGroup,
    Flow,
    FlowMember,
    FlowSummary,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.model.gate import ChildCancel, ChildCompletion, Fact, GateMemo, MailboxMessage, Reply, StepMemo
from flowfabric.model.instant import Instant
from flowfabric.model.limits.budget import Budget, BudgetDimension, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.scheduling.lane import Lane
from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.model.scheduling.worker import RegisteredWorker, WorkerEvent
from flowfabric.model.security.api_token import ApiToken
from flowfabric.model.security.signing_key import Keystore, SigningKey
from flowfabric.model.stream import Frame, Stream, StreamSummary
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint


class Column(msgspec.Struct, frozen=True):
    """A column of kind int, str, bytes, bool, float, `QueueKey`, or an enum that is stored as its member's ordinal."""

    name: str
    kind: type[Any]
    optional: bool

    @property
    def is_enum(self) -> bool:
        return issubclass(self.kind, Enum)


class Index(msgspec.Struct, frozen=True):
    """An ordered index; it omits rows whose first column is null, unless it is `whole`: a list of all rows uses it."""

    columns: tuple[str, ...]
    whole: bool = False


class HomeKind(Enum):
    """What a key column holds from which the home of a row follows (`homes.py`)."""

    EXECUTION = "an execution id, or one like it, which names its partition"
    PARTITION = "the number of a flow partition"
    TAG = "the tag of a partition of any family"
    FLOW = "a flow id"
    BUDGET = "a budget id"
    QUOTA = "the id of a quota policy"


# The first of these in a key decides.
_HOME_COLUMNS = {
    "execution_id": HomeKind.EXECUTION,
    "downstream_execution_id": HomeKind.EXECUTION,
    "parent_id": HomeKind.EXECUTION,
    "schedule_id": HomeKind.EXECUTION,
    "partition": HomeKind.PARTITION,
    "origin": HomeKind.TAG,
    "flow_id": HomeKind.FLOW,
    "budget_id": HomeKind.BUDGET,
    "quota_policy_id": HomeKind.QUOTA,
}


class Table(msgspec.Struct, frozen=True):
    """A table and its record type."""

    name: str
    row: type[msgspec.Struct]
    key: tuple[str, ...]
    aggregate_root: type[msgspec.Struct]  # `row` itself if it is a root
    columns: tuple[Column, ...]
    indexes: tuple[Index, ...] = ()

    @property
    def home(self) -> tuple[str, HomeKind] | None:
        """The key column from which the home of a row follows; None if the rows belong to no partition."""
        return next(((name, _HOME_COLUMNS[name]) for name in self.key if name in _HOME_COLUMNS), None)

    @property
    def is_aggregate_root(self) -> bool:
        return self.aggregate_root is self.row

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def _columns(row: type[msgspec.Struct]) -> tuple[Column, ...]:
    hints = get_type_hints(row)
    columns = []
    for field in row.__struct_fields__:
        hint, optional = hints[field], False
        if get_origin(hint) in (Union, types.UnionType):
            hint, *others = get_args(hint)
            optional = type(None) in others
        columns.append(Column(field, int if hint is Instant else hint, optional))
    return tuple(columns)


def _table(
    name: str,
    row: type[msgspec.Struct],
    *key: str,
    root: type[msgspec.Struct] | None = None,
    indexes: tuple[tuple[str, ...], ...] = (),
    list_order: tuple[str, ...] | None = None,
) -> Table:
    ordered = () if list_order is None else (Index(list_order, whole=True),)
    return Table(name, row, key, root or row, _columns(row), (*(Index(columns) for columns in indexes), *ordered))


TABLES: tuple[Table, ...] = (
    _table(
        "ff_exec_core",
        Execution,
        "execution_id",
        indexes=(
            ("line", "rank", "execution_id"),
            ("lease_expires_at", "execution_id"),
            ("delay_until", "execution_id"),
            ("attempt_timeout_at", "execution_id"),
            ("deadline_at", "execution_id"),
            ("purge_at", "execution_id"),
            ("blocked_on", "rank", "execution_id"),
            ("parent_id", "created_at", "execution_id"),
        ),
        list_order=("created_at", "execution_id"),
    ),
    _table("ff_payload", Payload, "execution_id", root=Execution),
    _table("ff_result", Result, "execution_id", root=Execution),
    _table("ff_attempt", Attempt, "execution_id", "attempt_index", root=Execution),
    _table("ff_idempotency", IdempotencyKey, "partition", "digest", indexes=(("expires_at",),)),
    _table("ff_sweep", SweepLease, "sweep"),
    _table("ff_partition_config", Deployment, "deployment_id"),
    _table("ff_lane", Lane, "lane_id"),
    _table("ff_api_token", ApiToken, "token_id"),
    _table(
        "ff_bulk_operation",
        BulkOperation,
        "operation_id",
        indexes=(("due_at", "operation_id"),),
        list_order=("created_at", "operation_id"),
    ),
    _table("ff_keystore", Keystore, "keystore_id"),
    _table("ff_waitpoint_hmac", SigningKey, "keystore_id", "kid", root=Keystore),
    _table(
        "ff_suspension",
        Suspension,
        "execution_id",
        indexes=(("due_at", "execution_id"), ("asks_until", "execution_id")),
    ),
    _table(
        "ff_waitpoint",
        Waitpoint,
        "waitpoint_id",
        "partition",
        root=Suspension,
        indexes=(("execution_id", "waitpoint_id"), ("pending_until", "waitpoint_id")),
    ),
    _table("ff_signal", Signal, "execution_id", "waitpoint_id", "seq", root=Suspension),
    _table("ff_remembered", IdempotencyRecord, "execution_id", "scope", "digest", root=Suspension),
    _table("ff_gate", GateMemo, "execution_id", "gate", root=Suspension),
    _table("ff_mail", MailboxMessage, "execution_id", "mailbox", "seq", root=Suspension),
    _table("ff_reply", Reply, "execution_id", "message_id", root=Suspension),
    _table("ff_child_end", ChildCompletion, "parent_id", "child_id", "life", root=Suspension, indexes=(("due_at",),)),
    _table("ff_child_cancel", ChildCancel, "parent_id", indexes=(("due_at", "parent_id"),)),
    _table(
        "ff_schedule",
        Schedule,
        "schedule_id",
        indexes=(("next_at", "schedule_id"),),
        list_order=("name", "schedule_id"),
    ),
    _table("ff_step", StepMemo, "execution_id", "name", "occurrence", root=Execution),
    _table("ff_fact", Fact, "execution_id", "name"),
    _table("ff_stream", Stream, "execution_id", "attempt_index"),
    _table("ff_frame", Frame, "execution_id", "attempt_index", "page", "ms", "seq", root=Stream),
    _table("ff_stream_summary", StreamSummary, "execution_id", "attempt_index", root=Stream),
    _table(
        "ff_flow_core",
        Flow,
        "flow_id",
        indexes=(
            ("partition", "flow_id"),
            ("project_at", "flow_id"),
            ("purge_check_at", "flow_id"),
        ),
        list_order=("created_at", "flow_id"),
    ),
    _table("ff_flow_member", FlowMember, "flow_id", "execution_id", root=Flow),
    _table(
        "ff_edge",
        Edge,
        "flow_id",
        "edge_id",
        root=Flow,
        indexes=(("upstream_execution_id", "edge_id"), ("downstream_execution_id", "edge_id")),
    ),
    _table(
        "ff_edge_group",
        EdgeGroup,
        "flow_id",
        "downstream_execution_id",
        indexes=(("waiting_since", "flow_id", "downstream_execution_id"),),
    ),
    _table(
        "ff_dependency",
        Dependency,
        "downstream_execution_id",
        "edge_id",
        indexes=(("unfolded_at", "downstream_execution_id", "edge_id"),),
    ),
    _table("ff_dispatch", CompletionDispatch, "execution_id", indexes=(("due_at", "execution_id"),)),
    _table(
        "ff_pending_cancel_groups",
        PendingSiblingCancel,
        "flow_id",
        "downstream_execution_id",
        indexes=(("flagged_at", "flow_id", "downstream_execution_id"),),
    ),
    _table("ff_cancel_backlog", CancelBacklog, "flow_id", indexes=(("due_at", "flow_id"),)),
    _table("ff_cancel_backlog_member", PendingMemberCancel, "flow_id", "execution_id", root=CancelBacklog),
    _table("ff_flow_summary", FlowSummary, "flow_id", root=Flow),
    _table("ff_outbox", OutboxMessage, "origin", "message_id", indexes=(("due_at",),)),
    _table(
        "ff_budget_policy",
        Budget,
        "namespace",
        "budget_id",
        indexes=(("next_reset_at", "namespace", "budget_id"), ("lapse_at", "namespace", "budget_id")),
    ),
    _table("ff_budget_usage", BudgetDimension, "namespace", "budget_id", "dimension", root=Budget),
    _table(
        "ff_budget_usage_by_exec",
        BudgetSpend,
        "namespace",
        "budget_id",
        "execution_id",
        "dimension",
        root=Budget,
        indexes=(("execution_id",),),
    ),
    _table(
        "ff_budget_reservation",
        BudgetReservation,
        "namespace",
        "budget_id",
        "reservation_id",
        "dimension",
        root=Budget,
        indexes=(("execution_id",),),
    ),
    _table(
        "ff_budget_usage_dedup",
        UsageKey,
        "namespace",
        "budget_id",
        "digest",
        "expires_at",
        root=Budget,
        indexes=(("expires_at",),),
    ),
    _table("ff_quota_policy", QuotaPolicy, "namespace", "quota_policy_id"),
    _table("ff_quota_admitted", QuotaSlot, "namespace", "quota_policy_id", "execution_id", root=QuotaPolicy),
    _table(
        "ff_quota_window",
        QuotaRequest,
        "namespace",
        "quota_policy_id",
        "dimension",
        "execution_id",
        root=QuotaPolicy,
        indexes=(("quota_policy_id", "namespace", "dimension", "admitted_at", "execution_id"), ("expires_at",)),
    ),
    _table("ff_worker_registry", RegisteredWorker, "namespace", "worker_instance_id", indexes=(("lapses_at",),)),
    _table(
        "ff_worker_registry_event",
        WorkerEvent,
        "namespace",
        "worker_instance_id",
        "event_at_ms",
        "event_kind",
        root=RegisteredWorker,
        indexes=(("expires_at",),),
    ),
)

TABLE: dict[type[msgspec.Struct], Table] = {table.row: table for table in TABLES}


def key_of(row: msgspec.Struct) -> tuple[Any, ...]:
    """Return the key of a row."""
    return tuple(getattr(row, name) for name in TABLE[type(row)].key)


def index_columns(row: type[msgspec.Struct], column: str) -> tuple[str, ...]:
    """Return the columns of the index that starts with this column."""
    return next(index.columns for index in TABLE[row].indexes if index.columns[0] == column)
