"""The engine's own vocabulary: what callers make to ask for things, and what they are shown."""

from __future__ import annotations

from flowfabric.model.condition import AllOf, ByName, Count, CountKind, OperatorOnly, Single, TimeoutOnly, Wildcard
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.asking import ask_tag, asked_by, schema_of
from flowfabric.rules.budgets import Need
from flowfabric.rules.change import Change, outcome_of
from flowfabric.rules.conditions import to_plain as plain_condition
from flowfabric.rules.create import CreateExecution
from flowfabric.rules.feeds import Filter
from flowfabric.rules.flow_views import FlowSnapshot
from flowfabric.rules.flows import EdgeSnapshot
from flowfabric.rules.frames import FrameView, StreamPage, SummaryView
from flowfabric.rules.gates import closed_by
from flowfabric.rules.lease import Fence
from flowfabric.rules.mailbox import MailArgs
from flowfabric.rules.parking import GateArgs, Ready
from flowfabric.rules.policy import PARTS as POLICY_PARTS
from flowfabric.rules.schemas import check_schema, target
from flowfabric.rules.signals import Accepted, Duplicate, SignalArgs
from flowfabric.rules.signed_handles import HandleKeys, is_signed_handle, sign_handle
from flowfabric.rules.streams import Appended, BestEffort
from flowfabric.rules.suspend_args import Fresh, ResumePolicy, SuspendArgs, UsePending
from flowfabric.rules.suspension_views import SuspensionRecord
from flowfabric.rules.tags import TRACE_TAG, check_not_reserved
from flowfabric.rules.tokens import Kids, WaitpointToken
from flowfabric.rules.views import StateVector
from flowfabric.rules.waitpoints import WaitpointRecord, WaitpointView
from flowfabric.rules.waits import ObservedSignal

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
