"""Batcher: calls that arrive while a batch is in flight form the next batch.

There is no timer. An idle batcher sends a call at once; a busy one sends hundreds of calls in one flush. Items with an
equal key never share a batch: the second one waits for the next flush, which begins after the first one's result.

A flush that raises fails every call of its batch. Where only the call at fault must fail, the flush divides the batch
itself: the load and decision queues of the engine repeat each call alone, SQLite and Postgres commit halves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

from flowfabric.event_loop import start_background

Item = TypeVar("Item")
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

Flush = Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]]


class Batcher(Generic[Item, Result]):
    """Run `flush` on everything that queued up while the previous flush was in flight.

    `flush` returns a result for each item, in order; an exception among them is raised for the caller of that item. If
    `flush` itself raises, every caller of the batch gets the exception. A caller that is cancelled gives up its result;
    its item is flushed all the same.
    """

    def __init__(
        self,
        flush: Flush[Item, Result],
        *,
        concurrency: int = 1,
        max_items: int = 500,
        max_weight: float = float("inf"),
        weight: Callable[[Item], float] = lambda item: 0,
        keys: Callable[[Item], Iterable[Hashable]] | None = None,
        on_abandoned: Callable[[Item], None] = lambda item: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`weight` bounds a batch beside the number of items; a batch has at least one item, however heavy.

        `on_abandoned` is called with an item that was flushed although its caller had been cancelled, `on_idle` when
        nothing is left to flush.
        """
        self._flush = flush
        self._concurrency = concurrency
        self._max_items = max_items
        self._max_weight = max_weight
        self._weight = weight
        self._keys = keys
        self._on_abandoned = on_abandoned
        self._on_idle = on_idle
        self._queue: deque[tuple[Item, float, asyncio.Future[Result]]] = deque()
        self._running = 0  # counted by the runners themselves: a task that has just returned does not run any more
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """True if nothing is queued or in flight."""
        return not self._running

    def add(self, item: Item) -> asyncio.Future[Result]:
        """Queue an item for the next flush."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._queue.append((item, self._weight(item), result))
        if self._running < self._concurrency:
            self._running += 1
            start_background(self._run(), self._tasks)
        return result

    async def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self) -> None:
        try:
            while batch := self._next_batch():
                await self._flush_batch(batch)
        finally:
            self._running -= 1
            if not self._running:
                self._on_idle()

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        postponed: list[tuple[Item, float, asyncio.Future[Result]]] = []
        taken: set[Hashable] = set()
        queue, total = self._queue, 0.0
        while queue and len(batch) < self._max_items:
            item, weight, result = entry = queue[0]
            if batch and total + weight > self._max_weight:
                break
            queue.popleft()
            keys = () if self._keys is None else tuple(self._keys(item))
            if taken.isdisjoint(keys):
                taken.update(keys)
                total += weight
                batch.append((item, result))
            else:
                postponed.append(entry)
        queue.extendleft(reversed(postponed))
        return batch

    async def _flush_batch(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results: Sequence[Result | Exception] = await self._flush([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            results = [error] * len(batch)
        for (item, future), result in zip(batch, results, strict=True):
            if future.done():
                self._on_abandoned(item)
            elif isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


class KeyedBatcher(Generic[Key, Item, Result]):
    """A batcher for each key, so that items of one key are flushed in order; forgotten when it is idle."""

    def __init__(
        self,
        flush: Callable[[Key, list[Item]], Awaitable[Sequence[Result | Exception]]],
        *,
        max_items: int = 500,
        max_weight: float = float("inf"),
        weight: Callable[[Item], float] = lambda item: 0,
    ) -> None:
        self._flush = flush
        self._max_items = max_items
        self._max_weight = max_weight
        self._weight = weight
        self._batchers: dict[Key, Batcher[Item, Result]] = {}

    def add(self, key: Key, item: Item) -> asyncio.Future[Result]:
        """Queue an item for the next flush of its key."""
        batcher = self._batchers.get(key)
        if batcher is None:
            batcher = self._batchers[key] = Batcher(
                partial(self._flush, key),
                max_items=self._max_items,
                max_weight=self._max_weight,
                weight=self._weight,
                on_idle=partial(self._forget, key),
            )
        return batcher.add(item)

    def _forget(self, key: Key) -> None:
        del self._batchers[key]

    async def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        while self._batchers:
            await asyncio.gather(*(batcher.drain() for batcher in [*self._batchers.values()]))
