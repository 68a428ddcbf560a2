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
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.durable.gates import GateArgs, outcome_of_children
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.durable.schema_limits import check_schema, resolve_reference
from flowfabric.rules.durable.vote_schema import approval_name, schema_tag, vote_schema
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.policy import PARTS as POLICY_PARTS
from flowfabric.rules.execution.tags import TRACE_TAG, check_not_reserved
from flowfabric.rules.execution.views import ExecutionSnapshot, StateVector
from flowfabric.rules.feed import Filter
from flowfabric.rules.flow.build import EdgeSnapshot
from flowfabric.rules.flow.views import FlowSnapshot
from flowfabric.rules.limits.budget import BudgetNeed
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
    "POLICY_PARTS",
    "TRACE_TAG",
    "Accepted",
    "AllConditions",
    "Appended",
    "BestEffort",
    "BudgetNeed",
    "ByName",
    "Change",
    "Count",
    "CountKind",
    "CreateExecution",
    "DuplicateDelivery",
    "EdgeSnapshot",
    "ExecutionSnapshot",
    "Fence",
    "Filter",
    "FlowSnapshot",
    "FrameView",
    "FreshWaitpoint",
    "GateArgs",
    "GatesReady",
    "HandleKeys",
    "KeyIds",
    "MessageArgs",
    "ObservedSignal",
    "OperatorOnly",
    "ResumePolicy",
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
    "is_signed_handle",
    "outcome_of",
    "outcome_of_children",
    "plain_condition",
    "resolve_reference",
    "schema_tag",
    "sign_handle",
    "vote_schema",
]
