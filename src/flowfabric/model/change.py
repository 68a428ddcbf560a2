"""A change: the data in which a rule says what shall be, and on what that was decided.

A rule returns a `Decision`: an answer and, mostly, a `Change`. A change touches the rows of one partition. Its guards
name the roots it was decided on; they stand apart from its writes, because a step memo or a progress note is fenced by
an execution that it does not write. The store checks every guard and writes everything or nothing; it never asks why.

Instants are given as `FromNow(offset)`: the store adds its own clock, read once for the commit, so that no caller's
clock ever decides what is stored. `not_before` and `not_after` let a change decided on an estimate of that clock be
refused when the estimate was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, QueueKey

A = TypeVar("A", covariant=True)


class FromNow(msgspec.Struct, frozen=True, gc=False):
    """An instant (or a rank) relative to the store's clock at the commit, in milliseconds."""

    offset: int = 0


NOW = FromNow(0)


class LeaseRequirement(IntEnum):
    """What a guard asks of the lease."""

    LIVE = 1  # this lease, and its end is in the future
    EXPIRED = 2  # this lease, and its end has come


_LIVE = LeaseRequirement.LIVE  # asked for by every end; to find a member in its class takes ten times as long


class LeaseCheck(msgspec.Struct, frozen=True, gc=False):
    """The lease a change was decided on, judged by the store's clock at the commit."""

    requires: LeaseRequirement
    lease_id: str
    lease_epoch: int


class Expected(msgspec.Struct, frozen=True, eq=False):
    """What a root that nobody looked at is supposed to hold in these columns; the others may hold anything.

    A rule that knows how a row was left, and who may have moved it since, decides on that; the store proves it.
    In the columns `own` each root is supposed to hold something else, which its guard says.
    """

    fields: dict[str, Any]
    per_row: tuple[str, ...] = ()


class Guard(msgspec.Struct, frozen=True, gc=False):
    """A root as it was seen: its revision, or its absence (`revision=None`); or unseen, as it is supposed to be."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]
    revision: int | None
    lease: LeaseCheck | None = None
    expected: Expected | None = None  # in place of a revision
    expected_values: tuple[Any, ...] = ()  # what the root is supposed to hold in the columns that `like` leaves to it


class Insert(msgspec.Struct, frozen=True, gc=False):
    """A row that did not exist. Integer fields may hold `FromNow` in place of an instant."""

    row: msgspec.Struct


class Upsert(msgspec.Struct, frozen=True, gc=False):
    """A row as it will be, whether or not it existed. Integer fields may hold `FromNow`."""

    row: msgspec.Struct


class Patch(msgspec.Struct, frozen=True, gc=False):
    """The fields of one row that change; a row that does not exist is left alone.

    `unless` names a field: the patch is passed over when that field is already set (the first close wins).
    """

    row: type[msgspec.Struct]
    key: tuple[Any, ...]
    fields: dict[str, Any]
    unless_set: str | None = None


class Delete(msgspec.Struct, frozen=True, gc=False):
    """All rows whose key begins like this."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]


class BulkInsert(msgspec.Struct, frozen=True, gc=False):
    """Rows that did not exist, like `row` but for the columns in `own`, of which each lists a value a row.

    Thousands that are created together differ in little; so only that has to be made, carried and encoded for each.
    """

    row: msgspec.Struct
    columns: dict[str, Sequence[Any]]

    def __post_init__(self) -> None:
        if len(set(map(len, self.columns.values()))) != 1:
            raise ValueError("copies list as many values of one column as of another")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def inserts(self) -> list[Insert]:
        """The same, row by row."""
        rows = zip(*self.columns.values(), strict=True)
        return [
            Insert(msgspec.structs.replace(self.row, **dict(zip(self.columns, values, strict=True)))) for values in rows
        ]


RowWrite = Insert | Upsert | Patch | Delete
Write = RowWrite | BulkInsert


class ColumnRef(msgspec.Struct, frozen=True, gc=False):
    """In a form: the value that the root has in this column."""

    column: str


