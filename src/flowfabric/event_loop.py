"""The event loop of programs that are FlowFabric's own: uvloop where it is to be had, else the one of asyncio.

A worker that drains Postgres spends about a tenth less on a job there; on SQLite, and where little is to be done, both
loops are alike. Whoever brings a loop of their own keeps it.

While it runs, Python's collector of cycles looks less often. A batch makes thousands of objects that refer to no
cycle and are gone by themselves; looking through them, and through everything that was ever loaded, cost 3 µs a job.
"""

from __future__ import annotations

import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

CANCEL_GRACE_S = 5.0  # how long tasks that were cancelled have to come to their end
GC_THRESHOLD = 20_000  # objects that are made before the collector looks at them


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but what does not listen to its cancellation does not keep the process from ending.

    Loops are loaded when they are needed: help and shell completion need none.
    """
    import asyncio

    try:
        import uvloop as provider
    except ImportError:  # on a platform that has none
        import asyncio as provider  # type: ignore[no-redef]

    with _seldom_collecting(), asyncio.Runner(loop_factory=provider.new_event_loop) as runner:
        value = runner.run(main)
        if deaf := runner.run(_end_others()):
            _leave(deaf)
        return value


async def run_on_loop(home: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on another loop, which runs in another thread, and return what it returns there.

    Cancelling the caller cancels it there. A loop that ends meanwhile leaves the outcome unknown.
    """
    import asyncio

    from flowfabric.errors import StoreUnavailable

    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, home)
    except RuntimeError as closed:
        coroutine.close()
        raise StoreUnavailable("the event loop that had the connections has ended", in_doubt=False) from closed
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StoreUnavailable("the event loop that had the connections has ended", in_doubt=True) from None


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; whatever still runs then is cancelled, so that nobody waits for it for ever."""
    import asyncio

    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end_others())
    finally:
        loop.close()


class IteratorExhausted(Exception):
    """An iterator is at its end; `StopAsyncIteration` cannot travel through a future."""


async def next_item(items: Any) -> Any:
    """The next one of an async iterator; `Exhausted` when there is none."""
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise IteratorExhausted from None


class LoopBoundValue:
    """Something that belongs to another loop than the one that uses it, such as a caller's database connection."""

    def __init__(self, value: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.value = value
        self._loop = loop

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on its loop."""
        return await run_on_loop(self._loop, coroutine)


async def _end_others() -> set[asyncio.Task[Any]]:
    """Cancel whatever still runs; what goes on all the same."""
    import asyncio

    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return set()
    for task in others:
        task.cancel()
    _, going_on = await asyncio.wait(others, timeout=CANCEL_GRACE_S)
    return going_on


def _leave(deaf: set[asyncio.Task[Any]]) -> None:
    """End the process without those: the loop would wait for them, for ever."""
    import logging
    import os
    import sys

    for task in deaf:
        logging.getLogger("flowfabric.worker").error("%r was cancelled and goes on; the process ends without it", task)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Leave alone what is loaded by now, and look at what is new less often."""
    young, *old = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(young, GC_THRESHOLD) if young else 0, *old)  # 0 says that somebody wants no collector at all
    try:
        yield
    finally:
        gc.set_threshold(young, *old)
        gc.unfreeze()
