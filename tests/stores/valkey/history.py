"""An independent history of writes: what was acknowledged, what is in doubt, what was refused, and what survived."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowfabric.errors import StoreUnavailable
from flowfabric.stores.valkey import ValkeyClient

TAGS = [f"{{fp:{number}}}" for number in range(24)]  # on all nodes of three


class WriteHistory:
    """Writers that append numbers to a list of each partition, one after the other, until they are stopped."""

    def __init__(self, client: ValkeyClient) -> None:
        self._client = client
        self._stopped = False
        self._progress = asyncio.Event()
        self.acknowledged: set[tuple[str, int]] = set()
        self.in_doubt: set[tuple[str, int]] = set()
        self.refused: set[tuple[str, int]] = set()
        self.slowest_s = 0.0

    async def write(self, tag: str) -> None:
        """Append 0, 1, 2 … to the list of a tag."""
        number = 0
        loop = asyncio.get_running_loop()
        while not self._stopped:
            began = loop.time()
            try:
                await self._client.call(tag, "RPUSH", f"{tag}:log", number)
                self.acknowledged.add((tag, number))
            except StoreUnavailable as error:
                (self.in_doubt if error.in_doubt else self.refused).add((tag, number))
                await asyncio.sleep(0.01)
            self.slowest_s = max(self.slowest_s, loop.time() - began)
            self._progress.set()
            number += 1

    def stop(self) -> None:
        """Let each writer end after its present write."""
        self._stopped = True

    async def wait_for_more(self, count: int) -> None:
        """Wait until each tag has so many more acknowledged writes."""
        before = Counter(tag for tag, _ in self.acknowledged)
        async with asyncio.timeout(30):
            while True:
                now = Counter(tag for tag, _ in self.acknowledged)
                if all(now[tag] - before[tag] >= count for tag in TAGS):
                    return
                self._progress.clear()
                await self._progress.wait()

    async def survivors(self) -> set[tuple[str, int]]:
        """Return what the servers have; fail if a write was executed twice, or though it was refused."""
        found: set[tuple[str, int]] = set()
        for tag in TAGS:
            numbers = [int(text) for text in await self._client.read(tag, "LRANGE", f"{tag}:log", 0, -1)]
            assert len(numbers) == len(set(numbers)), f"a write to {tag} was executed twice"
            found |= {(tag, number) for number in numbers}
        assert not found & self.refused, "a write was executed that was reported as not executed"
        assert found <= self.acknowledged | self.in_doubt
        return found


@asynccontextmanager
async def under_load(client: ValkeyClient, writes: int = 20) -> AsyncIterator[WriteHistory]:
    """Write to all partitions during the block; it begins after `writes` writes, and ends after as many more."""
    history = WriteHistory(client)
    async with asyncio.TaskGroup() as group:
        for tag in TAGS:
            group.create_task(history.write(tag))
        try:
            await history.wait_for_more(writes)
            yield history
            await history.wait_for_more(writes)
        finally:
            history.stop()
