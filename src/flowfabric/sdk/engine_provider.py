"""Provides the engine of an app: one per process, on a background loop unless a loop claims it.

A connection belongs to the loop that opened it. Programs that start a loop per call (`asyncio.run` in a script, async
views under WSGI) would open a pool for each. So the engine lives on one loop, and calls from other loops run there,
which costs about 0.1 ms per call. Workers, servers and `async with app` claim the loop they run on: there the engine is
called directly. While a claimed loop runs, all other loops and threads of the process use its engine, too.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flowfabric import event_loop
from flowfabric.event_loop import start_task
from flowfabric.sdk.worker.threads import LoopPortal, Portal, ThreadScheduler

if TYPE_CHECKING:
    from flowfabric import errors
    from flowfabric.engine.types import CreateExecution
    from flowfabric.engine_protocol import EngineAPI, LanePollerAPI
    from flowfabric.handles import Handle
    from flowfabric.model.answers import execution as answers

    _EngineAPI = EngineAPI
else:
    _EngineAPI = object  # at run time the protocol's own members would hide `__getattr__`

T = TypeVar("T")
EngineTask = asyncio.Task["EngineAPI"]

NEEDS_ENGINE_LOOP = frozenset({"start_sweeps", "wake_claims"})  # plain methods that must run on the engine's loop


class EngineProvider:
    """Finds the engine for the calling loop or thread, and opens it on first use."""

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, EngineAPI]], *, is_shared: Callable[[], bool]) -> None:
        """Open nothing yet. `connect` opens an engine on the running loop; `is_shared` is False for a memory store."""
        self._connect = connect
        self._is_shared = is_shared
        self._reset()

    def _reset(self) -> None:
        self._engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EngineTask] = weakref.WeakKeyDictionary()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._own_thread: threading.Thread | None = None
        self._cross_loop_engine: CrossLoopEngine | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    async def engine(self) -> EngineAPI:
        """Return the engine on the loop that owns it, and a `CrossLoopEngine` on any other loop."""
        loop = asyncio.get_running_loop()
        owner = self._owning_loop()
        if owner is loop:
            return await self._open_on(loop)
        connecting = self._engines.get(owner)
        if connecting is None or not connecting.done() or _has_failed(connecting):
            engine = await event_loop.run_on_loop(owner, self._open_on(owner))
        else:
            engine = connecting.result()
        proxy = self._cross_loop_engine
        if proxy is None or proxy.engine is not engine:
            # `__getattr__` has the operations, which a type checker cannot see; a test compares the signatures.
            proxy = self._cross_loop_engine = CrossLoopEngine(engine, owner)  # type: ignore[abstract]
        return proxy

    async def open_on_this_loop(self) -> EngineAPI:
        """Open the engine on this loop; a memory store that another loop has opened is used from there instead."""
        loop = asyncio.get_running_loop()
        self._check_fork()
        with self._lock:
            is_elsewhere = loop not in self._engines and self._running_loop() is not None
        if is_elsewhere and not self._is_shared():
            return await self.engine()
        return await self._open_on(loop)

    async def _open_on(self, loop: asyncio.AbstractEventLoop) -> EngineAPI:
        with self._lock:
            connecting = self._engines.get(loop)
            if connecting is None or _has_failed(connecting):
                connecting = self._engines[loop] = start_task(self._connect())
        return await asyncio.shield(connecting)

    def bind(self, engine: EngineAPI) -> EngineTask | None:
        """Use this engine on this loop from now on; return the previous one, for `unbind`."""

        async def opened() -> EngineAPI:
            return engine

        loop = asyncio.get_running_loop()
        self._check_fork()
        with self._lock:
            before = self._engines.get(loop)
            self._engines[loop] = start_task(opened())
        return before

    def unbind(self, before: EngineTask | None) -> None:
        """Restore the engine that `bind` replaced."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if before is None:
                self._engines.pop(loop, None)
            else:
                self._engines[loop] = before

    async def close(self) -> None:
        """Close the engine of this loop, or if it has claimed none, the engine on the background loop."""
        self._check_fork()
        with self._lock:
            connecting = self._engines.pop(asyncio.get_running_loop(), None)
        if connecting is None:
            await asyncio.to_thread(self.stop_own_loop)
        elif not _has_failed(connecting):
            await (await connecting).close()

    # -- loops and threads ----------------------------------------------------------------------------------------

    def portal(self, scheduler: ThreadScheduler | None) -> Portal:
        """Return a portal to the loop that owns the engine; `scheduler` is used for claimed loops only."""
        owner = self._owning_loop(from_thread=True)
        return LoopPortal(owner) if owner is self._own_loop else LoopPortal(owner, scheduler)

    def _owning_loop(self, *, from_thread: bool = False) -> asyncio.AbstractEventLoop:
        """Return the loop whose engine is used here: this one, or any other that has one, or the background loop."""
        self._check_fork()
        with self._lock:
            if not from_thread and ((here := asyncio.get_running_loop()) in self._engines or here is self._own_loop):
                return here
            return self._running_loop() or self._start_own_loop()

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return a running loop that has an engine; a claimed one is preferred to the background loop."""
        claimed = (loop for loop in list(self._engines) if loop is not self._own_loop and loop.is_running())
        own = self._own_loop if self._own_thread is not None and self._own_thread.is_alive() else None
        return next(claimed, own)

    def _start_own_loop(self) -> asyncio.AbstractEventLoop:
        self._own_loop = loop = asyncio.new_event_loop()
        self._own_thread = threading.Thread(
            target=event_loop.run_until_stopped, args=(loop,), name="flowfabric-engine", daemon=True
        )
        self._own_thread.start()
        atexit.register(self.stop_own_loop)
        return loop

    def stop_own_loop(self) -> None:
        """Close the background loop and its engine, if there is one. The next call starts another."""
        self._check_fork()
        with self._lock:
            loop, self._own_loop = self._own_loop, None
            thread, self._own_thread = self._own_thread, None
        if loop is None or thread is None:
            return
        atexit.unregister(self.stop_own_loop)
        try:
            LoopPortal(loop).call(self._close_on(loop))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    async def _close_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop in self._engines:
            await self.close()

    def _check_fork(self) -> None:
        """Start over in a forked child: the loops of its parent appear to run, but their threads are missing."""
        if self._pid != os.getpid():
            # Kept alive, so that the garbage collector does not close the parent's connections.
            _inherited.append((self._engines, self._own_loop, self._cross_loop_engine))
            self._reset()


_inherited: list[Any] = []


class CrossLoopEngine(_EngineAPI):
    """A proxy for an engine on another loop: operations run there, and their answers return to the caller's loop."""

    def __init__(self, engine: EngineAPI, owner: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._owner = owner

    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create executions in a caller's transaction, whose connection stays on the caller's loop."""
        outside = event_loop.LoopBoundValue(connection, asyncio.get_running_loop())
        return await event_loop.run_on_loop(self._owner, self.engine.create_within(outside, asks))

    async def complete_many(
        self,
        results: Sequence[tuple[Handle, bytes | None]],
        *,
        encoding: str | None = None,
        answered: Callable[[], None] | None = None,
    ) -> list[answers.Completed | errors.FabricError]:
        """Complete many executions; `answered` is called on the caller's loop."""
        here = asyncio.get_running_loop()
        callback = None if answered is None else lambda: _call(here, answered)
        return await event_loop.run_on_loop(
            self._owner, self.engine.complete_many(results, encoding=encoding, answered=callback)
        )

    def pulling(
        self,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> LanePollerAPI:
        """Return a poller whose claims run on the engine's loop."""
        poller = self.engine.pulling(
            lanes,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            namespaces=namespaces,
        )
        return _CrossLoopPoller(poller, self._owner)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engine, name)
        if inspect.iscoroutinefunction(value):

            @functools.wraps(value)
            async def call_on_owner(*args: Any, **kwargs: Any) -> Any:
                answer = await event_loop.run_on_loop(self._owner, value(*args, **kwargs))
                return self._iterate(answer) if hasattr(answer, "__anext__") else answer

            self.__dict__[name] = call_on_owner
            return call_on_owner
        if name in NEEDS_ENGINE_LOOP:
            return lambda *args: _call(self._owner, value, *args)
        return value

    async def _iterate(self, iterator: Any) -> AsyncIterator[Any]:
        """Yield the items of an iterator that belongs to the engine's loop."""
        try:
            while True:
                try:
                    yield await event_loop.run_on_loop(self._owner, event_loop.next_item(iterator))
                except event_loop.IteratorExhausted:
                    return
        finally:
            if hasattr(iterator, "aclose"):
                await event_loop.run_on_loop(self._owner, iterator.aclose())


class _CrossLoopPoller:
    """A proxy for a poller of an engine on another loop."""

    def __init__(self, poller: LanePollerAPI, owner: asyncio.AbstractEventLoop) -> None:
        self._poller = poller
        self._owner = owner

    def max_claim(self, slots: int) -> int:
        return self._poller.max_claim(slots)

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = lambda: True
    ) -> list[answers.Claimed]:
        claiming = self._poller.claim(limit, max_wait_ms=max_wait_ms, go_on=go_on)
        return await event_loop.run_on_loop(self._owner, claiming)

    def close(self) -> None:
        _call(self._owner, self._poller.close)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    loop.call_soon_threadsafe(function, *args)


def _has_failed(connecting: EngineTask) -> bool:
    """True if opening the engine has failed; its caller got the error."""
    return connecting.done() and (connecting.cancelled() or connecting.exception() is not None)