class RowTemplate(msgspec.Struct, frozen=True, eq=False):
    """What a change writes and tells when that is the same for every root, but for what the root itself says.

    A rule that finds an ordinary row answers with a form in place of writes, and a store fills it in by itself, for
    many rows at once, without the values having to travel. Values are constants, `FromNow`, and `Own` for columns
    that the form leaves as they are. `spelled_out` gives the change in full.
    """

    row: type[msgspec.Struct]
    fields: dict[str, Any]
    event: dict[str, Any]


def as_template(change: Change) -> RowTemplate:
    """The form of a change that a rule made of a row which holds `Own` where it may hold anything."""
    match change:
        case Change(writes=(Patch(row=root, fields=fields),), events=(event,)):
            return RowTemplate(root, fields, msgspec.structs.asdict(event))
    raise TypeError("a form patches its root and tells one event, nothing else")


class Change(msgspec.Struct, frozen=True, gc=False):
    """Guards, writes and events of one partition that hold together."""

    guards: tuple[Guard, ...]
    writes: tuple[Write, ...] = ()
    events: tuple[Event, ...] = ()
    template: RowTemplate | None = None  # of further writes about the first guard's root, and of what is told about it
    queues: tuple[QueueKey, ...] = ()  # to be known from now on, though nothing stands there yet
    not_before: int | None = None
    not_after: int | None = None
    id: int = 0  # minted by the engine; becomes the revision of every root that the change writes


def expand(change: Change, root: msgspec.Struct) -> Change:
    """A change with the writes and the event that its form means for this root, in place of the form."""
    form = change.template
    if form is None:
        return change

    def filled(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: getattr(root, value.column) if type(value) is ColumnRef else value for name, value in values.items()
        }

    patch = Patch(form.row, change.guards[0].key, filled(form.fields))
    told = Event(**filled(form.event))
    return msgspec.structs.replace(change, writes=(patch, *change.writes), events=(told, *change.events), template=None)


def merge_changes(*changes: Change) -> Change:
    """Changes of one partition that hold together; a root that several rely on is guarded once."""
    guards = {(guard.row, guard.key): guard for change in reversed(changes) for guard in change.guards}
    return Change(
        guards=tuple(reversed(guards.values())),
        writes=tuple(write for change in changes for write in change.writes),
        events=tuple(event for change in changes for event in change.events),
    )


def outcome_of(change: Change) -> str | None:
    """The end that a change brings about first, if it does."""
    if change.template is not None:
        outcome: str | None = change.template.event["outcome"]
        return outcome
    return change.events[0].outcome if change.events else None


def seen(row: Execution, lease: LeaseCheck | None = None) -> Guard:
    """The execution as the rule saw it."""
    return Guard(Execution, (row.execution_id,), row.revision, lease)


def absent(row: type[msgspec.Struct], *key: Any) -> Guard:
    """There is no such row."""
    return Guard(row, key, None)


def expect(row: type[msgspec.Struct], expected: Expected, *key: Any, expected_values: tuple[Any, ...] = ()) -> Guard:
    """A root that looks like this."""
    return Guard(row, key, None, expected=expected, expected_values=expected_values)


def live(row: Execution) -> LeaseCheck:
    """The row's lease, still running when the change is written."""
    return LeaseCheck(_LIVE, row.lease_id or "", row.lease_epoch)


def expired(row: Execution) -> LeaseCheck:
    """The row's lease, past its end when the change is written."""
    return LeaseCheck(LeaseRequirement.EXPIRED, row.lease_id or "", row.lease_epoch)


def lease_event(
    row: Execution, name: str, *, reason: str | None = None, outcome: str | None = None, details: str | None = None
) -> Event:
    """An entry of the lease history about the row's current lease; with an `outcome`, the completion as well."""
    return Event(
        execution_id=row.execution_id,
        namespace=row.namespace,
        tags=row.tags,
        flow_id=row.flow_id,
        lease=name,
        lease_id=row.lease_id,
        lease_epoch=row.lease_epoch,
        attempt_id=row.attempt_id,
        attempt_index=row.attempt_index,
        worker_id=row.worker_id,
        worker_instance_id=row.worker_instance_id,
        reason=reason,
        outcome=outcome,
        details=details,
    )


def from_now(offset: int) -> int:
    """An instant `offset` milliseconds from the commit, to stand in an integer field of an inserted row."""
    return FromNow(offset)  # type: ignore[return-value]
