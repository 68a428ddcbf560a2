"""Messages: operations on the inbox of a run, and replies to those who ask."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import completion_topic, reply_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution, Payload
from flowfabric.model.gate import Reply, ReplyState, StepMemo
from flowfabric.model.suspension import IdempotencyRecord, Suspension
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import asks, mailbox
from flowfabric.rules.durable.asks import ReplyArgs, ReplyRows, ask_id
from flowfabric.rules.durable.inbox_schema import Inbox, NeedsInbox, parse_inbox
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery

MAX_CACHED_INBOXES = 1000


class Messages:
    """Sends messages to runs, and carries replies to those who ask."""

    def __init__(self, runtime: Runtime, root_queues: RootQueues) -> None:
        self.runtime = runtime
        self.root_queues = root_queues
        # By execution, which may be created again under its id: when it was, and what it declares to take.
        self._inboxes: dict[str, tuple[int, Inbox]] = {}

    async def send(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to an execution that has not ended; messages are kept in order until they are received."""
        ask = validate_suspension.validate_mail(args)
        answer = await self._send(ask)
        while isinstance(answer, NeedsInbox):
            await self._load_inbox(ask.execution_id)
            answer = await self._send(ask)
        return answer

    async def _send(self, ask: MessageArgs) -> Accepted | DuplicateDelivery | NeedsInbox:
        key, call = wait_encoding.key_digest(ask.idempotency_key or ""), str(self.runtime.minter.change_id())
        reads = ReadSet()
        row, suspension = reads.one(Execution, ask.execution_id), reads.one(Suspension, ask.execution_id)
        earlier = reads.one(IdempotencyRecord, ask.execution_id, ask.scope, key)
        asked = reads.each(Reply, ((ask.execution_id, ask.message_id),) if ask.wants_reply else ())

        def decide(rows: Rows, now: int) -> Decision[Accepted | DuplicateDelivery | NeedsInbox]:
            found, known = row(rows), next(iter(asked(rows)), None)
            inbox = None if found is None else self._find_inbox(found)
            return mailbox.send_message(
                found, suspension(rows), earlier(rows), ask, now, asked=known, inbox=inbox, call=call
            )

        return await self.root_queues.decide_and_commit(ask.execution_id, reads, decide)

    def _find_inbox(self, row: Execution) -> Inbox | None:
        created_at, inbox = self._inboxes.get(row.execution_id, (None, None))
        return inbox if created_at == row.created_at else None

    async def _load_inbox(self, execution_id: str) -> None:
        reads = ReadSet()
        row, payload = reads.one(Execution, execution_id), reads.one(Payload, execution_id)
        rows = (await self.runtime.load(reads)).rows
        found, stored = row(rows), payload(rows)
        if len(self._inboxes) >= MAX_CACHED_INBOXES:
            self._inboxes.clear()
        if found is not None:
            self._inboxes[execution_id] = found.created_at, parse_inbox(None if stored is None else stored.policy)

    async def ask(self, args: MessageArgs, *, max_wait_ms: int = 0) -> Reply:
        """Send a message that wants a reply, unless it was sent before, and wait up to `max_wait_ms` for the reply."""
        asked = msgspec.structs.replace(validate_suspension.validate_mail(args), wants_reply=True)
        if asked.idempotency_key:
            asked = msgspec.structs.replace(asked, message_id=ask_id(asked), idempotency_key=None)
        await self.send(asked)
        return await self.read_reply(asked.execution_id, asked.message_id, max_wait_ms=max_wait_ms)

    async def reply(self, handle: Handle, args: ReplyArgs, memo: MemoArgs) -> Reply:
        """Reply to a message as the holder of the lease, and record that; the first reply stays and is the answer."""
        fields, ask = self.runtime.handle_fields(handle), validate_suspension.validate_reply(args)
        record = validate_suspension.step_memo(fields, memo)
        execution, reads = fields.execution_id, ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        asked = reads.one(Reply, execution, ask.message_id)
        known = reads.one(StepMemo, execution, record.name, record.occurrence)

        def decide(rows: Rows, now: int) -> Decision[Reply]:
            found = ReplyRows(row(rows), suspension(rows), asked(rows), known(rows))
            return asks.reply(found, ask, record, Fence.of(fields), now)

        return await self.runtime.decide_and_commit(reads, decide)

    async def close_inbox(self, handle: Handle, memo: MemoArgs) -> bool:
        """Close the inbox of the held execution if nothing is unread, and record whether that was so."""
        fields = self.runtime.handle_fields(handle)
        record = validate_suspension.step_memo(fields, memo)
        execution, reads = fields.execution_id, ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        known = reads.one(StepMemo, execution, record.name, record.occurrence)

        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: mailbox.close_inbox(
                row(rows), suspension(rows), known(rows), record, Fence.of(fields), now
            ),
        )

    async def read_reply(self, execution_id: str, message_id: str, *, max_wait_ms: int = 0) -> Reply:
        """Return the reply to a message; wait up to `max_wait_ms` for it. One that is still open has no answer yet."""
        execution = validate.validate_execution_id(execution_id)
        message = validate.parse_uuid("message_id", message_id)
        clock = asyncio.get_running_loop().time
        until = clock() + validation.duration_ms("max_wait_ms", max_wait_ms, least=0) / 1000
        reads = ReadSet()
        row, asked = reads.one(Execution, execution), reads.one(Reply, execution, message)
        while True:
            hint = self.runtime.wakeups.subscribe(reply_topic(execution), completion_topic(execution))
            try:
                rows = (await self.runtime.load(reads)).rows
                answer = asks.read_reply(row(rows), asked(rows))
                if isinstance(answer, errors.FabricError):
                    raise answer
                left = until - clock()
                if answer.state is not ReplyState.OPEN or left <= 0:
                    return answer
                await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
            finally:
                hint.cancel()
