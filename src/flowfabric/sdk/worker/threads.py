"""Threads for plain functions, and the way from a thread back to the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class DaemonThreadPool(Executor):
    """As many threads as are needed at once. One that never returns does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run it in a thread that has nothing to do, or in a new one."""
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
        """Let idle threads end, and the others when they are done; nobody waits for them."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            future, call = given
            value, error = None, None
            wanted = future.set_running_or_notify_cancel()
            if wanted:
                try:
                    value = call()
                except BaseException as raised:
                    error = raised
            with self._lock:  # before the answer, so that whoever asks again at once finds this thread free
                self._idle += 1
            if wanted and error is None:
                future.set_result(value)
            elif wanted:
                future.set_exception(error)
            del given, future, call, value, error


def call_future_safe(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call it in a thread; what must not travel from there through a future is told as an error.

    Whoever waits for a `StopIteration` would wait for ever. What ends a process is the main thread's: Ctrl-C is told
    there and nowhere else.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as stop:
        told = RuntimeError("StopIteration was raised: a next() found nothing")
        raise told.with_traceback(stop.__traceback__) from stop
    except (KeyboardInterrupt, GeneratorExit) as end:
        told = RuntimeError(f"{type(end).__name__} was raised in a thread")
        raise told.with_traceback(end.__traceback__) from end


class ThreadScheduler(Protocol):
    """Who decides when a thread that asked the loop for something goes on; for tests in virtual time."""

    def will_wait(self) -> None:
        """The calling thread will ask the loop for something and wait."""

    def answered(self, thread: int) -> None:
        """A thread has its answer; called on the loop."""

    def wait_turn(self) -> None:
        """Wait until the calling thread may go on."""


class Portal:
    """Lets threads run coroutines on a loop and wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: ThreadScheduler | None = None) -> None:
        self._loop = loop
        self._turns = turns

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns on the loop; this thread waits for it."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not None:
            coroutine.close()
            raise RuntimeError("this would block the event loop that runs here: await the method without .sync instead")
        if self._turns is None:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        self._turns.will_wait()
        asked = asyncio.run_coroutine_threadsafe(_in_turns(coroutine, self._turns, threading.get_ident()), self._loop)
        try:
            return asked.result()
        finally:
            self._turns.wait_turn()


async def _in_turns(coroutine: Coroutine[Any, Any, T], turns: ThreadScheduler, thread: int) -> T:
    try:
        return await coroutine
    finally:
        turns.answered(thread)
