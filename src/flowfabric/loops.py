"""The event loop of programs that are FlowFabric's own: uvloop where it is to be had, else the one of asyncio.

A store call is a wake-up and a few small reads and writes, so the loop is a good part of its price: workers do a third
more on uvloop. Whoever brings a loop of their own keeps it.
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
