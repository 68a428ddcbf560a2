"""The base of every group of operations."""

from __future__ import annotations

from flowfabric.engine.runtime.runtime import Runtime


class Operations:
    """A group of the engine's operations. All groups share one runtime."""

    runtime: Runtime
