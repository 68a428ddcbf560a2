"""Tools for tests of applications and of this project: a `World` in virtual time, and stores that fail on request.

The names are imported on first use, so that the pytest plugin in this package loads no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfabric.testing.flaky_store import FlakyStore as FlakyStore
    from flowfabric.testing.flaky_store import Loss as Loss
    from flowfabric.testing.flaky_store import SyncPoint as SyncPoint
    from flowfabric.testing.invariants import InvariantBroken as InvariantBroken
    from flowfabric.testing.invariants import InvariantChecker as InvariantChecker
    from flowfabric.testing.invariants import check_invariants as check_invariants
    from flowfabric.testing.world import World as World

_MODULES = {
    "FlakyStore": "flowfabric.testing.flaky_store",
    "InvariantBroken": "flowfabric.testing.invariants",
    "InvariantChecker": "flowfabric.testing.invariants",
    "Loss": "flowfabric.testing.flaky_store",
    "SyncPoint": "flowfabric.testing.flaky_store",
    "World": "flowfabric.testing.world",
    "check_invariants": "flowfabric.testing.invariants",
}

__all__ = [*_MODULES]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value
