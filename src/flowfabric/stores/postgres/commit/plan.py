"""A batch of changes as pieces of a statement, and the values that fill them.

Rows are gathered by shape and turned into columns. Within a piece the guards stand in key order, which is the order
in which they are locked.

Most batches are written by one statement. Three kinds are not:

* A delete of all rows that begin like a key, and a patch of a row that is no root, look for rows by the statement's
  snapshot. While the statement waited for a lock, someone with a lock beside ours may have added such a row. So these
  batches lock and judge in a first statement, and write in a second one, which sees everything that was committed
  before the locks were held.
  A root that a change patches or deletes without guarding it is there already: it came with a change that wrote a root
  which this one guards.
* A change that writes one row twice (deletes all and puts one back) needs its writes one after the other; the second
  writes go into a further statement.
* So do deletes of all roots that begin like a key, beside a change that writes one of them.
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
from flowfabric.stores.port import Unstorable
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

Values = list[Any]
S = TypeVar("S", bound=tuple[Any, ...])

MAX_EVENTS_PER_BATCH = 65536  # of a batch: its place in the feed leaves this much room


class CommitPlan:
    """What to judge, what to write in which order, and what to tell."""

    def __init__(self, changes: Sequence[Change], habits: ParameterShapes) -> None:
        self.claim: tuple[ClaimFragment, Values] | None = None
        self.queues: tuple[list[int], str] | None = None  # those that work is put into: their numbers, and their rows
        self.is_single = len(changes) == 1
        if self.is_single:
            habits = habits.single
        self.guards = _judged(changes, habits)
        changes, copied = _copied(changes, habits)
        self.rounds = [part for writes in _rounds(changes) for part in _in_parts(_written(writes, habits))]
        self.rounds[0] += copied
        self.rounds[0] += _formed(changes, habits)
        self.events = _told(changes, habits)
        self.is_multi_statement = len(self.rounds) > 1 or any(_needs_new_snapshot(piece) for piece, _ in self.rounds[0])


def _needs_new_snapshot(piece: WriteFragment) -> bool:
    if isinstance(piece, TemplateFragment | BulkInsertFragment):
        return False
    table = TABLE[piece.row]
    if type(piece) is DeleteFragment:
        return not table.is_aggregate_root or piece.deletes_roots_by_prefix
    return type(piece) is UpdateFragment and not table.is_aggregate_root


def _judged(changes: Sequence[Change], habits: ParameterShapes) -> list[tuple[ConditionFragment, Values]]:
    kinds: defaultdict[tuple[RowType, LockMode, Expected | None], list[tuple[Any, int, Guard]]] = defaultdict(list)
    bounds: list[tuple[int, int | None, int | None]] = []
    for no, change in enumerate(changes, start=1):
        guards = change.guards
        if not guards or change.not_before is not None or change.not_after is not None:
            bounds.append((no, change.not_before, change.not_after))
        if change.template is not None and len(guards) == 1 and (guard := guards[0]).revision is not None:
            # An ordinary end, of which there are most: what it guards is the root that it writes.
            kinds[guard.row, "update", guard.expected].append((guard.key, no, guard))
            continue
        written = _written_roots(change)
        for guard in guards:
            lock: LockMode = "update" if (guard.row, guard.key) in written else "share"
            if guard.revision is None and guard.expected is None:
                lock = "none"
            kinds[guard.row, lock, guard.expected].append((guard.key, no, guard))
    found: list[tuple[ConditionFragment, Values]] = []
    # Tables in one order, and what will be written before what is only looked at: two batches meet in the same order.
    for row, lock, like in sorted(kinds, key=_in_order):
        rows = kinds[row, lock, like]
        rows.sort(key=itemgetter(0))
        keys, numbers, guarded = zip(*rows, strict=True)
        columns = list(zip(*keys, strict=True))
        types: tuple[str, ...] = KEY_TYPES[row]
        leased = False
        if like is not None:
            columns += zip(*(guard.own for guard in guarded), strict=True)
            types += tuple(COLUMN_TYPES[row][name] for name in like.per_row)
        elif lock != "none":
            columns.append(tuple([guard.revision for guard in guarded]))
            types += ("bigint",)
            leases = [guard.lease for guard in guarded]
            leased = any(leases)
            if leased:
                columns += _asked(leases)
                types += tuple(LEASE_TYPES.values())
        counted, habit, values = habits.encode_columns((row, lock, like, leased), types, numbers, columns)
        found.append((GuardFragment(row, lock, like, leased, counted, habit), values))
    if bounds:
        numbers, *columns = zip(*bounds, strict=True)
        counted, habit, values = habits.encode_columns(
            TimeBoundsFragment, tuple(BOUND_TYPES.values()), numbers, columns
        )
        found.append((TimeBoundsFragment(counted, habit), values))
    return found


def _in_order(kind: tuple[RowType, LockMode, Expected | None]) -> tuple[Any, ...]:
    row, lock, like = kind
    return TABLE[row].name, lock != "update", lock, [] if like is None else sorted((*like.fields, *like.per_row))


def _asked(leases: Sequence[LeaseCheck | None]) -> list[tuple[Any, ...]]:
    """What is asked of leases, a column each."""
    return [
        tuple([lease and int(lease.requires) for lease in leases]),
        tuple([lease and lease.lease_id for lease in leases]),
        tuple([lease and lease.lease_epoch for lease in leases]),
    ]


def _written_roots(change: Change) -> set[tuple[RowType, tuple[Any, ...]]]:
    """The rows that the change writes, as far as it guards any of their kind."""
    guarded = {guard.row for guard in change.guards if guard.revision is not None or guard.expected is not None}
    written = {target(write) for write in change.writes if row_type_of(write) in guarded} if guarded else set()
    if change.template is not None:
        written.add((change.template.row, change.guards[0].key))
    return written


def _copied(
    changes: Sequence[Change], habits: ParameterShapes
) -> tuple[Sequence[Change], list[tuple[WriteFragment, Values]]]:
    """The copies of changes that write nothing else, and the changes without them; other copies are told singly."""
    if not any(type(write) is BulkInsert for change in changes for write in change.writes):
        return changes, []
    left: list[Change] = []
    found: list[tuple[WriteFragment, Values]] = []
    for no, change in enumerate(changes, start=1):
        writes = change.writes
        if all(type(write) is BulkInsert for write in writes):
            try:
                found += [_copies(no, change.id, write, habits) for write in writes if type(write) is BulkInsert]
                writes = ()
            except MixedTimeEncoding:
                writes = tuple(expand_bulk_inserts(writes))
        left.append(msgspec.structs.replace(change, writes=tuple(expand_bulk_inserts(writes))))
    return left, found


def _copies(no: int, change_id: int, copies: BulkInsert, habits: ParameterShapes) -> tuple[WriteFragment, Values]:
    row = type(copies.row)
    names, types = COLUMN_TYPES[row].keys(), tuple(COLUMN_TYPES[row].values())
    own = frozenset(place for place, name in enumerate(names) if name in copies.columns)
    habit, values = habits.encode_bulk_insert(
        (BulkInsert, row, own), types, bulk_insert_columns(copies, change_id), own
    )
    return BulkInsertFragment(row, habit), [no, *values]


def _rounds(changes: Sequence[Change]) -> list[list[tuple[int, int, Write]]]:
    """The writes with the number and id of their change, those that meet in a row one round after the other."""
    rounds: list[list[tuple[int, int, Write]]] = [[]]
    first = rounds[0]
    for no, change in enumerate(changes, start=1):
        writes = _as_guarded(change)
        if len(writes) == 1:
            first.append((no, change.id, writes[0]))
            continue
        # Two inserts of one row are refused wherever they stand.
        if all(type(write) is Insert for write in writes) or len({row_type_of(write) for write in writes}) == len(
            writes
        ):
            first += [(no, change.id, write) for write in writes]
            continue
        targets = [target(write) for write in writes]
        emptied = _emptied(targets)
        if not emptied and len(set(targets)) == len(targets):
            first += [(no, change.id, write) for write in writes]
            continue
        levels: dict[tuple[RowType, tuple[Any, ...]], int] = {}
        for write, place in zip(writes, targets, strict=True):
            meets = (other for other in levels if _may_overlap(place, other)) if place[0] in emptied else (place,)
            level = levels[place] = max((levels.get(other, -1) + 1 for other in meets), default=0)
            while level >= len(rounds):
                rounds.append([])
            rounds[level].append((no, change.id, write))
    return rounds


def _as_guarded(change: Change) -> tuple[Write, ...]:
    """Its writes; what has to be absent is inserted: of two who put it at once neither would be refused.

    Once only: what the change itself has written is there, and may be replaced.
    """
    writes = change.writes
    if Upsert not in map(type, writes):  # as in most changes
        return writes
    absent = {(guard.row, guard.key) for guard in change.guards if guard.revision is None and guard.expected is None}
    found: list[Write] = []
    for write in writes:
        if (type(write) is Upsert or type(write) is Insert) and (place := target(write)) in absent:
            absent.remove(place)
            found.append(Insert(write.row))
        else:
            found.append(write)
    return tuple(found)


def _emptied(targets: Sequence[tuple[RowType, tuple[Any, ...]]]) -> set[RowType]:
    """The kinds of rows that are deleted by the beginning of a key beside others of them: different keys may meet."""
    widths: dict[RowType, int] = {}
    return {row for row, key in targets if widths.setdefault(row, len(key)) != len(key)}


def _may_overlap(one: tuple[RowType, tuple[Any, ...]], other: tuple[RowType, tuple[Any, ...]]) -> bool:
    """Whether two keys, of which a deleted one may be the beginning of many, can name the same row."""
    (row, key), (other_row, other_key) = one, other
    return row is other_row and key[: len(other_key)] == other_key[: len(key)]


def _written(writes: list[tuple[int, int, Write]], habits: ParameterShapes) -> list[tuple[WriteFragment, Values]]:
    patches: defaultdict[tuple[RowType, tuple[str, ...], str | None], list[tuple[Any, ...]]] = defaultdict(list)
    rows: defaultdict[tuple[RowType, bool], list[tuple[int, int, msgspec.Struct]]] = defaultdict(list)
    deletes: defaultdict[tuple[RowType, int], list[tuple[Any, ...]]] = defaultdict(list)
    for no, change_id, write in writes:
        if type(write) is Patch:
            fields = write.fields
            shape = (write.row, tuple(fields), write.unless_set)
            patches[shape].append((no, write.key, tuple(fields.values()), change_id))
        elif type(write) is Delete:
            deletes[write.row, len(write.key)].append((no, *write.key))
        else:
            new: Any = write.row
            rows[type(new), type(write) is Upsert].append((no, change_id, new))
    found: list[tuple[WriteFragment, Values]] = []
    for (row, width), starts in _in_turn(deletes):
        numbers, *columns = zip(*starts, strict=True)
        types = KEY_TYPES[row][:width]
        known = habits.encode_columns((row, width), types, numbers, columns, always_list=0 if width else None)
        found.append((DeleteFragment(row, width, *known[:2]), known[2]))
    for (row, names, unless), given in _in_turn(patches):
        found.append(_patched(row, names, unless, given, habits))
    for (row, put), inserts in _in_turn(rows):
        found.append(_inserted(row, put, inserts, habits))
    return found


def _in_parts(pieces: list[tuple[WriteFragment, Values]]) -> list[list[tuple[WriteFragment, Values]]]:
    """A round, and apart from it the deletes of roots that begin like a key, where other changes write such roots.

    An execution goes with the edges that lead to it while the end of another one is noted on one of these. A single
    statement would write that row once, for one of the two.
    """
    emptied = {piece.row for piece, _ in pieces if type(piece) is DeleteFragment and piece.deletes_roots_by_prefix}
    if not emptied:
        return [pieces]
    emptied &= {piece.row for piece, _ in pieces if type(piece) is UpdateFragment or type(piece) is InsertFragment}
    later = [one for one in pieces if type(one[0]) is DeleteFragment and one[0].row in emptied]
    return [[one for one in pieces if one not in later], later] if later else [pieces]


def _in_turn(shapes: dict[S, list[Any]]) -> Iterable[tuple[S, list[Any]]]:
    """The shapes of a batch in an order that does not depend on that of its changes."""
    return sorted(shapes.items(), key=_by_name) if len(shapes) > 1 else shapes.items()


def _by_name(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    row, *rest = item[0]
    return TABLE[row].name, *(str(part) for part in rest)


def _patched(
    row: RowType, names: tuple[str, ...], unless: str | None, given: list[tuple[Any, ...]], habits: ParameterShapes
) -> tuple[WriteFragment, Values]:
    columns, types = _columns_of_patch(row, names)
    numbers, keys, fields, ids = zip(*given, strict=True)
    cells = [*zip(*keys, strict=True), *zip(*fields, strict=True)]
    if len(columns) > len(names):
        cells.append(ids)
    counted, habit, values = habits.encode_columns((row, names, unless), types, numbers, cells)
    return UpdateFragment(row, columns, unless, counted, habit), values


@lru_cache(maxsize=1000)
def _columns_of_patch(row: RowType, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that a patch of these fields sets, a root's revision among them, and the types of key and columns."""
    kinds = COLUMN_TYPES[row]
    if unknown := set(names) - kinds.keys():
        raise Unstorable(f"{TABLE[row].name} has no column {sorted(unknown)}")
    columns = names if CODEC[row].revision_ordinal is None else (*names, "revision")
    return columns, KEY_TYPES[row] + tuple(kinds[name] for name in columns)


