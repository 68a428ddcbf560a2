"""Rows of durable functions: gates, memos, messages and replies, facts, ends of children and pending child cancels.

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
    mailboxes: tuple[str, ...] = ()  # instead of one: the first message of any of them closes the gate
    children: tuple[str, ...] = ()
    need: int = 0
    any_outcome: bool = False
    votes: tuple[Vote, ...] = ()
    number: int | None = None  # its place in the order of the run's operations, given by the function
    task: str | None = None  # the task whose code has to change, for a hold
    version: str | None = None  # the version of the code that does not fit, for a hold
    note: str | None = None  # what does not fit, for a hold

    @property
    def receives(self) -> tuple[str, ...]:
        """The mailboxes whose next message closes the gate."""
        return self.mailboxes or (() if self.mailbox is None else (self.mailbox,))


class ChildResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a child, as the memo of its parent's gate keeps it."""

    child_id: str
    payload: bytes
    encoding: str | None = None


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
    mailbox: str | None = None
    number: int | None = None
    results: str | None = None  # [ChildResult, …] as JSON: small results of the children that ended
    message_number: int | None = None
    wants_reply: bool = False


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
    number: int | None = None  # its place among all messages to the execution; None if an older release stored it
    wants_reply: bool = False


class ReplyState(StrEnum):
    """What became of a message that wants a reply."""

    OPEN = "open"
    ANSWERED = "answered"
    REFUSED = "refused"
    NOT_ANSWERED = "not_answered"  # the function went on without it, for good


class Reply(msgspec.Struct, Generic[Instant], frozen=True):
    """The reply to a message, by the id of the message. It is stored open with the message; the first reply stays."""

    execution_id: str
    message_id: str
    mailbox: str
    state: ReplyState
    asked_at: Instant
    replied_at: Instant | None = None
    payload: bytes | None = None
    payload_encoding: str | None = None
    reason: str | None = None  # why it was refused or not answered


class Fact(msgspec.Struct, Generic[Instant], frozen=True):
    """What a run shows under a name: the last value that its function has set. It is kept as long as the run."""

    execution_id: str
    name: str
    number: int  # how often it was set
    set_at: Instant
    value: bytes
    encoding: str | None = None
    revision: int = 0


class ChildCompletion(msgspec.Struct, Generic[Instant], frozen=True):
    """The completion of a child. `life` is its replay count: each run ends once.

    `due_at` is set until it was delivered to the parent's gates; then the row waits for a gate that names the child.
    """

    parent_id: str
    child_id: str
    life: int
    outcome: str
    due_at: Instant | None = None
    result: bytes | None = None  # None also if it is too large to travel to the parent
    result_encoding: str | None = None


class ChildCancel(msgspec.Struct, Generic[Instant], frozen=True):
    """Says that the children of a cancelled or expired parent are still to be cancelled."""

    parent_id: str
    due_at: Instant | None = None
    revision: int = 0


class StepState(StrEnum):
    """What a step memo says of its step. Every state but `DONE` is stored under the step's name with a prefix."""

    DONE = "done"
    FAILED = "failed"
    TRIES = "tries"  # failed tries so far, and when the next one begins
    BEGAN = "began"  # the start of a step that must not run twice
    LEFT = "left"  # the function stopped waiting for it
    FACT = "fact"  # how often a branch has set a fact


class StepMemo(msgspec.Struct, Generic[Instant], frozen=True):
    """The result of a finished step of a durable function; the first record stays.

    Other operations of the function that happen once are recorded in the same way, under names with a prefix.
    """

    execution_id: str
    name: str
    occurrence: int
    attempt_index: int
    recorded_at: Instant
    result: bytes
    encoding: str | None = None
    digest: str | None = None  # it tells the step's input, so that a step that replaced it is detected
    number: int | None = None  # its place in the order of the run's operations; None if an older release recorded it
    started_at: int | None = None  # when its first try began; None if that is not known

    @property
    def state(self) -> StepState:
        """What the memo says of its step."""
        name = self.name
        return _PREFIXED_STATES.get(name.partition(":")[0], _DONE) if ":" in name else _DONE

    @property
    def step(self) -> str:
        """The name of the step, without the prefix of the state."""
        return self.name if self.state is _DONE else self.name.partition(":")[2]


_DONE = StepState.DONE  # hot path: a module constant is found faster than an enum member
_PREFIXED_STATES = {state.value: state for state in StepState if state is not _DONE}


def step_row_name(step: str, state: StepState) -> str:
    """Return the name under which this state of a step is stored."""
    return step if state is _DONE else f"{state}:{step}"
