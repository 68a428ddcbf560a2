"""FlowFabric: durable execution on a store you already run."""

from __future__ import annotations

from flowfabric.connect import connect
from flowfabric.engine.engine import Engine
from flowfabric.errors import FabricError, StoreUnavailable
from flowfabric.handles import Handle, HandleKind
from flowfabric.rules.create import CreateExecution
from flowfabric.rules.lease import Fence
from flowfabric.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "CreateExecution",
    "Engine",
    "FabricError",
    "Fence",
    "Handle",
    "HandleKind",
    "Settings",
    "StoreUnavailable",
    "__version__",
    "connect",
]
