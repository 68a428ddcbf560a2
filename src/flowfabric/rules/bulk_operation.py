"""Bulk operations: start, pin a page, record what was done to it, cancel, and delete after a while.

Each change guards the operation's row by its revision. Two sweepers that work on the same page do the same things to
the same lives, and only one of them records the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Cancelled, Changed
from flowfabric.model.bulk_operation import BulkOperation, BulkState, BulkVerb, PinnedExecution
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.execution_filter import ExecutionFilter
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import cancel, fences, operator
from flowfabric.rules.execution.fences import Fence

RETENTION_MS = 30 * 24 * 60 * 60 * 1000  # an ended operation is kept so long

Position = tuple[int, str]


class BulkRequest(msgspec.Struct, frozen=True):
    """A bulk operation that is asked for."""

    operation_id: str
    verb: BulkVerb
    criteria: ExecutionFilter
    ceiling: int
    reason: str
    requested_by: str
    priority: int | None = None


class BulkStatus(msgspec.Struct, frozen=True):
    """A bulk operation as shown to readers."""

    operation_id: str
    verb: BulkVerb
    criteria: ExecutionFilter
    ceiling: int
    state: BulkState
    created_at: int
    ended_at: int | None
    reason: str
    requested_by: str
    priority: int | None
    changed: int
    refused: int
    last_refusal: str | None


def status(row: BulkOperation) -> BulkStatus:
    """Return the operation as shown to readers."""
    return view_of(BulkStatus, row, criteria=criteria_of(row))


def criteria_of(row: BulkOperation) -> ExecutionFilter:
    """Return the filter. Raises `Corruption` if the stored text is not valid."""
    try:
        return msgspec.json.decode(row.criteria, type=ExecutionFilter)
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"bulk_operation: criteria: {fault}") from fault


def page_of(row: BulkOperation) -> list[PinnedExecution]:
    """Return the pinned executions."""
    return [] if row.page is None else msgspec.json.decode(row.page, type=list[PinnedExecution])


def position_of(row: BulkOperation) -> Position | None:
    """Return the position after which the next page is searched."""
    if row.after_created_at is None or row.after_execution_id is None:
        return None
    return row.after_created_at, row.after_execution_id


def is_open_to(verb: BulkVerb, row: Execution) -> bool:
    """True if the verb can be applied to an execution in this state."""
    match verb:
        case BulkVerb.CANCEL:
            return row.lifecycle_phase is not LifecyclePhase.TERMINAL
        case BulkVerb.REPLAY:
            return row.lifecycle_phase is LifecyclePhase.TERMINAL
        case BulkVerb.PRIORITY:
            is_runnable = row.lifecycle_phase is LifecyclePhase.RUNNABLE
            return is_runnable and row.eligibility_state is EligibilityState.ELIGIBLE_NOW


def start(row: BulkOperation | None, ask: BulkRequest) -> Decision[str]:
    """Record a new operation; the same request again changes nothing, another one under this id is a conflict."""
    criteria = msgspec.json.encode(ask.criteria).decode()
    if row is not None:
        same = (row.verb, row.criteria, row.ceiling, row.reason, row.priority)
        if same == (ask.verb, criteria, ask.ceiling, ask.reason, ask.priority):
            return Decision(row.operation_id)
        return refuse(errors.IdempotencyConflict("operation_id: in use for another bulk operation"))
    made = view_of(BulkOperation, ask, criteria=criteria, state=BulkState.RUNNING, created_at=NOW, due_at=NOW)
    guard = Guard(BulkOperation, (ask.operation_id,), None)
    return Decision(ask.operation_id, Change(guards=(guard,), writes=(Insert(made),)))


def pin_page(
    row: BulkOperation | None,
    expected: BulkOperation,
    pinned: Sequence[PinnedExecution],
    after: Position | None,
) -> Decision[bool]:
    """Pin the next page, or end the operation if nothing is left; False if another process was first.

    `after` is the position up to which the page was searched; None means that nothing is left to search.
    """
    if row is None or row.revision != expected.revision or row.state is not BulkState.RUNNING or row.page is not None:
        return Decision(False)
    fields: dict[str, object] = {}
    if pinned:
        fields["page"] = msgspec.json.encode(list(pinned)).decode()
    if after is not None:
        fields |= {"after_created_at": after[0], "after_execution_id": after[1]}
    elif pinned:
        fields |= {"after_created_at": 0, "after_execution_id": ""}  # the next search finds nothing
    else:
        fields |= _ended(BulkState.COMPLETED)
    return Decision(True, _patch(row, fields))


def record_page(
    row: BulkOperation | None, expected: BulkOperation, changed: int, refused: int, refusal: str | None
) -> Decision[bool]:
    """Record what was done to the pinned page; False if another process has recorded it."""
    if row is None or row.page is None or row.page != expected.page:
        return Decision(False)
    if (row.after_created_at, row.after_execution_id) != (expected.after_created_at, expected.after_execution_id):
        return Decision(False)
    fields: dict[str, object] = {
        "page": None,
        "changed": row.changed + changed,
        "refused": row.refused + refused,
    }
    if refusal is not None:
        fields["last_refusal"] = refusal
    is_full = row.changed + changed + row.refused + refused >= row.ceiling
    if row.state is BulkState.RUNNING and is_full:
        fields |= _ended(BulkState.COMPLETED)
    return Decision(True, _patch(row, fields))


def cancel_life(row: Execution | None, life: int, reason: str) -> Decision[Cancelled]:
    """Cancel an execution unless it was replayed since it was pinned."""
    if row is not None and row.replay_count != life:
        return refuse(errors.ConflictError("it was replayed meanwhile", execution_id=row.execution_id))
    return cancel.cancel(row, Fence(), fences.OPERATOR_OVERRIDE, reason)


def prioritise_life(row: Execution | None, life: int, priority: int) -> Decision[Changed]:
    """Change the priority of an execution unless it was replayed since it was pinned."""
    if row is not None and row.replay_count != life:
        return refuse(errors.ConflictError("it was replayed meanwhile", execution_id=row.execution_id))
    return operator.change_priority(row, priority)


def stop(row: BulkOperation | None) -> Decision[bool]:
    """Cancel a running operation: what was done stays done, and no further page is begun. False if it has ended."""
    if row is None:
        return refuse(errors.NotFound("operation"))
    if row.state is not BulkState.RUNNING:
        return Decision(False)
    return Decision(True, _patch(row, _ended(BulkState.CANCELLED)))


def delete_if_due(row: BulkOperation | None, now: int) -> Decision[bool]:
    """Delete an operation that ended long ago."""
    if row is None or row.state is BulkState.RUNNING or row.due_at is None or row.due_at > now:
        return Decision(False)
    return Decision(True, Change(guards=(_seen(row),), writes=(Delete(BulkOperation, (row.operation_id,)),)))


def _ended(state: BulkState) -> dict[str, object]:
    return {"state": state, "ended_at": NOW, "due_at": FromNow(RETENTION_MS)}


def _seen(row: BulkOperation) -> Guard:
    return Guard(BulkOperation, (row.operation_id,), row.revision)


def _patch(row: BulkOperation, fields: dict[str, object]) -> Change:
    return Change(guards=(_seen(row),), writes=(Patch(BulkOperation, (row.operation_id,), fields),))
