"""Partial reads of ready queues and of lists of blocked work: bounded beside an old snapshot (dead_entries.py).

Claims by plan read the first rows of each queue and claim some of them later. While there are few dead entries, that is
one list, and the server counts the entries of all queues together. Beyond that each part of a queue is read and
counted by itself. `standing` finds the queues that have work. It steps from queue to queue, and over all entries of
queues whose work is gone. Queues that have a floor are left out of these steps and are asked one by one.
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
STANDING = number_parameters(
    _STATEMENTS["standing_within"].format(clock=_NOW, entries=_ENTRIES), ("clock", "lows", "highs")
)
_FIRST = number_parameters(
    _STATEMENTS["first_positions"].format(clock=_NOW, entries=_ENTRIES),
    ("clock", "lines", "low_ranks", "low_ids", "high_ranks", "high_ids"),
)
_SIZES = number_parameters(_STATEMENTS["queue_sizes"].format(clock=_NOW, entries=_ENTRIES), ("clock", "known"))
_SMALLEST, _LARGEST = -1, 2**63 - 1  # around the numbers of queues


def is_bounded(scan: Scan) -> bool:
    """Whether this list may leave out rows, and is the first rows of some queues."""
    return scan.partial and scan.row is Execution and scan.order == BY_POSITION and _condition(scan) is not None


def _condition(scan: Scan) -> Where | None:
    """The condition that names the queues."""
    ops = ("=",) if scan.limit_by is None else ("in",)
    return next((one for one in scan.where if one.column in COLUMNS and one.op in ops), None)


class QueueReads:
    """Reads the heads of queues, and which queues have work."""

    def __init__(
        self, links: ConnectionPool, lines: PostgresQueueIds, dead_entries: DeadEntries, clock: Callable[[], int | None]
    ) -> None:
        self._links = links
        self._lines = lines
        self.dead_entries = dead_entries
        self._clock = clock

    async def scan(self, scan: Scan) -> list[Execution]:
        """The first rows of some queues, as far as they are read now; the next lists find the others."""
        named = _condition(scan)
        assert named is not None
        others = tuple(one for one in scan.where if one is not named)
        given = {encode(value, queue_id) for value in (named.value if named.op == "in" else (named.value,))} - {None}
        values: dict[Hashable, Any] = {(value, others) if others else value: value for value in sorted(given)}
        if not values:
            return []
        rows = await self._scan(scan, named.column, others, values)
        while not rows and scan.after is None and self.dead_entries.may_read_more([*values]):
            rows = await self._scan(scan, named.column, others, values)
        return rows

    async def _scan(
        self, scan: Scan, column: str, others: tuple[Where, ...], values: dict[Hashable, Any]
    ) -> list[Execution]:
        if not self.dead_entries.may_hide_rows(values):
            return await self._scan_heads(scan, column, others, values)
        parts = self.dead_entries.parts(values)
        if scan.after is not None:
            parts = [part for part in parts if part.slice is None]
        words, given = _part_words(scan, column, others, parts, self._clock())
        answer = await self._links.read(lambda connection: connection.fetch(words, *given))
        decode = CODEC[Execution].decode
        found = await self._lines.decode(lambda at: [[decode(row, at) for row in one["rows"]] for one in answer])
        if scan.after is None:
            for part, one, rows in zip(parts, answer, found, strict=True):
                self._note(part, one, [row.rank for row in rows], scan.limit, share_of(len(values)))
        together = {row.execution_id: row for rows in found for row in rows}
        ordered = sorted(together.values(), key=lambda row: (row.rank, row.execution_id))
        return _first_of_each(ordered, column, scan.limit)

    async def _scan_heads(
        self, scan: Scan, column: str, others: tuple[Where, ...], values: dict[Hashable, Any]
    ) -> list[Execution]:
        words, given = _head_words(scan, column, others, [*values.values()], self._clock())
        answer = await self._links.read(lambda connection: connection.fetch(words, *given))
        decode = CODEC[Execution].decode
        kept = [row for row in answer if row["execution_id"] is not None]
        rows = await self._lines.decode(lambda at: [decode(row[2:], at) for row in kept])
        if scan.after is None:
            floor = floor_of_heads([row.rank for row in rows], answer[0]["now"], full=False, dead=0)
            self.dead_entries.note_all([*values], answer[0]["entries"], len(rows), floor)
        return rows

    def _note(self, part: Part, one: Any, ranks: Sequence[int], limit: int, share: int) -> None:
        entries = one["ended"] - one["began"]
        floor = floor_of_heads(ranks, one["now"], full=len(ranks) >= limit, dead=entries - len(ranks))
        self.dead_entries.note_part(part, entries, len(ranks), floor, share)

    def _note_first(self, part: Part, one: Any, share: int) -> None:
        first = one["first_rank"]
        self._note(part, one, [] if first is None else [first], 1, share)

    # -- queues that have work ------------------------------------------------------------------------------------

    async def standing(self, lane_id: str) -> list[QueueKey]:
        """The queues of a lane that have work, in order, as far as they are read now."""
        found = await self._standing()
        while not found and self.dead_entries.may_read_more(self.dead_entries.tracked_numbers()):
            found = await self._standing()
        keys = await self._lines.keys_of(found)
        return sorted(key for key in keys if key.lane_id == lane_id)

    async def _standing(self) -> list[int]:
        """The numbers of queues of all lanes that have work."""
        tracked = self.dead_entries.tracked_numbers()
        bounds = [_SMALLEST, *tracked, _LARGEST]
        answer = await self._links.read(
            lambda connection: connection.fetchrow(STANDING, self._clock(), bounds[:-1], bounds[1:])
        )
        numbers = [*answer["numbers"]]
        entries = answer["ended"] - answer["began"]
        if tracked:
            numbers += await self._standing_before(tracked)
        if entries > BLOAT_THRESHOLD + 4 * len(answer["numbers"]) and self.dead_entries.affords_more:
            await self._learn_sizes(tracked)
        return numbers

    async def _standing_before(self, tracked: list[int]) -> list[int]:
        """Those of the queues with a floor that have work in the parts that are read now."""
        parts = self.dead_entries.parts({number: number for number in tracked})
        given = [[part.range.key for part in parts], *_bounds_of(parts)]
        answer = await self._links.read(lambda connection: connection.fetch(_FIRST, self._clock(), *given))
        for part, one in zip(parts, answer, strict=True):
            self._note_first(part, one, share_of(len(tracked)))
        return [one["line"] for one in answer if one["first_rank"] is not None]

    async def _learn_sizes(self, tracked: list[int]) -> None:
        """Find out which of the other queues have many dead entries, once."""
        answer = await self._links.read(lambda connection: connection.fetch(_SIZES, self._clock(), tracked))
        self.dead_entries.spend(len(answer) + sum(one["ended"] - one["began"] for one in answer))
        for one in answer:
            self._note_first(Part(one["line"], IndexRange(one["line"])), one, share_of(len(answer)))


def _first_of_each(rows: Sequence[Execution], column: str, limit: int) -> list[Execution]:
    """At most so many rows of each queue."""
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


def _head_words(
    scan: Scan, column: str, others: tuple[Where, ...], values: list[Any], clock: int | None
) -> tuple[str, list[Any]]:
    """The first rows of each queue, with the time and the number of entries beside each row, or beside none."""
    conditions = ConditionBuilder(Execution, queue_id)
    table = TABLE[Execution]
    entries = ENTRIES_READ_TEMPLATE.format(index=f"{table.name}_{column}")
    now = CLOCK_SQL.format(given=conditions.parameter(clock, "bigint"))
    each = f"unnest({conditions.parameter(values, _kind(column) + '[]')}) as u (each)"
    met = "".join(f" and {conditions.condition(one)}" for one in others)
    if scan.after is not None:
        rank, name = scan.after
        low = (conditions.column_parameter("rank", rank), conditions.column_parameter("execution_id", name))
        met += f" and (t.rank, t.execution_id) > ({', '.join(low)})"
    limit = conditions.parameter(scan.limit, "bigint")
    words = (
        f"with before as materialized (select {entries} as entries), found as materialized ("
        f"select t.* from (select u.each from before, {each} offset 0) v, lateral (select t.* from {table.name} t"
        f' where t."{column}" = v.each{met} order by t.rank, t.execution_id limit {limit}) t),'
        f" after as materialized (select {now} as now, {entries} - before.entries as entries from before"
        f" where (select count(*) from found) >= 0)"
        f" select a.now, a.entries, {table_column_list(table, 't.')} from after a left join found t on true"
        f" order by t.rank, t.execution_id"
    )
    return words, conditions.values


def _part_words(
    scan: Scan, column: str, others: tuple[Where, ...], parts: Sequence[Part], clock: int | None
) -> tuple[str, list[Any]]:
    """The first rows of each part, with the entries that the server had counted before and after it."""
    conditions = ConditionBuilder(Execution, queue_id)
    table = TABLE[Execution]
    entries = ENTRIES_READ_TEMPLATE.format(index=f"{table.name}_{column}")
    now = CLOCK_SQL.format(given=conditions.parameter(clock, "bigint"))
    kinds = (_kind(column), "bigint", "text", "bigint", "text")
    after: Any = scan.after
    lists = [[part.range.key for part in parts], *_bounds_of(parts, after)]
    given = ", ".join(conditions.parameter(values, f"{kind}[]") for kind, values in zip(kinds, lists, strict=True))
    met = "".join(f" and {conditions.condition(one)}" for one in others)
    limit = conditions.parameter(scan.limit, "bigint")
    words = (
        f"select {now} as now, {entries} as began,"
        f" array(select row({table_column_list(table, 't.')}) from {table.name} t"
        f' where t."{column}" = p.each and (t.rank, t.execution_id) > (p.low_rank, p.low_id)'
        f" and (t.rank, t.execution_id) <= (p.high_rank, p.high_id){met}"
        f" order by t.rank, t.execution_id limit {limit}) as rows, {entries} as ended"
        f" from unnest({given}) as p (each, low_rank, low_id, high_rank, high_id)"
    )
    return words, conditions.values


def _kind(column: str) -> str:
    return "bigint" if column == "line" else "text"
