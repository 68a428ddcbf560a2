"""Group loads: what concurrent calls in one process want to see is asked for together.

Calls of one moment, and calls that come while others are on their way, share a trip. There is no timer, so an idle
engine adds no delay. What is asked for in large numbers travels alone: nobody should wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from flowfabric import errors
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read

CONCURRENT_LOADS = 3  # trips under way at once
MAX_BATCH_READS = 500  # wants of one trip


class LoadQueue:
    """The way of all looks by key to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Sequence[Read], asyncio.Future[Loaded]]] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._running = 0  # counted by the lanes themselves: a task that has just returned is not running any more

    async def load(self, wants: Sequence[Read]) -> Loaded:
        """The rows of each want, and the store's time."""
        if len(wants) >= MAX_BATCH_READS:
            return await self._store.load(wants)
        answer: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._waiting.append((wants, answer))
        if self._running < CONCURRENT_LOADS:
            self._running += 1
            lane = asyncio.create_task(self._run_lane())
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)
        return await answer

    async def _run_lane(self) -> None:
        try:
            while batch := self._next_batch():
                await self._ask(batch)
        finally:
            self._running -= 1

    async def _ask(self, batch: list[tuple[Sequence[Read], asyncio.Future[Loaded]]]) -> None:
        try:
            loaded = await self._store.load([want for wants, _ in batch for want in wants])
        except errors.Corruption as unreadable:
            await self._ask_each(batch, unreadable)
            return
        except Exception as error:  # whatever it is, every caller of this trip must hear of it and no lane may die
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        begin = 0
        for wants, answer in batch:
            end = begin + len(wants)
            if not answer.done():
                answer.set_result(Loaded(loaded.now, loaded.rows[begin:end]))
            begin = end

    async def _ask_each(self, batch: list[tuple[Sequence[Read], asyncio.Future[Loaded]]], cause: Exception) -> None:
        """Ask for each caller alone: only those whose own rows cannot be read need to hear of it."""
        if len(batch) > 1:
            for one in batch:
                await self._ask([one])
        elif not batch[0][1].done():
            batch[0][1].set_exception(cause)

    def _next_batch(self) -> list[tuple[Sequence[Read], asyncio.Future[Loaded]]]:
        batch: list[tuple[Sequence[Read], asyncio.Future[Loaded]]] = []
        size, waiting = 0, self._waiting
        while waiting and size + len(waiting[0][0]) <= MAX_BATCH_READS:
            size += len(waiting[0][0])
            batch.append(waiting.popleft())
        return batch
