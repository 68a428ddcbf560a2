"""OutboxRelay: delivers messages to other partitions, at once in the process that committed them, else by a sweep.

A message is a row of the commit that caused it, so it is never lost and never sent without that commit. It may be
delivered twice (the process died before the row was deleted), so receivers are idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.event_loop import start_background
from flowfabric.model.change import Change, Upsert
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.text import pluralize
from flowfabric.rules import outbox

logger = logging.getLogger("flowfabric.outbox")

Receiver = Callable[[OutboxMessage], Awaitable[None]]


class OutboxRelay:
    """Delivers the messages that commits write for other partitions."""

    def __init__(self, runtime: Runtime, receivers: Mapping[str, Receiver]) -> None:
        """`receivers` has the receiver of each kind of message."""
        self.runtime = runtime
        self._receivers = receivers
        self._deliveries: set[asyncio.Task[None]] = set()

    def deliver_written_messages(self, change: Change, _: object) -> None:
        """Deliver the messages of a change that this process has just committed."""
        messages = [
            msgspec.structs.replace(write.row, revision=change.id)
            for write in change.writes
            if type(write) is Upsert and type(write.row) is OutboxMessage
        ]
        if not messages:
            return
        start_background(self._deliver_now(messages), self._deliveries)

    async def wait_for_deliveries(self) -> None:
        """Wait until every message of this process was delivered or left to the sweep."""
        while self._deliveries:
            await asyncio.wait(self._deliveries)

    async def deliver_outbox_message(self, message: OutboxMessage) -> bool:
        """Deliver a message and delete it; return False if it has to be retried."""
        receiver = self._receivers.get(message.kind)
        if receiver is None:
            logger.error("message %s: no receiver for %s", message.message_id, message.kind)
            return False
        try:
            await receiver(message)
        except errors.FabricError as refused:
            logger.warning("message %s to %s was not delivered: %s", message.message_id, message.target, refused)
            return False
        await self._commit(outbox.acknowledge(message))
        return True

    async def redeliver_outbox_message(self, message: OutboxMessage) -> bool:
        """Deliver a message that was not delivered before; each failure makes the next delay longer."""
        if await self.deliver_outbox_message(message):
            return True
        await self._commit(outbox.postpone(message))
        return False

    async def _deliver_now(self, messages: Sequence[OutboxMessage]) -> None:
        try:
            await asyncio.gather(*(self.deliver_outbox_message(message) for message in messages))
        except errors.StoreUnavailable as error:
            logger.warning("%s left to the sweep: %s", pluralize(len(messages), "message"), error)

    async def _commit(self, change: Change) -> None:
        # A failed guard means that another process has delivered the message: nothing is left to do.
        await self.runtime.commit_queue.add(msgspec.structs.replace(change, id=self.runtime.minter.change_id()))
