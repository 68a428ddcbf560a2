"""Park: suspend a durable function until one of its gates closes.

The change that parks also opens the gates that are new, so that a function with a hundred waits costs one change. A new
gate may close at once: its message has arrived, or its children have ended. Then all gates are opened or closed as they
are, and the function continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import Change, Delete, Upsert, Write, lease_event, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion, Gate, GateKind, GateMemo, GateOutcome, MailboxMessage
from flowfabric.model.instant import Draft
from flowfabric.model.suspension import NO_TIMEOUT, Suspension, TimeoutBehavior
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable.gates import ClosedGates, GateArgs, NeedsMessages
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules

MAX_DESCRIBED = 5  # gates that the text of a parked execution names


class ParkedExecution(msgspec.Struct, frozen=True):
    """The execution waits and its lease is released."""

    suspension_id: str
    holder: HandleFields


class GatesClosed(msgspec.Struct, frozen=True):
    """The memos of gates that have closed, by name; nothing was parked."""

    memos: dict[str, GateMemo]


class GatesReady(msgspec.Struct, frozen=True):
    """Gates that have closed already; nothing was parked."""

    gates: tuple[str, ...]


class ParkRows(msgspec.Struct, frozen=True):
    """The rows that parking is decided on."""

    row: Execution | None
    root: Suspension | None
    memos: Mapping[str, GateMemo] = {}  # the gates that have closed, by name
    messages: Sequence[MailboxMessage] = ()  # the first unread ones of the mailboxes of new gates
    ends: Sequence[ChildCompletion] = ()  # children of new gates that have ended
    left: frozenset[str] = frozenset()  # new gates that the function has left


class _Opened(msgspec.Struct, frozen=True):
    """The result of opening the new gates: those that are open, those that closed at once, and the writes."""

    open: dict[str, Gate]
    closed: dict[str, tuple[Gate, GateOutcome, MailboxMessage[Draft] | None]]
    fields: dict[str, Any]
    writes: tuple[Write, ...]


def park(
    rows: ParkRows,
    new: Sequence[GateArgs],
    names: tuple[str, ...],
    *,
    suspension_id: str,
    reason_code: str,
    fence: Fence,
    holder: HandleFields,
    now: int,
    only_open: bool = False,
) -> Decision[ParkedExecution | GatesClosed | NeedsMessages]:
    """Open the new gates, and release the lease until one of all these gates closes.

    If one of them has closed or expired, or closes as it is opened, the function continues at once. With `only_open` it
    does in any case.
    """
    row = rows.row
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    gates = wait_state.open_gates(rows.root)
    for args in new:
        if (known := gates.get(args.name)) is not None and known.kind is not args.kind:
            return refuse(errors.InvalidInput(f"gate {args.name}: it is a {known.kind.value} gate"))
    names = tuple(dict.fromkeys((*names, *(args.name for args in new))))
    unopened = [args for args in new if args.name not in gates and args.name not in rows.memos]
    if late := [args.name for args in unopened if args.name in rows.left]:
        return refuse(errors.InvalidInput(f"gates: {', '.join(late)} was left before"))
    known_names = {*gates, *rows.memos, *(args.name for args in unopened)}
    unknown = [name for name in names if name not in known_names]
    if unknown or not names:
        return refuse(errors.InvalidInput(f"gates: {', '.join(unknown) or 'none'} to wait for"))
    if not unopened and (rows.memos or only_open):
        return Decision(GatesClosed({name: rows.memos[name] for name in names if name in rows.memos}))
    opened = _open(rows, row, unopened, now)
    if isinstance(opened, NeedsMessages):
        return Decision(opened)
    before = wait_state.suspension_or_new(rows.root, row)
    suspension = msgspec.structs.replace(before, **opened.fields, **wait_state.gate_columns({**gates, **opened.open}))
    guards = (seen(row, live(row)), wait_state.seen_suspension(rows.root, row.execution_id))
    closed = opened.closed | gate_rules.expired_gates(suspension, names, now)
    if closed or rows.memos or only_open:
        fields, memo_writes = gate_rules.update_gates(row, suspension, {}, closed, ends=rows.ends)
        writes = (Upsert(msgspec.structs.replace(suspension, **fields)), *opened.writes, *memo_writes)
        change = Change(guards=guards, writes=(*writes, *wait_state.mark_has_waits(row)))
        return Decision(lambda now: _closed_gates(rows, row, names, closed, now), change)
    gates = {**gates, **opened.open}
    row_patch = suspend_rules.suspend_row(
        row,
        suspension_id=suspension_id,
        waitpoint_id=next((gate.waitpoints[0][0] for name in names if (gate := gates[name]).waitpoints), None),
        reason_code=reason_code,
        now=now,
        waits_for=" or ".join(gate_rules.describe_wait(name, gates[name]) for name in names[:MAX_DESCRIBED])
        + (f" or {len(names) - MAX_DESCRIBED} more" if len(names) > MAX_DESCRIBED else ""),
        keys=[gates[name].mailbox for name in names],
        held_task=next((gate.task for name in names if (gate := gates[name]).task is not None), None),
    )
    change = Change(
        guards=guards,
        writes=(
            row_patch,
            Upsert(_parked_suspension(suspension, row, names, suspension_id, reason_code)),
            *waitpoint_rules.close_replaced_waitpoints(suspension, ()),
        ),
        events=(lease_event(row, "released", reason="suspend"),),
    )
    return Decision(ParkedExecution(suspension_id, holder), change)


def _open(rows: ParkRows, row: Execution, unopened: Sequence[GateArgs], now: int) -> _Opened | NeedsMessages:
    """Return the gates that are new, and which of them close at once."""
    outcomes = {end.child_id: end.outcome for end in rows.ends}
    root = rows.root
    opened: dict[str, Gate] = {}
    closed: dict[str, tuple[Gate, GateOutcome, MailboxMessage[Draft] | None]] = {}
    writes: tuple[Write, ...] = ()
    for args in unopened:
        gate = gate_rules.new_gate(args, now)
        outcome: GateOutcome | None = None
        mail: MailboxMessage | None = None
        if args.kind is GateKind.MAILBOX and (heads := mailbox.heads(root, args.receives)):
            mail = mailbox.first_of(heads, rows.messages)
            if root is None or mail is None:
                return NeedsMessages(heads)
            root, outcome = mailbox.receive_first(root, mail.mailbox), GateOutcome.SATISFIED
            writes += (Delete(MailboxMessage, (row.execution_id, mail.mailbox, mail.seq)),)
        elif args.kind is GateKind.CHILDREN:
            gate, outcome = gate_rules.apply_child_outcomes(gate, outcomes)
        opened[args.name] = gate
        if outcome is not None:
            closed[args.name] = (gate, outcome, mail)
    return _Opened(opened, closed, {"mail": None if root is None else root.mail}, writes)


def _closed_gates(rows: ParkRows, row: Execution, names: tuple[str, ...], closed: ClosedGates, now: int) -> GatesClosed:
    known = dict(rows.memos)
    for name, (gate, outcome, mail) in closed.items():
        known[name] = gate_rules.gate_memo(row.execution_id, name, gate, outcome, mail, now, ends=rows.ends)
    return GatesClosed({name: known[name] for name in names if name in known})


def _parked_suspension(
    suspension: Suspension, row: Execution, names: tuple[str, ...], suspension_id: str, reason_code: str
) -> Suspension[Draft]:
    """Return the suspension row that waits on gates; it times out when the first of them expires."""
    gates = wait_state.open_gates(suspension)
    ends = [end for name in names if (end := gates[name].expires_at) is not None]
    timeout_at = min(ends, default=None)
    return wait_state.next_suspension(
        suspension,
        suspension_id=suspension_id,
        attempt_index=row.attempt_index,
        reason_code=reason_code,
        timeout_at=timeout_at,
        timeout_behavior=TimeoutBehavior.AUTO_RESUME,
        due_at=NO_TIMEOUT if timeout_at is None else timeout_at,
        waits_on=wait_encoding.encode_or_none(list(names)),
    )
