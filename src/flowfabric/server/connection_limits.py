"""The wire's own limits: a request has to begin soon, its head has to end, and there are only so many connections.

uvicorn bounds neither of the first two: a connection that says nothing, or never finishes its headers, would be kept
for ever. Its limit of connections refuses the requests of all of them once there are too many; here those that came
first go on, and later ones are answered 503 and closed. Far too many are closed before they say anything.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flowfabric.server.errors import Problem

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
MAX_REFUSED_CONNECTIONS = 100  # connections beyond the limit that are still told why they are refused


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a clock and a scale for heads."""

    head_timeout_s = HEAD_TIMEOUT_S
    max_connections = 0
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if self.max_connections and len(self.connections) > self.max_connections:
            self.app = refuse_connection
            if len(self.connections) > self.max_connections + MAX_REFUSED_CONNECTIONS:
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        # Looked at afterwards: a head that is complete by now is for the application to judge.
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_over()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._hang_up)

    def _head_is_over(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _hang_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


async def refuse_connection(scope: Any, receive: Any, send: Any) -> None:
    """Answer 503 and let the connection end."""
    problem = Problem("too many connections; come back later", "unavailable", True)
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    body = msgspec.json.encode(problem)
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def protocol_class(most_connections: int) -> type[BoundedProtocol]:
    """The protocol of one server; no limit of connections is 0."""
    return type("BoundedProtocol", (BoundedProtocol,), {"most_connections": most_connections})
