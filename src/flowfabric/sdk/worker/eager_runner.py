"""Runs many coroutines in few asyncio tasks: one task runs them in turn, until one of them waits.

Creating a task costs as much as many a handler. So coroutines that never wait run one after the other in the same task,
each with its own context variables. A coroutine that waits keeps the task to itself until it finishes, and the queued
ones continue in other tasks. A waiting coroutine is therefore alone in its task, and can be cancelled there.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

from flowfabric.event_loop import start_task

T = TypeVar("T")

StartCoroutine = Callable[[T, "asyncio.Task[None]"], Coroutine[Any, Any, None]]


class EagerRunner(Generic[T]):
    """A queue of items, and the tasks that run a coroutine for each."""

    def __init__(self, start: StartCoroutine[T]) -> None:
        """Run nothing yet. `start` returns the coroutine of an item, given the task in which it will run."""
        self._start = start
        self._queue: deque[T] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = 0  # tasks that have been created and have not taken an item yet
        self._last_waited = False
        self._loop = asyncio.get_running_loop()

    def add(self, items: Iterable[T]) -> None:
        """Queue items, to be started in their order."""
        self._queue.extend(items)
        # One turn later: a claim that is sent now leaves before the handlers occupy the loop.
        self._loop.call_soon(self._add_first_tasks)

    def discard(self, item: T) -> None:
        """Remove an item that has not been started."""
        self._queue.remove(item)

    def _add_first_tasks(self) -> None:
        # Handlers tend to be alike: if the last one waited, each item probably needs its own task.
        self._add_tasks(len(self._queue) if self._last_waited else 1)

    def _add_tasks(self, count: int) -> None:
        for _ in range(min(count, len(self._queue) - self._starting)):
            self._starting += 1
            self._tasks.add(start_task(self._run()))

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._starting -= 1
        try:
            while self._queue:
                coroutine = self._start(self._queue.popleft(), task)
                run_in_context = contextvars.copy_context().run
                try:
                    awaited = run_in_context(coroutine.send, None)
                except StopIteration:
                    self._last_waited = False
                except BaseException:
                    self._add_tasks(1)
                    raise
                else:
                    self._last_waited = True
                    self._add_tasks(2)  # doubles the tasks with each waiting item, so the queue drains quickly
                    await _continue(coroutine, awaited, run_in_context)
                    return
                if task.cancelling():  # a cancellation for the finished coroutine must not hit the next one
                    self._add_tasks(1)
                    return
        finally:
            self._tasks.discard(task)


@types.coroutine
def _continue(
    coroutine: Coroutine[Any, Any, None], awaited: Any, run_in_context: Callable[..., Any]
) -> Generator[Any, Any, None]:
    """Run a coroutine that waits to its end, with its own context variables."""
    resume: Callable[[Any], Any]
    while True:
        try:
            value = yield awaited
        except BaseException as error:
            resume, value = coroutine.throw, error
        else:
            resume = coroutine.send
        try:
            awaited = run_in_context(resume, value)
        except StopIteration:
            return
