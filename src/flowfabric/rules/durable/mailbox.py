"""Mailboxes: messages to an execution, kept in order per name until its function receives them."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Upsert, Write, from_now, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateKind, GateOutcome, MailboxMessage
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import IdempotencyRecord, Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.conditions import SignalEffect
from flowfabric.rules.suspension.signals import DEDUPED, Accepted, DuplicateDelivery, signal_event

MAX_PAYLOAD_BYTES = 65_536
MOST_UNREAD = 10_000
APPENDED = "appended_to_mailbox"


class MessageArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A message, its id minted by whoever sends it."""

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
        """Where its key is remembered."""
        return f"mail:{self.mailbox}"


def send_message(
    row: Execution | None,
    root: Suspension | None,
    remembered: IdempotencyRecord | None,
    ask: MessageArgs,
    now: int,
    *,
    call: str = "",
) -> Decision[Accepted | DuplicateDelivery]:
    """Hand a message to the function that waits for one of this name, or keep it until one does.

    `call` names the sending: a sender may send the very same message twice.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if ask.idempotency_key and remembered is not None and remembered.expires_at > now:
        told = signal_event(row, remembered.answer, None, ask.sender, DEDUPED, call)
        return Decision(DuplicateDelivery(remembered.answer), Change(guards=(seen(row),), events=(told,)))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    guard, root = wait_state.seen_suspension(root, row.execution_id), wait_state.suspension_or_new(root, row)
    mail = MailboxMessage(
        ask.execution_id,
        ask.mailbox,
        _places(root).get(ask.mailbox, [1, 1])[1],
        ask.message_id,
        from_now(0),
        ask.sender,
        ask.payload or None,
        ask.payload_encoding,
    )
    fields, writes, effect = _delivered(row, root, mail, now)
    if effect is None:
        return refuse(errors.SignalLimitExceeded(execution_id=row.execution_id))
    if ask.idempotency_key:
        key = wait_encoding.key_digest(ask.idempotency_key)
        kept = IdempotencyRecord(row.execution_id, ask.scope, key, from_now(ask.dedup_ttl_ms), ask.message_id)
        writes += (Upsert(kept),)
    change = Change(
        guards=(seen(row), guard),
        writes=(Upsert(msgspec.structs.replace(root, **fields)), *writes, *wait_state.mark_has_waits(row)),
        events=(signal_event(row, ask.message_id, None, ask.sender, effect, call),),
        # A key whose time was over at the look must be over.
        not_before=remembered.expires_at if ask.idempotency_key and remembered is not None else None,
    )
    return Decision(Accepted(ask.message_id, effect), change)


def _delivered(
    row: Execution, root: Suspension, mail: MailboxMessage, now: int
) -> tuple[dict[str, Any], tuple[Write, ...], str | None]:
    for name, gate in wait_state.open_gates(root).items():
        if gate.kind is GateKind.MAILBOX and gate.mailbox == mail.mailbox and not wait_state.is_gate_expired(gate, now):
            fields, writes = gate_rules.update_gates(row, root, {}, {name: (gate, GateOutcome.SATISFIED, mail)})
            return fields, writes, SignalEffect.SATISFIED
    places = _places(root)
    if sum(written - read for read, written in places.values()) >= MOST_UNREAD:
        return {}, (), None
    read, written = places.get(mail.mailbox, [1, 1])
    return (
        {"mail": wait_encoding.encode_or_none(places | {mail.mailbox: [read, written + 1]})},
        (Insert(mail),),
        APPENDED,
    )


def next_unread(root: Suspension | None, mailbox: str) -> int | None:
    """The place of the first message that nobody has received; None when there is none."""
    read, written = _places(root).get(mailbox, [1, 1])
    return read if read < written else None


def mark_received(root: Suspension | None, mailbox: str) -> str | None:
    """The counters after the first message was received."""
    places = _places(root)
    read, written = places[mailbox]
    if read + 1 == written:
        del places[mailbox]
    else:
        places[mailbox] = [read + 1, written]
    return wait_encoding.encode_or_none(places)


def _places(root: Suspension | None) -> dict[str, list[int]]:
    text = None if root is None else root.mail
    return {} if text is None else msgspec.json.decode(text, type=dict[str, list[int]])
