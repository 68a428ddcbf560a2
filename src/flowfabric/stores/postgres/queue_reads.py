"""Partial reads of ready queues and of blocked work, whose cost stays bounded beside an old snapshot (dead_entries.py).

Guarded claims read the first rows of each queue and claim some of them later. While there are few dead index entries,
that is one scan, and the server counts the entries of all queues together. Beyond that, each part of a queue is read
and counted separately.

`nonempty_queues` steps from queue to queue through the index, and reads all dead entries of queues that have become
empty. Queues with a floor are excluded from these steps and are read one by one.
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
from flowfabric.stores.postgres.reads import ENTRIES_READ_TEMPLATE, ConditionBuilder
from flowfabric.stores.postgres.sql import load_statements, number_parameters, table_column_list
from flowfabric.stores.queries import Scan, Where

BY_POSITION = ("rank", "execution_id")
COLUMNS = ("line", "blocked_on")  # of executions, each with an index by position

_ENTRIES = ENTRIES_READ_TEMPLATE.format(index="ff_exec_core_line")
_NOW = CLOCK_SQL.format(given=":clock::bigint")
_STATEMENTS = load_statements("queue_ids.sql")
NONEMPTY_QUEUES = number_parameters(
    _STATEMENTS["nonempty_queues"].format(clock=_NOW, entries=_ENTRIES), ("clock", "lows", "highs")
)
_FIRST = number_parameters(
    _STATEMENTS["first_positions"].format(clock=_NOW, entries=_ENTRIES),
    ("clock", "queue_ids", "low_ranks", "low_ids", "high_ranks", "high_ids"),
)
_SIZES = number_parameters(_STATEMENTS["queue_sizes"].format(clock=_NOW, entries=_ENTRIES), ("clock", "known"))
_SMALLEST, _LARGEST = -1, 2**63 - 1  # exclusive bounds of queue ids


def is_bounded(scan: Scan) -> bool:
    """True if the scan is partial and reads the first rows of some queues."""
    return scan.partial and scan.row is Execution and scan.order == BY_POSITION and _condition(scan) is not None


def _condition(scan: Scan) -> Where | None:
    """Return the condition that names the queues."""
    ops = ("=",) if scan.limit_by is None else ("in",)
    return next((where for where in scan.where if where.column in COLUMNS and where.op in ops), None)


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

    async def scan(self, scan: Scan) -> list[Execution]:
        """Return the first rows of some queues, as far as they are read now; later scans find the others."""
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
        ids = await self._nonempty_ids()
        while not ids and self.dead_entries.may_read_more(self.dead_entries.tracked_numbers()):
            ids = await self._nonempty_ids()
        keys = await self._queue_ids.keys_of(ids)
        return sorted(key for key in keys if key.lane_id == lane_id)

    async def _nonempty_ids(self) -> list[int]:
        """Return the ids of the nonempty queues of all lanes."""
        tracked = self.dead_entries.tracked_numbers()
        bounds = [_SMALLEST, *tracked, _LARGEST]
        record = await self._pool.read(
            lambda connection: connection.fetchrow(NONEMPTY_QUEUES, self._clock(), bounds[:-1], bounds[1:])
        )
        ids = [*record["queue_ids"]]
        entries = record["ended"] - record["began"]
        if tracked:
            ids += await self._nonempty_tracked_ids(tracked)
        if entries > BLOAT_THRESHOLD + 4 * len(record["queue_ids"]) and self.dead_entries.affords_more:
            await self._measure_queues(tracked)
        return ids

    async def _nonempty_tracked_ids(self, tracked: list[int]) -> list[int]:
        """Return those queues with a floor that have rows in the parts that are read now."""
        parts = self.dead_entries.parts({id_: id_ for id_ in tracked})
        arguments = [[part.range.key for part in parts], *_bounds_of(parts)]
        records = await self._pool.read(lambda connection: connection.fetch(_FIRST, self._clock(), *arguments))
        for part, record in zip(parts, records, strict=True):
            self._record_first(part, record, share_of(len(tracked)))
        return [record["line"] for record in records if record["first_rank"] is not None]

    async def _measure_queues(self, tracked: list[int]) -> None:
        """Find out which of the other queues have many dead entries."""
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
