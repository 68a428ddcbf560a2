"""The engine's own vocabulary: what callers make to ask for things, and what they are shown."""

from __future__ import annotations

from flowfabric.model.condition import AllOf, ByName, Count, CountKind, OperatorOnly, Single, TimeoutOnly, Wildcard
from flowfabric.rules.budgets import Need
from flowfabric.rules.change import Change
from flowfabric.rules.create import CreateExecution
from flowfabric.rules.frames import StreamPage
from flowfabric.rules.lease import Fence
from flowfabric.rules.mailbox import MailArgs
from flowfabric.rules.parking import GateArgs
from flowfabric.rules.signals import SignalArgs
from flowfabric.rules.suspend_args import Fresh, SuspendArgs
from flowfabric.rules.tokens import WaitpointToken

__all__ = [
    "AllOf",
    "ByName",
    "Change",
    "Count",
    "CountKind",
    "CreateExecution",
    "Fence",
    "Fresh",
    "GateArgs",
    "MailArgs",
    "Need",
    "OperatorOnly",
    "SignalArgs",
    "Single",
    "StreamPage",
    "SuspendArgs",
    "TimeoutOnly",
    "WaitpointToken",
    "Wildcard",
]
