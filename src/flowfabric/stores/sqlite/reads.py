"""The verbs that only read: each runs on a reader's thread, and no transaction outlives it."""

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
from flowfabric.model.signing_key import SigningKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.codec import CODEC, decode_counts, encode
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Where, prefix_upper_bound
from flowfabric.stores.sqlite import migrator, statements
from flowfabric.stores.sqlite.queue_ids import SQLiteQueueIds
from flowfabric.stores.sqlite.writes import execute_batched

MAX_INLINE_READS = 12  # wants that are fetched in one step whatever their tables
_RARE = (SigningKey,)  # rows of which there are never many


def ping(db: apsw.Connection, now: int) -> int:
    """The time, when the file can be read and has a schema that this release runs on."""
    db.execute("SELECT 1 FROM ff_schema_version")
    migrator.check_schema_version(db)
    return now


def data_version(db: apsw.Connection) -> int:
    """A number that changes when somebody else has written."""
    return int(db.pragma("data_version"))


def is_cheap(wants: Sequence[Read]) -> bool:
    """Whether these are so few rows that fetching them takes less time than having it done."""
    return len(wants) <= MAX_INLINE_READS and all(
        len(want.key) == len(TABLE[want.row].key) or want.row in _RARE for want in wants
    )


def load(db: apsw.Connection, lines: SQLiteQueueIds, wants: Sequence[Read], now: int) -> Loaded:
    """The rows asked for, as of one moment."""
    if len(wants) < 2:
        return Loaded(now, [_starting(db, lines, want) for want in wants])
    if len(wants) <= MAX_INLINE_READS and all(want.row in _TOLD_BY_JSON for want in wants):
        return Loaded(now, _several(db, lines, wants))
    found: list[list[Any]] = [[] for _ in wants]
    keyed: dict[type[msgspec.Struct], list[tuple[Any, ...]]] = {}
    with db:
        for number, want in enumerate(wants):
            if want.row in _TOLD_BY_JSON and len(want.key) == len(TABLE[want.row].key):
                keyed.setdefault(want.row, []).append((number, *want.key))
            else:
                found[number] = _starting(db, lines, want)
        for row, asked in keyed.items():
            if len(asked) == 1:
                ((number, *key),) = asked
                found[number] = _starting(db, lines, Read(row, tuple(key)))
                continue
            decode = CODEC[row].decode
            for (told,) in execute_batched(db, statements.rows_by_key(row), asked):
                for number, *values in msgspec.json.decode(told):
                    found[number].append(decode(values, lambda number: lines.key_of(db, number)))
    return Loaded(now, found)


def _several(db: apsw.Connection, lines: SQLiteQueueIds, wants: Sequence[Read]) -> list[list[Any]]:
    """A few rows of whatever tables in one statement, which sees one moment by itself."""
    shape = tuple((want.row, len(want.key)) for want in wants)
    (told,) = db.execute(statements.rows_of_tables(shape), [part for want in wants for part in want.key])
    return [
        [
            CODEC[want.row].decode(values, lambda number: lines.key_of(db, number))
            for values in msgspec.json.decode(rows)
        ]
        if rows
        else []
        for want, rows in zip(wants, told, strict=True)
    ]


# Rows that can be fetched in one step, however many; each step of a statement hands the interpreter lock to and fro.
_TOLD_BY_JSON = frozenset(
    table.row
    for table in TABLE.values()
    if all(column.kind in (int, str, bool, QueueKey) or column.is_enum for column in table.columns)
)


def due(
    db: apsw.Connection,
    lines: SQLiteQueueIds,
    row: type[msgspec.Struct],
    column: str,
    limit: int,
    where: Sequence[Where],
    now: int,
) -> Due:
    """Rows whose instant has come, and the next instant."""
    _known(row, column)
    text, values = _conditions(db, lines, row, where)
    come = " AND ".join([f"{column} <= ?", *text])
    order = (column, *TABLE[row].key)
    rows = _rows(db, lines, row, statements.select_rows(row, come, order, limit=True), (now, *values, limit))
    to_come = " AND ".join([f"{column} > ?", *text])
    ((next_at,),) = db.execute(statements.next_instant(row, column, to_come), (now, *values))
    return Due(now, rows, next_at)


def scan(db: apsw.Connection, lines: SQLiteQueueIds, scan: Scan) -> list[Any]:
    """The rows of a list."""
    if scan.limit_by is None:
        return _listed(db, lines, scan)
    if scan.max_values is not None:
        scan = scan.with_values(_values(db, scan))
    found = [_listed(db, lines, one) for one in scan.split_by_value()]
    return [*merge(*found, key=attrgetter(*scan.full_order))]


def _values(db: apsw.Connection, scan: Scan) -> list[str]:
    """The values that begin with the prefix of a list, one index search each."""
    _known(scan.row, scan.limit_by_condition.column)
    prefix, after = scan.limit_by_condition.value, scan.values_after
    statement = statements.distinct_values(scan.row, scan.limit_by_condition.column, ">=" if after is None else ">")
    bounds = (prefix if after is None else max(prefix, after), prefix_upper_bound(prefix))
    return [value for (value,) in db.execute(statement, (*bounds, scan.max_values))]


