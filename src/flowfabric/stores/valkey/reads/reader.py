"""Loads by key and due rows. A load reads all rows of a partition in one call, which is one snapshot of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from flowfabric.clock import Clock
from flowfabric.ids import PartitionCounts
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.codec import encode
from flowfabric.stores.homes import HomeTag, home_of
from flowfabric.stores.queries import Due, Loaded, Read, Where, meets
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.reads.partition_load import PartitionLoad
from flowfabric.stores.valkey.registry import Registry
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, ValkeyTable, integer

PAGE = 500  # rows that one call reads, so that it is short

Row = list[Any]  # the stored columns of a row


class Reader:
    """Reads rows of all partitions."""

    def __init__(
        self, client: ValkeyClient, registry: Registry, functions: Callable[[str], str], clock: Clock | None
    ) -> None:
        self._client = client
        self._registry = registry
        self._functions = functions
        self._clock = clock
        self.counts = PartitionCounts()
        self._strict = True  # refuses to decode rows in unknown queues

    def now_argument(self) -> str:
        """Return the time for a function: empty if the server reads its own clock."""
        return "" if self._clock is None else str(self._clock())

    async def ping(self) -> int:
        """Return the time of the partition of no partition."""
        if self._clock is not None:
            await self._client.read("{ff}", "PING")
            return self._clock()
        seconds, micros = await self._client.read("{ff}", "TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def homes_of(self, row: type[msgspec.Struct], key: Sequence[Any] = ()) -> list[HomeTag]:
        """Return the partitions that may hold rows with this key prefix."""
        if (home := home_of(row, tuple(key), self.counts)) is not None:
            return [home]
        await self._registry.refresh()
        return sorted(self._registry.homes)

    def home_of_execution(self, execution_id: str) -> HomeTag:
        """Return the partition of an execution."""
        home = home_of(Execution, (execution_id,), self.counts)
        assert home is not None
        return home

    # Loads

    async def load(self, reads: Sequence[Read]) -> Loaded:
        """Load the requested rows: one call for each partition."""
        if not reads:
            return Loaded(await self.ping(), [])
        now, loads = self.now_argument(), dict[HomeTag, PartitionLoad]()
        for ordinal, read in enumerate(reads):
            home = home_of(read.row, read.key, self.counts)
            homes = [home] if home is not None else await self.homes_of(read.row, read.key)
            for one in homes:
                if one not in loads:
                    loads[one] = PartitionLoad(one)
                loads[one].add(ordinal, read)
        results = await asyncio.gather(*(self._call(load, now) for load in loads.values()))
        rows: list[list[tuple[Any, ...]]] = [[] for _ in reads]
        times: list[int] = [0] * len(reads)
        for load, (at, exact, listed) in zip(loads.values(), results, strict=True):
            load.assign(exact, listed, rows)
            for ordinal in load.ordinals:
                times[ordinal] = times[ordinal] or at
        if 0 in times:
            fallback = next((at for at in times if at), 0) or await self.ping()
            times = [at or fallback for at in times]
        decoded = await self._decode(reads, rows)
        return Loaded(times[0], decoded, None if len(set(times)) == 1 else times)

    def _call(self, load: PartitionLoad, now: str) -> Awaitable[Any]:
        keys = load.keys
        return self._client.read(
            load.home, "FCALL_RO", self._functions("load"), len(keys), *keys, load.home, now, load.request()
        )

    async def _decode(self, reads: Sequence[Read], rows: list[list[tuple[Any, ...]]]) -> list[list[Any]]:
        def decode(read: Read, found: list[tuple[Any, ...]]) -> list[Any]:
            table = VALKEY_TABLES[read.row]
            if len(found) > 1:
                found = sorted(found, key=itemgetter(0))
            return [table.decode(key, blob, self.queue_of) for key, blob in found]

        decoded: list[list[Any]] = await self.retry_decode(
            lambda: [decode(*pair) for pair in zip(reads, rows, strict=True)]
        )
        return decoded

    async def retry_decode(self, decode: Callable[[], Any]) -> Any:
        """Decode rows; if one is in an unknown queue, read the registry first."""
        try:
            return decode()
        except UncachedQueue:
            await self._registry.refresh()
            self._strict = False
            try:
                return decode()
            finally:
                self._strict = True

    def queue_of(self, digest: Any) -> QueueKey:
        if self._strict and not self._registry.knows(digest):
            raise UncachedQueue
        return self._registry.queue_of(digest)

    # Due rows

    async def due(self, row: type[msgspec.Struct], column: str, limit: int, where: tuple[Where, ...]) -> Due:
        """Return due rows of all partitions, ordered by instant and key."""
        now, table = self.now_argument(), VALKEY_TABLES[row]
        homes = await self.homes_of(row)
        results = await asyncio.gather(*(self._due_in(home, table, column, limit, where, now) for home in homes))
        index = table.table.column_names.index(column)
        found = [(stored[index], key, stored) for _, rows, _ in results for key, stored in rows]
        found.sort(key=lambda one: (one[0], one[1]))
        next_at = min((at for _, _, at in results if at is not None), default=None)
        if any(one.op == "in" and not one.value for one in where):
            next_at = None
        time = max((at for at, _, _ in results), default=0) or await self.ping()
        rows = await self.retry_decode(lambda: [table.codec.decode(one[2], self.queue_of) for one in found[:limit]])
        return Due(time, rows, next_at)

    async def _due_in(
        self, home: HomeTag, table: ValkeyTable, column: str, limit: int, where: tuple[Where, ...], now: str
    ) -> tuple[int, list[tuple[tuple[Any, ...], Row]], int | None]:
        found: list[tuple[tuple[Any, ...], Row]] = []
        offset, at, next_at = 0, 0, None
        number = list(table.indexes).index(column) + 1
        keys = (f"{home}:{table.name}", f"{home}:{table.indexes[column].suffix}")
        while True:
            size = min(limit - len(found), PAGE)
            at, rows, later = await self._client.read(
                home, "FCALL_RO", self._functions("due"), 2, *keys, home, now, table.number, number, offset, size
            )
            next_at = integer(later.decode()) if later else None
            page = self.stored(table, home, rows)
            found += [one for one in page if self.matches(table, one[1], where)]
            offset += len(page)
            if len(page) < size or len(found) >= limit:
                return at, found, next_at

    def stored(self, table: ValkeyTable, home: HomeTag, rows: Sequence[bytes]) -> list[tuple[tuple[Any, ...], Row]]:
        """Return key and stored columns of rows that came with their key texts."""
        keys = (table.key(text.decode(), home) for text in rows[::2])
        return [(key, table.stored(key, blob)) for key, blob in zip(keys, rows[1::2], strict=True)]

    def matches(self, table: ValkeyTable, stored: Row, where: Iterable[Where]) -> bool:
        names = table.table.column_names
        return all(meets(stored[names.index(one.column)], one, self.encode) for one in where)

    def encode(self, value: Any) -> Any:
        return encode(value, self._registry.digest_of)  # type: ignore[arg-type]


class UncachedQueue(Exception):
    """A row is in a queue that this process does not know yet."""
