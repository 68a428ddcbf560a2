"""Outbox: messages between partitions, committed with their cause, delivered at least once.

The sender tries to deliver at once. A sweep delivers what is left and backs off exponentially. The messages release
quota slots of executions that have ended (`rules.limits.quota.release_messages`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.change import Change, Delete, Guard, Patch, Upsert
from flowfabric.model.instant import FromNow
from flowfabric.model.outbox import OutboxMessage

HEADSTART_MS = 2000  # time for the sender to deliver before a sweep of another process tries
MAX_BACKOFF_MS = 60_000


def send(origin: str, message_id: str, kind: str, target: str, body: Any) -> Upsert:
    """Return the write that sends a message with its commit; sending it again replaces it."""
    text = msgspec.json.encode(body).decode()
    return Upsert(OutboxMessage(origin, message_id, kind, target, text, FromNow(HEADSTART_MS)))


def acknowledge(message: OutboxMessage) -> Change:
    """Return the change that deletes a delivered message."""
    return Change(guards=(_seen(message),), writes=(Delete(OutboxMessage, _key(message)),))


def postpone(message: OutboxMessage) -> Change:
    """Return the change that retries a message later; the delay doubles with every try."""
    backoff_ms = min(MAX_BACKOFF_MS, HEADSTART_MS * 2 ** min(message.attempts, 16))
    fields = {"attempts": message.attempts + 1, "due_at": FromNow(backoff_ms)}
    return Change(guards=(_seen(message),), writes=(Patch(OutboxMessage, _key(message), fields),))


def _key(message: OutboxMessage) -> tuple[str, str]:
    return message.origin, message.message_id


def _seen(message: OutboxMessage) -> Guard:
    return Guard(OutboxMessage, _key(message), message.revision)
