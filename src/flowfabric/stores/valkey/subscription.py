"""A subscription to channels: one connection of its own that reconnects.

Messages that were published while it was not connected are lost. So after every reconnect `on_reconnect` is called
once the server has confirmed the subscription: a caller that relies on messages polls then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from contextlib import suppress

from libvalkey import ProtocolError, Reader, pack_command

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.event_loop import start_task
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey.connection import MAX_BACKOFF_S
from flowfabric.stores.valkey.errors import ReplyError, unavailable
from flowfabric.stores.valkey.session import Endpoint, Reply

PING = pack_command(("PING",))
PING_SHARE = 0.4  # share of `command_s`: the silence after which the connection is checked
UNLIMITED_S = 10.0  # instead of `command_s` if that is unlimited
_NOT_ENOUGH = object()
_LOG = logging.getLogger("flowfabric.store")


class ChannelSubscription:
    """Receives the messages of some channels."""

    def __init__(
        self,
        *channels: str,
        on_message: Callable[[bytes, bytes], None],
        on_reconnect: Callable[[], None],
    ) -> None:
        """`on_message` gets channel and payload."""
        self.channels = channels
        self.ready = asyncio.Event()  # set while the subscription is confirmed
        self._on_message = on_message
        self._on_reconnect = on_reconnect
        self._task: asyncio.Task[None] | None = None
        self._was_ready = False
        self._location = ("", 0)
        self._writer: asyncio.StreamWriter | None = None

    def start(self, endpoint: Callable[[], Endpoint], deadlines: Deadlines) -> None:
        """Connect in the background to the endpoint that is named then."""
        self._task = start_task(self._run(endpoint, deadlines), name="flowfabric-valkey-subscription")

    def leave_unless(self, locations: Container[tuple[str, int]]) -> None:
        """Reconnect unless the present node is one of these: one that was removed from a cluster hears nothing."""
        if self._writer is not None and self._location not in locations:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Stop; a second call does nothing."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, endpoint: Callable[[], Endpoint], deadlines: Deadlines) -> None:
        while True:
            try:
                await self._listen(endpoint(), deadlines)
            except (OSError, ProtocolError, ReplyError, StoreUnavailable, TimeoutError) as error:
                _LOG.debug("the subscription was interrupted: %s", error)
            except Exception:
                _LOG.exception("a message was not handled; the subscription starts again")
            self.ready.clear()
            await asyncio.sleep(MAX_BACKOFF_S)

    async def _listen(self, endpoint: Endpoint, deadlines: Deadlines) -> None:
        """Receive messages until the connection ends."""
        limit_s = deadlines.command_s or UNLIMITED_S
        async with asyncio.timeout(deadlines.connect_s or None):
            stream, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.tls)
        self._location, self._writer = (endpoint.host, endpoint.port), writer
        try:
            greeting = endpoint.greeting()
            writer.writelines([*greeting, pack_command(("SUBSCRIBE", *self.channels))])
            reader = Reader(protocolError=ProtocolError, replyError=ReplyError, notEnoughData=_NOT_ENOUGH)
            unconfirmed = len(greeting) + len(self.channels)
            is_checking = False
            while True:
                try:
                    async with asyncio.timeout(limit_s * (1 - PING_SHARE if is_checking else PING_SHARE)):
                        data = await stream.read(65536)
                except TimeoutError:
                    if is_checking or unconfirmed:
                        raise
                    is_checking = True
                    writer.write(PING)
                    continue
                if not data:
                    raise unavailable(f"{endpoint}: the server closed the connection", StoreFault.TRANSPORT)
                is_checking = False
                reader.feed(data)
                while (reply := reader.gets()) is not _NOT_ENOUGH:
                    if unconfirmed:
                        unconfirmed -= 1
                        self._confirm(reply, unconfirmed)
                    elif isinstance(reply, list) and reply[0] == b"message":
                        self._on_message(reply[1], reply[2])
        finally:
            self._writer = None
            writer.transport.abort()

    def _confirm(self, reply: Reply, missing: int) -> None:
        if isinstance(reply, ReplyError):
            raise reply
        if not missing:
            self.ready.set()
            if self._was_ready:
                self._on_reconnect()
            self._was_ready = True
