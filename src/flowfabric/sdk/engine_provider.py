"""The engine of an app: one per process, on an event loop of its own unless a loop claims it.

A connection belongs to the loop that opened it. Programs that start a loop per call (`asyncio.run` in a script, async
views under WSGI) would open a pool for each. So the engine lives on one loop, and calls of other loops hop there and
back, which costs about 0.1 ms. Workers, servers and `async with app` claim the loop they run on: there the engine is
called without a hop, and while such a loop runs, all other loops and threads of the process use its engine, too.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flowfabric import event_loop
from flowfabric.sdk.worker.threads import Portal, ThreadScheduler

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

T = TypeVar("T")
EngineTask = asyncio.Task["Engine"]

NEEDS_ENGINE_LOOP = frozenset({"start_sweeps", "wake_claims"})  # plain verbs that must run on the engine's loop


class EngineProvider:
    """Finds the engine for whichever loop or thread asks, and opens it when there is none."""

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, Engine]], *, is_shared: Callable[[], bool]) -> None:
        """`connect` opens an engine on the running loop; `is_shared` is False for a store that only one engine sees."""
        self._connect = connect
        self._is_shared = is_shared
        self._begin()

    def _begin(self) -> None:
        self._engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EngineTask] = weakref.WeakKeyDictionary()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._own_thread: threading.Thread | None = None
        self._elsewhere: CrossLoopEngine | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    async def engine(self) -> Engine:
        """The engine: as it is on the loop that has it, or one whose verbs hop there."""
        loop = asyncio.get_running_loop()
        home = self._home()
        if home is loop:
            return await self._of_this_loop(loop)
        connecting = self._engines.get(home)
        if connecting is None or not connecting.done() or _has_failed(connecting):
            engine = await event_loop.run_on_loop(home, self._of_this_loop(home))
        else:
            engine = connecting.result()
        known = self._elsewhere
        if known is None or known.engine is not engine:
            known = self._elsewhere = CrossLoopEngine(engine, home)
        return cast("Engine", known)

    async def open_on_this_loop(self) -> Engine:
        """Open the engine on this loop, unless the store is one that another loop of this process has already."""
        loop = asyncio.get_running_loop()
        self._notice_fork()
        with self._lock:
            is_elsewhere = loop not in self._engines and self._running() is not None
        if is_elsewhere and not self._is_shared():
            return await self.engine()
        return await self._of_this_loop(loop)

    async def _of_this_loop(self, loop: asyncio.AbstractEventLoop) -> Engine:
        with self._lock:
            connecting = self._engines.get(loop)
            if connecting is None or _has_failed(connecting):
                connecting = self._engines[loop] = loop.create_task(self._connect())
        return await asyncio.shield(connecting)

    def bind(self, engine: Engine) -> EngineTask | None:
        """Use this engine on this loop from now on; what was used before, for `unbind`."""

        async def bound() -> Engine:
            return engine

        loop = asyncio.get_running_loop()
        self._notice_fork()
        with self._lock:
            before = self._engines.get(loop)
            self._engines[loop] = loop.create_task(bound())
        return before

    def unbind(self, before: EngineTask | None) -> None:
        """Use what was used before `bind`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if before is None:
                self._engines.pop(loop, None)
            else:
                self._engines[loop] = before

    async def close(self) -> None:
        """Close the engine of this loop; on a loop that has none, the one on the loop of our own."""
        self._notice_fork()
        with self._lock:
            connecting = self._engines.pop(asyncio.get_running_loop(), None)
        if connecting is None:
            await asyncio.to_thread(self.stop_own_loop)
        elif not _has_failed(connecting):
            await (await connecting).close()

    # -- loops and threads ----------------------------------------------------------------------------------------

    def portal(self, turns: ThreadScheduler | None) -> Portal:
        """The way from a thread to the loop that has the engine; `turns` is for loops that are not our own."""
        home = self._home(anywhere=True)
        return Portal(home) if home is self._own_loop else Portal(home, turns)

    def _home(self, *, anywhere: bool = False) -> asyncio.AbstractEventLoop:
        """The loop whose engine to use here: this one if it has claimed one, else any that has, else our own."""
        self._notice_fork()
        with self._lock:
            if not anywhere and ((here := asyncio.get_running_loop()) in self._engines or here is self._own_loop):
                return here
            return self._running() or self._start_own_loop()

    def _running(self) -> asyncio.AbstractEventLoop | None:
        """A loop that has an engine and runs; a claimed one before our own."""
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
        """Close the engine on the loop of our own, if there is one, and end that loop. The next call starts another."""
        self._notice_fork()
        with self._lock:
            loop, self._own_loop = self._own_loop, None
            thread, self._own_thread = self._own_thread, None
        if loop is None or thread is None:
            return
        atexit.unregister(self.stop_own_loop)
        try:
            Portal(loop).call(self._close_of(loop))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    async def _close_of(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop in self._engines:
            await self.close()

    def _notice_fork(self) -> None:
        """A forked child has none of its parent's threads: loops that ran there look as if they ran here."""
        if self._pid != os.getpid():
            # Kept, so that nothing of the parent's is closed here.
            _inherited.append((self._engines, self._own_loop, self._elsewhere))
            self._begin()


_inherited: list[Any] = []


class CrossLoopEngine:
    """An engine that lives on another loop: its verbs run there, and their answers come back to whoever asked."""

    def __init__(self, engine: Engine, home: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._home = home

    async def create_within(self, using: Any, asks: Any) -> Any:
        """Create executions in a caller's transaction, whose connection stays on the caller's loop."""
        outside = event_loop.LoopBoundValue(using, asyncio.get_running_loop())
        return await event_loop.run_on_loop(self._home, self.engine.create_within(outside, asks))

    async def complete_many(self, results: Any, *, answered: Callable[[], None] | None = None, **ways: Any) -> Any:
        """Complete many; `answered` is called on the caller's loop."""
        here = asyncio.get_running_loop()
        told = None if answered is None else lambda: _call(here, answered)
        return await event_loop.run_on_loop(self._home, self.engine.complete_many(results, answered=told, **ways))

    def pulling(self, *given: Any, **ways: Any) -> Any:
        """Claims, one after the other."""
        return _PullElsewhere(self.engine.pulling(*given, **ways), self._home)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engine, name)
        if inspect.iscoroutinefunction(value):

            async def hopping(*given: Any, **ways: Any) -> Any:
                answer = await event_loop.run_on_loop(self._home, value(*given, **ways))
                return self._iterated(answer) if hasattr(answer, "__anext__") else answer

            self.__dict__[name] = hopping
            return hopping
        if name in NEEDS_ENGINE_LOOP:
            return lambda *given: _call(self._home, value, *given)
        return value

    async def _iterated(self, events: Any) -> AsyncIterator[Any]:
        """What an iterator of the engine's loop yields."""
        try:
            while True:
                try:
                    yield await event_loop.run_on_loop(self._home, event_loop.next_item(events))
                except event_loop.IteratorExhausted:
                    return
        finally:
            if hasattr(events, "aclose"):
                await event_loop.run_on_loop(self._home, events.aclose())


class _PullElsewhere:
    """One worker's claims on an engine of another loop."""

    def __init__(self, pull: Any, home: asyncio.AbstractEventLoop) -> None:
        self._pull = pull
        self._home = home

    async def claim(self, *given: Any, **ways: Any) -> Any:
        return await event_loop.run_on_loop(self._home, self._pull.claim(*given, **ways))

    def close(self) -> None:
        _call(self._home, self._pull.close)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *given: Any) -> None:
    loop.call_soon_threadsafe(function, *given)


def _has_failed(connecting: EngineTask) -> bool:
    """True if it has failed, which whoever asked for it was told."""
    return connecting.done() and (connecting.cancelled() or connecting.exception() is not None)
