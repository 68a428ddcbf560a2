"""The verbs that write: each runs on the writer's thread, inside its transaction.

A batch is judged first and written afterwards, set by set: the n-th writes of all accepted changes go together,
gathered by shape, so that a hundred finishes cost as many statements as one. No two changes of a batch meet in a
root, so only the order within a change matters, and that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

import apsw
import msgspec
from msgspec.structs import astuple

from flowfabric.model.change import (
    BulkInsert,
    Change,
    Delete,
    Expected,
    Insert,
    LeaseRequirement,
    Patch,
    RowTemplate,
    Upsert,
    Write,
)
from flowfabric.model.event import Event
from flowfabric.model.execution import QueueKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.claim_result import decode_claimed_rows
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, LeaseRef
from flowfabric.stores.codec import (
    CODEC,
    bulk_insert_columns,
    encode_column,
    encode_row,
    expand_bulk_inserts,
    refuse_queue,
    row_type_of,
    target,
)
from flowfabric.stores.port import Unstorable
from flowfabric.stores.sqlite import claim_result, statements
from flowfabric.stores.sqlite.queue_ids import UNKNOWN_ID, WriterQueueIds

_MOST = 128  # rows per statement
_WIDEST = 6000  # values per statement: the driver keeps prepared ones only up to 16 KiB of text

_LIVE = LeaseRequirement.LIVE  # to find a member in its class takes ten times as long

Row = Sequence[Any]
WriteShape = tuple[type[Write], type[msgspec.Struct], tuple[str, ...], str | None]  # kind, table, columns, unless
WritesByShape = dict[WriteShape, list[Row]]


def commit(db: apsw.Connection, lines: WriterQueueIds, changes: Sequence[Change], now: int) -> list[int | None]:
    """Write the changes whose guards hold; per change, now or None."""
    refused = _refused(db, changes, now)
    accepted = [change for number, change in enumerate(changes) if number not in refused] if refused else changes
    for gathered in _rounds(accepted):
        _write(db, lines, gathered, now)
    for line in {line for change in accepted for line in change.queues}:
        lines.ensure_id(db, line)
    _tell(db, lines, [event for change in accepted for event in change.events], now)
    _fill_in(db, accepted, now)
    return [None if number in refused else now for number in range(len(changes))] if refused else [now] * len(changes)


def _fill_in(db: apsw.Connection, changes: Iterable[Change], now: int) -> None:
    """Write what the forms of these changes mean for their roots."""
    formed: dict[RowTemplate, list[Row]] = {}
    for change in changes:
        if change.template is not None:
            formed.setdefault(change.template, []).append((change.id, now, *change.guards[0].key))
    for form, rows in formed.items():
        for statement in statements.apply_template(form):
            execute_batched(db, statement, rows)


def claim_rows(db: apsw.Connection, lines: WriterQueueIds, take: ClaimRequest, now: int) -> ClaimedRows:
    """Claim the first rows of the lines."""
    numbers = {lines.id_of(db, line) for line in take.queues} - {UNKNOWN_ID}
    if not numbers or not take.lease_ids:
        return ClaimedRows(now, [])
    asked = [value for number in numbers for value in (number, now)]
    ((heads,),) = db.execute(statements.queue_heads(len(numbers)), (*asked, len(take.lease_ids)))
    heads = msgspec.json.decode(heads)
    if not heads:
        return ClaimedRows(now, [])
    stamps = take.lease_ids[: len(heads)]
    stamped = [
        (row, stamp.lease_id, stamp.attempt_id, stamp.revision) for row, stamp in zip(heads, stamps, strict=True)
    ]
    given = (now, take.worker_id, take.worker_instance_id, take.lease_ttl_ms)
    execute_batched(db, statements.claim_rows(tuple(take.shared_fields.items())), stamped, leading=given)
    rows = [(row,) for row in heads]
    execute_batched(db, statements.INSERT_CLAIM_EVENTS, rows, leading=(now,))
    rarities, columns = claim_result.decode_columns(
        execute_batched(db, statements.claimed_rows(tuple(take.shared_fields)), rows)
    )
    return ClaimedRows(
        now, decode_claimed_rows(take, stamps, now, rarities, columns, lambda number: lines.key_of(db, number))
    )


def renew(db: apsw.Connection, leases: Sequence[LeaseRef], now: int) -> list[int | None]:
    """Move the end of the leases that are in force; per lease, its new end or None."""
    asked = [
        (number, held.execution_id, held.attempt_index, held.attempt_id, held.lease_id, held.lease_epoch)
        for number, held in enumerate(leases)
    ]
    refused = {number for (number,) in execute_batched(db, statements.FAILED_RENEWALS, asked, now)}
    kept = [held for number, held in enumerate(leases) if number not in refused]
    execute_batched(db, statements.INSERT_RENEWAL_EVENTS, [(now, held.execution_id) for held in kept])
    execute_batched(db, statements.RENEW, [(now, now + held.lease_ttl_ms, held.execution_id) for held in kept])
    return [None if number in refused else now + held.lease_ttl_ms for number, held in enumerate(leases)]


def trim_feed(db: apsw.Connection, before: int, limit: int) -> int:
    """Drop the oldest events that were told before an instant; how many went."""
    ((last,),) = db.execute(statements.statement("last_to_trim"), (limit, before))
    if last is None:
        return 0
    db.execute(statements.statement("note_trimmed"), (last,))
    db.execute(statements.statement("trim"), (last,))
    return int(db.changes())


def _refused(db: apsw.Connection, changes: Sequence[Change], now: int) -> set[int]:
    """The numbers of the changes that must not be written."""
    refused: set[int] = set()
    roots: dict[type[msgspec.Struct], list[Row]] = {}
    leases: dict[type[msgspec.Struct], list[Row]] = {}
    looks: dict[tuple[type[msgspec.Struct], Expected], list[Row]] = {}
    for number, change in enumerate(changes):
        if change.not_before is not None and now < change.not_before:
            refused.add(number)
        if change.not_after is not None and now > change.not_after:
            refused.add(number)
        for guard in change.guards:
            lease = guard.lease
            if guard.expected is not None:
                own = encode_row(guard.expected_values, refuse_queue, now)
                looks.setdefault((guard.row, guard.expected), []).append((number, *guard.key, *own))
            elif lease is None or guard.revision is None:
                roots.setdefault(guard.row, []).append((number, *guard.key, guard.revision))
            else:
                live = lease.requires is _LIVE
                leases.setdefault(guard.row, []).append(
                    (number, *guard.key, guard.revision, live, lease.lease_id, lease.lease_epoch)
                )
    for row, asked in roots.items():
        refused.update(number for (number,) in execute_batched(db, statements.failed_guards(row, with_leases=False), asked))
    for row, asked in leases.items():
        refused.update(
            number for (number,) in execute_batched(db, statements.failed_guards(row, with_leases=True), asked, now)
        )
    for kind, asked in looks.items():
        refused.update(number for (number,) in execute_batched(db, statements.failed_expectations(*kind), asked))
    return refused


def _rounds(changes: Iterable[Change]) -> list[WritesByShape]:
    """What to write: what meets in no row goes together, what does is written in its order."""
    rounds: list[WritesByShape] = [{}]
    for change in changes:
        if len(change.writes) == 1:
            _gather(rounds[0], change.writes[0], change.id)
            continue
        writes: Sequence[Write] = change.writes
        if BulkInsert in map(type, writes) and not all(type(write) is BulkInsert for write in writes):
            writes = expand_bulk_inserts(writes)
        for place, write in zip(_places(writes), writes, strict=True):
            if place == len(rounds):
                rounds.append({})
            _gather(rounds[place], write, change.id)
    return rounds


def _places(writes: Sequence[Write]) -> Sequence[int]:
    """The round of each write: how many writes of the same row come before it."""
    if all(type(write) is Insert or type(write) is BulkInsert for write in writes) or len(
        {row_type_of(write) for write in writes}
    ) == len(writes):
        return [0] * len(writes)  # two inserts of one row are refused wherever they stand
    emptied = {write.row for write in writes if type(write) is Delete}  # where one write may meet any number of rows
    targets = [target(write) for write in writes]
    if not emptied and len(set(targets)) == len(targets):
        return [0] * len(writes)
    written: dict[object, int] = {}
    places = []
    for kind, key in targets:
        row: object = kind if kind in emptied else (kind, key)
        places.append(written.get(row, 0))
        written[row] = places[-1] + 1
    return places


def _gather(gathered: WritesByShape, write: Write, change_id: int) -> None:
    """Put a write with those of its shape."""
    values: Row
    if type(write) is Patch:  # by type, as in the codec
        shape = _shape_of_patch(write.row, tuple(write.fields), write.unless_set)
        if len(shape[2]) > len(write.fields):
            values = (*write.fields.values(), change_id, *write.key)
        else:
            values = (*write.fields.values(), *write.key)
    elif type(write) is Delete:
        shape = Delete, write.row, TABLE[write.row].key[: len(write.key)], None
        values = write.key or (0,)
    elif type(write) is BulkInsert:
        shape = BulkInsert, type(write.row), (), None
        values = (write, change_id)
    else:
        row: Any = write.row
        shape = type(write), type(row), (), None
        values = (row, change_id)
    gathered.setdefault(shape, []).append(values)


@lru_cache(maxsize=1000)
def _shape_of_patch(row: type[msgspec.Struct], names: tuple[str, ...], unless: str | None) -> WriteShape:
    """The shape of a patch of these fields; a root gets the change's id as its revision."""
    codec = CODEC[row]
    if unknown := set(names) - codec.column.keys():
        raise Unstorable(f"{codec.table.name} has no column {sorted(unknown)}")
    return Patch, row, names if codec.revision_ordinal is None else (*names, "revision"), unless


