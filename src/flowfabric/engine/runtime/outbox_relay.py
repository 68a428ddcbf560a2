"""The relay: messages to other partitions arrive at once in the process that sent them, and by sweep whatever happens.

A message is a row of the commit that caused it, so it is never lost and never sent for something that did not happen.
It may arrive twice (its receiver did the work and the process died before the row was removed), so receivers do the
same thing once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.runtime import Runtime
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
        """Deliver what a change that was just written here owes to others."""
        messages = [
            msgspec.structs.replace(write.row, revision=change.id)
            for write in change.writes
            if type(write) is Upsert and type(write.row) is OutboxMessage
        ]
        if not messages:
            return
        task = asyncio.create_task(self._deliver_now(messages))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    async def wait_for_deliveries(self) -> None:
        """Wait until everything that was sent from here has arrived or was left to the sweep."""
        while self._deliveries:
            await asyncio.wait(self._deliveries)

    async def deliver_outbox_message(self, message: OutboxMessage) -> bool:
        """Hand a message to its receiver and forget it; False when it has to wait for another try."""
        receiver = self._receivers.get(message.kind)
        if receiver is None:
            logger.error("message %s: nobody here receives %s", message.message_id, message.kind)
            return False
        try:
            await receiver(message)
        except errors.FabricError as refused:
            logger.warning("message %s to %s has to wait: %s", message.message_id, message.target, refused)
            return False
        await self._settled(outbox.acknowledge(message))
        return True

    async def redeliver_outbox_message(self, message: OutboxMessage) -> bool:
        """The sweep's form: a message that has to wait again waits longer each time."""
        if await self.deliver_outbox_message(message):
            return True
        await self._settled(outbox.postpone(message))
        return False

    async def _deliver_now(self, messages: Sequence[OutboxMessage]) -> None:
        try:
            await asyncio.gather(*(self.deliver_outbox_message(message) for message in messages))
        except errors.StoreUnavailable as away:
            logger.warning("%s left to the sweep: %s", pluralize(len(messages), "message"), away)

    async def _settled(self, change: Change) -> None:
        # A guard that fails means that another process delivered the message as well: nothing is left to do.
        await self.runtime.commit_queue.add(msgspec.structs.replace(change, id=self.runtime.minter.change_id()))
