"""Rows of durable functions: gates, memos, mailbox messages and completions of children.

They belong to the execution, not to an attempt. An open gate is stored in the suspension row. The change that closes it
writes a memo, so that a later attempt finds the votes, the message or the outcomes that an earlier one waited for.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class GateKind(StrEnum):
    """What closes a gate."""

    SIGNALS = "signals"  # a condition on the signals to its waitpoints
    MAILBOX = "mailbox"  # the next message of a mailbox
    CHILDREN = "children"  # the completion of child executions
    TIMER = "timer"  # time alone


class GateOutcome(StrEnum):
    """How a gate closed."""

    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"  # too many children failed for it to be satisfied
    TIMED_OUT = "timed_out"


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """A satisfier of a gate: a signal by its sequence number, or a child by its outcome."""

    member: str  # the waitpoint's id, or the child's
    seq: int = 0
    outcome: str = ""


class Gate(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open gate. At `expires_at` it closes by timeout."""

    kind: GateKind
    opened_at: int
    expires_at: int | None = None
    condition: str | None = None
    progress: str | None = None
    waitpoints: tuple[tuple[str, str], ...] = ()  # ids and keys
    mailbox: str | None = None
    children: tuple[str, ...] = ()
    need: int = 0
    any_outcome: bool = False
    votes: tuple[Vote, ...] = ()


class GateMemo(msgspec.Struct, Generic[Instant], frozen=True):
    """The outcome of a closed gate. For a message, `payload` and the columns after it are those of the message."""

    execution_id: str
    gate: str
    kind: GateKind
    ended_as: GateOutcome
    opened_at: int
    closed_at: Instant
    votes: str | None = None  # [Vote, …] as JSON
    payload: bytes | None = None
    payload_encoding: str | None = None
    sender: str | None = None
    message_id: str | None = None


class MailboxMessage(msgspec.Struct, Generic[Instant], frozen=True):
    """A message that was not received yet, by its sequence number in its mailbox."""

    execution_id: str
    mailbox: str
    seq: int
    message_id: str
    sent_at: Instant
    sender: str = ""
    payload: bytes | None = None
    payload_encoding: str | None = None


class ChildCompletion(msgspec.Struct, Generic[Instant], frozen=True):
    """The completion of a child. `life` is its replay count: each run ends once.

    `due_at` is set until it was delivered to the parent's gates; then the row waits for a gate that names the child.
    """

    parent_id: str
    child_id: str
    life: int
    outcome: str
    due_at: Instant | None = None


class StepMemo(msgspec.Struct, Generic[Instant], frozen=True):
    """The result of a finished step of a durable function; the first record stays."""

    execution_id: str
    name: str
    occurrence: int
    attempt_index: int
    recorded_at: Instant
    result: bytes
    encoding: str | None = None
    digest: str | None = None  # of the step's input, to detect that another step has replaced it
