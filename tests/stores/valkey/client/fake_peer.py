"""A fake Valkey server that answers as a test says: partial replies, silence, closed connections, redirects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from libvalkey import Reader

_NOT_ENOUGH = object()


class Peer:
    """One connection of a client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, data: bytes) -> None:
        """Send bytes now."""
        self._writer.write(data)

    def stop_reading(self) -> None:
        """Read nothing more, so that the client's buffers fill."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def end(self) -> None:
        """Send what was written, then close the connection."""
        self._writer.close()


Answer = Callable[[list[bytes], Peer], bytes | None]


class FakeServer:
    """Answers each command with the bytes that `answer` returns; None is silence."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.connections = 0
        self.port = 0
        self.listener: asyncio.Server
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def named(self, name: bytes) -> list[list[bytes]]:
        """Return the received commands of a name."""
        return [command for command in self.commands if command[0] == name]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        parser = Reader(notEnoughData=_NOT_ENOUGH)
        peer = Peer(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not _NOT_ENOUGH:
                    self.commands.append(command)
                    reply = b"+OK\r\n" if command[0] in (b"HELLO", b"SELECT") else self.answer(command, peer)
                    if reply is not None and not writer.is_closing():
                        writer.write(reply)
        writer.close()

    def stop_listening(self) -> None:
        """Refuse new connections."""
        self.listener.close()

    def close_connections(self) -> None:
        """Close all connections at once."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def fake_server(answer: Answer) -> AsyncIterator[FakeServer]:
    """Run a fake server."""
    fake = FakeServer(answer)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.listener = server
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        fake.close_connections()


def slot_map(*ranges: tuple[int, int, int]) -> bytes:
    """Encode a reply of CLUSTER SLOTS; a range is its first slot, its last one and the port of its node."""
    rows = [b"*3\r\n:%d\r\n:%d\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % row for row in ranges]
    return b"*%d\r\n" % len(rows) + b"".join(rows)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)
