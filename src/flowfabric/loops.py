"""The event loop of programs that are FlowFabric's own: uvloop where it is to be had, else the one of asyncio.

A worker that drains Postgres spends about a tenth less on a job there; on SQLite, and where little is to be done, both
loops are alike. Whoever brings a loop of their own keeps it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`. Loops are loaded when they are needed: help and shell completion need none."""
    import asyncio

    try:
        import uvloop as provider
    except ImportError:  # on a platform that has none
        import asyncio as provider  # type: ignore[no-redef]

    with asyncio.Runner(loop_factory=provider.new_event_loop) as runner:
        return runner.run(main)
