"""A batch of changes as pieces of a statement, and the arrays that fill them.

Rows are gathered by shape and turned into columns. Within a piece the guards stand in key order, which is the order
in which they are locked.

Most batches are written by one statement. Two kinds are not:

* A delete of all rows that begin like a key, and a patch of a row that is no root, look for rows by the statement's
  snapshot. While the statement waited for a lock, someone with a lock beside ours may have added such a row. So these
  batches lock and judge in a first statement, and write in a second one, which sees everything that was committed
  before the locks were held.
* A change that writes one row twice (deletes all and puts one back) needs its writes one after the other; the second
  writes go into a further statement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import msgspec
from msgspec.structs import astuple

from flowfabric.model.event import Event
from flowfabric.model.execution import LineKey
from flowfabric.rules.change import Change, Delete, FromNow, Guard, Insert, Patch, Put, Write
from flowfabric.stores.base import Unstorable
from flowfabric.stores.codec import CODEC, CODES
from flowfabric.stores.postgres.pieces import (
    Cell,
    Deleted,
    Guards,
    Inserted,
    Judged,
    Lock,
    Patched,
    Row,
    Timed,
    Told,
    Writes,
)
from flowfabric.stores.rows import TABLE, Column

LineOf = Callable[[LineKey], int]
Arrays = list[Sequence[Any]]

MOST_EVENTS = 65536  # of a batch: its place in the feed leaves this much room
_NONE = type(None)
_EVENT_FIELDS = Event.__struct_fields__


class Batch:
    """What to judge, what to write in which order, and what to tell."""

    def __init__(self, changes: Sequence[Change], line_of: LineOf) -> None:
        self.guards: list[tuple[Guards, Arrays]] = _judged(changes)
        rounds = _rounds(changes)
        self.rounds = [_written(writes, line_of) for writes in rounds]
        self.told = _told(changes)
        self.in_steps = len(rounds) > 1 or any(_needs_new_snapshot(piece) for piece, _ in self.rounds[0])


def _needs_new_snapshot(piece: Writes) -> bool:
    table = TABLE[piece.row]
    if type(piece) is Deleted:
        return not table.is_root or piece.width < len(table.key)
    return type(piece) is Patched and not table.is_root


def _judged(changes: Sequence[Change]) -> list[tuple[Guards, Arrays]]:
    kinds: dict[tuple[Row, Lock], list[tuple[Any, int, Guard]]] = {}
    bounds: list[tuple[int, int | None, int | None]] = []
    for no, change in enumerate(changes, start=1):
        guards = change.guards
        if not guards or change.not_before is not None or change.not_after is not None:
            bounds.append((no, change.not_before, change.not_after))
        written = {_target(write) for write in change.writes} if guards else ()
        for guard in guards:
            lock: Lock = (
                "none" if guard.revision is None else "update" if (guard.row, guard.key) in written else "share"
            )
            kinds.setdefault((guard.row, lock), []).append((guard.key, no, guard))
    found: list[tuple[Guards, Arrays]] = []
    # Tables in one order, and what will be written before what is only looked at: two batches meet in the same order.
    for row, lock in sorted(kinds, key=lambda kind: (TABLE[kind[0]].name, kind[1] != "update", kind[1])):
        rows = kinds[row, lock]
        rows.sort(key=itemgetter(0))
        keys = zip(*[key for key, _, _ in rows], strict=True)
        arrays: Arrays = [[no for _, no, _ in rows], *keys]
        leases = [guard.lease for _, _, guard in rows]
        leased = lock != "none" and any(leases)
        if lock != "none":
            arrays.append([guard.revision for _, _, guard in rows])
        if leased:
            arrays += [
                [lease and lease.want.value for lease in leases],
                [lease and lease.lease_id for lease in leases],
                [lease and lease.lease_epoch for lease in leases],
            ]
        found.append((Judged(row, lock, leased), arrays))
    if bounds:
        found.append((Timed(), list(zip(*bounds, strict=True))))
    return found


def _target(write: Write) -> tuple[Row, tuple[Any, ...]]:
    """The row that is written, as a guard would name it."""
    if isinstance(write, Patch | Delete):
        return write.row, write.key
    row = type(write.row)
    return row, CODEC[row].key(write.row)


def _rounds(changes: Sequence[Change]) -> list[list[tuple[int, int, Write]]]:
    """The writes with the number and id of their change, those that meet in a row one round after the other."""
    rounds: list[list[tuple[int, int, Write]]] = [[]]
    first = rounds[0]
    for no, change in enumerate(changes, start=1):
        writes = change.writes
        tables = {write.row if isinstance(write, Patch | Delete) else type(write.row) for write in writes}
        if len(tables) == len(writes):
            first += [(no, change.id, write) for write in writes]
            continue
        levels: dict[tuple[Row, tuple[Any, ...]], int] = {}
        deleting = any(isinstance(write, Delete) for write in writes)
        for write in writes:
            target = _target(write)
            meets = (other for other in levels if _meet(target, other)) if deleting else (target,)
            level = levels[target] = max((levels.get(other, -1) + 1 for other in meets), default=0)
            while level >= len(rounds):
                rounds.append([])
            rounds[level].append((no, change.id, write))
    return rounds


def _meet(one: tuple[Row, tuple[Any, ...]], other: tuple[Row, tuple[Any, ...]]) -> bool:
    """Whether two keys, of which a deleted one may be the beginning of many, can name the same row."""
    (row, key), (other_row, other_key) = one, other
    return row is other_row and key[: len(other_key)] == other_key[: len(key)]


def _written(writes: list[tuple[int, int, Write]], line_of: LineOf) -> list[tuple[Writes, Arrays]]:
    patches: dict[tuple[Row, tuple[str, ...], str | None], list[tuple[Any, ...]]] = {}
    rows: dict[tuple[Row, bool], list[tuple[int, int, msgspec.Struct]]] = {}
    deletes: dict[tuple[Row, int], list[tuple[Any, ...]]] = {}
    for no, change_id, write in writes:
        if isinstance(write, Patch):
            shape = (write.row, tuple(write.fields), write.unless)
            patches.setdefault(shape, []).append((no, *write.key, *write.fields.values(), change_id))
        elif isinstance(write, Insert | Put):
            rows.setdefault((type(write.row), isinstance(write, Put)), []).append((no, change_id, write.row))
        else:
            deletes.setdefault((write.row, len(write.key)), []).append((no, *write.key))
    found: list[tuple[Writes, Arrays]] = []
    for (row, width), starts in sorted(deletes.items(), key=_by_name):
        found.append((Deleted(row, width), list(zip(*starts, strict=True))))
    for (row, fields, unless), given in sorted(patches.items(), key=_by_name):
        found.append(_patched(row, fields, unless, given, line_of))
    for (row, put), new in sorted(rows.items(), key=_by_name):
        found.append(_inserted(row, put, new, line_of))
    return found


def _by_name(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    row, *rest = item[0]
    return TABLE[row].name, *(str(part) for part in rest)


def _patched(
    row: Row, fields: tuple[str, ...], unless: str | None, given: list[tuple[Any, ...]], line_of: LineOf
) -> tuple[Writes, Arrays]:
    codec = CODEC[row]
    if unknown := set(fields) - codec.column.keys():
        raise Unstorable(f"{codec.table.name} has no column {sorted(unknown)}")
    no, *columns = zip(*given, strict=True)
    width = len(codec.table.key)
    keys, values, ids = columns[:width], columns[width:-1], columns[-1]
    arrays: Arrays = [no, *keys]
    names, cells = list(fields), list[Cell]()
    for name, column in zip(fields, values, strict=True):
        if name == "revision" and codec.revision_place is not None:
            column = ids
        cells.append(_encoded(codec.column[name], column, arrays, line_of))
    if codec.revision_place is not None and "revision" not in fields:
        names.append("revision")
        cells.append("value")
        arrays.append(ids)
    return Patched(row, tuple(names), tuple(cells), unless), arrays


def _inserted(
    row: Row, put: bool, new: list[tuple[int, int, msgspec.Struct]], line_of: LineOf
) -> tuple[Writes, Arrays]:
    codec = CODEC[row]
    arrays: Arrays = [[no for no, _, _ in new]]
    names, cells = [], list[Cell]()
    columns = zip(*[astuple(one) for _, _, one in new], strict=True)
    for place, (column, values) in enumerate(zip(codec.table.columns, columns, strict=True)):
        if place == codec.revision_place:
            values = tuple(change_id for _, change_id, _ in new)
        elif column.optional and values.count(None) == len(values):
            continue
        names.append(column.name)
        cells.append(_encoded(column, values, arrays, line_of))
    return Inserted(row, tuple(names), tuple(cells), put), arrays


def _encoded(column: Column, values: Sequence[Any], arrays: Arrays, line_of: LineOf) -> Cell:
    """Append the column as the server gets it."""
    if column.is_enum:
        try:
            arrays.append([None if value is None else CODES[id(value)] for value in values])
        except KeyError as error:
            raise Unstorable(f"{column.name} keeps members of {column.kind.__name__} only") from error
        return "value"
    if column.kind is LineKey:
        arrays.append([None if value is None else line_of(value) for value in values])
        return "value"
    kinds = set(map(type, values))
    if FromNow not in kinds:
        arrays.append(values)
        return "value"
    if kinds <= {FromNow, _NONE}:
        arrays.append([None if value is None else value.offset for value in values])
        return "offset"
    arrays.append([value.offset if type(value) is FromNow else value for value in values])
    arrays.append([type(value) is FromNow for value in values])
    return "either"


def _told(changes: Sequence[Change]) -> tuple[Told, Arrays] | None:
    events = [(no, event) for no, change in enumerate(changes, start=1) for event in change.events]
    if not events:
        return None
    if len(events) > MOST_EVENTS:
        raise Unstorable(f"{len(events)} events are more than one batch may have")
    arrays: Arrays = [[no for no, _ in events], range(len(events))]
    names = []
    columns = zip(*[astuple(event) for _, event in events], strict=True)
    for name, values in zip(_EVENT_FIELDS, columns, strict=True):
        if values.count(None) < len(values):
            names.append(name)
            arrays.append(values)
    return Told(tuple(names)), arrays
