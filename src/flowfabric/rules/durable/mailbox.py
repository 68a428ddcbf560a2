"""Mailboxes: messages to an execution, kept in order until its function receives them.

The suspension row stores a pair of counters per mailbox: the next message to read and the next to write. Each message
has a number among all messages to the execution, so that a gate on several mailboxes receives the one that was sent
first. Once the inbox is closed, senders are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Gate, GateKind, GateOutcome, MailboxMessage, Reply, ReplyState, StepMemo
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import IdempotencyRecord, Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable.inbox_schema import Inbox, NeedsInbox, check_message
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.conditions import SignalEffect
from flowfabric.rules.suspension.signals import DEDUPED, Accepted, DuplicateDelivery, signal_event

MAX_PAYLOAD_BYTES = 65_536
MAX_UNREAD = 10_000
MAX_UNREAD_MAILBOXES = 1000  # the counters of all mailboxes with unread messages are one column
MAX_MAILBOXES = 16  # one gate can wait for so many
INTERNAL_PREFIX = "ff."  # no sender names a mailbox that begins so
APPENDED = "appended_to_mailbox"
IS_CLOSED, HAS_UNREAD = b"true", b"false"


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
    wants_reply: bool = False  # the same message id is the same question for as long as the run is kept

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
    asked: Reply | None = None,
    inbox: Inbox | None = None,
    is_internal: bool = False,
    call: str = "",
) -> Decision[Accepted | DuplicateDelivery | NeedsInbox]:
    """Pass a message to the function that waits for this mailbox, or store it until one does.

    `asked` is the reply to a message of this id, if it was sent before and wants one. `inbox` is what the run declares
    to take; it does not concern an internal message. `call` identifies the call, because a sender may
    send the same message twice.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if args.wants_reply and asked is not None:
        return Decision(DuplicateDelivery(args.message_id))
    if args.idempotency_key and remembered is not None and remembered.expires_at > now:
        duplicate_event = signal_event(row, remembered.answer, None, args.sender, DEDUPED, call)
        return Decision(DuplicateDelivery(remembered.answer), Change(guards=(seen(row),), events=(duplicate_event,)))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    if not is_internal and suspension is not None and suspension.inbox_closed_at is not None:
        return refuse(errors.InboxClosed(execution_id=row.execution_id))
    if not is_internal and decode_terms(row.terms).has_inbox:
        if inbox is None:
            return Decision(NeedsInbox())
        if invalid := check_message(inbox, args.mailbox, args.payload):
            return refuse(invalid)
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
        suspension.message_count + 1,
        args.wants_reply,
    )
    fields, writes, effect = _deliver(row, suspension, mail, now)
    if effect is None:
        return refuse(errors.SignalLimitExceeded(execution_id=row.execution_id))
    fields["message_count"] = suspension.message_count + 1
    if args.wants_reply:
        writes += (Insert(Reply(row.execution_id, args.message_id, args.mailbox, ReplyState.OPEN, NOW)),)
    if args.idempotency_key:
        key = wait_encoding.key_digest(args.idempotency_key)
        record = IdempotencyRecord(row.execution_id, args.scope, key, FromNow(args.dedup_ttl_ms), args.message_id)
        writes += (Upsert(record),)
    change = Change(
        guards=(seen(row), guard),
        writes=(Upsert(msgspec.structs.replace(suspension, **fields)), *writes, *_mark_has_mail(row, is_internal)),
        events=(signal_event(row, args.message_id, None, args.sender, effect, call),),
        # A record that had expired when it was loaded must have expired at the commit.
        not_before=remembered.expires_at if args.idempotency_key and remembered is not None else None,
    )
    return Decision(Accepted(args.message_id, effect), change)


def _mark_has_mail(row: Execution, is_internal: bool) -> tuple[Write, ...]:
    """Mark the row; nobody misses an internal message that is unread at the end."""
    names = ("has_waits",) if is_internal else ("has_waits", "has_mail")
    marks = {name: True for name in names if not getattr(row, name)}
    return (Patch(Execution, (row.execution_id,), marks),) if marks else ()


def _deliver(
    row: Execution, suspension: Suspension, mail: MailboxMessage[Draft], now: int
) -> tuple[dict[str, Any], tuple[Write, ...], str | None]:
    """Return the changed columns of the suspension, further writes and the effect.

    The effect is None if too many messages, or mailboxes, are unread.
    """
    for name, gate in wait_state.open_gates(suspension).items():
        if takes(gate, mail.mailbox, now):
            fields, writes = gate_rules.update_gates(row, suspension, {}, {name: (gate, GateOutcome.SATISFIED, mail)})
            return fields, writes, SignalEffect.SATISFIED
    counters = _counters(suspension)
    if sum(written - read for read, written in counters.values()) >= MAX_UNREAD:
        return {}, (), None
    if mail.mailbox not in counters and len(counters) >= MAX_UNREAD_MAILBOXES:
        return {}, (), None
    read, written = counters.get(mail.mailbox, [1, 1])
    return (
        {"mail": wait_encoding.encode_or_none(counters | {mail.mailbox: [read, written + 1]})},
        (Insert(mail),),
        APPENDED,
    )


