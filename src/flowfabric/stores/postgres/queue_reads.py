"""Partial reads of ready queues and of blocked work, whose cost stays bounded beside an old snapshot (dead_entries.py).

Guarded claims read the first rows of each queue and claim some of them later. While there are few dead index entries,
that is one scan, and the server counts the entries of all queues together. Beyond that, each part of a queue is read
and counted separately.

`nonempty_queues` steps from queue to queue through the index, and reads all dead entries of queues that have become
empty. Queues with a floor are excluded from these steps and are read one by one, `MAX_TRACKED` in one search: the next
search continues after them.

Lists of blocked work by prefix are read alike. No table has the names of empty lists, so a process remembers those that
it has read rows of. The dead entries of other lists are read only within the budget of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.codec import CODEC, encode
from flowfabric.stores.postgres.commit.fragments import CLOCK_SQL
from flowfabric.stores.postgres.dead_entries import (
    BLOAT_THRESHOLD,
    DeadEntries,
    IndexRange,
    Part,
    Position,
    floor_of_heads,
    share_of,
)
from flowfabric.stores.postgres.pool import ConnectionPool
from flowfabric.stores.postgres.queue_ids import PostgresQueueIds, queue_id
from flowfabric.stores.postgres.reads import ENTRIES_READ_TEMPLATE, ConditionBuilder, scan_statement
from flowfabric.stores.postgres.sql import load_statements, number_parameters, table_column_list
from flowfabric.stores.queries import Scan, Where, prefix_upper_bound

BY_POSITION = ("rank", "execution_id")
BY_LIST = ("blocked_on", *BY_POSITION)
COLUMNS = ("line", "blocked_on")  # columns of executions that have an index by position

_ENTRIES = ENTRIES_READ_TEMPLATE.format(index="ff_exec_core_line")
_NOW = CLOCK_SQL.format(given=":clock::bigint")
_STATEMENTS = load_statements("queue_ids.sql")
_BLOCKED_ENTRIES = ENTRIES_READ_TEMPLATE.format(index="ff_exec_core_blocked_on")
_NONEMPTY_PARAMETERS = ("clock", "lows", "highs", "limit")
NONEMPTY_QUEUES = number_parameters(
    _STATEMENTS["nonempty_queues"].format(clock=_NOW, entries=_ENTRIES, column="line", kind="bigint"),
    _NONEMPTY_PARAMETERS,
)
NONEMPTY_LISTS = number_parameters(
    _STATEMENTS["nonempty_queues"].format(clock=_NOW, entries=_BLOCKED_ENTRIES, column="blocked_on", kind="text"),
    _NONEMPTY_PARAMETERS,
)
_FIRST = number_parameters(
    _STATEMENTS["first_positions"].format(clock=_NOW, entries=_ENTRIES),
    ("clock", "queue_ids", "low_ranks", "low_ids", "high_ranks", "high_ids"),
)
_SIZES = number_parameters(_STATEMENTS["queue_sizes"].format(clock=_NOW, entries=_ENTRIES), ("clock", "known"))
_SMALLEST, _LARGEST = -1, 2**63 - 1  # exclusive bounds of queue ids
MAX_TRACKED = 64  # queues with a floor that one search for nonempty queues reads
MAX_WINDOWS = 4  # searches of one call, if they find nothing
MAX_NAMES = 4096  # names of lists of blocked work that are remembered


def is_bounded(scan: Scan) -> bool:
    """True if the scan is partial and reads the first rows of some queues, or of lists whose names have a prefix."""
    if not scan.partial or scan.row is not Execution:
        return False
    return _prefix(scan) is not None or (scan.order == BY_POSITION and _condition(scan) is not None)


def _condition(scan: Scan) -> Where | None:
    """Return the condition that names the queues."""
    ops = ("=",) if scan.limit_by is None else ("in",)
    return next((where for where in scan.where if where.column in COLUMNS and where.op in ops), None)


def _prefix(scan: Scan) -> str | None:
    """Return the prefix of the lists that a scan reads: the first rows of each list, or all rows list by list."""
    order, limit_by = (BY_LIST, None) if scan.max_values is None else (BY_POSITION, "blocked_on")
    if scan.order != order or scan.limit_by != limit_by:
        return None
    starts = [where.value for where in scan.where if where.column == "blocked_on" and where.op == "starts"]
    return starts[0] if starts and prefix_upper_bound(starts[0]) is not None else None


class QueueReads:
    """Reads the heads of queues, and finds the nonempty queues."""

    def __init__(
        self,
        pool: ConnectionPool,
        queue_ids: PostgresQueueIds,
        dead_entries: DeadEntries,
        clock: Callable[[], int | None],
    ) -> None:
        self._pool = pool
        self._queue_ids = queue_ids
        self.dead_entries = dead_entries
        self._clock = clock
        self._cursors: dict[str, Any] = {}  # by index: where the next search continues
        self._names: dict[str, None] = {}  # names of lists of blocked work, oldest first
        self._gap_entries: dict[str, int] = {}  # by prefix: read by the last search outside of lists with a floor

    async def scan(self, scan: Scan) -> list[Execution]:
        """Return the first rows of some queues, as far as they are read now; later scans find the others."""
        if (prefix := _prefix(scan)) is not None:
            return await self._scan_prefix(scan, prefix)
        condition = _condition(scan)
        assert condition is not None
        others = tuple(where for where in scan.where if where is not condition)
        named = condition.value if condition.op == "in" else (condition.value,)
        encoded = {encode(value, queue_id) for value in named} - {None}
        values: dict[Hashable, Any] = {(value, others) if others else value: value for value in sorted(encoded)}
        if not values:
            return []
        rows = await self._scan(scan, condition.column, others, values)
        while not rows and scan.after is None and self.dead_entries.may_read_more([*values]):
            rows = await self._scan(scan, condition.column, others, values)
        return rows

    async def _scan(
        self, scan: Scan, column: str, others: tuple[Where, ...], values: dict[Hashable, Any]
    ) -> list[Execution]:
        if not self.dead_entries.may_hide_rows(values):
            return await self._scan_heads(scan, column, others, values)
        parts = self.dead_entries.parts(values)
        if scan.after is not None:
            parts = [part for part in parts if part.slice is None]
        statement, arguments = _parts_statement(scan, column, others, parts, self._clock())
        records = await self._pool.read(lambda connection: connection.fetch(statement, *arguments))
        decode = CODEC[Execution].decode
        rows_by_part = await self._queue_ids.decode(
            lambda decode_queue: [[decode(row, decode_queue) for row in record["rows"]] for record in records]
        )
        if scan.after is None:
            for part, record, rows in zip(parts, records, rows_by_part, strict=True):
                self._record(part, record, [row.rank for row in rows], scan.limit, share_of(len(values)))
        by_id = {row.execution_id: row for rows in rows_by_part for row in rows}
        ordered = sorted(by_id.values(), key=lambda row: (row.rank, row.execution_id))
        return _first_of_each(ordered, column, scan.limit)

    async def _scan_heads(
        self, scan: Scan, column: str, others: tuple[Where, ...], values: dict[Hashable, Any]
    ) -> list[Execution]:
        statement, arguments = _heads_statement(scan, column, others, [*values.values()], self._clock())
        records = await self._pool.read(lambda connection: connection.fetch(statement, *arguments))
        decode = CODEC[Execution].decode
        found = [record for record in records if record["execution_id"] is not None]
        rows = await self._queue_ids.decode(lambda decode_queue: [decode(record[2:], decode_queue) for record in found])
        if scan.after is None:
            floor = floor_of_heads([row.rank for row in rows], records[0]["now"], full=False, dead=0)
            self.dead_entries.note_all([*values], records[0]["entries"], len(rows), floor)
        return rows

    def _record(self, part: Part, record: Any, ranks: Sequence[int], limit: int, share: int) -> None:
        entries = record["ended"] - record["began"]
        floor = floor_of_heads(ranks, record["now"], full=len(ranks) >= limit, dead=entries - len(ranks))
        self.dead_entries.note_part(part, entries, len(ranks), floor, share)

    def _record_first(self, part: Part, record: Any, share: int) -> None:
        first = record["first_rank"]
        self._record(part, record, [] if first is None else [first], 1, share)

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        """Return the nonempty queues of a lane, in order, as far as they are read now."""
        keys = await self._nonempty_keys(lane_id)
        windows = 1
        while not keys and self.dead_entries.may_read_more(tracked := self.dead_entries.tracked_numbers()):
            if len(tracked) > MAX_TRACKED and windows >= MAX_WINDOWS:
                break
            keys = await self._nonempty_keys(lane_id)
            windows += 1
        return keys

    async def _nonempty_keys(self, lane_id: str) -> list[QueueKey]:
        keys = await self._queue_ids.keys_of(await self._nonempty_ids())
        return sorted(key for key in keys if key.lane_id == lane_id)

    async def _nonempty_ids(self) -> list[int]:
        """Return the ids of the nonempty queues of all lanes, in the part of the index whose turn it is."""
        all_tracked = self.dead_entries.tracked_numbers()
        tracked, bounds = self._window("line", all_tracked, _SMALLEST, _LARGEST)
        ids, entries, _ = await self._nonempty(NONEMPTY_QUEUES, bounds)
        if entries > BLOAT_THRESHOLD + 4 * len(ids) and self.dead_entries.affords_more:
            await self._measure_queues(all_tracked)
        return ids + await self._nonempty_tracked_ids(tracked) if tracked else ids

    async def _nonempty(
        self, statement: str, bounds: list[Any], limit: int | None = None
    ) -> tuple[list[Any], int, int]:
        """Return the nonempty queues between these bounds, the number of entries read, and the time."""
        record = await self._pool.read(
            lambda connection: connection.fetchrow(statement, self._clock(), bounds[:-1], bounds[1:], limit)
        )
        return [*record["queues"]], record["ended"] - record["began"], record["now"]

    def _window(self, index: str, tracked: list[Any], low: Any, high: Any) -> tuple[list[Any], list[Any]]:
        """Return the next `MAX_TRACKED` queues with a floor, and the bounds of the ranges between them.

        If there are more, the next call continues after them.
        """
        start = max(low, self._cursors.pop(index, low))
        ahead = [one for one in tracked if one > start]
        if len(ahead) <= MAX_TRACKED:
            return ahead, [start, *ahead, high]
        self._cursors[index] = ahead[MAX_TRACKED - 1]
        return ahead[:MAX_TRACKED], [start, *ahead[:MAX_TRACKED]]

    async def _nonempty_tracked_ids(self, tracked: list[int]) -> list[int]:
        """Return those queues with a floor that have rows in the parts that are read now."""
        parts = self.dead_entries.parts({id_: id_ for id_ in tracked})
        arguments = [[part.range.key for part in parts], *_bounds_of(parts)]
        records = await self._pool.read(lambda connection: connection.fetch(_FIRST, self._clock(), *arguments))
        for part, record in zip(parts, records, strict=True):
            self._record_first(part, record, share_of(len(tracked)))
        return [record["line"] for record in records if record["first_rank"] is not None]

    # -- lists of blocked work by prefix --------------------------------------------------------------------------

    async def _scan_prefix(self, scan: Scan, prefix: str) -> list[Execution]:
        """Return rows of the lists whose names have a prefix, in the scan's order, as far as they are read now."""
        if self._gap_entries.get(prefix, 0) <= BLOAT_THRESHOLD and not self._tracked_names(prefix):
            rows = await self._scan_all_lists(scan, prefix)
        elif scan.max_values is not None:
            names = await self._nonempty_names(prefix, scan.values_after or prefix, scan.max_values)
            rows = await self.scan(scan.with_values(names))
        else:
            rows = await self._scan_list_by_list(scan, prefix)
        for row in rows:
            if row.blocked_on is not None:
                self._names[row.blocked_on] = self._names.pop(row.blocked_on, None)
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return rows

    async def _scan_all_lists(self, scan: Scan, prefix: str) -> list[Execution]:
        """Return the rows of a scan, and count the entries of all lists together."""
        statement, arguments = scan_statement(scan, queue_id)
        now = CLOCK_SQL.format(given=f"${len(arguments) + 1}::bigint")
        columns = table_column_list(TABLE[Execution], "t.")
        statement = (
            f"select {now} as now, {_BLOCKED_ENTRIES} as began,"
            f" array(select row({columns}) from ({statement}) t) as rows,"
            f" {_BLOCKED_ENTRIES} as ended from unnest(array[1]) as once"
        )
        clock = self._clock()
        record = await self._pool.read(lambda connection: connection.fetchrow(statement, *arguments, clock))
        decode = CODEC[Execution].decode
        rows = await self._queue_ids.decode(lambda decode_queue: [decode(row, decode_queue) for row in record["rows"]])
        names = [row.blocked_on for row in rows if row.blocked_on is not None]
        end = max(names) if len(names) >= (scan.max_values or scan.limit) else prefix_upper_bound(prefix)
        self._record_gaps(prefix, names, end, record["ended"] - record["began"], record["now"])
        return rows

    async def _scan_list_by_list(self, scan: Scan, prefix: str) -> list[Execution]:
        """Return the rows of one list after the other, up to the limit."""
        others = tuple(where for where in scan.where if where.op != "starts")
        rows: list[Execution] = []
        name, *position = scan.after or (prefix,)
        if position and position[0] < _LARGEST:
            where = (Where("blocked_on", "=", name), *others)
            after = (position[0], position[1] if len(position) > 1 else "")
            rows = await self.scan(Scan(Execution, where, BY_POSITION, after, scan.limit, partial=True))
        if len(rows) < scan.limit:
            where = (Where("blocked_on", "in", tuple(await self._nonempty_names(prefix, name, scan.limit))), *others)
            page = Scan(Execution, where, BY_POSITION, limit=scan.limit, limit_by="blocked_on", partial=True)
            rows += sorted(await self.scan(page), key=lambda row: (row.blocked_on or "", row.rank, row.execution_id))
        return rows[: scan.limit]

    async def _nonempty_names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Return nonempty lists, and lists with a floor. The ranges between these are read only within the budget."""
        tracked, bounds = self._window(prefix, self._tracked_names(prefix, after), after, prefix_upper_bound(prefix))
        if self._gap_entries.get(prefix, 0) > BLOAT_THRESHOLD and not self.dead_entries.affords_more:
            return tracked[:limit]
        names, entries, now = await self._nonempty(NONEMPTY_LISTS, bounds, limit)
        self._record_gaps(prefix, names, max(names) if len(names) >= limit else bounds[-1], entries, now)
        return sorted([*names, *tracked])[:limit]

    def _record_gaps(self, prefix: str, found: list[str], end: str | None, entries: int, now: int) -> None:
        """Record the entries that a search up to `end` has read; beyond the threshold, known empty lists get floors."""
        dead = self._gap_entries[prefix] = entries - 4 * len(found)
        if dead <= BLOAT_THRESHOLD:
            return
        self.dead_entries.spend(dead)
        known = {name for name in self._names if name.startswith(prefix) and name < (end or prefix)}
        empty = sorted(known - {*found})
        self.dead_entries.note_all(empty, entries, len(found), floor_of_heads((), now, full=False, dead=0))

    def _tracked_names(self, prefix: str, after: str = "") -> list[str]:
        """Return the lists of this prefix that have a floor, in order."""
        return sorted(name for name in self.dead_entries.tracked_names() if name.startswith(prefix) and name > after)

    async def _measure_queues(self, tracked: list[int]) -> None:
        """Count the dead entries of each of the other queues."""
        records = await self._pool.read(lambda connection: connection.fetch(_SIZES, self._clock(), tracked))
        self.dead_entries.spend(len(records) + sum(record["ended"] - record["began"] for record in records))
        for record in records:
            self._record_first(Part(record["line"], IndexRange(record["line"])), record, share_of(len(records)))


def _first_of_each(rows: Sequence[Execution], column: str, limit: int) -> list[Execution]:
    """Return at most `limit` rows of each queue."""
    counts: dict[Any, int] = {}
    kept = []
    for row in rows:
        queue = getattr(row, column)
        counts[queue] = counts.get(queue, 0) + 1
        if counts[queue] <= limit:
            kept.append(row)
    return kept


def _bounds_of(parts: Sequence[Part], after: Position | None = None) -> list[list[Any]]:
    lows = [part.range.low if after is None else max(part.range.low, after) for part in parts]
    highs = [part.range.high for part in parts]
    return [[rank for rank, _ in lows], [name for _, name in lows], [rank for rank, _ in highs], [n for _, n in highs]]


def _heads_statement(
    scan: Scan, column: str, others: tuple[Where, ...], values: list[Any], clock: int | None
) -> tuple[str, list[Any]]:
    """Return a query for the first rows of each queue, with the time and the number of index entries in every record.

    Without rows there is one record with nulls.
    """
    conditions = ConditionBuilder(Execution, queue_id)
    table = TABLE[Execution]
    entries = ENTRIES_READ_TEMPLATE.format(index=f"{table.name}_{column}")
    now = CLOCK_SQL.format(given=conditions.parameter(clock, "bigint"))
    each = f"unnest({conditions.parameter(values, _kind(column) + '[]')}) as u (each)"
    met = "".join(f" and {conditions.condition(where)}" for where in others)
    if scan.after is not None:
        rank, name = scan.after
        low = (conditions.column_parameter("rank", rank), conditions.column_parameter("execution_id", name))
        met += f" and (t.rank, t.execution_id) > ({', '.join(low)})"
    limit = conditions.parameter(scan.limit, "bigint")
    statement = (
        f"with before as materialized (select {entries} as entries), found as materialized ("
        f"select t.* from (select u.each from before, {each} offset 0) v, lateral (select t.* from {table.name} t"
        f' where t."{column}" = v.each{met} order by t.rank, t.execution_id limit {limit}) t),'
        f" after as materialized (select {now} as now, {entries} - before.entries as entries from before"
        f" where (select count(*) from found) >= 0)"
        f" select a.now, a.entries, {table_column_list(table, 't.')} from after a left join found t on true"
        f" order by t.rank, t.execution_id"
    )
    return statement, conditions.values


def _parts_statement(
    scan: Scan, column: str, others: tuple[Where, ...], parts: Sequence[Part], clock: int | None
) -> tuple[str, list[Any]]:
    """Return a query for the first rows of each part, with the number of index entries read before and after it."""
    conditions = ConditionBuilder(Execution, queue_id)
    table = TABLE[Execution]
    entries = ENTRIES_READ_TEMPLATE.format(index=f"{table.name}_{column}")
    now = CLOCK_SQL.format(given=conditions.parameter(clock, "bigint"))
    kinds = (_kind(column), "bigint", "text", "bigint", "text")
    after: Any = scan.after
    lists = [[part.range.key for part in parts], *_bounds_of(parts, after)]
    columns = ", ".join(conditions.parameter(values, f"{kind}[]") for kind, values in zip(kinds, lists, strict=True))
    met = "".join(f" and {conditions.condition(where)}" for where in others)
    limit = conditions.parameter(scan.limit, "bigint")
    statement = (
        f"select {now} as now, {entries} as began,"
        f" array(select row({table_column_list(table, 't.')}) from {table.name} t"
        f' where t."{column}" = p.each and (t.rank, t.execution_id) > (p.low_rank, p.low_id)'
        f" and (t.rank, t.execution_id) <= (p.high_rank, p.high_id){met}"
        f" order by t.rank, t.execution_id limit {limit}) as rows, {entries} as ended"
        f" from unnest({columns}) as p (each, low_rank, low_id, high_rank, high_id)"
    )
    return statement, conditions.values


def _kind(column: str) -> str:
    return "bigint" if column == "line" else "text"
