"""Reads of rows: loads by key, due rows, scans, searches and counts.

A load reads all rows of a partition in one call, which is one snapshot of it. Scans and searches read pages of an index
or of the keys, partition by partition, and evaluate conditions here: no call reads more than `PAGE` rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

import msgspec

from flowfabric.clock import Clock
from flowfabric.ids import PartitionCounts
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.codec import decode_counts, encode
from flowfabric.stores.homes import HomeTag, home_of
from flowfabric.stores.queries import Due, GroupedCount, Loaded, Read, Scan, SearchPage, Where
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.codec import VALKEY_TABLES, ValkeyTable, integer
from flowfabric.stores.valkey.ranges import KeyRange, meets, ranges_of
from flowfabric.stores.valkey.registry import Registry
from flowfabric.stores.verdicts import Unstorable

PAGE = 500  # rows that one call reads, so that it is short
MAX_READS = 1000  # rows of one table that a load names in one command
CONCURRENT = 64  # partitions that a scan reads at once

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

    # Loads

    async def load(self, reads: Sequence[Read]) -> Loaded:
        """Load the requested rows: one call for each partition."""
        if not reads:
            return Loaded(await self.ping(), [])
        now, loads = self.now_argument(), dict[HomeTag, _PartitionLoad]()
        for ordinal, read in enumerate(reads):
            home = home_of(read.row, read.key, self.counts)
            homes = [home] if home is not None else await self.homes_of(read.row, read.key)
            for one in homes:
                if one not in loads:
                    loads[one] = _PartitionLoad(one)
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

    def _call(self, load: _PartitionLoad, now: str) -> Awaitable[Any]:
        keys = load.keys
        return self._client.read(
            load.home, "FCALL_RO", self._functions("load"), len(keys), *keys, load.home, now, load.request()
        )

    async def _decode(self, reads: Sequence[Read], rows: list[list[tuple[Any, ...]]]) -> list[list[Any]]:
        def decode(read: Read, found: list[tuple[Any, ...]]) -> list[Any]:
            table = VALKEY_TABLES[read.row]
            if len(found) > 1:
                found = sorted(found, key=itemgetter(0))
            return [table.decode(key, blob, self._queue_of) for key, blob in found]

        decoded: list[list[Any]] = await self.retry_decode(
            lambda: [decode(*pair) for pair in zip(reads, rows, strict=True)]
        )
        return decoded

    async def retry_decode(self, decode: Callable[[], Any]) -> Any:
        """Decode rows; if one is in an unknown queue, read the registry first."""
        try:
            return decode()
        except UnknownQueue:
            await self._registry.refresh()
            self._strict = False
            try:
                return decode()
            finally:
                self._strict = True

    _strict = True

    def _queue_of(self, digest: Any) -> QueueKey:
        if self._strict and not self._registry.knows(digest):
            raise UnknownQueue
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
        rows = await self.retry_decode(lambda: [table.codec.decode(one[2], self._queue_of) for one in found[:limit]])
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
            page = self._stored(table, home, rows)
            found += [one for one in page if self._matches(table, one[1], where)]
            offset += len(page)
            if len(page) < size or len(found) >= limit:
                return at, found, next_at

    def _stored(self, table: ValkeyTable, home: HomeTag, rows: Sequence[bytes]) -> list[tuple[tuple[Any, ...], Row]]:
        """Return key and stored columns of rows that came with their key texts."""
        keys = (table.key(text.decode(), home) for text in rows[::2])
        return [(key, table.stored(key, blob)) for key, blob in zip(keys, rows[1::2], strict=True)]

    def _matches(self, table: ValkeyTable, stored: Row, where: Iterable[Where]) -> bool:
        names = table.table.column_names
        return all(meets(stored[names.index(one.column)], one, self._encode) for one in where)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._registry.digest_of)  # type: ignore[arg-type]

    # Scans

    async def scan(self, scan: Scan) -> list[Any]:
        """Return the rows of a scan, in its order."""
        if scan.max_values is not None:
            scan = scan.with_values(await self._values(scan))
        parts = scan.split_by_value() if scan.limit_by else [scan]
        found = await asyncio.gather(*(self._scan_part(part) for part in parts))
        rows = [row for _, row in merge(*found, key=itemgetter(0))]
        table = VALKEY_TABLES[scan.row]
        decoded: list[Any] = await self.retry_decode(
            lambda: [table.codec.decode_scanned(scan, row, self._queue_of) for row in rows]
        )
        return decoded

    async def _scan_part(self, scan: Scan) -> list[tuple[tuple[Any, ...], Row]]:
        """Return the first rows of one scan with their sort keys."""
        if scan.limit <= 0:
            return []
        table = VALKEY_TABLES[scan.row]
        plan = ranges_of(scan, table, self.counts, self._encode)
        homes = [plan.home] if plan.home is not None else await self._homes_to_scan(scan, plan.is_queue)
        ranges = [one for home in homes for one in plan.in_home(home)]
        if plan.is_global_order:
            return await self._read_in_sequence(scan, table, plan.sequence(homes))
        found: list[tuple[tuple[Any, ...], Row]] = []
        for start in range(0, len(ranges), CONCURRENT):
            parts = await asyncio.gather(
                *(self._read_range(scan, table, one, plan.is_ordered) for one in ranges[start : start + CONCURRENT])
            )
            found += [one for part in parts for one in part]
        found.sort(key=itemgetter(0))
        return found[: scan.limit]

    async def _homes_to_scan(self, scan: Scan, is_queue: bool) -> list[HomeTag]:
        await self._registry.refresh()
        if is_queue:
            lines = next(one.value for one in scan.where if one.column == "line" and one.op in ("=", "in"))
            queues = [lines] if isinstance(lines, QueueKey) else lines
            return self._registry.places(self._registry.digest_of(queue) for queue in queues if queue is not None)
        return sorted(self._registry.homes)

    async def _read_in_sequence(
        self, scan: Scan, table: ValkeyTable, ranges: Sequence[KeyRange]
    ) -> list[tuple[tuple[Any, ...], Row]]:
        """Read ranges that follow one another in the order of the scan, until there are enough rows."""
        found: list[tuple[tuple[Any, ...], Row]] = []
        step = 8
        for start in range(0, len(ranges), step):
            parts = await asyncio.gather(
                *(self._read_range(scan, table, one, True) for one in ranges[start : start + step])
            )
            found += [one for part in parts for one in part]
            if len(found) >= scan.limit:
                break
        return found[: scan.limit]

    async def _read_range(
        self, scan: Scan, table: ValkeyTable, span: KeyRange, is_ordered: bool
    ) -> list[tuple[tuple[Any, ...], Row]]:
        """Read the rows of a range that the scan selects; if they are in its order, no more than it wants."""
        found: list[tuple[tuple[Any, ...], Row]] = []
        offset, size = 0, min(scan.limit, PAGE) if is_ordered else PAGE
        while True:
            count, rows = await self._page(table, span, offset, size)
            for _, stored in rows:
                if self._matches(table, stored, scan.where):
                    sort_key = self._sort_key(scan, table, stored)
                    if self._is_after(scan, sort_key):
                        found.append((sort_key, [*stored]))
            offset += count
            if count < size or (is_ordered and len(found) >= scan.limit):
                return found
            size = PAGE

    async def _page(
        self, table: ValkeyTable, span: KeyRange, offset: int, size: int
    ) -> tuple[int, list[tuple[tuple[Any, ...], Row]]]:
        home, index = span.home, span.index
        if span.index is None and not table.is_listed:
            flat: list[bytes] = await self._client.read(home, "HGETALL", f"{home}:{table.name}")
            return 0, self._stored(table, home, flat)
        suffix = f"{table.name}:k" if index is None else index.suffix
        number = 0 if index is None else list(table.indexes.values()).index(index) + 1
        keys = (f"{home}:{table.name}", f"{home}:{suffix}")
        bounds = (span.first, span.last)
        count, rows = await self._client.read(
            home, "FCALL_RO", self._functions("range"), 2, *keys, home, table.number, number, *bounds, offset, size
        )
        if index is None or index.is_score:
            return count, self._stored(table, home, rows)
        texts = [index.key_text(member.decode()) for member in rows[::2]]
        found = [(table.key(text, home), blob) for text, blob in zip(texts, rows[1::2], strict=True)]
        return count, [(key, table.stored(key, blob)) for key, blob in found]

    def _sort_key(self, scan: Scan, table: ValkeyTable, stored: Row) -> tuple[Any, ...]:
        names = table.table.column_names
        return tuple(stored[names.index(name)] for name in scan.full_order)

    def _is_after(self, scan: Scan, sort_key: tuple[Any, ...]) -> bool:
        if scan.after is None:
            return True
        after = tuple(self._encode(value) for value in scan.after)
        return sort_key[: len(after)] > after

    async def _values(self, scan: Scan) -> list[str]:
        """Return the first values of an indexed text column that have the prefix of the scan."""
        table, condition = VALKEY_TABLES[scan.row], scan.limit_by_condition
        index = table.indexes[condition.column]
        number = list(table.indexes).index(condition.column) + 1
        first = "[" + condition.value
        if scan.values_after is not None and scan.values_after + "\1" > condition.value:
            first = "[" + scan.values_after + "\1"
        last = "(" + condition.value + "\U0010ffff\U0010ffff" if condition.value else "+"
        wanted = scan.max_values or 0
        homes = await self.homes_of(scan.row)
        found = await asyncio.gather(
            *(
                self._client.read(
                    home,
                    "FCALL_RO",
                    self._functions("values"),
                    1,
                    f"{home}:{index.suffix}",
                    home,
                    table.number,
                    number,
                    first,
                    last,
                    wanted,
                )
                for home in homes
            )
        )
        values = {value.decode() for part in found for value in part}
        return sorted(value for value in values if value.startswith(condition.value))[:wanted]

    # Searches

    async def search(self, scan: Scan, budget: int) -> SearchPage:
        """Return rows in the order of the key, reading at most `budget` rows."""
        table = VALKEY_TABLES[scan.row]
        plan = ranges_of(msgspec.structs.replace(scan, where=()), table, self.counts, self._encode)
        ranges = plan.sequence(await self.homes_of(scan.row))
        found: list[Row] = []
        last: tuple[Any, ...] | None = None
        left, position, offset = budget, 0, 0
        while position < len(ranges) and left > 0 and len(found) < scan.limit:
            size = min(left, PAGE)
            ahead = ranges[position : position + (8 if offset == 0 else 1)]
            pages = await asyncio.gather(
                *(self._page(table, one, offset if n == 0 else 0, size) for n, one in enumerate(ahead))
            )
            for number, (count, rows) in enumerate(pages):
                for key, stored in rows:
                    if left == 0 or len(found) >= scan.limit:
                        break
                    if scan.after is not None and key <= scan.after:
                        continue
                    left, last = left - 1, key
                    if self._matches(table, stored, scan.where):
                        found.append(stored)
                if count == size:
                    position, offset = position + number, (offset if number == 0 else 0) + count
                    break
            else:
                position, offset = position + len(ahead), 0
        rows = await self.retry_decode(
            lambda: [table.codec.decode_scanned(scan, stored, self._queue_of) for stored in found]
        )
        return SearchPage.of(scan, rows, last if left == 0 else None)

    # Counts

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        """Count the rows of an index by columns of their executions."""
        table = VALKEY_TABLES[query.row]
        index = table.indexes[query.column]
        homes = await self.homes_of(query.row)
        if query.values is None:
            bounds = [("-inf", "+inf") if index.is_score else ("-", "+")]
        else:
            texts = dict.fromkeys(self._encode(value) for value in query.values)
            bounds = [(f"[{text}\0", f"({text}\1") for text in texts]
        counts: dict[bytes, int] = {}
        for bound in bounds:
            left = query.limit
            for home in homes:
                if left <= 0:
                    break
                left -= await self._count_in(home, table, query, bound, left, counts)
        rows = ((*self._padded(msgspec.msgpack.decode(group), len(query.group_by)), n) for group, n in counts.items())
        return decode_counts(query.group_by, rows)

    async def _count_in(
        self,
        home: HomeTag,
        table: ValkeyTable,
        query: GroupedCount,
        bounds: tuple[str, str],
        limit: int,
        counts: dict[bytes, int],
    ) -> int:
        executions, seen = VALKEY_TABLES[Execution], 0
        places = msgspec.msgpack.encode([executions.place[name] for name in query.group_by])
        names = table.table.key
        source = table.place.get(query.execution_column, 0)
        if query.execution_column in names and len(names) > 1:
            source = -(names.index(query.execution_column) + 1)
        number = list(table.indexes).index(query.column) + 1
        keys = (f"{home}:{table.name}", f"{home}:{table.indexes[query.column].suffix}", f"{home}:exec_core")
        while seen < limit:
            size = min(limit - seen, PAGE)
            arguments = (home, table.number, number, *bounds, seen, size, source, places)
            count, groups = await self._client.read(
                home, "FCALL_RO", self._functions("count"), len(keys), *keys, *arguments
            )
            for group, n in zip(groups[::2], groups[1::2], strict=True):
                counts[group] = counts.get(group, 0) + n
            seen += count
            if count < size:
                break
        return seen

    @staticmethod
    def _padded(cells: list[Any], width: int) -> list[Any]:
        return cells + [None] * (width - len(cells))


class UnknownQueue(Exception):
    """A row is in a queue that this process does not know yet."""


class _PartitionLoad:
    """The reads of one partition."""

    def __init__(self, home: HomeTag) -> None:
        self.home = home
        self.ordinals: set[int] = set()
        self._exact: dict[type[msgspec.Struct], list[tuple[int, tuple[Any, ...], str]]] = {}
        self._listed: list[tuple[int, type[msgspec.Struct], str]] = []

    def add(self, ordinal: int, read: Read) -> None:
        """Add a read; one whose key no row can have finds nothing."""
        table = VALKEY_TABLES[read.row]
        self.ordinals.add(ordinal)
        try:
            if len(read.key) == len(table.table.key):
                text = table.key_text(read.key, self.home)
                self._exact.setdefault(read.row, []).append((ordinal, read.key, text))
            else:
                self._listed.append((ordinal, read.row, table.prefix_text(read.key, self.home)))
        except Unstorable:
            pass

    @property
    def _groups(self) -> list[tuple[type[msgspec.Struct], list[tuple[int, tuple[Any, ...], str]]]]:
        return [
            (row, reads[start : start + MAX_READS])
            for row, reads in self._exact.items()
            for start in range(0, len(reads), MAX_READS)
        ]

    @property
    def keys(self) -> list[str]:
        """The names of the keys that the call reads."""
        rows = dict.fromkeys(self._exact, False) | {row: True for _, row, _ in self._listed}
        names = [f"{self.home}:{VALKEY_TABLES[row].name}" for row in rows]
        names += [f"{self.home}:{VALKEY_TABLES[row].name}:k" for row, listed in rows.items() if listed]
        return names or [f"{self.home}:f"]

    def request(self) -> bytes:
        """Return the argument of the function."""
        exact = [[VALKEY_TABLES[row].number, *(text for _, _, text in reads)] for row, reads in self._groups]
        listed = [[VALKEY_TABLES[row].number, prefix] for _, row, prefix in self._listed]
        return msgspec.msgpack.encode([exact, listed])

    def assign(
        self,
        exact: Sequence[Sequence[bytes | None]],
        listed: Sequence[Sequence[bytes]],
        rows: list[list[tuple[Any, ...]]],
    ) -> None:
        """Add keys and blobs to the rows of each read."""
        for (_, reads), blobs in zip(self._groups, exact, strict=True):
            for (ordinal, key, _), blob in zip(reads, blobs, strict=True):
                if blob is not None:
                    rows[ordinal].append((key, blob))
        for (ordinal, row, _), found in zip(self._listed, listed, strict=True):
            table = VALKEY_TABLES[row]
            rows[ordinal] += [
                (table.key(text.decode(), self.home), blob) for text, blob in zip(found[::2], found[1::2], strict=True)
            ]
