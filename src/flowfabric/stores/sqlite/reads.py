"""Read operations: each runs on a reader's thread and ends its transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any

import apsw
import msgspec

from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.codec import CODEC, decode_counts, encode
from flowfabric.stores.queries import (
    Due,
    FeedPage,
    FoundExecution,
    GroupedCount,
    Loaded,
    Read,
    Scan,
    Search,
    SearchPage,
    Where,
    prefix_upper_bound,
)
from flowfabric.stores.sqlite import migrator, statements
from flowfabric.stores.sqlite.queue_ids import SQLiteQueueIds
from flowfabric.stores.sqlite.writes import execute_batched

MAX_INLINE_READS = 12  # reads that are fetched in one step, whatever their tables
_SMALL_TABLES = (SigningKey,)


def ping(db: apsw.Connection, now: int) -> int:
    """Return the time; raise if the file cannot be read or has a schema that this release cannot run on."""
    db.execute("SELECT 1 FROM ff_schema_version")
    migrator.check_schema_version(db)
    return now


def data_version(db: apsw.Connection) -> int:
    """Return a number that changes when another connection has written."""
    return int(db.pragma("data_version"))


def is_cheap(reads: Sequence[Read]) -> bool:
    """True if fetching these rows takes less time than handing the work to another thread."""
    return len(reads) <= MAX_INLINE_READS and all(
        len(read.key) == len(TABLE[read.row].key) or read.row in _SMALL_TABLES for read in reads
    )


def load(db: apsw.Connection, queue_ids: SQLiteQueueIds, reads: Sequence[Read], now: int) -> Loaded:
    """Load the requested rows from one snapshot."""
    if len(reads) < 2:
        return Loaded(now, [_rows_by_prefix(db, queue_ids, read) for read in reads])
    if len(reads) <= MAX_INLINE_READS and all(read.row in _FITS_JSON for read in reads):
        return Loaded(now, _rows_of_tables(db, queue_ids, reads))
    rows_by_read: list[list[Any]] = [[] for _ in reads]
    by_table: dict[type[msgspec.Struct], list[tuple[Any, ...]]] = {}
    with db:
        for number, read in enumerate(reads):
            if read.row in _FITS_JSON and len(read.key) == len(TABLE[read.row].key):
                by_table.setdefault(read.row, []).append((number, *read.key))
            else:
                rows_by_read[number] = _rows_by_prefix(db, queue_ids, read)
        for row, keys in by_table.items():
            if len(keys) == 1:
                ((number, *key),) = keys
                rows_by_read[number] = _rows_by_prefix(db, queue_ids, Read(row, tuple(key)))
                continue
            decode = CODEC[row].decode
            for (text,) in execute_batched(db, statements.rows_by_key(row), keys):
                for number, *values in msgspec.json.decode(text):
                    rows_by_read[number].append(decode(values, lambda id_: queue_ids.key_of(db, id_)))
    return Loaded(now, rows_by_read)


def _rows_of_tables(db: apsw.Connection, queue_ids: SQLiteQueueIds, reads: Sequence[Read]) -> list[list[Any]]:
    """Load a few rows of any tables in one statement, which has a snapshot of its own."""
    shape = tuple((read.row, len(read.key)) for read in reads)
    (texts,) = db.execute(statements.rows_of_tables(shape), [part for read in reads for part in read.key])
    return [
        [CODEC[read.row].decode(values, lambda id_: queue_ids.key_of(db, id_)) for values in msgspec.json.decode(text)]
        if text
        else []
        for read, text in zip(reads, texts, strict=True)
    ]


# Tables whose rows fit into JSON, so that one step fetches many; each step releases and reacquires the GIL.
_FITS_JSON = frozenset(
    table.row
    for table in TABLE.values()
    if all(column.kind in (int, str, bool, QueueKey) or column.is_enum for column in table.columns)
)


def due(
    db: apsw.Connection,
    queue_ids: SQLiteQueueIds,
    row: type[msgspec.Struct],
    column: str,
    limit: int,
    where: Sequence[Where],
    now: int,
) -> Due:
    """Return the rows whose instant has passed, and the next instant."""
    _check_columns(row, column)
    conditions, values = _conditions(db, queue_ids, row, where)
    past = " AND ".join([f"{column} <= ?", *conditions])
    order = (column, *TABLE[row].key)
    rows = _rows(db, queue_ids, row, statements.select_rows(row, past, order, limit=True), (now, *values, limit))
    future = " AND ".join([f"{column} > ?", *conditions])
    ((next_at,),) = db.execute(statements.next_instant(row, column, future), (now, *values))
    return Due(now, rows, next_at)


def scan(db: apsw.Connection, queue_ids: SQLiteQueueIds, scan: Scan) -> list[Any]:
    """Return the rows of a scan."""
    if scan.limit_by is None:
        return _scan_rows(db, queue_ids, scan)
    if scan.max_values is not None:
        scan = scan.with_values(_values(db, scan))
    rows_by_value = [_scan_rows(db, queue_ids, part) for part in scan.split_by_value()]
    return [*merge(*rows_by_value, key=attrgetter(*scan.full_order))]


def _values(db: apsw.Connection, scan: Scan) -> list[str]:
    """Return the values with the prefix of a scan; each costs one index search."""
    _check_columns(scan.row, scan.limit_by_condition.column)
    prefix, after = scan.limit_by_condition.value, scan.values_after
    statement = statements.distinct_values(scan.row, scan.limit_by_condition.column, ">=" if after is None else ">")
    bounds = (prefix if after is None else max(prefix, after), prefix_upper_bound(prefix))
    return [value for (value,) in db.execute(statement, (*bounds, scan.max_values))]


def _scan_rows(db: apsw.Connection, queue_ids: SQLiteQueueIds, scan: Scan) -> list[Any]:
    _check_columns(scan.row, *scan.order)
    conditions, values = _conditions(db, queue_ids, scan.row, scan.where)
    order = scan.full_order
    if scan.after is not None:
        columns = order[: len(scan.after)]
        follows = "<" if scan.descending else ">"
        conditions.append(f"({', '.join(columns)}) {follows} ({', '.join('?' * len(columns))})")
        values += [encode(value, lambda queue: queue_ids.id_of(db, queue)) for value in scan.after]
    directed = tuple(f"{name} DESC" for name in order) if scan.descending else order
    statement = statements.select_rows(scan.row, " AND ".join(conditions), directed, limit=True)
    stored = db.execute(statement, (*values, scan.limit)).fetchall()
    codec = CODEC[scan.row]
    return [codec.decode_scanned(scan, row, lambda id_: queue_ids.key_of(db, id_)) for row in stored]


def search(db: apsw.Connection, queue_ids: SQLiteQueueIds, search: Search) -> SearchPage:
    """Return executions newest first, among as many rows as the budget allows."""
    bounds, bound_values = _conditions(db, queue_ids, Execution, search.bounds)
    if search.after is not None:
        bounds.append("(created_at, execution_id) < (?, ?)")
        bound_values += search.after
    filters, filter_values = _conditions(db, queue_ids, Execution, search.filters)
    if search.kind is not None:
        filters.append("kind = ?")
        filter_values.append(search.kind)
    with db:  # one snapshot
        statement = statements.search(" AND ".join(bounds), " AND ".join(filters))
        stored: list[Any] = db.execute(
            statement, (*bound_values, search.budget, *filter_values, search.limit)
        ).fetchall()
        decode = CODEC[Execution].decode
        found = [FoundExecution(decode(row[:-1], lambda id_: queue_ids.key_of(db, id_)), row[-1]) for row in stored]
        last: Any = None
        if len(found) < search.limit:
            end = statements.search_end(" AND ".join(bounds))
            last = db.execute(end, (*bound_values, search.budget - 1)).fetchone()
    return SearchPage(found, found[-1].position if len(found) >= search.limit else last)


def kinds(db: apsw.Connection, execution_ids: Sequence[str]) -> dict[str, str]:
    """Return the kinds of executions by id."""
    found: Iterable[Any] = db.execute(statements.statement("kinds"), (msgspec.json.encode(execution_ids).decode(),))
    return dict(found)


def count_grouped(db: apsw.Connection, queue_ids: SQLiteQueueIds, query: GroupedCount) -> dict[tuple[Any, ...], int]:
    """Count rows by columns of their executions."""
    _check_columns(query.row, query.column, query.execution_column)
    _check_columns(Execution, *query.group_by)
    counts: Counter[tuple[Any, ...]] = Counter()
    for value in (None,) if query.values is None else dict.fromkeys(query.values):
        where = Where(query.column, "set") if value is None else Where(query.column, "=", value)
        (condition,), values = _conditions(db, queue_ids, query.row, (where,))
        statement = statements.count_grouped(query.row, query.column, query.execution_column, query.group_by, condition)
        counts.update(decode_counts(query.group_by, db.execute(statement, (*values, query.limit)).fetchall()))
    return counts


def queues(db: apsw.Connection, lane_id: str | None) -> list[QueueKey]:
    """List the queues of one lane or of all lanes."""
    return _queue_keys(db.execute(statements.statement("queues"), (lane_id,)))


def nonempty_queues(db: apsw.Connection, lane_id: str) -> list[QueueKey]:
    """List the nonempty queues of a lane."""
    return _queue_keys(db.execute(statements.statement("nonempty_queues"), (lane_id,)))


def executions_in_missing_queues(db: apsw.Connection, limit: int) -> list[str]:
    """List executions in queues that have no row."""
    return [id_ for (id_,) in db.execute(statements.statement("executions_in_missing_queues"), (limit,))]


def _queue_keys(rows: Iterable[Any]) -> list[QueueKey]:
    return [QueueKey(lane, required, key, weight, bool(guarded)) for lane, required, key, weight, guarded in rows]


def lanes(db: apsw.Connection, after: str | None, limit: int) -> list[str]:
    """List the lanes, ascending."""
    return [lane for (lane,) in db.execute(statements.statement("lanes"), (after, limit))]


def feed_end(db: apsw.Connection) -> int:
    """Return the last assigned position."""
    ((end,),) = db.execute(statements.statement("feed_end"))
    return int(end)


def feed(db: apsw.Connection, topic: Topic, after: int, limit: int) -> FeedPage:
    """Return the events of a topic after a position."""
    end = feed_end(db)  # read first: events committed meanwhile belong to the next page
    events = _events(db.execute(statements.select_events("feed", TOPIC_FIELDS[topic]), (after, end, limit)))
    ((trimmed_to,),) = db.execute(statements.select_events("last_trimmed_position", TOPIC_FIELDS[topic]))
    has_gap = after < trimmed_to
    if after > end:
        return FeedPage([], end, has_gap, diverged=True)
    ((exists,),) = db.execute(statements.statement("position_exists"), (after,))
    if len(events) < limit:
        return FeedPage(events, max(after, end), has_gap, not exists)
    return FeedPage(events, events[-1].position if events else after, has_gap, not exists)


def history(db: apsw.Connection, execution_id: str, topic: Topic, limit: int, without: str) -> list[FeedEvent]:
    """Return the newest events of an execution, oldest first, except those that the topic names `without`."""
    return _events(
        db.execute(statements.select_events("history", TOPIC_FIELDS[topic]), (execution_id, limit, without))
    )[::-1]


def _rows_by_prefix(db: apsw.Connection, queue_ids: SQLiteQueueIds, read: Read) -> list[Any]:
    key = TABLE[read.row].key
    condition = " AND ".join(f"{name} = ?" for name in key[: len(read.key)])
    order = key if len(read.key) < len(key) else ()
    return _rows(db, queue_ids, read.row, statements.select_rows(read.row, condition, order), read.key)


def _check_columns(row: type[msgspec.Struct], *columns: str) -> None:
    """Refuse column names that are not in the catalog, because names become part of a statement."""
    for column in columns:
        if column not in CODEC[row].column:
            raise ValueError(f"{TABLE[row].name} has no column {column!r}")


def _conditions(
    db: apsw.Connection, queue_ids: SQLiteQueueIds, row: type[msgspec.Struct], where: Sequence[Where]
) -> tuple[list[str], list[Any]]:
    conditions: list[str] = []
    values: list[Any] = []
    _check_columns(row, *(part.column for part in where))
    for part in where:
        sql, arguments = statements.condition(
            part, lambda value: encode(value, lambda queue: queue_ids.id_of(db, queue))
        )
        conditions.append(sql)
        values += arguments
    return conditions, values


def _rows(
    db: apsw.Connection, queue_ids: SQLiteQueueIds, row: type[msgspec.Struct], statement: str, values: tuple[Any, ...]
) -> list[Any]:
    codec = CODEC[row]
    # Fetch all rows before decoding, because the decoder may have to read the queue table.
    stored = db.execute(statement, values).fetchall()
    return [codec.decode(values, lambda id_: queue_ids.key_of(db, id_)) for values in stored]


def _events(rows: Iterable[tuple[Any, ...]]) -> list[FeedEvent]:
    return [FeedEvent(position, at, Event(*values)) for position, at, *values in rows]
