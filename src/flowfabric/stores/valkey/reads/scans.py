"""Scans and counts: pages of an index or of the keys, partition by partition.

Conditions are evaluated here. No call reads more than `PAGE` rows, so that no call takes long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

import msgspec

from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.codec import decode_counts
from flowfabric.stores.homes import HomeTag
from flowfabric.stores.queries import GroupedCount, Scan
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.reads.ranges import KeyRange, ranges_of
from flowfabric.stores.valkey.reads.reader import PAGE, Reader, Row
from flowfabric.stores.valkey.registry import Registry
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, ValkeyTable

CONCURRENT = 64  # partitions that a scan reads at once
AHEAD = 8  # partitions that an ordered scan reads at once

Keyed = tuple[tuple[Any, ...], Row]  # a row with its key or its sort key


class Scanner:
    """Reads rows by conditions, from all partitions that may hold some."""

    def __init__(
        self, client: ValkeyClient, registry: Registry, reader: Reader, functions: Callable[[str], str]
    ) -> None:
        self._client = client
        self._registry = registry
        self._reader = reader
        self._functions = functions

    async def scan(self, scan: Scan) -> list[Any]:
        """Return the rows of a scan, in its order."""
        if scan.max_values is not None:
            scan = scan.with_values(await self._values(scan))
        parts = scan.split_by_value() if scan.limit_by else [scan]
        found = await asyncio.gather(*(self._scan_part(part) for part in parts))
        rows = [row for _, row in merge(*found, key=itemgetter(0), reverse=scan.descending)]
        table = VALKEY_TABLES[scan.row]
        decoded: list[Any] = await self._reader.retry_decode(
            lambda: [table.codec.decode_scanned(scan, row, self._reader.queue_of) for row in rows]
        )
        return decoded

    async def _scan_part(self, scan: Scan) -> list[Keyed]:
        """Return the first rows of one scan with their sort keys."""
        if scan.limit <= 0:
            return []
        table = VALKEY_TABLES[scan.row]
        plan = ranges_of(scan, table, self._reader.counts, self._reader.encode)
        homes = [plan.home] if plan.home is not None else await self._homes_to_scan(scan, plan.is_queue)
        ranges = [one for home in homes for one in plan.in_home(home)]
        if plan.is_global_order:
            return await self._read_in_sequence(scan, table, plan.sequence(homes))
        found: list[Keyed] = []
        for start in range(0, len(ranges), CONCURRENT):
            parts = await asyncio.gather(
                *(self._read_range(scan, table, one, plan.is_ordered) for one in ranges[start : start + CONCURRENT])
            )
            found += [one for part in parts for one in part]
        found.sort(key=itemgetter(0), reverse=scan.descending)
        return found[: scan.limit]

    async def _homes_to_scan(self, scan: Scan, is_queue: bool) -> list[HomeTag]:
        await self._registry.refresh()
        if is_queue:
            lines = next(one.value for one in scan.where if one.column == "line" and one.op in ("=", "in"))
            queues = [lines] if isinstance(lines, QueueKey) else lines
            return self._registry.places(self._registry.digest_of(queue) for queue in queues if queue is not None)
        return sorted(self._registry.homes)

    async def _read_in_sequence(self, scan: Scan, table: ValkeyTable, ranges: Sequence[KeyRange]) -> list[Keyed]:
        """Read ranges that follow one another in the order of the scan, until there are enough rows."""
        found: list[Keyed] = []
        for start in range(0, len(ranges), AHEAD):
            parts = await asyncio.gather(
                *(self._read_range(scan, table, one, True) for one in ranges[start : start + AHEAD])
            )
            found += [one for part in parts for one in part]
            if len(found) >= scan.limit:
                break
        return found[: scan.limit]

    async def _read_range(self, scan: Scan, table: ValkeyTable, span: KeyRange, is_ordered: bool) -> list[Keyed]:
        """Read the rows of a range that the scan selects; if they are in its order, no more than it wants."""
        found: list[Keyed] = []
        offset, size = 0, min(scan.limit, PAGE) if is_ordered else PAGE
        while True:
            backwards = is_ordered and scan.descending
            count, rows = await self._page(table, span, offset, size, backwards=backwards)
            for _, stored in rows:
                if self._reader.matches(table, stored, scan.where):
                    sort_key = self._sort_key(scan, table, stored)
                    if self._is_after(scan, sort_key):
                        found.append((sort_key, [*stored]))
            offset += count
            if count < size or (is_ordered and len(found) >= scan.limit):
                return found
            size = PAGE

    async def _page(
        self, table: ValkeyTable, span: KeyRange, offset: int, size: int, *, backwards: bool
    ) -> tuple[int, list[Keyed]]:
        home, index = span.home, span.index
        if span.index is None and not table.is_listed:
            flat: list[bytes] = await self._client.read(home, "HGETALL", f"{home}:{table.name}")
            return 0, self._reader.stored(table, home, flat)
        suffix = f"{table.name}:k" if index is None else index.suffix
        number = 0 if index is None else list(table.indexes.values()).index(index) + 1
        keys = (f"{home}:{table.name}", f"{home}:{suffix}")
        arguments = (home, table.number, number, span.first, span.last, offset, size, int(backwards))
        count, rows = await self._client.read(home, "FCALL_RO", self._functions("range"), 2, *keys, *arguments)
        if index is None or index.is_score:
            return count, self._reader.stored(table, home, rows)
        texts = [index.key_text(member.decode()) for member in rows[::2]]
        found = [(table.key(text, home), blob) for text, blob in zip(texts, rows[1::2], strict=True)]
        return count, [(key, table.stored(key, blob)) for key, blob in found]

    def _sort_key(self, scan: Scan, table: ValkeyTable, stored: Row) -> tuple[Any, ...]:
        names = table.table.column_names
        return tuple(stored[names.index(name)] for name in scan.full_order)

    def _is_after(self, scan: Scan, sort_key: tuple[Any, ...]) -> bool:
        if scan.after is None:
            return True
        after = tuple(self._reader.encode(value) for value in scan.after)
        return sort_key[: len(after)] < after if scan.descending else sort_key[: len(after)] > after

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
        homes = await self._reader.homes_of(scan.row)
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

    # Counts

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        """Count the rows of an index by columns of their executions."""
        table = VALKEY_TABLES[query.row]
        index = table.indexes[query.column]
        homes = await self._reader.homes_of(query.row)
        if query.values is None:
            bounds = [("-inf", "+inf") if index.is_score else ("-", "+")]
        else:
            texts = dict.fromkeys(self._reader.encode(value) for value in query.values)
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
        return [None if cell is False else cell for cell in cells] + [None] * (width - len(cells))
