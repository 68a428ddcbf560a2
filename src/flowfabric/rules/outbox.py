"""Messages between partitions: how they are sent, forgotten and put off."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.change import Change, Delete, FromNow, Guard, Patch, Upsert, from_now
from flowfabric.model.outbox import OutboxMessage

HEADSTART_MS = 2000  # the sender delivers at once; the sweep of another process leaves it this much time
LONGEST_WAIT_MS = 60_000


def send(origin: str, message_id: str, kind: str, target: str, body: Any) -> Upsert:
    """The write that sends a message with its commit; sent again, it takes the place of the first."""
    text = msgspec.json.encode(body).decode()
    return Upsert(OutboxMessage(origin, message_id, kind, target, text, from_now(HEADSTART_MS)))


def acknowledge(message: OutboxMessage) -> Change:
    """The message has done its work."""
    return Change(guards=(_seen(message),), writes=(Delete(OutboxMessage, _key(message)),))


def postpone(message: OutboxMessage) -> Change:
    """Its receiver could not take it now; the pause doubles with every try."""
    wait = min(LONGEST_WAIT_MS, HEADSTART_MS * 2 ** min(message.attempts, 16))
    fields = {"attempts": message.attempts + 1, "due_at": FromNow(wait)}
    return Change(guards=(_seen(message),), writes=(Patch(OutboxMessage, _key(message), fields),))


def _key(message: OutboxMessage) -> tuple[str, str]:
    return message.origin, message.message_id


def _seen(message: OutboxMessage) -> Guard:
    return Guard(OutboxMessage, _key(message), message.revision)