def _write(db: apsw.Connection, lines: WriterQueueIds, gathered: WritesByShape, now: int) -> None:
    for (kind, row, names, unless), rows in gathered.items():
        if kind is Delete:
            statement, columns = statements.delete(row, len(names)), _turned(rows if names else rows[:1])
        elif kind is Patch:
            statement, columns = statements.patch(row, names, unless), _turned(rows)
        elif kind is BulkInsert:
            for copies, change_id in rows:
                execute_batched(
                    db, statements.insert(row, upsert=False), _encoded(db, lines, _copied(copies, change_id), now)
                )
            continue
        else:
            statement, columns = statements.insert(row, upsert=kind is Upsert), _columns(row, rows)
        execute_batched(db, statement, _encoded(db, lines, columns, now))


def _columns(row: type[msgspec.Struct], new: Sequence[Row]) -> list[Row]:
    """The columns of new rows, of which each comes with the id of its change: the revision of a root."""
    codec = CODEC[row]
    rows, ids = zip(*new, strict=True)
    columns = _turned([*map(astuple, rows)])
    if None in columns[0]:  # which would be taken for one of the rows that only fill up
        raise Unstorable(f"a row of {codec.table.name} has no key")
    if codec.revision_ordinal is not None:
        columns[codec.revision_ordinal] = ids
    return columns


