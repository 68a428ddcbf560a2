"""Virtual time on the running event loop: when nothing can happen before the next timer, it is the next timer's time.

Time stands still while a thread is at work or a socket could answer, so that a handler in a thread never sees its own
lease lapse because the loop looked idle. Only the standard event loops can be bent like this.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any, cast

REAL_LOOK_S = 0.005


class VirtualTime:
    """Bends the time of one running loop until it is let go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = cast("Any", loop)
        if not hasattr(loop, "_selector"):
            raise RuntimeError(f"virtual time needs asyncio's own event loop, not {type(loop).__name__}")
        self._selector: selectors.BaseSelector = self._loop._selector
        self._now = loop.time()
        self._threads = 0

    def start(self) -> None:
        """Take the loop's time over."""
        loop, selector = self._loop, self._selector
        self._real_select = selector.select
        self._real_executor = loop.run_in_executor
        loop.time = lambda: self._now
        selector.select = self._select  # type: ignore[method-assign]
        loop.run_in_executor = self._run_in_executor

    def stop(self) -> None:
        """Give it back. Timers that were set meanwhile belong to what was stopped before."""
        del self._loop.time
        del self._loop.run_in_executor
        self._selector.select = self._real_select  # type: ignore[method-assign]

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def thread_waits(self, more: int) -> None:
        """A thread waits for the loop (1), or does so no more (-1): while it waits, time need not."""
        self._threads -= more

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real_select(0)
        if ready or timeout == 0:
            return ready
        if self._threads or timeout is None:  # something real is under way: wait for it in real time
            return self._real_select(REAL_LOOK_S)
        self._now += max(timeout, 0.0)
        return []

    def _run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._real_executor(executor, function, *args)
        self._threads += 1

        def over(_: asyncio.Future[Any]) -> None:
            self._threads -= 1

        future.add_done_callback(over)
        return future
