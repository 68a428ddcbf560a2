"""Write operations: each runs on the writer's thread, inside its transaction.

A batch is judged first and then written in rounds. The writes of all accepted changes that do not overlap form a round
and are grouped by shape, so that a hundred completions cost as many statements as one. No two changes of a batch write
the same aggregate root, so only the order within a change matters, and the rounds keep that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

import apsw
import msgspec
from msgspec.structs import asdict, astuple

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
    at,
    evaluate,
)
from flowfabric.model.event import Event
from flowfabric.model.execution import QueueKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.claim_result import decode_claimed_rows
from flowfabric.stores.claims import ROW_PARAMETERS, SHARED_PARAMETERS, ClaimedRows, ClaimRequest, LeaseRef
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
from flowfabric.stores.sqlite import claim_result, statements
from flowfabric.stores.sqlite.errors import translate_error
from flowfabric.stores.sqlite.queue_ids import UNKNOWN_ID, WriterQueueIds
from flowfabric.stores.verdicts import Unstorable, Verdict, verdict_on

_MAX_ROWS = 128  # rows per statement
_MAX_VALUES = 6000  # values per statement: the driver caches prepared statements only up to 16 KiB of text

_LIVE = LeaseRequirement.LIVE

Row = Sequence[Any]
WriteShape = tuple[type[Write], type[msgspec.Struct], tuple[str, ...], str | None]  # kind, table, columns, unless
WritesByShape = dict[WriteShape, list[Row]]


def commit(db: apsw.Connection, queue_ids: WriterQueueIds, changes: Sequence[Change], now: int) -> list[Verdict]:
    """Write the changes whose guards hold; raise `Unstorable` or a driver error if one of them cannot be written."""
    refused = _refused(db, changes, now)
    accepted = [change for number, change in enumerate(changes) if number not in refused] if refused else changes
    for writes_by_shape in _rounds(accepted):
        _write(db, queue_ids, writes_by_shape, now)
    for queue in {queue for change in accepted for queue in change.queues}:
        queue_ids.ensure_id(db, queue)
    _insert_events(db, queue_ids, [event for change in accepted for event in change.events], now)
    _apply_templates(db, accepted, now)
    return [None if number in refused else now for number in range(len(changes))] if refused else [now] * len(changes)


def commit_in_halves(
    db: apsw.Connection, queue_ids: WriterQueueIds, changes: Sequence[Change], now: int, fault: Unstorable
) -> list[Verdict]:
    """Commit a batch that failed with `fault` in parts, each under a savepoint, until each change at fault is alone."""
    if len(changes) == 1:
        return [verdict_on(fault)]
    verdicts: list[Verdict] = []
    half = len(changes) // 2
    for part in (changes[:half], changes[half:]):
        db.execute("SAVEPOINT part")
        try:
            verdicts += commit(db, queue_ids, part, now)
        except Exception as error:
            part_fault = translate_error(error)
            if not isinstance(part_fault, Unstorable):
                raise
            db.execute("ROLLBACK TO part")
            queue_ids.on_rollback()
            verdicts += commit_in_halves(db, queue_ids, part, now, part_fault)
        db.execute("RELEASE part")
    return verdicts


def _apply_templates(db: apsw.Connection, changes: Iterable[Change], now: int) -> None:
    """Apply the row templates of these changes to their roots."""
    roots: dict[RowTemplate, list[Row]] = {}
    for change in changes:
        if change.template is not None:
            roots.setdefault(change.template, []).append((*change.guards[0].key, change.id))
    for template, rows in roots.items():
        update = statements.update_by_template(template, "key", ("revision",))
        execute_batched(db, update, rows, leading=(now,))
        keys = [key for *key, _ in rows]
        execute_batched(db, statements.insert_template_events(template, "key"), keys, leading=(now,))


def claim_rows(db: apsw.Connection, queue_ids: WriterQueueIds, request: ClaimRequest, now: int) -> ClaimedRows:
    """Claim the first rows of the requested queues."""
    ids = {queue_ids.id_of(db, queue) for queue in request.queues} - {UNKNOWN_ID}
    if not ids or not request.lease_ids:
        return ClaimedRows(now, [])
    arguments = [value for id_ in ids for value in (id_, now)]
    ((heads,),) = db.execute(statements.queue_heads(len(ids)), (*arguments, len(request.lease_ids)))
    heads = msgspec.json.decode(heads)
    if not heads:
        return ClaimedRows(now, [])
    lease_ids = request.lease_ids[: len(heads)]
    template = request.template
    update = statements.update_by_template(template, "rowid", ROW_PARAMETERS, SHARED_PARAMETERS)
    claims = [(row, *astuple(new)) for row, new in zip(heads, lease_ids, strict=True)]
    execute_batched(db, update, claims, leading=(now, *request.parameters.values()))
    rows = [(row,) for row in heads]
    execute_batched(db, statements.insert_template_events(template, "rowid"), rows, leading=(now,))
    sparse, columns = claim_result.decode_columns(execute_batched(db, statements.claimed_rows(template), rows))
    return ClaimedRows(
        now, decode_claimed_rows(request, lease_ids, now, sparse, columns, lambda id_: queue_ids.key_of(db, id_))
    )


def renew(db: apsw.Connection, leases: Sequence[LeaseRef], template: RowTemplate, now: int) -> list[int | None]:
    """Apply the template where its condition holds; return, per lease, its new expiry, or None if it was refused."""
    parameters = LeaseRef.__struct_fields__[1:]  # the fields that follow the key
    rows = [(*astuple(lease), number) for number, lease in enumerate(leases)]
    failed = execute_batched(db, statements.failed_conditions(template, parameters), rows, leading=(now,))
    refused = {number for (number,) in failed}
    renewed = [lease for number, lease in enumerate(leases) if number not in refused]
    update = statements.update_by_template(template, "key", parameters)
    execute_batched(db, update, [*map(astuple, renewed)], leading=(now,))
    keys = [(lease.execution_id,) for lease in renewed]
    execute_batched(db, statements.insert_template_events(template, "key"), keys, leading=(now,))
    expiry = template.fields["lease_expires_at"]
    return [
        None if number in refused else at(evaluate(expiry, None, asdict(lease)), now)
        for number, lease in enumerate(leases)
    ]


def trim_feed(db: apsw.Connection, before: int, limit: int) -> int:
    """Delete the oldest events emitted before an instant; return the number of deleted events."""
    ((last,),) = db.execute(statements.statement("last_to_trim"), (limit, before))
    if last is None:
        return 0
    db.execute(statements.statement("record_trimmed"), (last,))
    db.execute(statements.statement("delete_events_up_to"), (last,))
    return int(db.changes())


def _refused(db: apsw.Connection, changes: Sequence[Change], now: int) -> set[int]:
    """Return the numbers of the changes whose guards or time bounds do not hold."""
    refused: set[int] = set()
    roots: dict[type[msgspec.Struct], list[Row]] = {}
    leases: dict[type[msgspec.Struct], list[Row]] = {}
    expected: dict[tuple[type[msgspec.Struct], Expected], list[Row]] = {}
    for number, change in enumerate(changes):
        if change.not_before is not None and now < change.not_before:
            refused.add(number)
        if change.not_after is not None and now > change.not_after:
            refused.add(number)
        for guard in change.guards:
            lease = guard.lease
            if guard.expected is not None:
                values = encode_row(guard.expected_values, refuse_queue, now)
                expected.setdefault((guard.row, guard.expected), []).append((number, *guard.key, *values))
            elif lease is None or guard.revision is None:
                roots.setdefault(guard.row, []).append((number, *guard.key, guard.revision))
            else:
                live = lease.requires is _LIVE
                leases.setdefault(guard.row, []).append(
                    (number, *guard.key, guard.revision, live, lease.lease_id, lease.lease_epoch)
                )
    for row, guards in roots.items():
        failed = execute_batched(db, statements.failed_guards(row, with_leases=False), guards)
        refused.update(number for (number,) in failed)
    for row, guards in leases.items():
        failed = execute_batched(db, statements.failed_guards(row, with_leases=True), guards, now)
        refused.update(number for (number,) in failed)
    for kind, guards in expected.items():
        failed = execute_batched(db, statements.failed_expectations(*kind), guards)
        refused.update(number for (number,) in failed)
    return refused


def _rounds(changes: Iterable[Change]) -> list[WritesByShape]:
    """Group the writes into rounds: writes of one row are in successive rounds, in their order."""
    rounds: list[WritesByShape] = [{}]
    for change in changes:
        if len(change.writes) == 1:
            _add_write(rounds[0], change.writes[0], change.id)
            continue
        writes: Sequence[Write] = change.writes
        if BulkInsert in map(type, writes) and not all(type(write) is BulkInsert for write in writes):
            writes = expand_bulk_inserts(writes)
        for round_no, write in zip(_round_numbers(writes), writes, strict=True):
            if round_no == len(rounds):
                rounds.append({})
            _add_write(rounds[round_no], write, change.id)
    return rounds


def _round_numbers(writes: Sequence[Write]) -> Sequence[int]:
    """Return the round of each write: the number of earlier writes to the same row."""
    if all(type(write) is Insert or type(write) is BulkInsert for write in writes) or len(
        {row_type_of(write) for write in writes}
    ) == len(writes):
        return [0] * len(writes)  # two inserts of one row are refused in any round
    deleted_types = {write.row for write in writes if type(write) is Delete}  # a delete may match any number of rows
    targets = [target(write) for write in writes]
    if not deleted_types and len(set(targets)) == len(targets):
        return [0] * len(writes)
    written: dict[object, int] = {}
    rounds = []
    for kind, key in targets:
        row: object = kind if kind in deleted_types else (kind, key)
        rounds.append(written.get(row, 0))
        written[row] = rounds[-1] + 1
    return rounds


def _add_write(writes_by_shape: WritesByShape, write: Write, change_id: int) -> None:
    """Add a write to those of its shape."""
    values: Row
    if type(write) is Patch:
        shape = _patch_shape(write.row, tuple(write.fields), write.unless_set)
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
    writes_by_shape.setdefault(shape, []).append(values)


@lru_cache(maxsize=1000)
def _patch_shape(row: type[msgspec.Struct], names: tuple[str, ...], unless_set: str | None) -> WriteShape:
    """Return the shape of a patch of these fields; an aggregate root gets the change's id as its revision."""
    codec = CODEC[row]
    if unknown := set(names) - codec.column.keys():
        raise Unstorable(f"{codec.table.name} has no column {sorted(unknown)}")
    return Patch, row, names if codec.revision_ordinal is None else (*names, "revision"), unless_set


