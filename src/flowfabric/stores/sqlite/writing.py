"""The verbs that write: each runs on the writer's thread, inside its transaction.

A batch is judged first and written afterwards, set by set: the n-th writes of all accepted changes go together,
gathered by shape, so that a hundred finishes cost as many statements as one. No two changes of a batch meet in a
root, so only the order within a change matters, and that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import apsw
import msgspec
from msgspec.structs import astuple, replace

from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, LineKey, Payload
from flowfabric.rules.change import Change, Delete, Insert, LeaseWant, Patch, Put
from flowfabric.stores.base import Held, Take, Taken, Unstorable, lease_event
from flowfabric.stores.codec import CODEC
from flowfabric.stores.sqlite import sql
from flowfabric.stores.sqlite.lines import UNKNOWN, LinesOfWriter

_SIZES = (64, 32, 16, 8, 4, 2, 1)  # rows per statement: few different statements, few rounds
_WIDEST = 6000  # values per statement: the driver keeps prepared ones only up to 16 KiB of text

Row = Sequence[Any]


def commit(db: apsw.Connection, lines: LinesOfWriter, changes: Sequence[Change], now: int) -> list[int | None]:
    """Write the changes whose guards hold; per change, now or None."""
    refused = _refused(db, changes, now)
    accepted = [change for number, change in enumerate(changes) if number not in refused]
    for group in _rounds(accepted, lambda line: lines.number_to_write(db, line), now):
        for statement, rows in group.items():
            _many(db, statement, rows)
    _tell(db, [event for change in accepted for event in change.events], now)
    return [None if number in refused else now for number in range(len(changes))]


def take(db: apsw.Connection, lines: LinesOfWriter, take: Take, now: int) -> Taken:
    """Claim the first rows of the lines."""
    found = _heads(db, lines, take, now)
    patches: dict[sql.Rows, list[Row]] = {}
    rows: list[tuple[Execution, Payload]] = []
    events: list[Event] = []
    codec = CODEC[Execution]
    for (row, payload), stamp in zip(found, take.stamps, strict=False):
        fields = take.fields(row, stamp, now)
        key = (row.execution_id,)
        cells = codec.patch_cells(
            Patch(Execution, key, fields), stamp.revision, lambda line: lines.number_to_write(db, line)
        )
        patches.setdefault(sql.patch(Execution, cells.columns, None), []).append((*cells.at(now), *key))
        taken = replace(row, **fields)
        rows.append((taken, payload))
        events.append(lease_event(taken, "acquired", "claim_resumed" if row.next_type is None else None))
    for statement, values in patches.items():
        _many(db, statement, values)
    _tell(db, events, now)
    return Taken(now, rows)


def renew(db: apsw.Connection, leases: Sequence[Held], now: int) -> list[int | None]:
    """Move the end of the leases that are in force; per lease, its new end or None."""
    asked = [
        (number, held.execution_id, held.attempt_index, held.attempt_id, held.lease_id, held.lease_epoch)
        for number, held in enumerate(leases)
    ]
    refused = {number for (number,) in _many(db, sql.REFUSED_RENEWALS, asked, now)}
    kept = [held for number, held in enumerate(leases) if number not in refused]
    _many(db, sql.TELL_RENEWALS, [(now, held.execution_id) for held in kept])
    _many(db, sql.RENEW, [(now, now + held.lease_ttl_ms, held.execution_id) for held in kept])
    return [None if number in refused else now + held.lease_ttl_ms for number, held in enumerate(leases)]


def _refused(db: apsw.Connection, changes: Sequence[Change], now: int) -> set[int]:
    """The numbers of the changes that must not be written."""
    refused: set[int] = set()
    roots: dict[type[msgspec.Struct], list[Row]] = {}
    leases: dict[type[msgspec.Struct], list[Row]] = {}
    for number, change in enumerate(changes):
        if change.not_before is not None and now < change.not_before:
            refused.add(number)
        if change.not_after is not None and now > change.not_after:
            refused.add(number)
        for guard in change.guards:
            lease = guard.lease
            if lease is None or guard.revision is None:
                roots.setdefault(guard.row, []).append((number, *guard.key, guard.revision))
            else:
                live = lease.want is LeaseWant.LIVE
                leases.setdefault(guard.row, []).append(
                    (number, *guard.key, guard.revision, live, lease.lease_id, lease.lease_epoch)
                )
    for row, asked in roots.items():
        refused.update(number for (number,) in _many(db, sql.refused_guards(row, lease=False), asked))
    for row, asked in leases.items():
        refused.update(number for (number,) in _many(db, sql.refused_guards(row, lease=True), asked, now))
    return refused


def _rounds(
    changes: Iterable[Change], line_of: Callable[[LineKey], int], now: int
) -> Iterable[dict[sql.Rows, list[Row]]]:
    """What to write: the first writes of all changes, then the second ones, and so on, each gathered by statement."""
    rounds: list[dict[sql.Rows, list[Row]]] = []
    for change in changes:
        for place, write in enumerate(change.writes):
            if place == len(rounds):
                rounds.append({})
            statement, values = _written(write, change.id, line_of, now)
            rounds[place].setdefault(statement, []).append(values)
    return rounds


def _written(
    write: Insert | Put | Patch | Delete, change_id: int, line_of: Callable[[LineKey], int], now: int
) -> tuple[sql.Rows, Row]:
    if type(write) is Patch:
        cells = CODEC[write.row].patch_cells(write, change_id, line_of)
        return sql.patch(write.row, cells.columns, write.unless), (*cells.at(now), *write.key)
    if type(write) is Delete:
        return sql.delete(write.row, len(write.key)), write.key
    assert isinstance(write, Insert | Put)
    row = type(write.row)
    return sql.insert(row, replace=type(write) is Put), CODEC[row].row_cells(write, change_id, line_of).at(now)


def _tell(db: apsw.Connection, events: Iterable[Event], now: int) -> None:
    _many(db, sql.TELL, [(now, *astuple(event)) for event in events])


def _heads(db: apsw.Connection, lines: LinesOfWriter, take: Take, now: int) -> list[tuple[Execution, Payload]]:
    """The rows to claim as they are now, in rank order, and their payloads."""
    numbers = [number for number in (lines.number(db, line) for line in take.lines) if number != UNKNOWN]
    if not numbers or not take.stamps:
        return []
    asked = [value for number in numbers for value in (number, now)]
    ((listed, blob),) = db.execute(sql.heads(len(numbers)), (*asked, len(take.stamps)))
    execution, payload = CODEC[Execution], CODEC[Payload]
    width, bytes_place, begin = len(execution.columns), payload.columns.index("input_payload"), 0
    found: list[tuple[Execution, Payload]] = []
    for values in msgspec.json.decode(listed):
        cold = values[width:]
        if (length := cold[bytes_place]) is not None:
            cold[bytes_place] = blob[begin : begin + length] if length else b""
            begin += length
        row = execution.decode(values[:width], lambda number: lines.line(db, number))
        found.append((row, payload.decode(cold, lambda number: lines.line(db, number))))
    return sorted(found, key=_rank)


def _rank(found: tuple[Execution, Payload]) -> tuple[int, str]:
    return found[0].rank, found[0].execution_id


def _many(db: apsw.Connection, statement: sql.Rows, rows: Sequence[Row], *rest: Any) -> list[Row]:
    """Run a statement over rows, many at a time; what it answers."""
    answers: list[Row] = []
    begin, left = 0, len(rows)
    for size in _SIZES:
        while left >= size and (size == 1 or size * len(rows[0]) <= _WIDEST):
            values = (*chain.from_iterable(rows[begin : begin + size]), *rest)
            if "\0" in "".join([value for value in values if type(value) is str]):
                raise Unstorable("a text contains NUL")
            answers += db.execute(statement(size), values)
            begin, left = begin + size, left - size
    return answers
