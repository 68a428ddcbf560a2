"""Heartbeats: leases are renewed from a thread of its own with a connection of its own.

A handler that blocks the event loop does not lose its work that way. But a loop that makes no turn for very long is
not alive either: after `stall_limit` the thread stops renewing, so that somebody else can take the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable

from flowfabric.engine.engine import Engine
from flowfabric.errors import FabricError, StoreUnavailable
from flowfabric.handles import Handle

logger = logging.getLogger("flowfabric.worker")

BLOCKED_AFTER_S = 1.0


class Heartbeat:
    """Renews what a worker holds until it is let go of."""

    def __init__(
        self,
        engine: Callable[[], Awaitable[Engine]],
        *,
        lease_ttl_ms: int,
        lost: Callable[[str, FabricError], None],
        stall_limit_s: float = 300.0,
    ) -> None:
        """`engine` makes a connection for this thread; `lost` is called on the worker's loop for each lost lease."""
        self._engine = engine
        self._ttl_ms = lease_ttl_ms
        self._lost = lost
        self._stall_limit_s = stall_limit_s
        self._held: dict[str, Handle] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._turned_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; must be called on the worker's event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._turn()
        self._thread = threading.Thread(target=self._run, name="flowfabric-heartbeat", daemon=True)
        self._thread.start()

    def hold(self, handle: Handle) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._held[handle.fields.lease_id] = handle

    def let_go(self, handle: Handle) -> None:
        """Renew it no more."""
        with self._lock:
            self._held.pop(handle.fields.lease_id, None)

    async def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _turn(self) -> None:
        """Note that the worker's loop turns, and again in a while."""
        self._turned_at = time.monotonic()
        if not self._stop.is_set():
            self._loop.call_later(min(0.25, self._ttl_ms / 6000), self._turn)

    def _run(self) -> None:
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        engine = await self._engine()
        reported = False
        try:
            while not self._stop.is_set():
                silent_s = time.monotonic() - self._turned_at
                if silent_s >= BLOCKED_AFTER_S and not reported:
                    self._report_blocked(silent_s)
                reported = silent_s >= BLOCKED_AFTER_S
                if silent_s < self._stall_limit_s:
                    await self._renew(engine)
                await asyncio.get_running_loop().run_in_executor(None, self._stop.wait, self._ttl_ms / 3000)
        finally:
            with contextlib.suppress(FabricError):
                await engine.close()

    async def _renew(self, engine: Engine) -> None:
        with self._lock:
            held = list(self._held.values())
        if not held:
            return
        try:
            answers = await engine.renew_many(held, lease_ttl_ms=self._ttl_ms)
        except StoreUnavailable as away:
            logger.warning("renewal: the store is away (%s); trying again", away)
            return
        for handle, answer in zip(held, answers, strict=True):
            if isinstance(answer, FabricError) and not isinstance(answer, StoreUnavailable):
                self.let_go(handle)
                self._loop.call_soon_threadsafe(self._lost, handle.fields.lease_id, answer)

    def _report_blocked(self, silent_s: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "(unknown)"
        logger.warning("the event loop has been blocked for %.1f s by:\n%s", silent_s, stack)


class LoopHeartbeat:
    """The same on the worker's own loop, for a store that lives there."""

    def __init__(self, engine: Engine, *, lease_ttl_ms: int, lost: Callable[[str, FabricError], None]) -> None:
        self._engine = engine
        self._ttl_ms = lease_ttl_ms
        self._lost = lost
        self._held: dict[str, Handle] = {}
        self._holds = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._beat())

    def hold(self, handle: Handle) -> None:
        """Renew this lease from now on."""
        self._held[handle.fields.lease_id] = handle
        self._holds.set()

    def let_go(self, handle: Handle) -> None:
        """Renew it no more."""
        self._held.pop(handle.fields.lease_id, None)
        if not self._held:
            self._holds.clear()

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await self._holds.wait()
            await asyncio.sleep(self._ttl_ms / 3000)
            held = list(self._held.values())
            for handle, answer in zip(held, await self._engine.renew_many(held), strict=True):
                if isinstance(answer, FabricError):
                    self.let_go(handle)
                    self._lost(handle.fields.lease_id, answer)
