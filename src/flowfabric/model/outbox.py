"""Outbox: messages from a commit to another partition."""

from __future__ import annotations

from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class OutboxMessage(msgspec.Struct, Generic[Instant], frozen=True):
    """An effect in another partition, stored in the commit that causes it until it is delivered.

    Its id is derived from its content, and receiving it is idempotent, since it may be delivered several times.
    """

    origin: str  # the partition of the sender, as its tag: {fp:7}
    message_id: str
    kind: str
    target: str
    body: str  # a JSON object
    due_at: Instant  # when the sweep may deliver it; the process that sent it does so at once
    attempts: int = 0
    revision: int = 0
