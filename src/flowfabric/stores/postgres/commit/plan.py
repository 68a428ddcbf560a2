"""The plan of a commit: a batch of changes as statement fragments, with the arguments of each.

Rows are grouped by shape and turned into columns. Within a fragment the guards are in key order, which is the order in
which they are locked.

Most batches are written by one statement. Three kinds need several:

* A delete by key prefix, and a patch of a row that is no aggregate root, find their rows in the statement's snapshot.
  While the statement waited for a lock, another transaction may have added such a row. So these batches lock and judge
  in a first statement and write in a second one, whose snapshot includes everything committed before the locks were
  held. An aggregate root that a change patches or deletes without guarding it exists already: it was committed together
  with a root that this change guards.
* A change that writes one row twice (deletes by prefix and inserts one again) needs its writes in order; the second
  writes go into a further statement.
* So do deletes of aggregate roots by prefix, if another change of the batch writes one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple

from flowfabric.model.change import (
    BulkInsert,
    Change,
    Delete,
    Expected,
    Guard,
    Insert,
    LeaseCheck,
    Patch,
    RowTemplate,
    Upsert,
    Write,
)
from flowfabric.model.event import Event
from flowfabric.model.execution import QueueKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.codec import CODEC, bulk_insert_columns, expand_bulk_inserts, row_type_of, target
from flowfabric.stores.postgres.commit.claim import ClaimFragment
from flowfabric.stores.postgres.commit.fragments import (
    BOUND_TYPES,
    COLUMN_TYPES,
    EVENT_TYPES,
    KEY_TYPES,
    LEASE_TYPES,
    BulkInsertFragment,
    ConditionFragment,
    DeleteFragment,
    EventFragment,
    GuardFragment,
    InsertFragment,
    LockMode,
    TemplateFragment,
    TimeBoundsFragment,
    UpdateFragment,
    WriteFragment,
)
from flowfabric.stores.postgres.commit.parameters import MixedTimeEncoding, ParameterShapes
from flowfabric.stores.postgres.sql import RowType
from flowfabric.stores.verdicts import Unstorable

Values = list[Any]
S = TypeVar("S", bound=tuple[Any, ...])

MAX_EVENTS_PER_BATCH = 65536  # a position is the batch's position plus the event's index, which has 16 bits


class CommitPlan:
    """The guards, the writes in rounds that are executed one after the other, and the events of a batch."""

    def __init__(self, changes: Sequence[Change], shapes: ParameterShapes) -> None:
        self.claim: tuple[ClaimFragment, Values] | None = None
        self.queues: tuple[list[int], str] | None = None  # the ids and the rows of the queues that work is put into
        self.is_single = len(changes) == 1
        if self.is_single:
            shapes = shapes.single
        self.guards = _guards(changes, shapes)
        changes, bulk_inserts = _bulk_inserts(changes, shapes)
        self.rounds = [
            part for writes in _rounds(changes) for part in _split_prefix_deletes(_write_fragments(writes, shapes))
        ]
        self.rounds[0] += bulk_inserts
        self.rounds[0] += _templates(changes, shapes)
        self.events = _events(changes, shapes)
        self.is_multi_statement = len(self.rounds) > 1 or any(
            _needs_new_snapshot(fragment) for fragment, _ in self.rounds[0]
        )


def _needs_new_snapshot(fragment: WriteFragment) -> bool:
    if isinstance(fragment, TemplateFragment | BulkInsertFragment):
        return False
    table = TABLE[fragment.row]
    if type(fragment) is DeleteFragment:
        return not table.is_aggregate_root or fragment.deletes_roots_by_prefix
    return type(fragment) is UpdateFragment and not table.is_aggregate_root


def _guards(changes: Sequence[Change], shapes: ParameterShapes) -> list[tuple[ConditionFragment, Values]]:
    kinds: defaultdict[tuple[RowType, LockMode, Expected | None], list[tuple[Any, int, Guard]]] = defaultdict(list)
    bounds: list[tuple[int, int | None, int | None]] = []
    for change_no, change in enumerate(changes, start=1):
        guards = change.guards
        if not guards or change.not_before is not None or change.not_after is not None:
            bounds.append((change_no, change.not_before, change.not_after))
        if change.template is not None and len(guards) == 1 and (guard := guards[0]).revision is not None:
            # A fast path for ordinary completions, the most frequent change: they guard the root that they write.
            kinds[guard.row, "update", guard.expected].append((guard.key, change_no, guard))
            continue
        written = _written_roots(change)
        for guard in guards:
            lock: LockMode = "update" if (guard.row, guard.key) in written else "share"
            if guard.revision is None and guard.expected is None:
                lock = "none"
            kinds[guard.row, lock, guard.expected].append((guard.key, change_no, guard))
    fragments: list[tuple[ConditionFragment, Values]] = []
    # All batches lock tables in the same order, and rows to be written before rows that are only shared.
    for row, lock, expected in sorted(kinds, key=_lock_order):
        rows = kinds[row, lock, expected]
        rows.sort(key=itemgetter(0))
        keys, numbers, guarded = zip(*rows, strict=True)
        columns = list(zip(*keys, strict=True))
        types: tuple[str, ...] = KEY_TYPES[row]
        has_leases = False
        if expected is not None:
            columns += zip(*(guard.expected_values for guard in guarded), strict=True)
            types += tuple(COLUMN_TYPES[row][name] for name in expected.per_row)
        elif lock != "none":
            columns.append(tuple([guard.revision for guard in guarded]))
            types += ("bigint",)
            leases = [guard.lease for guard in guarded]
            has_leases = any(leases)
            if has_leases:
                columns += _lease_columns(leases)
                types += tuple(LEASE_TYPES.values())
        implicit_numbers, encodings, values = shapes.encode_columns(
            (row, lock, expected, has_leases), types, numbers, columns
        )
        fragments.append((GuardFragment(row, lock, expected, has_leases, implicit_numbers, encodings), values))
    if bounds:
        numbers, *columns = zip(*bounds, strict=True)
        implicit_numbers, encodings, values = shapes.encode_columns(
            TimeBoundsFragment, tuple(BOUND_TYPES.values()), numbers, columns
        )
        fragments.append((TimeBoundsFragment(implicit_numbers, encodings), values))
    return fragments


def _lock_order(kind: tuple[RowType, LockMode, Expected | None]) -> tuple[Any, ...]:
    row, lock, expected = kind
    return (
        TABLE[row].name,
        lock != "update",
        lock,
        [] if expected is None else sorted((*expected.fields, *expected.per_row)),
    )


def _lease_columns(leases: Sequence[LeaseCheck | None]) -> list[tuple[Any, ...]]:
    """Return the lease checks as the columns of `LEASE_TYPES`."""
    return [
        tuple([lease and int(lease.requires) for lease in leases]),
        tuple([lease and lease.lease_id for lease in leases]),
        tuple([lease and lease.lease_epoch for lease in leases]),
    ]


def _written_roots(change: Change) -> set[tuple[RowType, tuple[Any, ...]]]:
    """Return the keys of the rows that the change writes, for row types that it also guards."""
    guarded = {guard.row for guard in change.guards if guard.revision is not None or guard.expected is not None}
    written = {target(write) for write in change.writes if row_type_of(write) in guarded} if guarded else set()
    if change.template is not None:
        written.add((change.template.row, change.guards[0].key))
    return written


def _bulk_inserts(
    changes: Sequence[Change], shapes: ParameterShapes
) -> tuple[Sequence[Change], list[tuple[WriteFragment, Values]]]:
    """Return the changes without bulk inserts, and the fragments of these; others are expanded to single inserts.

    Only the bulk inserts of changes that write nothing else become fragments.
    """
    if not any(type(write) is BulkInsert for change in changes for write in change.writes):
        return changes, []
    left: list[Change] = []
    fragments: list[tuple[WriteFragment, Values]] = []
    for change_no, change in enumerate(changes, start=1):
        writes = change.writes
        if all(type(write) is BulkInsert for write in writes):
            try:
                fragments += [
                    _bulk_insert(change_no, change.id, write, shapes) for write in writes if type(write) is BulkInsert
                ]
                writes = ()
            except MixedTimeEncoding:
                writes = tuple(expand_bulk_inserts(writes))
        left.append(msgspec.structs.replace(change, writes=tuple(expand_bulk_inserts(writes))))
    return left, fragments


def _bulk_insert(
    change_no: int, change_id: int, insert: BulkInsert, shapes: ParameterShapes
) -> tuple[WriteFragment, Values]:
    row = type(insert.row)
    names, types = COLUMN_TYPES[row].keys(), tuple(COLUMN_TYPES[row].values())
    listed = frozenset(index for index, name in enumerate(names) if name in insert.columns)
    columns = bulk_insert_columns(insert, change_id)
    encodings, values = shapes.encode_bulk_insert((BulkInsert, row, listed), types, columns, listed)
    return BulkInsertFragment(row, encodings), [change_no, *values]


def _rounds(changes: Sequence[Change]) -> list[list[tuple[int, int, Write]]]:
    """Return the writes with the number and id of their change; writes that may overlap are in successive rounds."""
    rounds: list[list[tuple[int, int, Write]]] = [[]]
    first = rounds[0]
    for change_no, change in enumerate(changes, start=1):
        writes = _as_guarded(change)
        if len(writes) == 1:
            first.append((change_no, change.id, writes[0]))
            continue
        # Two inserts of one row are refused in any round.
        if all(type(write) is Insert for write in writes) or len({row_type_of(write) for write in writes}) == len(
            writes
        ):
            first += [(change_no, change.id, write) for write in writes]
            continue
        targets = [target(write) for write in writes]
        overlapping = _types_with_overlap(targets)
        if not overlapping and len(set(targets)) == len(targets):
            first += [(change_no, change.id, write) for write in writes]
            continue
        levels: dict[tuple[RowType, tuple[Any, ...]], int] = {}
        for write, key in zip(writes, targets, strict=True):
            meets = (other for other in levels if _may_overlap(key, other)) if key[0] in overlapping else (key,)
            level = levels[key] = max((levels.get(other, -1) + 1 for other in meets), default=0)
            while level >= len(rounds):
                rounds.append([])
            rounds[level].append((change_no, change.id, write))
    return rounds


def _as_guarded(change: Change) -> tuple[Write, ...]:
    """Return the writes of a change, with an insert in place of the first upsert of each row that must be absent.

    Of two concurrent upserts neither would be refused. A second upsert of the same row replaces what the change itself
    has inserted.
    """
    writes = change.writes
    if Upsert not in map(type, writes):
        return writes
    absent = {(guard.row, guard.key) for guard in change.guards if guard.revision is None and guard.expected is None}
    result: list[Write] = []
    for write in writes:
        if (type(write) is Upsert or type(write) is Insert) and (key := target(write)) in absent:
            absent.remove(key)
            result.append(Insert(write.row))
        else:
            result.append(write)
    return tuple(result)


def _types_with_overlap(targets: Sequence[tuple[RowType, tuple[Any, ...]]]) -> set[RowType]:
    """Return the row types that are written by full key and by key prefix: different keys may overlap there."""
    lengths: dict[RowType, int] = {}
    return {row for row, key in targets if lengths.setdefault(row, len(key)) != len(key)}


def _may_overlap(one: tuple[RowType, tuple[Any, ...]], other: tuple[RowType, tuple[Any, ...]]) -> bool:
    """True if two keys or key prefixes can match the same row."""
    (row, key), (other_row, other_key) = one, other
    return row is other_row and key[: len(other_key)] == other_key[: len(key)]


def _write_fragments(
    writes: list[tuple[int, int, Write]], shapes: ParameterShapes
) -> list[tuple[WriteFragment, Values]]:
    patches: defaultdict[tuple[RowType, tuple[str, ...], str | None], list[tuple[Any, ...]]] = defaultdict(list)
    rows: defaultdict[tuple[RowType, bool], list[tuple[int, int, msgspec.Struct]]] = defaultdict(list)
    deletes: defaultdict[tuple[RowType, int], list[tuple[Any, ...]]] = defaultdict(list)
    for change_no, change_id, write in writes:
        if type(write) is Patch:
            fields = write.fields
            shape = (write.row, tuple(fields), write.unless_set)
            patches[shape].append((change_no, write.key, tuple(fields.values()), change_id))
        elif type(write) is Delete:
            deletes[write.row, len(write.key)].append((change_no, *write.key))
        else:
            new: Any = write.row
            rows[type(new), type(write) is Upsert].append((change_no, change_id, new))
    fragments: list[tuple[WriteFragment, Values]] = []
    for (row, key_length), prefixes in _ordered(deletes):
        numbers, *columns = zip(*prefixes, strict=True)
        types = KEY_TYPES[row][:key_length]
        known = shapes.encode_columns((row, key_length), types, numbers, columns, always_list=0 if key_length else None)
        fragments.append((DeleteFragment(row, key_length, *known[:2]), known[2]))
    for (row, names, unless_set), updates in _ordered(patches):
        fragments.append(_update(row, names, unless_set, updates, shapes))
    for (row, is_upsert), inserts in _ordered(rows):
        fragments.append(_insert(row, is_upsert, inserts, shapes))
    return fragments


def _split_prefix_deletes(fragments: list[tuple[WriteFragment, Values]]) -> list[list[tuple[WriteFragment, Values]]]:
    """Split a round: deletes of aggregate roots by prefix come after the writes of such roots by other changes.

    For example, one change deletes an execution with its incoming edges while another records a completion on one of
    these edges. A single statement would write that row only once, for one of the two changes.
    """
    prefix_types = {
        fragment.row
        for fragment, _ in fragments
        if type(fragment) is DeleteFragment and fragment.deletes_roots_by_prefix
    }
    if not prefix_types:
        return [fragments]
    prefix_types &= {
        fragment.row
        for fragment, _ in fragments
        if type(fragment) is UpdateFragment or type(fragment) is InsertFragment
    }
    later = [part for part in fragments if type(part[0]) is DeleteFragment and part[0].row in prefix_types]
    return [[part for part in fragments if part not in later], later] if later else [fragments]


def _ordered(shapes: dict[S, list[Any]]) -> Iterable[tuple[S, list[Any]]]:
    """Return the shapes of a batch in an order that does not depend on the order of its changes."""
    return sorted(shapes.items(), key=_shape_order) if len(shapes) > 1 else shapes.items()


def _shape_order(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    row, *rest = item[0]
    return TABLE[row].name, *(str(part) for part in rest)


def _update(
    row: RowType,
    names: tuple[str, ...],
    unless_set: str | None,
    patches: list[tuple[Any, ...]],
    shapes: ParameterShapes,
) -> tuple[WriteFragment, Values]:
    columns, types = _update_columns(row, names)
    numbers, keys, fields, ids = zip(*patches, strict=True)
    cells = [*zip(*keys, strict=True), *zip(*fields, strict=True)]
    if len(columns) > len(names):
        cells.append(ids)
    implicit_numbers, encodings, values = shapes.encode_columns((row, names, unless_set), types, numbers, cells)
    return UpdateFragment(row, columns, unless_set, implicit_numbers, encodings), values


@lru_cache(maxsize=1000)
def _update_columns(row: RowType, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that a patch sets, with the root's revision, and the types of key and columns."""
    types = COLUMN_TYPES[row]
    if unknown := set(names) - types.keys():
        raise Unstorable(f"{TABLE[row].name} has no column {sorted(unknown)}")
    columns = names if CODEC[row].revision_ordinal is None else (*names, "revision")
    return columns, KEY_TYPES[row] + tuple(types[name] for name in columns)


