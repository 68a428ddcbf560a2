"""A TCP proxy that can become a black hole: connections stay open, and nothing is forwarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any


class BlackHole:
    """Forwards connections to a server until `swallow` is called."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._flowing: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._closed_to_new = False
        self.port = 0
        self.accepted = 0

    def swallow(self, *, new: bool = False) -> None:
        """Stop forwarding on open connections, in both directions; with `new`, also on new connections."""
        self._closed_to_new = new
        for flowing in self._flowing:
            flowing.clear()
        self._flowing.clear()

    def heal(self) -> None:
        """Forward new connections again. Swallowed connections stay swallowed."""
        self._closed_to_new = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a connection of a client."""
        self.accepted += 1
        self._writers.append(writer)
        if not self._closed_to_new:
            self._start(self._forward(reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flowing = asyncio.Event()
        flowing.set()
        self._flowing.add(flowing)
        there, to = await asyncio.open_connection(self._host, self._port)
        self._writers.append(to)
        self._start(_pump(reader, to, flowing))
        await _pump(there, writer, flowing)
        self._flowing.discard(flowing)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        for writer in self._writers:
            with suppress(ConnectionError):
                await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(65536):
            await flowing.wait()  # forever, once it was swallowed
            writer.write(piece)
            await writer.drain()
    await flowing.wait()  # the end of the stream is not forwarded either
    writer.close()


@asynccontextmanager
async def black_hole(host: str, port: int) -> AsyncIterator[BlackHole]:
    """Run a proxy in front of a server."""
    hole = BlackHole(host, port)
    server = await asyncio.start_server(hole.accept, "127.0.0.1", 0)
    hole.port = server.sockets[0].getsockname()[1]
    try:
        yield hole
    finally:
        server.close()
        await hole.close()
