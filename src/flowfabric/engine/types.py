"""The engine's own vocabulary: what callers make to ask for things, and what they are shown."""

from __future__ import annotations

from flowfabric.model.change import Change, outcome_of
from flowfabric.model.condition import AllOf, ByName, Count, CountKind, OperatorOnly, Single, TimeoutOnly, Wildcard
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.durable.gates import GateArgs, closed_by
from flowfabric.rules.durable.mailbox import MailArgs
from flowfabric.rules.durable.park import Ready
from flowfabric.rules.durable.schema_limits import check_schema, target
from flowfabric.rules.durable.vote_schema import ask_tag, asked_by, schema_of
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.execution.policy import PARTS as POLICY_PARTS
from flowfabric.rules.execution.tags import TRACE_TAG, check_not_reserved
from flowfabric.rules.execution.views import StateVector
from flowfabric.rules.feed import Filter
from flowfabric.rules.flow.build import EdgeSnapshot
from flowfabric.rules.flow.views import FlowSnapshot
from flowfabric.rules.limits.budget import Need
from flowfabric.rules.security.keystore import Kids
from flowfabric.rules.security.signed_handle import HandleKeys, is_signed_handle, sign_handle
from flowfabric.rules.security.waitpoint_token import WaitpointToken
from flowfabric.rules.stream.append import Appended, BestEffort
from flowfabric.rules.stream.read import FrameView, StreamPage, SummaryView
from flowfabric.rules.suspension.arguments import Fresh, ResumePolicy, SuspendArgs, UsePending
from flowfabric.rules.suspension.conditions import to_plain as plain_condition
from flowfabric.rules.suspension.signals import Accepted, Duplicate, SignalArgs
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.rules.suspension.views import SuspensionRecord
from flowfabric.rules.suspension.waitpoints import WaitpointRecord, WaitpointView

__all__ = [
    "POLICY_PARTS",
    "TRACE_TAG",
    "Accepted",
    "AllOf",
    "Appended",
    "BestEffort",
    "ByName",
    "Change",
    "Count",
    "CountKind",
    "CreateExecution",
    "Duplicate",
    "EdgeSnapshot",
    "Fence",
    "Filter",
    "FlowSnapshot",
    "FrameView",
    "Fresh",
    "GateArgs",
    "HandleKeys",
    "Kids",
    "MailArgs",
    "Need",
    "ObservedSignal",
    "OperatorOnly",
    "Ready",
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
    "UsePending",
    "WaitpointRecord",
    "WaitpointToken",
    "WaitpointView",
    "Wildcard",
    "ask_tag",
    "asked_by",
    "check_not_reserved",
    "check_schema",
    "closed_by",
    "is_signed_handle",
    "outcome_of",
    "plain_condition",
    "schema_of",
    "sign_handle",
    "target",
]
