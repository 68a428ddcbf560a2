"""Changes: data that says what to write, and on which state that was decided.

A rule returns a `Decision`: an answer and usually a `Change`. A change touches the rows of one partition. Its guards
name the rows it was decided on. They are separate from its writes, because a step memo or a progress note is fenced by
an execution that it does not write. The store checks every guard and writes everything or nothing; it never knows why.

Instants are given as `FromNow(offset)` of the store's clock (`model.instant`). A change that was decided on an estimate
of that clock carries `not_before` and `not_after`, and is refused if the estimate was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import FromNow

A = TypeVar("A", covariant=True)


class LeaseRequirement(IntEnum):
    """What a guard requires of the lease."""

    LIVE = 1  # this lease, not expired yet
    EXPIRED = 2  # this lease, expired


_LIVE = LeaseRequirement.LIVE  # hot path: a module constant is found faster than an enum member


class LeaseCheck(msgspec.Struct, frozen=True, gc=False):
    """The lease a change was decided on, checked by the store's clock at the commit."""

    requires: LeaseRequirement
    lease_id: str
    lease_epoch: int


class Expected(msgspec.Struct, frozen=True, eq=False):
    """The values that a row that was not loaded is expected to have in these columns; other columns may have any.

    A rule that knows how a row was left, and who may have changed it since, decides on that expectation; the store
    verifies it. Each guard gives its own values for the columns in `per_row`.
    """

    fields: dict[str, Any]
    per_row: tuple[str, ...] = ()


class Guard(msgspec.Struct, frozen=True, gc=False):
    """A row as it was loaded: its revision, or its absence (`revision=None`); or not loaded, as it is expected."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]
    revision: int | None
    lease: LeaseCheck | None = None
    expected: Expected | None = None  # instead of a revision
    expected_values: tuple[Any, ...] = ()  # values of the columns in `expected.per_row`


class Insert(msgspec.Struct, frozen=True, gc=False):
    """A draft of a row that does not exist yet."""

    row: msgspec.Struct


class Upsert(msgspec.Struct, frozen=True, gc=False):
    """A draft of a row as it will be, whether or not it exists."""

    row: msgspec.Struct


class Patch(msgspec.Struct, frozen=True, gc=False):
    """The columns of one row that change; a missing row is ignored.

    `unless_set` names a column: the patch is skipped if that column is set already (the first close wins).
    """

    row: type[msgspec.Struct]
    key: tuple[Any, ...]
    fields: dict[str, Any]
    unless_set: str | None = None


class Delete(msgspec.Struct, frozen=True, gc=False):
    """Delete all rows whose key starts with this prefix."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]


class BulkInsert(msgspec.Struct, frozen=True, gc=False):
    """Rows that do not exist yet, equal to `row` except for `columns`, which list one value per row.

    Thousands of rows created together differ in few columns; only these are built, sent and encoded per row.
    """

    row: msgspec.Struct
    columns: dict[str, Sequence[Any]]

    def __post_init__(self) -> None:
        if len(set(map(len, self.columns.values()))) != 1:
            raise ValueError("a bulk insert needs equally many values in every column")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def inserts(self) -> list[Insert]:
        """Return the same as single inserts."""
        rows = zip(*self.columns.values(), strict=True)
        return [
            Insert(msgspec.structs.replace(self.row, **dict(zip(self.columns, values, strict=True)))) for values in rows
        ]


RowWrite = Insert | Upsert | Patch | Delete
Write = RowWrite | BulkInsert

PATCHED_ROWS = (Execution,)  # have columns that are written without a guard (renewals), so they are never replaced


class ColumnRef(msgspec.Struct, frozen=True, gc=False):
    """In a template: the value that the row has in this column."""

    column: str


class Parameter(msgspec.Struct, frozen=True, gc=False):
    """In a template: a value that comes with the request, for each row or for all rows; never null."""

    name: str


class Plus(msgspec.Struct, frozen=True):
    """In a template: the sum of two values; null if one of them is null."""

    left: Any
    right: Any


class IfSet(msgspec.Struct, frozen=True):
    """In a template: `then` if the row's column is not null, else `otherwise`."""

    column: str
    then: Any
    otherwise: Any


class Condition(msgspec.Struct, frozen=True, eq=False):
    """What a row must be for a template to be applied to it: values that columns have, and instants yet to come."""

    equal: dict[str, Any]
    future: tuple[str, ...] = ()


class RowTemplate(msgspec.Struct, frozen=True, eq=False):
    """The writes and the event of a change that are the same for every row, except for values of the row itself.

    A rule that finds an ordinary row answers with a template instead of writes. The store applies it to many rows at
    once, without sending the values. A store compiles a template once; it may also interpret it (`template_fields`,
    `template_event`, `holds`). A value is a constant, or one of `FromNow`, `ColumnRef`, `Parameter`, `Plus`, `IfSet`.

    * `fields` are computed from the row as it is before any of them is written.
    * `event` is computed from the row as it is afterwards, without parameters.
    * `condition` is checked at the store's time. A row that does not meet it is neither written nor emits an event.

    The template of a change has no parameters; `expand` returns the full change. A template does not set the revision:
    the store does, to the id of the change or the revision of the claim. A renewal has none and leaves it as it is.
    """

    row: type[msgspec.Struct]
    fields: dict[str, Any]
    event: dict[str, Any]
    condition: Condition | None = None


