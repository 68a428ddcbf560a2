"""The types of the engine's interface: arguments that callers build, and answers that they receive."""

from __future__ import annotations

from flowfabric.model.change import Change, outcome_of
from flowfabric.model.condition import (
    AllConditions,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
)
from flowfabric.model.execution import KeyUntil
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.bulk_operation import BulkStatus
from flowfabric.rules.durable.approval_views import Approval
from flowfabric.rules.durable.asks import ReplyArgs
from flowfabric.rules.durable.child_results import results_of
from flowfabric.rules.durable.facts import MAX_FACT_BYTES, FactArgs, sets_of
from flowfabric.rules.durable.gates import GateArgs, outcome_of_children
from flowfabric.rules.durable.keys import BATCH_MAILBOX, KeyMode, KeyPolicy
from flowfabric.rules.durable.leave import LeftOperation
from flowfabric.rules.durable.mailbox import MAX_MAILBOXES, MessageArgs
from flowfabric.rules.durable.park import GatesClosed, GatesReady
from flowfabric.rules.durable.releases import HELD_PREFIX, HOLD_MAILBOX, is_accepted, patch_tag
from flowfabric.rules.durable.schema_limits import check_schema, resolve_reference
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.durable.vote_schema import approval_name, schema_tag, vote_schema
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.policy import PARTS as POLICY_PARTS
from flowfabric.rules.execution.tags import TRACE_TAG, check_not_reserved
from flowfabric.rules.execution.views import ExecutionInput, ExecutionListing, ExecutionSnapshot, StateVector
from flowfabric.rules.feed import Filter
from flowfabric.rules.flow.build import EdgeSnapshot
from flowfabric.rules.flow.views import FlowGraph, FlowListing, FlowSnapshot
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.limits.quota import QuotaStatus
from flowfabric.rules.schedules.define import Backfilled, PutOutcome
from flowfabric.rules.schedules.overlap import SCHEDULE_KEY
from flowfabric.rules.schedules.views import ScheduleDescription, ScheduledRun, ScheduleStatus
from flowfabric.rules.scheduling.capabilities import version_token
from flowfabric.rules.security.keystore import KeyIds
from flowfabric.rules.security.signed_handle import HandleKeys, is_signed_handle, sign_handle
from flowfabric.rules.security.waitpoint_token import WaitpointToken
from flowfabric.rules.stream.append import Appended, BestEffort
from flowfabric.rules.stream.read import FrameView, StreamPage, SummaryView
from flowfabric.rules.suspension.arguments import FreshWaitpoint, ResumePolicy, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.conditions import condition_to_builtins as plain_condition
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery, SignalArgs
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.rules.suspension.views import SuspensionRecord
from flowfabric.rules.suspension.waitpoints import WaitpointRecord, WaitpointView

__all__ = [
    "BATCH_MAILBOX",
    "HELD_PREFIX",
    "HOLD_MAILBOX",
    "MAX_FACT_BYTES",
    "MAX_MAILBOXES",
    "POLICY_PARTS",
    "SCHEDULE_KEY",
    "TRACE_TAG",
    "Accepted",
    "AllConditions",
    "Appended",
    "Approval",
    "Backfilled",
    "BestEffort",
    "BudgetNeed",
    "BulkStatus",
    "ByName",
    "Change",
    "Count",
    "CountKind",
    "CreateExecution",
    "DuplicateDelivery",
    "EdgeSnapshot",
    "ExecutionInput",
    "ExecutionListing",
    "ExecutionSnapshot",
    "FactArgs",
    "Fence",
    "Filter",
    "FlowGraph",
    "FlowListing",
    "FlowSnapshot",
    "FrameView",
    "FreshWaitpoint",
    "GateArgs",
    "GatesClosed",
    "GatesReady",
    "HandleKeys",
    "KeyIds",
    "KeyMode",
    "KeyPolicy",
    "KeyUntil",
    "LeftOperation",
    "MemoArgs",
    "MessageArgs",
    "ObservedSignal",
    "OperatorOnly",
    "PutOutcome",
    "QuotaStatus",
    "ReplyArgs",
    "ResumePolicy",
    "ScheduleDescription",
    "ScheduleStatus",
    "ScheduledRun",
    "SignalArgs",
    "Single",
    "StateVector",
    "StreamPage",
    "SummaryView",
    "SuspendArgs",
    "SuspensionRecord",
    "TimeoutBehavior",
    "TimeoutOnly",
    "UsePendingWaitpoint",
    "WaitpointRecord",
    "WaitpointToken",
    "WaitpointView",
    "Wildcard",
    "approval_name",
    "check_not_reserved",
    "check_schema",
    "is_accepted",
    "is_signed_handle",
    "outcome_of",
    "outcome_of_children",
    "patch_tag",
    "plain_condition",
    "resolve_reference",
    "results_of",
    "schema_tag",
    "sets_of",
    "sign_handle",
    "version_token",
    "vote_schema",
]