def takes(gate: Gate, mailbox: str, now: int) -> bool:
    """True if the next message of this mailbox closes the gate."""
    return gate.kind is GateKind.MAILBOX and mailbox in gate.receives and not wait_state.is_gate_expired(gate, now)


def heads(suspension: Suspension | None, mailboxes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the first unread message of each of these mailboxes that has one, as mailbox and sequence number."""
    counters = _counters(suspension)
    pairs = ((name, counters.get(name, [1, 1])) for name in mailboxes)
    return tuple((name, read) for name, (read, written) in pairs if read < written)


def first_of(heads: Sequence[tuple[str, int]], messages: Sequence[MailboxMessage]) -> MailboxMessage | None:
    """Return the message among the heads that was sent first; None if they are not all loaded."""
    loaded = {(message.mailbox, message.seq): message for message in messages}
    found = [loaded[head] for head in heads if head in loaded]
    return min(found, key=lambda message: message.number or 0) if len(found) == len(heads) else None


def unread_count(suspension: Suspension | None, mailbox: str) -> int:
    """Return the number of unread messages."""
    read, written = _counters(suspension).get(mailbox, [1, 1])
    return written - read


def mark_received(suspension: Suspension | None, mailbox: str) -> str | None:
    """Return the counters after the first message was received."""
    counters = _counters(suspension)
    read, written = counters[mailbox]
    if read + 1 == written:
        del counters[mailbox]
    else:
        counters[mailbox] = [read + 1, written]
    return wait_encoding.encode_or_none(counters)


def receive_first(suspension: Suspension, mailbox: str) -> Suspension:
    """Return the suspension row after the first message was received."""
    return msgspec.structs.replace(suspension, mail=mark_received(suspension, mailbox))


def first_unread(suspension: Suspension | None, mailbox: str, count: int) -> range:
    """Return the sequence numbers of the first unread messages, at most `count`."""
    read, written = _counters(suspension).get(mailbox, [1, 1])
    return range(read, min(written, read + count))


def return_to_head(
    suspension: Suspension, messages: Sequence[MailboxMessage]
) -> tuple[str | None, list[MailboxMessage]]:
    """Return the counters after these messages, in order, went back to the heads of their mailboxes, and their rows."""
    counters, rows = _counters(suspension), []
    for mailbox in dict.fromkeys(message.mailbox for message in messages):
        returned = [message for message in messages if message.mailbox == mailbox]
        read, written = counters.get(mailbox, [1, 1])
        first = read - len(returned)
        counters[mailbox] = [first, written]
        rows += [msgspec.structs.replace(message, seq=first + place) for place, message in enumerate(returned)]
    return wait_encoding.encode_or_none(counters), rows


def unread(suspension: Suspension | None) -> dict[str, int]:
    """Count the unread messages by mailbox."""
    counts = {name: written - read for name, (read, written) in _counters(suspension).items()}
    return {name: count for name, count in counts.items() if count and not name.startswith(INTERNAL_PREFIX)}


def close_inbox(
    row: Execution | None,
    suspension: Suspension | None,
    known: StepMemo | None,
    memo: StepMemo,
    fence: Fence,
    now: int,
) -> Decision[bool]:
    """Close the inbox if nothing is unread, and record whether that was so; an answer that is recorded stays."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if known is not None:
        return Decision(known.result == IS_CLOSED)
    closes = not unread(suspension)
    result = IS_CLOSED if closes else HAS_UNREAD
    writes: tuple[Write, ...] = (Insert(msgspec.structs.replace(memo, recorded_at=NOW, result=result)),)
    if closes:
        root = wait_state.suspension_or_new(suspension, row)
        writes += (Upsert(msgspec.structs.replace(root, inbox_closed_at=NOW)),)
    marks = {name: True for name in ("has_steps", *(("has_waits",) if closes else ())) if not getattr(row, name)}
    if marks:
        writes += (Patch(Execution, (row.execution_id,), marks),)
    guards = (seen(row, live(row)), wait_state.seen_suspension(suspension, row.execution_id))
    return Decision(closes, Change(guards=guards, writes=writes))


def _counters(suspension: Suspension | None) -> dict[str, list[int]]:
    text = None if suspension is None else suspension.mail
    return {} if text is None else msgspec.json.decode(text, type=dict[str, list[int]])
