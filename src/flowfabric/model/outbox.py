"""Messages between partitions: what a commit owes to another one."""

from __future__ import annotations

import msgspec


class OutboxMessage(msgspec.Struct, frozen=True):
    """An effect in another partition, kept in the commit that caused it until it was delivered there.

    Its id is derived from what it is about, and its receiver does the same thing once however often it hears of it.
    """

    origin: str  # the partition of the sender, as its tag: {fp:7}
    message_id: str
    kind: str
    target: str
    body: str  # a JSON object
    due_at: int  # when the sweep may deliver it; the process that sent it does so at once
    attempts: int = 0
    revision: int = 0