def _inserted(
    row: RowType, put: bool, new: list[tuple[int, int, Any]], habits: ParameterShapes
) -> tuple[WriteFragment, Values]:
    numbers, ids, rows = zip(*new, strict=True)
    columns = list(zip(*map(astuple, rows), strict=True))
    codec = CODEC[row]
    if codec.revision_ordinal is not None:
        columns[codec.revision_ordinal] = ids
    types = tuple(COLUMN_TYPES[row].values())
    counted, habit, values = habits.encode_columns(
        (row, put, None), types, numbers, columns, always_list=codec.key_ordinals[0]
    )
    return InsertFragment(row, put, counted, habit), values


def _formed(changes: Sequence[Change], habits: ParameterShapes) -> list[tuple[WriteFragment, Values]]:
    forms: defaultdict[RowTemplate, list[tuple[int, int, tuple[Any, ...]]]] = defaultdict(list)
    for no, change in enumerate(changes, start=1):
        if change.template is not None:
            forms[change.template].append((no, change.id, change.guards[0].key))
    found: list[tuple[WriteFragment, Values]] = []
    for form, roots in forms.items():
        numbers, ids, keys = zip(*roots, strict=True)
        types = (*KEY_TYPES[form.row], "bigint")
        counted, habit, values = habits.encode_columns(form, types, numbers, [*zip(*keys, strict=True), ids])
        found.append((TemplateFragment(form, counted, habit), values))
    return found


def _told(changes: Sequence[Change], habits: ParameterShapes) -> tuple[EventFragment, Values] | None:
    events = [(no, event) for no, change in enumerate(changes, start=1) for event in change.events]
    if not events:
        return None
    if len(events) + len(changes) > MAX_EVENTS_PER_BATCH:  # a form tells one event
        raise Unstorable(f"{len(events)} events are more than one batch may have")
    numbers, told = zip(*events, strict=True)
    columns = zip(*map(astuple, told), strict=True)
    counted, habit, values = habits.encode_columns(Event, tuple(EVENT_TYPES.values()), numbers, columns)
    return EventFragment(counted, habit), values


def queues_written(changes: Sequence[Change]) -> set[QueueKey]:
    """The lines that the changes write to."""
    found: set[QueueKey] = set()
    for change in changes:
        for write in change.writes:
            if isinstance(write, Delete):
                continue
            values = write.fields.values() if isinstance(write, Patch) else astuple(write.row)
            found |= {value for value in values if type(value) is QueueKey}
    return found