def evaluate(value: Any, row: msgspec.Struct | None, parameters: Mapping[str, Any]) -> Any:
    """Return a template's value for this row; an instant stays a `FromNow`."""
    kind = type(value)
    if kind is ColumnRef:
        return getattr(row, value.column)
    if kind is Parameter:
        return parameters[value.name]
    if kind is IfSet:
        chosen = value.otherwise if getattr(row, value.column) is None else value.then
        return evaluate(chosen, row, parameters)
    if kind is Plus:
        left, right = evaluate(value.left, row, parameters), evaluate(value.right, row, parameters)
        if left is None or right is None:
            return None
        return FromNow(left.offset + right) if type(left) is FromNow else left + right
    return value


def at(value: Any, now: int) -> Any:
    """Return a value at the store's time: the instant for a `FromNow`, any other value as it is."""
    return now + value.offset if type(value) is FromNow else value


_NO_PARAMETERS: dict[str, Any] = {}


def template_fields(
    template: RowTemplate, row: msgspec.Struct, parameters: Mapping[str, Any] = _NO_PARAMETERS
) -> dict[str, Any]:
    """Return the fields that a template writes to this row."""
    (constants, computed), _ = _split(template)
    return constants | {name: evaluate(value, row, parameters) for name, value in computed}


def template_event(template: RowTemplate, written: msgspec.Struct) -> Event:
    """Return the event that a template emits for a row that it has written."""
    _, (constants, computed) = _split(template)
    return Event(**constants, **{name: evaluate(value, written, _NO_PARAMETERS) for name, value in computed})


@lru_cache(1024)
def _split(template: RowTemplate) -> tuple[tuple[dict[str, Any], list[tuple[str, Any]]], ...]:
    """Return the constants of the fields and of the event, each with the values that have to be computed."""
    computed = (ColumnRef, Parameter, Plus, IfSet)
    return tuple(
        (
            {name: value for name, value in values.items() if type(value) not in computed},
            [(name, value) for name, value in values.items() if type(value) in computed],
        )
        for values in (template.fields, template.event)
    )


def holds(condition: Condition, row: msgspec.Struct, parameters: Mapping[str, Any], now: int) -> bool:
    """True if the row meets the condition of a template at this time."""
    return all(
        getattr(row, name) == evaluate(value, row, parameters) for name, value in condition.equal.items()
    ) and all((getattr(row, name) or 0) > now for name in condition.future)


def as_template(change: Change) -> RowTemplate:
    """Return the template of a change that was decided on a row with `ColumnRef` in its unknown columns."""
    match change:
        case Change(writes=(Patch(row=row, fields=fields),), events=(event,)):
            return RowTemplate(row, fields, msgspec.structs.asdict(event))
    raise TypeError("a template patches its row and emits one event, nothing else")


class Change(msgspec.Struct, frozen=True, gc=False):
    """Guards, writes and events of one partition that are committed together."""

    guards: tuple[Guard, ...]
    writes: tuple[Write, ...] = ()
    events: tuple[Event, ...] = ()
    template: RowTemplate | None = None  # further writes of the first guard's row, and its event
    queues: tuple[QueueKey, ...] = ()  # registered although no row is in them yet
    not_before: int | None = None
    not_after: int | None = None
    id: int = 0  # minted by the engine; the new revision of every row that the change writes


def expand(change: Change, row: msgspec.Struct) -> Change:
    """Return the change with its template replaced by the writes and the event for this row."""
    template = change.template
    if template is None:
        return change
    fields = template_fields(template, row)
    patch = Patch(template.row, change.guards[0].key, fields)
    emitted = template_event(template, msgspec.structs.replace(row, **fields))
    return msgspec.structs.replace(
        change, writes=(patch, *change.writes), events=(emitted, *change.events), template=None
    )


def merge_changes(*changes: Change) -> Change:
    """Merge changes of one partition into one; a row that several rely on is guarded once, as the first one does."""
    guards = {(guard.row, guard.key): guard for change in reversed(changes) for guard in reversed(change.guards)}
    return Change(
        guards=tuple(reversed(guards.values())),
        writes=tuple(write for change in changes for write in change.writes),
        events=tuple(event for change in changes for event in change.events),
        queues=tuple(dict.fromkeys(queue for change in changes for queue in change.queues)),
        not_before=max((change.not_before for change in changes if change.not_before is not None), default=None),
        not_after=min((change.not_after for change in changes if change.not_after is not None), default=None),
    )


def outcome_of(change: Change) -> str | None:
    """Return the first terminal outcome that a change emits, if any."""
    if change.template is not None:
        outcome: str | None = change.template.event["outcome"]
        return outcome
    return change.events[0].outcome if change.events else None


def seen(row: Execution, lease: LeaseCheck | None = None) -> Guard:
    """Return a guard on the execution as it was loaded."""
    return Guard(Execution, (row.execution_id,), row.revision, lease)


def absent(row: type[msgspec.Struct], *key: Any) -> Guard:
    """Return a guard on the absence of a row."""
    return Guard(row, key, None)


def expect(row: type[msgspec.Struct], expected: Expected, *key: Any, expected_values: tuple[Any, ...] = ()) -> Guard:
    """Return a guard on a row that was not loaded."""
    return Guard(row, key, None, expected=expected, expected_values=expected_values)


def live(row: Execution) -> LeaseCheck:
    """Require that the row's lease is live at the commit."""
    return LeaseCheck(_LIVE, row.lease_id or "", row.lease_epoch)


def expired(row: Execution) -> LeaseCheck:
    """Require that the row's lease has expired at the commit."""
    return LeaseCheck(LeaseRequirement.EXPIRED, row.lease_id or "", row.lease_epoch)


def lease_event(
    row: Execution, name: str, *, reason: str | None = None, outcome: str | None = None, details: str | None = None
) -> Event:
    """Return an event of the lease history about the row's current lease; with an `outcome`, also the completion."""
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