def _copied(copies: BulkInsert, change_id: int) -> list[Row]:
    columns = bulk_insert_columns(copies, change_id)
    if None in columns[0]:
        raise Unstorable(f"a row of {TABLE[type(copies.row)].name} has no key")
    return [column if len(column) == len(copies) else (*column,) * len(copies) for column in columns]


def _turned(rows: Sequence[Row]) -> list[Row]:
    return [*zip(*rows, strict=True)]


def _encoded(db: apsw.Connection, lines: WriterQueueIds, columns: Sequence[Row], now: int) -> list[Row]:
    """Rows as they are stored, from their columns."""

    def line_of(line: QueueKey) -> int:
        return lines.ensure_id(db, line)

    if len(columns[0]) == 1:
        return [encode_row([value for (value,) in columns], line_of, now)]
    return _turned([encode_column(column, line_of, now) for column in columns])


def _tell(db: apsw.Connection, lines: WriterQueueIds, events: Sequence[Event], now: int) -> None:
    if events:
        execute_batched(
            db,
            statements.INSERT_EVENTS,
            _encoded(db, lines, _turned([(now, *astuple(event)) for event in events]), now),
        )


def execute_batched(
    db: apsw.Connection,
    statement: statements.StatementForRows,
    rows: Sequence[Row],
    *rest: Any,
    leading: tuple[Any, ...] = (),
) -> list[Row]:
    """Run a statement over rows, many at a time, with what stands before and after them; what it answers."""
    answers: list[Row] = []
    begin, left = 0, len(rows)
    while left > 0:
        width = len(rows[0])
        most = _MOST if width * _MOST <= _WIDEST else _MOST // 2
        # In powers of two, so that few different statements have to be prepared and kept.
        size = min(most, 1 << (left - 1).bit_length())
        values = [*leading, *chain.from_iterable(rows if size >= len(rows) else rows[begin : begin + size])]
        if size > left:
            values += repeat(None, (size - left) * width)
        values += rest
        try:
            answers += db.execute(statement(size), values)
        except TypeError as error:  # of the driver, which takes only what SQLite knows
            raise Unstorable(str(error)) from error
        begin, left = begin + size, left - size
    return answers
