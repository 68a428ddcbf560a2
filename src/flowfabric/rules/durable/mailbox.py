"""Mailboxes: messages to an execution, kept in order per name until its function receives them."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Put, Write, at, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateEnd, GateKind, Mail
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import Remembered, Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.conditions import Effect
from flowfabric.rules.suspension.signals import DEDUPED, Accepted, Duplicate, event

MAX_PAYLOAD_BYTES = 65_536
MOST_UNREAD = 10_000
APPENDED = "appended_to_mailbox"


class MailArgs(msgspec.Struct, frozen=True, kw_only=True):
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


def send(
    row: Execution | None,
    root: Suspension | None,
    remembered: Remembered | None,
    ask: MailArgs,
    now: int,
    *,
    call: str = "",
) -> Decision[Accepted | Duplicate]:
    """Hand a message to the function that waits for one of this name, or keep it until one does.

    `call` names the sending: a sender may send the very same message twice.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if ask.idempotency_key and remembered is not None and remembered.expires_at > now:
        told = event(row, remembered.answer, None, ask.sender, DEDUPED, call)
        return Decision(Duplicate(remembered.answer), Change(guards=(seen(row),), events=(told,)))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    guard, root = wait_state.guard_of(root, row.execution_id), wait_state.root_of(root, row)
    mail = Mail(
        ask.execution_id,
        ask.mailbox,
        _places(root).get(ask.mailbox, [1, 1])[1],
        ask.message_id,
        at(0),
        ask.sender,
        ask.payload or None,
        ask.payload_encoding,
    )
    fields, writes, effect = _delivered(row, root, mail, now)
    if effect is None:
        return refuse(errors.SignalLimitExceeded(execution_id=row.execution_id))
    if ask.idempotency_key:
        key = wait_encoding.digest(ask.idempotency_key)
        kept = Remembered(row.execution_id, ask.scope, key, at(ask.dedup_ttl_ms), ask.message_id)
        writes += (Put(kept),)
    change = Change(
        guards=(seen(row), guard),
        writes=(Put(msgspec.structs.replace(root, **fields)), *writes, *wait_state.marked(row)),
        events=(event(row, ask.message_id, None, ask.sender, effect, call),),
        # A key whose time was over at the look must be over.
        not_before=remembered.expires_at if ask.idempotency_key and remembered is not None else None,
    )
    return Decision(Accepted(ask.message_id, effect), change)


def _delivered(
    row: Execution, root: Suspension, mail: Mail, now: int
) -> tuple[dict[str, Any], tuple[Write, ...], str | None]:
    for name, gate in wait_state.open_gates(root).items():
        if gate.kind is GateKind.MAILBOX and gate.mailbox == mail.mailbox and not wait_state.gate_is_past(gate, now):
            fields, writes = gate_rules.moved_on(row, root, {}, {name: (gate, GateEnd.SATISFIED, mail)})
            return fields, writes, Effect.SATISFIED
    places = _places(root)
    if sum(written - read for read, written in places.values()) >= MOST_UNREAD:
        return {}, (), None
    read, written = places.get(mail.mailbox, [1, 1])
    return {"mail": wait_encoding.written(places | {mail.mailbox: [read, written + 1]})}, (Insert(mail),), APPENDED


def next_unread(root: Suspension | None, mailbox: str) -> int | None:
    """The place of the first message that nobody has received; None when there is none."""
    read, written = _places(root).get(mailbox, [1, 1])
    return read if read < written else None


def taken(root: Suspension | None, mailbox: str) -> str | None:
    """The counters after the first message was received."""
    places = _places(root)
    read, written = places[mailbox]
    if read + 1 == written:
        del places[mailbox]
    else:
        places[mailbox] = [read + 1, written]
    return wait_encoding.written(places)


def _places(root: Suspension | None) -> dict[str, list[int]]:
    text = None if root is None else root.mail
    return {} if text is None else msgspec.json.decode(text, type=dict[str, list[int]])
