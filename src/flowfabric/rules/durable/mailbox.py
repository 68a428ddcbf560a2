"""Mailboxes: messages to an execution, kept in order per mailbox until its function receives them.

The suspension row stores a pair of counters per mailbox: the next message to read and the next to write.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Upsert, Write, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateKind, GateOutcome, MailboxMessage
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import IdempotencyRecord, Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.conditions import SignalEffect
from flowfabric.rules.suspension.signals import DEDUPED, Accepted, DuplicateDelivery, signal_event

MAX_PAYLOAD_BYTES = 65_536
MAX_UNREAD = 10_000
APPENDED = "appended_to_mailbox"


class MessageArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A message; the sender mints its id."""

    execution_id: str
    mailbox: str
    message_id: str
    payload: bytes | None = None
    payload_encoding: str | None = None
    sender: str = ""
    idempotency_key: str | None = None
    dedup_ttl_ms: int = 24 * 60 * 60 * 1000

    @property
    def scope(self) -> str:
        """The scope under which its idempotency key is stored."""
        return f"mail:{self.mailbox}"


def send_message(
    row: Execution | None,
    suspension: Suspension | None,
    remembered: IdempotencyRecord | None,
    args: MessageArgs,
    now: int,
    *,
    call: str = "",
) -> Decision[Accepted | DuplicateDelivery]:
    """Pass a message to the function that waits for this mailbox, or store it until one does.

    `call` identifies the call, because a sender may send the same message twice.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if args.idempotency_key and remembered is not None and remembered.expires_at > now:
        duplicate_event = signal_event(row, remembered.answer, None, args.sender, DEDUPED, call)
        return Decision(DuplicateDelivery(remembered.answer), Change(guards=(seen(row),), events=(duplicate_event,)))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    guard, suspension = (
        wait_state.seen_suspension(suspension, row.execution_id),
        wait_state.suspension_or_new(suspension, row),
    )
    mail = MailboxMessage(
        args.execution_id,
        args.mailbox,
        _counters(suspension).get(args.mailbox, [1, 1])[1],
        args.message_id,
        NOW,
        args.sender,
        args.payload or None,
        args.payload_encoding,
    )
    fields, writes, effect = _deliver(row, suspension, mail, now)
    if effect is None:
        return refuse(errors.SignalLimitExceeded(execution_id=row.execution_id))
    if args.idempotency_key:
        key = wait_encoding.key_digest(args.idempotency_key)
        record = IdempotencyRecord(row.execution_id, args.scope, key, FromNow(args.dedup_ttl_ms), args.message_id)
        writes += (Upsert(record),)
    change = Change(
        guards=(seen(row), guard),
        writes=(Upsert(msgspec.structs.replace(suspension, **fields)), *writes, *wait_state.mark_has_waits(row)),
        events=(signal_event(row, args.message_id, None, args.sender, effect, call),),
        # A record that had expired when it was loaded must have expired at the commit.
        not_before=remembered.expires_at if args.idempotency_key and remembered is not None else None,
    )
    return Decision(Accepted(args.message_id, effect), change)


def _deliver(
    row: Execution, suspension: Suspension, mail: MailboxMessage[Draft], now: int
) -> tuple[dict[str, Any], tuple[Write, ...], str | None]:
    """Return the changed columns of the suspension, further writes and the effect; the effect is None if the mailbox is
    full."""
    for name, gate in wait_state.open_gates(suspension).items():
        if gate.kind is GateKind.MAILBOX and gate.mailbox == mail.mailbox and not wait_state.is_gate_expired(gate, now):
            fields, writes = gate_rules.update_gates(row, suspension, {}, {name: (gate, GateOutcome.SATISFIED, mail)})
            return fields, writes, SignalEffect.SATISFIED
    counters = _counters(suspension)
    if sum(written - read for read, written in counters.values()) >= MAX_UNREAD:
        return {}, (), None
    read, written = counters.get(mail.mailbox, [1, 1])
    return (
        {"mail": wait_encoding.encode_or_none(counters | {mail.mailbox: [read, written + 1]})},
        (Insert(mail),),
        APPENDED,
    )


def next_unread(suspension: Suspension | None, mailbox: str) -> int | None:
    """Return the sequence number of the first unread message; None if there is none."""
    read, written = _counters(suspension).get(mailbox, [1, 1])
    return read if read < written else None


def mark_received(suspension: Suspension | None, mailbox: str) -> str | None:
    """Return the counters after the first message was received."""
    counters = _counters(suspension)
    read, written = counters[mailbox]
    if read + 1 == written:
        del counters[mailbox]
    else:
        counters[mailbox] = [read + 1, written]
    return wait_encoding.encode_or_none(counters)


def _counters(suspension: Suspension | None) -> dict[str, list[int]]:
    text = None if suspension is None else suspension.mail
    return {} if text is None else msgspec.json.decode(text, type=dict[str, list[int]])
