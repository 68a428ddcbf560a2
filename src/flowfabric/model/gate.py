"""Gates: the waits of a durable function. They belong to the execution, not to an attempt.

A gate that is open lives in the suspension's row; the change that closes it writes what came of it as a memo, so that
a later attempt finds the votes, the message or the children's ends that an earlier one waited for.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class GateKind(StrEnum):
    """What opens the way."""

    SIGNALS = "signals"  # a condition on the signals to its waitpoints
    MAILBOX = "mailbox"  # the next message of a name
    CHILDREN = "children"  # the ends of child executions
    TIMER = "timer"  # time alone


class GateOutcome(StrEnum):
    """How a gate closed."""

    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"  # so many children ended otherwise that it can never be satisfied
    TIMED_OUT = "timed_out"


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """A satisfier of a gate: a signal by its place, or a child by its end."""

    member: str  # the waitpoint's id, or the child's
    seq: int = 0
    outcome: str = ""


class Gate(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open gate. `expires_at` closes it when nothing else has."""

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


class GateMemo(msgspec.Struct, frozen=True):
    """What came of a gate. For a message, `payload` and the fields after it are the message's."""

    execution_id: str
    gate: str
    kind: GateKind
    ended_as: GateOutcome
    opened_at: int
    closed_at: int
    votes: str | None = None  # [Vote, …] as JSON
    payload: bytes | None = None
    payload_encoding: str | None = None
    sender: str | None = None
    message_id: str | None = None


class MailboxMessage(msgspec.Struct, frozen=True):
    """A message that nobody has received yet, by its place in the mailbox of its name."""

    execution_id: str
    mailbox: str
    seq: int
    message_id: str
    sent_at: int
    sender: str = ""
    payload: bytes | None = None
    payload_encoding: str | None = None


class ChildCompletion(msgspec.Struct, frozen=True):
    """The end of a child that no gate has taken in yet. `life` counts its replays: each life ends once.

    `due_at` is set until the parent's gates have been asked; then it waits for a gate that names the child.
    """

    parent_id: str
    child_id: str
    life: int
    outcome: str
    due_at: int | None = None


class StepMemo(msgspec.Struct, frozen=True):
    """What a finished step of a durable function returned; the first record stands."""

    execution_id: str
    name: str
    occurrence: int
    attempt_index: int
    recorded_at: int
    result: bytes
    encoding: str | None = None
    digest: str | None = None  # of the step's input, to notice that another step has taken its place
