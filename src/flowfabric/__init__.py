"""FlowFabric: durable execution on a store you already run.

The public names are imported on first use, so that a command line that prints its help loads no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfabric.connector import connect as connect
    from flowfabric.engine.engine import Engine as Engine
    from flowfabric.errors import FabricError as FabricError
    from flowfabric.errors import InvalidInput as InvalidInput
    from flowfabric.errors import KeyTaken as KeyTaken
    from flowfabric.errors import StoreUnavailable as StoreUnavailable
    from flowfabric.handles import Handle as Handle
    from flowfabric.handles import HandleKind as HandleKind
    from flowfabric.model.scheduling.schedule import Calendar as Calendar
    from flowfabric.rules.execution.create import CreateExecution as CreateExecution
    from flowfabric.rules.execution.fences import Fence as Fence
    from flowfabric.sdk.approvals import Approval as Approval
    from flowfabric.sdk.approvals import Votes as Votes
    from flowfabric.sdk.context import Context as Context
    from flowfabric.sdk.context import current as current
    from flowfabric.sdk.durable.attempt import NonDeterministic as NonDeterministic
    from flowfabric.sdk.durable.budgets import Reservation as Reservation
    from flowfabric.sdk.durable.inbox import Inbox as Inbox
    from flowfabric.sdk.durable.inbox import Message as Message
    from flowfabric.sdk.durable.output import Output as Output
    from flowfabric.sdk.durable.races import Won as Won
    from flowfabric.sdk.durable.step_identity import step as step
    from flowfabric.sdk.exceptions import BudgetExceeded as BudgetExceeded
    from flowfabric.sdk.exceptions import Fatal as Fatal
    from flowfabric.sdk.exceptions import NotAnswered as NotAnswered
    from flowfabric.sdk.exceptions import Refused as Refused
    from flowfabric.sdk.exceptions import RetryAfter as RetryAfter
    from flowfabric.sdk.exceptions import RunCancelled as RunCancelled
    from flowfabric.sdk.exceptions import RunEnded as RunEnded
    from flowfabric.sdk.exceptions import RunExpired as RunExpired
    from flowfabric.sdk.exceptions import RunFailed as RunFailed
    from flowfabric.sdk.exceptions import RunSkipped as RunSkipped
    from flowfabric.sdk.exceptions import StepFailed as StepFailed
    from flowfabric.sdk.exceptions import StepInterrupted as StepInterrupted
    from flowfabric.sdk.exceptions import StepTimeout as StepTimeout
    from flowfabric.sdk.fabric import Fabric as Fabric
    from flowfabric.sdk.flows import Flow as Flow
    from flowfabric.sdk.flows import FlowRun as FlowRun
    from flowfabric.sdk.joins import AllOf as AllOf
    from flowfabric.sdk.joins import AnyOf as AnyOf
    from flowfabric.sdk.joins import Quorum as Quorum
    from flowfabric.sdk.keys.key import Key as Key
    from flowfabric.sdk.keys.keyed import Keyed as Keyed
    from flowfabric.sdk.limits import Budget as Budget
    from flowfabric.sdk.limits import Limit as Limit
    from flowfabric.sdk.retry import Retry as Retry
    from flowfabric.sdk.run import Reset as Reset
    from flowfabric.sdk.run import Run as Run
    from flowfabric.sdk.schedules import ScheduleHandle as ScheduleHandle
    from flowfabric.sdk.task import Task as Task
    from flowfabric.sdk.worker.worker import Worker as Worker
    from flowfabric.settings import Deadlines as Deadlines
    from flowfabric.settings import Settings as Settings

__version__ = "0.1.0"

_MODULES = {
    "AllOf": "flowfabric.sdk.joins",
    "AnyOf": "flowfabric.sdk.joins",
    "Approval": "flowfabric.sdk.approvals",
    "Budget": "flowfabric.sdk.limits",
    "BudgetExceeded": "flowfabric.sdk.exceptions",
    "Calendar": "flowfabric.model.scheduling.schedule",
    "Context": "flowfabric.sdk.context",
    "CreateExecution": "flowfabric.rules.execution.create",
    "Deadlines": "flowfabric.settings",
    "Engine": "flowfabric.engine.engine",
    "Fabric": "flowfabric.sdk.fabric",
    "FabricError": "flowfabric.errors",
    "Fatal": "flowfabric.sdk.exceptions",
    "Fence": "flowfabric.rules.execution.fences",
    "Flow": "flowfabric.sdk.flows",
    "FlowRun": "flowfabric.sdk.flows",
    "Handle": "flowfabric.handles",
    "HandleKind": "flowfabric.handles",
    "Inbox": "flowfabric.sdk.durable.inbox",
    "InvalidInput": "flowfabric.errors",
    "Key": "flowfabric.sdk.keys.key",
    "KeyTaken": "flowfabric.errors",
    "Keyed": "flowfabric.sdk.keys.keyed",
    "Limit": "flowfabric.sdk.limits",
    "Message": "flowfabric.sdk.durable.inbox",
    "NonDeterministic": "flowfabric.sdk.durable.attempt",
    "NotAnswered": "flowfabric.sdk.exceptions",
    "Output": "flowfabric.sdk.durable.output",
    "Quorum": "flowfabric.sdk.joins",
    "Refused": "flowfabric.sdk.exceptions",
    "Reservation": "flowfabric.sdk.durable.budgets",
    "Reset": "flowfabric.sdk.run",
    "Retry": "flowfabric.sdk.retry",
    "RetryAfter": "flowfabric.sdk.exceptions",
    "Run": "flowfabric.sdk.run",
    "RunCancelled": "flowfabric.sdk.exceptions",
    "RunEnded": "flowfabric.sdk.exceptions",
    "RunExpired": "flowfabric.sdk.exceptions",
    "RunFailed": "flowfabric.sdk.exceptions",
    "RunSkipped": "flowfabric.sdk.exceptions",
    "ScheduleHandle": "flowfabric.sdk.schedules",
    "Settings": "flowfabric.settings",
    "StepFailed": "flowfabric.sdk.exceptions",
    "StepInterrupted": "flowfabric.sdk.exceptions",
    "StepTimeout": "flowfabric.sdk.exceptions",
    "StoreUnavailable": "flowfabric.errors",
    "Task": "flowfabric.sdk.task",
    "Votes": "flowfabric.sdk.approvals",
    "Won": "flowfabric.sdk.durable.races",
    "Worker": "flowfabric.sdk.worker.worker",
    "connect": "flowfabric.connector",
    "current": "flowfabric.sdk.context",
    "step": "flowfabric.sdk.durable.step_identity",
}

__all__ = ["__version__", *_MODULES]

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
