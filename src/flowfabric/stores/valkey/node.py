"""One server, with a connection for writes and one for reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from libvalkey import pack_command

from flowfabric.errors import StoreUnavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey.connection import Connection
from flowfabric.stores.valkey.errors import ReplyError
from flowfabric.stores.valkey.session import Argument, Command, Confirmation, Endpoint, Reply
from flowfabric.stores.valkey.slots import Location


class NodeOwner(Protocol):
    """Decides what happens to the commands of a node that got no proper reply."""

    deadlines: Deadlines
    confirmations: Sequence[Confirmation]

    def endpoint(self, location: Location) -> Endpoint:
        """Return where a node is, and the user to connect as."""

    def handle_error_reply(self, node: Node, command: Command, error: ReplyError) -> None:
        """Send a refused command again, or fail it."""

    def handle_lost(self, commands: Sequence[Command], error: StoreUnavailable, *, sent: bool) -> None:
        """Send commands without a reply again, or fail them; `sent`: the server may have received them."""

    def refresh_soon(self) -> None:
        """Ask for the slot map."""


class Node:
    """One server, with a connection for writes and one for reads."""

    def __init__(self, owner: NodeOwner, location: Location) -> None:
        self.location = location
        self._owner = owner
        endpoint = owner.endpoint(location)
        self.writes = Connection(endpoint, self, owner.confirmations)
        self.reads = Connection(endpoint, self)
        self.is_slow = False
        self.loading: asyncio.Future[Reply] | None = None  # the library

    @property
    def deadlines(self) -> Deadlines:
        return self._owner.deadlines

    def __str__(self) -> str:
        return f"{self.location[0]}:{self.location[1]}"

    def call(self, *arguments: Argument) -> asyncio.Future[Reply]:
        """Send a command to this node on its write connection."""
        return self._send(self.writes, arguments, is_read=False)

    def read(self, *arguments: Argument) -> asyncio.Future[Reply]:
        """Send a command to this node on its read connection."""
        return self._send(self.reads, arguments, is_read=True)

    def _send(self, connection: Connection, arguments: tuple[Argument, ...], *, is_read: bool) -> asyncio.Future[Reply]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        connection.send(Command(pack_command(arguments), future, loop.time(), slot=None, is_read=is_read))
        return future

    def load_library(self, library: str) -> asyncio.Future[Reply]:
        """Load the functions here; calls during a load share it."""
        if self.loading is None or self.loading.done():
            self.loading = self.call("FUNCTION", "LOAD", "REPLACE", library)
        return self.loading

    def handle_error_reply(self, command: Command, error: ReplyError) -> None:
        self._owner.handle_error_reply(self, command, error)

    def handle_lost(self, commands: Sequence[Command], error: StoreUnavailable, *, sent: bool) -> None:
        self._owner.handle_lost(commands, error, sent=sent)

    def handle_slow(self) -> None:
        self.is_slow = True
        self._owner.refresh_soon()

    async def close(self) -> None:
        await asyncio.gather(self.writes.close(), self.reads.close())
