"""Leave: a durable function stops waiting for operations, for good.

A wait that was cancelled by the function must not swallow anything afterwards. The change that records it as left
closes its gate as well; a message that the gate has received meanwhile goes back to the head of its mailbox, or to the
next open gate of that mailbox. A gate that is not open yet may be about to be opened, because the call that was
cancelled is still under way: the change writes the suspension row, so that this call is decided again and refused. A
race records its winner in the same change, so that a replay never sees two winners.

The gate of an approval stays open: only the await is left, while the question and its links stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateKind, GateMemo, GateOutcome, MailboxMessage, StepMemo, StepState, step_row_name
from flowfabric.model.instant import NOW, Draft
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import mailbox
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension import state as wait_state

LEFT_RESULT = b"null"


class LeftOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that the function left: a wait by its gate, or a step (or another await) by name and occurrence."""

    name: str
    occurrence: int = 0
    is_gate: bool = True
    number: int | None = None

    @property
    def memo_name(self) -> str:
        """The name of the memo that says that it was left."""
        return step_row_name(self.name, StepState.LEFT)


class LeaveRows(msgspec.Struct, frozen=True):
    """The rows that leaving is decided on."""

    row: Execution | None
    root: Suspension | None = None
    known: StepMemo | None = None  # the memo to record with it, if one is stored already
    left: Sequence[StepMemo] = ()  # memos of operations that were left before
    gate_memos: Mapping[str, GateMemo] = {}


def leave_gates(
    rows: LeaveRows, operations: Sequence[LeftOperation], memo: StepMemo | None, fence: Fence, now: int
) -> Decision[StepMemo | None]:
    """Record operations as left and close their gates; with `memo`, record that too, or return the stored one."""
    row = rows.row
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if rows.known is not None:  # the losers were left in the change that recorded it
        return Decision(rows.known)
    left_before = {(known.name, known.occurrence) for known in rows.left}
    new = [operation for operation in operations if (operation.memo_name, operation.occurrence) not in left_before]
    if not new and memo is None:
        return Decision(None)
    writes: tuple[Write, ...] = tuple(Insert(_left_memo(row, operation)) for operation in new)
    guards: tuple[Guard, ...] = (seen(row, live(row)),)
    if memo is not None:
        writes += (Insert(msgspec.structs.replace(memo, recorded_at=NOW)),)
    if names := [one.name for one in new if one.is_gate]:
        guards += (wait_state.seen_suspension(rows.root, row.execution_id),)
        root = wait_state.suspension_or_new(rows.root, row)
        writes += _close(row, root, names, rows.gate_memos, now) or (Upsert(root),)
    marks = {"has_steps": True} | ({"has_waits": True} if names else {})
    if any(not getattr(row, mark) for mark in marks):
        writes += (Patch(Execution, (row.execution_id,), marks),)
    change = Change(guards=guards, writes=writes)
    return Decision(lambda now: None if memo is None else msgspec.structs.replace(memo, recorded_at=now), change)


def _left_memo(row: Execution, operation: LeftOperation) -> StepMemo[Draft]:
    return StepMemo(
        execution_id=row.execution_id,
        name=operation.memo_name,
        occurrence=operation.occurrence,
        attempt_index=row.attempt_index or 0,
        recorded_at=NOW,
        result=LEFT_RESULT,
        encoding="json",
        number=operation.number,
    )


def _close(
    row: Execution, root: Suspension, names: Sequence[str], memos: Mapping[str, GateMemo], now: int
) -> tuple[Write, ...]:
    """Close these gates and return the messages that they received."""
    gates = wait_state.open_gates(root)
    closed = [name for name in names if name in gates and gates[name].kind is not GateKind.SIGNALS]
    received = [memo for name in names if (memo := memos.get(name)) is not None and memo.mailbox is not None]
    if not closed and not received:
        return ()
    remaining = {name: gate for name, gate in gates.items() if name not in closed}
    writes: tuple[Write, ...] = tuple(Delete(GateMemo, (row.execution_id, memo.gate)) for memo in received)
    # Older messages have no number; they were received in the order in which they were sent.
    order = sorted(received, key=lambda memo: (memo.message_number or 0, memo.closed_at, memo.number or 0))
    returned = [returned_message(memo) for memo in order]
    for name, gate in list(remaining.items()):
        message = next((one for one in returned if mailbox.takes(gate, one.mailbox, now)), None)
        if message is not None:
            returned.remove(message)
            writes += (Insert(gate_rules.gate_memo(row.execution_id, name, gate, GateOutcome.SATISFIED, message, NOW)),)
            del remaining[name]
    fields = wait_state.gate_columns(remaining)
    if returned:
        fields["mail"], unread = mailbox.return_to_head(root, returned)
        writes += tuple(Insert(message) for message in unread)
    return (Upsert(msgspec.structs.replace(root, **fields)), *writes)


def returned_message(memo: GateMemo) -> MailboxMessage:
    """Return the message that a gate received, without its place in the mailbox."""
    return MailboxMessage(
        execution_id=memo.execution_id,
        mailbox=memo.mailbox or "",
        seq=0,
        message_id=memo.message_id or "",
        sent_at=memo.closed_at,
        sender=memo.sender or "",
        payload=memo.payload,
        payload_encoding=memo.payload_encoding,
        number=memo.message_number,
        wants_reply=memo.wants_reply,
    )