def _insert(
    row: RowType, is_upsert: bool, new: list[tuple[int, int, Any]], shapes: ParameterShapes
) -> tuple[WriteFragment, Values]:
    numbers, ids, rows = zip(*new, strict=True)
    columns = list(zip(*map(astuple, rows), strict=True))
    codec = CODEC[row]
    if codec.revision_ordinal is not None:
        columns[codec.revision_ordinal] = ids
    types = tuple(COLUMN_TYPES[row].values())
    implicit_numbers, encodings, values = shapes.encode_columns(
        (row, is_upsert, None), types, numbers, columns, always_list=codec.key_ordinals[0]
    )
    return InsertFragment(row, is_upsert, implicit_numbers, encodings), values


def _templates(changes: Sequence[Change], shapes: ParameterShapes) -> list[tuple[WriteFragment, Values]]:
    templates: defaultdict[RowTemplate, list[tuple[int, int, tuple[Any, ...]]]] = defaultdict(list)
    for change_no, change in enumerate(changes, start=1):
        if change.template is not None:
            templates[change.template].append((change_no, change.id, change.guards[0].key))
    fragments: list[tuple[WriteFragment, Values]] = []
    for template, roots in templates.items():
        numbers, ids, keys = zip(*roots, strict=True)
        types = (*KEY_TYPES[template.row], "bigint")
        implicit_numbers, encodings, values = shapes.encode_columns(
            template, types, numbers, [*zip(*keys, strict=True), ids]
        )
        fragments.append((TemplateFragment(template, implicit_numbers, encodings), values))
    return fragments


def _events(changes: Sequence[Change], shapes: ParameterShapes) -> tuple[EventFragment, Values] | None:
    events = [(change_no, event) for change_no, change in enumerate(changes, start=1) for event in change.events]
    if not events:
        return None
    if len(events) + len(changes) > MAX_EVENTS_PER_BATCH:  # each template emits one more event
        raise Unstorable(f"{len(events)} events are more than one batch may have")
    numbers, structs = zip(*events, strict=True)
    columns = zip(*map(astuple, structs), strict=True)
    implicit_numbers, encodings, values = shapes.encode_columns(Event, tuple(EVENT_TYPES.values()), numbers, columns)
    return EventFragment(implicit_numbers, encodings), values


def queues_written(changes: Sequence[Change]) -> set[QueueKey]:
    """Return the queues that the changes write to."""
    queues: set[QueueKey] = set()
    for change in changes:
        for write in change.writes:
            if isinstance(write, Delete):
                continue
            values = write.fields.values() if isinstance(write, Patch) else astuple(write.row)
            queues |= {value for value in values if type(value) is QueueKey}
    return queues
