"""Asks: messages that want a reply. The reply is fenced by the lease, and the first one stays.

An ask stores its reply as open, in the change that sends the message. So the same ask, sent again under the same id, is
recognised for as long as the run is kept. The sender reads the reply. An end writes nothing for it: an open reply of
a run that has ended is not answered.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateMemo, Reply, ReplyState, StepMemo
from flowfabric.model.instant import NOW
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.steps import mark_has_steps
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension import state as wait_state

MAX_REASON_BYTES = 4096


def ask_id(args: MessageArgs) -> str:
    """Return the id of a message with an idempotency key that wants a reply: the same question has the same id."""
    # The length says where the name ends, because both are free text.
    question = f"{args.execution_id}|{len(args.mailbox)}|{args.mailbox}|{args.idempotency_key or ''}"
    return str(uuid.uuid5(uuid.NAMESPACE_OID, question))


class ReplyArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A reply: with a `reason` the message is refused, otherwise it is answered with the payload."""

    message_id: str
    payload: bytes | None = None
    payload_encoding: str | None = None
    reason: str | None = None


class ReplyRows(msgspec.Struct, frozen=True):
    """The rows that a reply is decided on."""

    row: Execution | None
    root: Suspension | None
    reply: Reply | None
    known: StepMemo | None = None  # the memo to record with the reply, if one is stored already


def reply(rows: ReplyRows, args: ReplyArgs, memo: StepMemo, fence: Fence, now: int) -> Decision[Reply]:
    """Reply to a message as the holder of the lease, and record that; a stored reply is returned instead."""
    row, asked = rows.row, rows.reply
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if asked is None:
        return refuse(errors.InvalidInput(f"message_id: no message {args.message_id} of this run wants a reply"))
    if rows.known is not None:
        return Decision(asked)
    writes: tuple[Write, ...] = (Insert(msgspec.structs.replace(memo, recorded_at=NOW)), *mark_has_steps(row))
    answer = asked
    if asked.state is ReplyState.OPEN:
        answer = msgspec.structs.replace(
            asked,
            state=ReplyState.ANSWERED if args.reason is None else ReplyState.REFUSED,
            replied_at=now,
            payload=args.payload,
            payload_encoding=args.payload_encoding,
            reason=args.reason,
        )
        root = wait_state.suspension_or_new(rows.root, row)
        writes += (Upsert(msgspec.structs.replace(answer, replied_at=NOW)), Upsert(root))
    guards = (seen(row, live(row)), wait_state.seen_suspension(rows.root, row.execution_id))
    return Decision(answer, Change(guards=guards, writes=writes))


def read_reply(row: Execution | None, asked: Reply | None) -> Reply | errors.FabricError:
    """Return the reply as its asker sees it: an open one of a run that has ended is not answered."""
    if row is None:
        return errors.NotFound("execution")
    if asked is None:
        return errors.NotFound("reply", execution_id=row.execution_id)
    if asked.state is not ReplyState.OPEN or row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return asked
    reason = f"ended as {row.terminal_outcome.value}"
    return msgspec.structs.replace(asked, state=ReplyState.NOT_ANSWERED, replied_at=row.completed_at, reason=reason)


def received_asks(memos: Iterable[GateMemo]) -> list[str]:
    """Return the ids of the messages among these memos that want a reply: the keys of the replies to load."""
    return [memo.message_id for memo in memos if memo.wants_reply and memo.message_id is not None]


def close_unanswered(replies: Iterable[Reply | None], reason: str) -> tuple[Write, ...]:
    """Return the writes that end open replies as not answered, for a change that forgets that they were received."""
    return tuple(
        Upsert(msgspec.structs.replace(one, state=ReplyState.NOT_ANSWERED, replied_at=NOW, reason=reason))
        for one in replies
        if one is not None and one.state is ReplyState.OPEN
    )
