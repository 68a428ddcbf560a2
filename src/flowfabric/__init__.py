"""FlowFabric: durable execution on a store you already run."""

from __future__ import annotations

from flowfabric.connect import connect
from flowfabric.engine.engine import Engine
from flowfabric.errors import FabricError, StoreUnavailable
from flowfabric.handles import Handle, HandleKind
from flowfabric.rules.create import CreateExecution
from flowfabric.rules.lease import Fence
from flowfabric.sdk.context import Context, current
from flowfabric.sdk.fabric import Fabric
from flowfabric.sdk.failing import Fatal, Retry, RetryAfter, RunCancelled, RunEnded, RunExpired, RunFailed, RunSkipped
from flowfabric.sdk.run import Run
from flowfabric.sdk.task import Task
from flowfabric.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Context",
    "CreateExecution",
    "Engine",
    "Fabric",
    "FabricError",
    "Fatal",
    "Fence",
    "Handle",
    "HandleKind",
    "Retry",
    "RetryAfter",
    "Run",
    "RunCancelled",
    "RunEnded",
    "RunExpired",
    "RunFailed",
    "RunSkipped",
    "Settings",
    "StoreUnavailable",
    "Task",
    "__version__",
    "connect",
    "current",
]
