"""Searches: executions of all partitions, newest first.

Every partition has an index by creation instant. The ids of its newest executions are read in small pages, and merged.
An id is next in the order once every partition has either given an older one, or has no more. Only then are rows read,
in this order, until enough of them meet the conditions or the budget is spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain

from flowfabric.model.execution import Execution
from flowfabric.stores.homes import HomeTag
from flowfabric.stores.queries import FoundExecution, Search, SearchPage, SearchPosition
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.reads.reader import PAGE, Reader, Row
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES

FIRST_PAGE = 8  # ids that are read of each partition at first; then twice as many each time

_TABLE = VALKEY_TABLES[Execution]
_INDEX = _TABLE.indexes["created_at"].suffix


class _Partition:
    """The ids of one partition, newest first, as far as they are read."""

    def __init__(self, home: HomeTag) -> None:
        self.home = home
        self.ids: list[SearchPosition] = []
        self.oldest: SearchPosition | None = None  # read so far
        self.read = 0
        self.size = FIRST_PAGE
        self.is_exhausted = False


class Searcher:
    """Searches executions, and reads their kinds."""

    def __init__(self, client: ValkeyClient, reader: Reader, functions: Callable[[str], str]) -> None:
        self._client = client
        self._reader = reader
        self._functions = functions

    async def search(self, search: Search) -> SearchPage:
        """Return executions that meet the conditions, newest first, reading at most the budget of rows."""
        partitions = [_Partition(home) for home in await self._reader.homes_of(Execution)]
        await asyncio.gather(*(self._read_ids(partition, search) for partition in partitions))
        found: list[FoundExecution] = []
        left = search.budget
        while True:
            positions = await self._next_positions(partitions, search, min(left, PAGE))
            rows = await self._rows(positions)
            matching = [
                (position, rows[position[1]])
                for position in positions
                if position[1] in rows and self._reader.matches(_TABLE, rows[position[1]], search.where)
            ]
            kinds = await self.kinds([execution_id for (_, execution_id), _ in matching])
            for row in await self._decode([row for _, row in matching]):
                kind = kinds.get(row.execution_id, "")
                if search.kind in (None, kind):
                    found.append(FoundExecution(row, kind))
                    if len(found) == search.limit:
                        return SearchPage(found, found[-1].position)
            left -= len(positions)
            if left <= 0:
                return SearchPage(found, positions[-1])
            if not positions:
                return SearchPage(found, None)

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        """Return the kinds of executions by id; one without a payload is left out."""
        calls, parts = list[asyncio.Future[list[bytes | None]]](), list[list[str]]()
        for home, names in self._by_home(execution_ids).items():
            for start in range(0, len(names), PAGE):
                part = names[start : start + PAGE]
                texts = [_TABLE.key_text((name,), home) for name in part]
                name = self._functions("kinds")
                calls.append(self._client.read(home, "FCALL_RO", name, 1, f"{home}:payload", home, *texts))
                parts.append(part)
        replies = await asyncio.gather(*calls)
        pairs = chain.from_iterable(zip(part, kinds, strict=True) for part, kinds in zip(parts, replies, strict=True))
        return {name: kind.decode() for name, kind in pairs if kind is not None}

    async def _next_positions(
        self, partitions: Sequence[_Partition], search: Search, count: int
    ) -> list[SearchPosition]:
        """Remove and return the next ids of all partitions, newest first; none if all are read."""
        while True:
            unfinished = [one for one in partitions if not one.is_exhausted and one.oldest is not None]
            # Partitions may have further ids that are older than this one.
            bound = max((one.oldest for one in unfinished if one.oldest is not None), default=None)
            merged = sorted(chain.from_iterable(one.ids for one in partitions), reverse=True)
            known = [position for position in merged if bound is None or position >= bound][:count]
            if known or not unfinished:
                last = known[-1] if known else None
                for one in partitions:
                    one.ids = [position for position in one.ids if last is not None and position < last]
                return known
            behind = [one for one in unfinished if one.oldest == bound]
            await asyncio.gather(*(self._read_ids(one, search) for one in behind))

    async def _read_ids(self, partition: _Partition, search: Search) -> None:
        """Read the next page of ids of a partition."""
        newest, oldest = _bounds(search)
        reply: list[bytes] = await self._client.read(
            partition.home,
            "ZREVRANGEBYSCORE",
            f"{partition.home}:{_INDEX}",
            newest,
            oldest,
            "WITHSCORES",
            "LIMIT",
            partition.read,
            partition.size,
        )
        for text, score in zip(reply[::2], reply[1::2], strict=True):
            (execution_id,) = _TABLE.key(text.decode(), partition.home)
            partition.oldest = (int(float(score)), execution_id)
            if search.after is None or partition.oldest < search.after:
                partition.ids.append(partition.oldest)
        partition.read += len(reply) // 2
        partition.is_exhausted = len(reply) // 2 < partition.size
        partition.size = min(partition.size * 2, PAGE)

    async def _rows(self, positions: Sequence[SearchPosition]) -> dict[str, Row]:
        """Return the stored columns of executions by id; one that was deleted meanwhile is left out."""
        by_home = self._by_home([execution_id for _, execution_id in positions])
        replies = await asyncio.gather(
            *(
                self._client.read(
                    home, "HMGET", f"{home}:{_TABLE.name}", *(_TABLE.key_text((name,), home) for name in names)
                )
                for home, names in by_home.items()
            )
        )
        return {
            name: _TABLE.stored((name,), blob)
            for names, blobs in zip(by_home.values(), replies, strict=True)
            for name, blob in zip(names, blobs, strict=True)
            if blob is not None
        }

    async def _decode(self, rows: Sequence[Row]) -> list[Execution]:
        decode = _TABLE.codec.decode
        decoded: list[Execution] = await self._reader.retry_decode(
            lambda: [decode(row, self._reader.queue_of) for row in rows]
        )
        return decoded

    def _by_home(self, execution_ids: Sequence[str]) -> dict[HomeTag, list[str]]:
        by_home: dict[HomeTag, list[str]] = {}
        for execution_id in execution_ids:
            by_home.setdefault(self._reader.home_of_execution(execution_id), []).append(execution_id)
        return by_home


def _bounds(search: Search) -> tuple[str, str]:
    """Return the newest and the oldest instant of creation that a search may find, as the server reads them."""
    newest, oldest = list[int](), list[int]()
    for condition in search.where:
        if condition.column == "created_at" and condition.value is not None:
            match condition.op:
                case "<" | "<=":
                    newest.append(condition.value - (condition.op == "<"))
                case ">" | ">=":
                    oldest.append(condition.value + (condition.op == ">"))
                case "=":
                    newest.append(condition.value)
                    oldest.append(condition.value)
    if search.after is not None:
        newest.append(search.after[0])
    return (str(min(newest)) if newest else "+inf"), (str(max(oldest)) if oldest else "-inf")