def _write(db: apsw.Connection, queue_ids: WriterQueueIds, writes_by_shape: WritesByShape, now: int) -> None:
    for (kind, row, names, unless_set), rows in writes_by_shape.items():
        if kind is Delete:
            statement, columns = statements.delete(row, len(names)), _transpose(rows if names else rows[:1])
        elif kind is Patch:
            statement, columns = statements.update(row, names, unless_set), _transpose(rows)
        elif kind is BulkInsert:
            for insert, change_id in rows:
                encoded = _encode_rows(db, queue_ids, _bulk_insert_columns(insert, change_id), now)
                execute_batched(db, statements.insert(row, upsert=False), encoded)
            continue
        else:
            statement, columns = statements.insert(row, upsert=kind is Upsert), _columns(row, rows)
        execute_batched(db, statement, _encode_rows(db, queue_ids, columns, now))


def _columns(row: type[msgspec.Struct], new: Sequence[Row]) -> list[Row]:
    """Return the columns of new rows. Each row comes with its change's id, the revision of an aggregate root."""
    codec = CODEC[row]
    rows, ids = zip(*new, strict=True)
    columns = _transpose([*map(astuple, rows)])
    if None in columns[0]:  # the statement would skip it like a padding row
        raise Unstorable(f"a row of {codec.table.name} has no key")
    if codec.revision_ordinal is not None:
        columns[codec.revision_ordinal] = ids
    return columns