def _listed(db: apsw.Connection, lines: SQLiteQueueIds, scan: Scan) -> list[Any]:
    _known(scan.row, *scan.order)
    text, values = _conditions(db, lines, scan.row, scan.where)
    order = scan.full_order
    if scan.after is not None:
        places = order[: len(scan.after)]
        text.append(f"({', '.join(places)}) > ({', '.join('?' * len(places))})")
        values += [encode(value, lambda line: lines.id_of(db, line)) for value in scan.after]
    statement = statements.select_rows(scan.row, " AND ".join(text), order, limit=True)
    stored = db.execute(statement, (*values, scan.limit)).fetchall()
    codec = CODEC[scan.row]
    return [codec.decode_scanned(scan, found, lambda number: lines.key_of(db, number)) for found in stored]


def count_grouped(db: apsw.Connection, lines: SQLiteQueueIds, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
    """Counts by columns of executions."""
    _known(tally.row, tally.column, tally.execution_column)
    _known(Execution, *tally.group_by)
    counts: Counter[tuple[Any, ...]] = Counter()
    for value in (None,) if tally.values is None else dict.fromkeys(tally.values):
        where = Where(tally.column, "set") if value is None else Where(tally.column, "=", value)
        (condition,), values = _conditions(db, lines, tally.row, (where,))
        statement = statements.count_grouped(tally.row, tally.column, tally.execution_column, tally.group_by, condition)
        counts.update(decode_counts(tally.group_by, db.execute(statement, (*values, tally.limit)).fetchall()))
    return counts


def queues(db: apsw.Connection, lane_id: str | None) -> list[QueueKey]:
    """The lines of one lane or of all."""
    return _lines(db.execute(statements.statement("lines"), (lane_id,)))


def nonempty_queues(db: apsw.Connection, lane_id: str) -> list[QueueKey]:
    """The lines of a lane in which something stands."""
    return _lines(db.execute(statements.statement("standing"), (lane_id,)))


def executions_in_missing_queues(db: apsw.Connection, limit: int) -> list[str]:
    """The executions in ready queues that have no row."""
    return [name for (name,) in db.execute(statements.statement("unlisted"), (limit,))]


def _lines(found: Iterable[Any]) -> list[QueueKey]:
    return [QueueKey(lane, required, key, weight, bool(decided)) for lane, required, key, weight, decided in found]


def lanes(db: apsw.Connection, after: str | None, limit: int) -> list[str]:
    """The lanes, ascending."""
    return [lane for (lane,) in db.execute(statements.statement("lanes"), (after, limit))]


def feed_end(db: apsw.Connection) -> int:
    """The last position that was given."""
    ((end,),) = db.execute(statements.statement("feed_end"))
    return int(end)


def feed(db: apsw.Connection, topic: Topic, after: int, limit: int) -> FeedPage:
    """Events of a topic after a position."""
    end = feed_end(db)  # asked for first: what is committed meanwhile belongs to the next page
    events = _events(db.execute(statements.select_events("feed", TOPIC_FIELDS[topic]), (after, end, limit)))
    ((lost_to,),) = db.execute(statements.select_events("lost", TOPIC_FIELDS[topic]))
    lost = after < lost_to
    if after > end:
        return FeedPage([], end, lost, diverged=True)
    ((known,),) = db.execute(statements.statement("is_position"), (after,))
    if len(events) < limit:
        return FeedPage(events, max(after, end), lost, not known)
    return FeedPage(events, events[-1].position if events else after, lost, not known)


def history(db: apsw.Connection, execution_id: str, topic: Topic, limit: int, without: str) -> list[FeedEvent]:
    """The newest events of one execution, oldest first; those that the topic calls `without` do not count."""
    return _events(
        db.execute(statements.select_events("history", TOPIC_FIELDS[topic]), (execution_id, limit, without))
    )[::-1]


def _starting(db: apsw.Connection, lines: SQLiteQueueIds, want: Read) -> list[Any]:
    key = TABLE[want.row].key
    condition = " AND ".join(f"{name} = ?" for name in key[: len(want.key)])
    order = key if len(want.key) < len(key) else ()
    return _rows(db, lines, want.row, statements.select_rows(want.row, condition, order), want.key)


def _known(row: type[msgspec.Struct], *columns: str) -> None:
    """Names that become part of a statement come from the catalogue, whoever asks."""
    for column in columns:
        if column not in CODEC[row].column:
            raise ValueError(f"{TABLE[row].name} has no column {column!r}")


def _conditions(
    db: apsw.Connection, lines: SQLiteQueueIds, row: type[msgspec.Struct], where: Sequence[Where]
) -> tuple[list[str], list[Any]]:
    text: list[str] = []
    values: list[Any] = []
    _known(row, *(one.column for one in where))
    for one in where:
        condition, fills = statements.condition(one, lambda value: encode(value, lambda line: lines.id_of(db, line)))
        text.append(condition)
        values += fills
    return text, values


def _rows(
    db: apsw.Connection, lines: SQLiteQueueIds, row: type[msgspec.Struct], statement: str, values: tuple[Any, ...]
) -> list[Any]:
    codec = CODEC[row]
    # Fetched whole before the first is decoded: a line may have to be looked up in between.
    stored = db.execute(statement, values).fetchall()
    return [codec.decode(found, lambda number: lines.key_of(db, number)) for found in stored]


def _events(found: Iterable[tuple[Any, ...]]) -> list[FeedEvent]:
    return [FeedEvent(position, at, Event(*values)) for position, at, *values in found]
