"""Threads for plain functions, and `Portal`, by which a thread runs coroutines on an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

from flowfabric.sdk.durable.branches import untracked

T = TypeVar("T")


class DaemonThreadPool(Executor):
    """An unbounded pool of daemon threads: one that never returns does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a function in an idle thread, or in a new one."""
        future: Future[T] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._count += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._count}", daemon=True).start()
        self._work.put((future, lambda: call_future_safe(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads now and the others when they are done, without waiting for them."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            value, error = None, None
            is_wanted = future.set_running_or_notify_cancel()
            if is_wanted:
                try:
                    value = call()
                except BaseException as raised:
                    error = raised
            with self._lock:  # before the result is set, so that a caller that submits again finds this thread idle
                self._idle += 1
            if is_wanted and error is None:
                future.set_result(value)
            elif is_wanted:
                future.set_exception(error)
            del item, future, call, value, error  # an idle thread keeps nothing alive


def call_future_safe(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function, and turn exceptions that must not pass through a future into a `RuntimeError`.

    A future cannot raise `StopIteration`: its caller would wait forever. `KeyboardInterrupt` and `GeneratorExit` would
    end the loop, although the real Ctrl-C arrives in the main thread only.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as stop:
        error = RuntimeError("StopIteration was raised: a next() found nothing")
        raise error.with_traceback(stop.__traceback__) from stop
    except (KeyboardInterrupt, GeneratorExit) as exit_:
        error = RuntimeError(f"{type(exit_).__name__} was raised in a thread")
        raise error.with_traceback(exit_.__traceback__) from exit_


class ThreadScheduler(Protocol):
    """Decides when a thread that called the loop continues; used by tests in virtual time."""

    def will_wait(self) -> None:
        """Note that the calling thread is about to call the loop and wait."""

    def answered(self, thread: int) -> None:
        """Note that a thread has its answer; called on the loop."""

    def wait_turn(self) -> None:
        """Block until the calling thread may continue."""


class Portal(Protocol):
    """Runs coroutines for a thread, which blocks until they return."""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result."""
        ...


class LoopPortal:
    """Runs the coroutines of other threads on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scheduler: ThreadScheduler | None = None) -> None:
        self._loop = loop
        self._scheduler = scheduler

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; refused on a thread that runs a loop itself."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not None:
            coroutine.close()
            raise RuntimeError("this would block the event loop that runs here: await the method without .sync instead")
        if self._scheduler is None:
            with untracked():
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return future.result()
        self._scheduler.will_wait()
        noted = _note_answer(coroutine, self._scheduler, threading.get_ident())
        with untracked():
            future = asyncio.run_coroutine_threadsafe(noted, self._loop)
        try:
            return future.result()
        finally:
            self._scheduler.wait_turn()


async def _note_answer(coroutine: Coroutine[Any, Any, T], scheduler: ThreadScheduler, thread: int) -> T:
    try:
        return await coroutine
    finally:
        scheduler.answered(thread)
