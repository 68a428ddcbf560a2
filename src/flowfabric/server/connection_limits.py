"""Limits on connections: time and size of a request head, and the number of connections.

uvicorn limits neither time nor size: a silent connection, or one that never finishes its headers, would stay open for
ever. Its connection limit refuses requests on all connections once there are too many. Here the first ones continue;
later ones are answered 503 and closed, and beyond MAX_REFUSED_CONNECTIONS more they are closed without a response.
A connection that was accepted just before the server stopped to listen is closed, too: uvicorn would wait for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flowfabric.server.errors import Problem

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
MAX_REFUSED_CONNECTIONS = 100  # connections beyond the limit that still get a 503


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a timeout and a size limit for request heads."""

    head_timeout_s = HEAD_TIMEOUT_S
    max_connections = 0
    closing: asyncio.Event
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.closing.is_set():
            transport.close()
            return
        self._start_head_timer()
        if self.max_connections and len(self.connections) > self.max_connections:
            self.app = refuse_connection
            if len(self.connections) > self.max_connections + MAX_REFUSED_CONNECTIONS:
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        # Checked afterwards: a head that is complete by now is checked by the application.
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._close_silent)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_silent(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


async def refuse_connection(scope: Any, receive: Any, send: Any) -> None:
    """Answer 503 and close the connection."""
    problem = Problem("too many connections; retry later", "unavailable", True)
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    body = msgspec.json.encode(problem)
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def protocol_class(max_connections: int, closing: asyncio.Event) -> type[BoundedProtocol]:
    """Return the protocol class of one server that shuts down when `closing` is set; 0 is no limit of connections."""
    return type("BoundedProtocol", (BoundedProtocol,), {"max_connections": max_connections, "closing": closing})
