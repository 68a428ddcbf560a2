"""Turns: handlers that begin together take turns in one task, until one of them waits for something.

A task for each costs as much as many a handler does. So they run one after the other in the same task, each with
context variables of its own. One that waits keeps the task to itself from then on, to its end, and those that have not
begun go on in others: whoever waits is alone in its task, and can be cancelled there.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

StartCoroutine = Callable[[T, "asyncio.Task[None]"], Coroutine[Any, Any, None]]


class EagerRunner(Generic[T]):
    """Those whose turn has not come yet, and the tasks that they get."""

    def __init__(self, call: StartCoroutine[T]) -> None:
        """`call` begins one, in the task that it is given."""
        self._call = call
        self._waiting: deque[T] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = 0  # tasks that will find somebody in line
        self._last_waited = False
        self._loop = asyncio.get_running_loop()

    def add(self, some: Iterable[T]) -> None:
        """Begin with these soon, in their order."""
        self._waiting.extend(some)
        self._start(len(self._waiting) if self._last_waited else 1)  # they may be like the last one

    def discard(self, one: T) -> None:
        """Do not begin with this one, whose turn has not come."""
        self._waiting.remove(one)

    def _start(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting) - self._starting)):
            self._starting += 1
            self._tasks.add(self._loop.create_task(self._run()))

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._starting -= 1
        try:
            while self._waiting:
                call = self._call(self._waiting.popleft(), task)
                inside = contextvars.copy_context().run
                try:
                    awaited = inside(call.send, None)
                except StopIteration:
                    self._last_waited = False
                except BaseException:
                    self._start(1)
                    raise
                else:
                    self._last_waited = True
                    self._start(2)  # there are soon as many tasks as those in line will need
                    await _go_on(call, awaited, inside)
                    return
                if task.cancelling():  # by one that is over, and perhaps has not even noticed
                    self._start(1)
                    return
        finally:
            self._tasks.discard(task)


@types.coroutine
def _go_on(call: Coroutine[Any, Any, None], awaited: Any, inside: Callable[..., Any]) -> Generator[Any, Any, None]:
    """Run one to its end that waits for something, as it began: with context variables of its own."""
    step: Callable[[Any], Any]
    while True:
        try:
            given = yield awaited
        except BaseException as thrown:
            step, given = call.throw, thrown
        else:
            step = call.send
        try:
            awaited = inside(step, given)
        except StopIteration:
            return
