"""LoadQueue: concurrent loads by key share a round trip to the store.

A load of many rows is sent alone, so that no other call waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric import errors
from flowfabric.batcher import Batcher
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read

CONCURRENT_LOADS = 3
MAX_BATCH_READS = 500


class LoadQueue:
    """Batches concurrent key loads into one round trip."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batcher = Batcher(self._load_batch, concurrency=CONCURRENT_LOADS, max_weight=MAX_BATCH_READS, weight=len)

    async def load(self, reads: Sequence[Read]) -> Loaded:
        """Return the rows of each read, and the store's time."""
        if len(reads) >= MAX_BATCH_READS:
            return await self._store.load(reads)
        return await self._batcher.add(reads)

    async def _load_batch(self, batch: list[Sequence[Read]]) -> list[Loaded | Exception]:
        try:
            loaded = await self._store.load([read for reads in batch for read in reads])
        except errors.Corruption as unreadable:
            return [unreadable] if len(batch) == 1 else await self._load_each(batch)
        answers: list[Loaded | Exception] = []
        begin = 0
        for reads in batch:
            end = begin + len(reads)
            answers.append(loaded.part(begin, end))
            begin = end
        return answers

    async def _load_each(self, batch: list[Sequence[Read]]) -> list[Loaded | Exception]:
        """Load for each caller alone: only a caller whose own rows are unreadable gets the error."""
        answers: list[Loaded | Exception] = []
        for reads in batch:
            try:
                answers.append(await self._store.load(reads))
            except errors.FabricError as error:
                answers.append(error)
        return answers