def _bulk_insert_columns(insert: BulkInsert, change_id: int) -> list[Row]:
    columns = bulk_insert_columns(insert, change_id)
    if None in columns[0]:
        raise Unstorable(f"a row of {TABLE[type(insert.row)].name} has no key")
    return [column if len(column) == len(insert) else (*column,) * len(insert) for column in columns]


def _transpose(rows: Sequence[Row]) -> list[Row]:
    return [*zip(*rows, strict=True)]


def _encode_rows(db: apsw.Connection, queue_ids: WriterQueueIds, columns: Sequence[Row], now: int) -> list[Row]:
    """Encode columns and return them as rows."""

    def encode_queue(queue: QueueKey) -> int:
        return queue_ids.ensure_id(db, queue)

    if len(columns[0]) == 1:
        return [encode_row([value for (value,) in columns], encode_queue, now)]
    return _transpose([encode_column(column, encode_queue, now) for column in columns])


def _insert_events(db: apsw.Connection, queue_ids: WriterQueueIds, events: Sequence[Event], now: int) -> None:
    if events:
        columns = _transpose([(now, *astuple(event)) for event in events])
        execute_batched(db, statements.INSERT_EVENTS, _encode_rows(db, queue_ids, columns, now))


def execute_batched(
    db: apsw.Connection,
    statement: statements.StatementForRows,
    rows: Sequence[Row],
    *trailing: Any,
    leading: tuple[Any, ...] = (),
) -> list[Row]:
    """Execute a statement for many rows at a time; return all result rows.

    `leading` and `trailing` are the arguments before and after the rows.
    """
    results: list[Row] = []
    begin, left = 0, len(rows)
    while left > 0:
        width = len(rows[0])
        max_rows = _MAX_ROWS if width * _MAX_ROWS <= _MAX_VALUES else _MAX_ROWS // 2
        # Powers of two keep the number of prepared statements small.
        size = min(max_rows, 1 << (left - 1).bit_length())
        values = [*leading, *chain.from_iterable(rows if size >= len(rows) else rows[begin : begin + size])]
        if size > left:
            values += repeat(None, (size - left) * width)
        values += trailing
        try:
            results += db.execute(statement(size), values)
        except TypeError as error:  # raised by the driver for types that SQLite does not store
            raise Unstorable(str(error)) from error
        begin, left = begin + size, left - size
    return results
