"""Server-sent events, resumable by the id of the last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from flowfabric import errors
from flowfabric.server.errors import status_and_problem
from flowfabric.server.request import Request, encode

POLL_WAIT_MS = 10_000  # how long one poll waits, and the interval of keep-alive comments
SHUTDOWN_EVENT = b'event: end\ndata: {"reason":"shutdown"}\n\n'
UNAUTHORIZED_EVENT = b'event: end\ndata: {"reason":"unauthorized"}\n\n'
KEEP_ALIVE_COMMENT = b": alive\n\n"


def format_event(data: bytes, *, name: str = "", cursor: str = "") -> bytes:
    """Format one event; `data` is a line of JSON."""
    prefix = f"id: {cursor}\n" if cursor else ""
    prefix += f"event: {name}\n" if name else ""
    return prefix.encode() + b"data: " + data + b"\n\n"


def last_event_id(request: Request[Any]) -> str:
    """Return the id of the last event that the client has seen, or an empty text."""
    return request.headers.get(b"last-event-id", b"").decode("ascii", "replace")


async def with_keep_alive(request: Request[Any], events: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield events and keep-alive comments; end cleanly when the server stops or the token becomes invalid."""
    over = asyncio.Event()
    yield b"retry: 1000\n\n"
    async with request.watch_disconnect(over.set) as is_open:
        next_event = asyncio.ensure_future(anext(events, None))
        ended = asyncio.ensure_future(over.wait())
        try:
            while is_open():
                await asyncio.wait(
                    (next_event, ended), timeout=POLL_WAIT_MS / 1000, return_when=asyncio.FIRST_COMPLETED
                )
                if not next_event.done():
                    if is_open():
                        yield KEEP_ALIVE_COMMENT
                    continue
                if request.rejection is not None:
                    break
                try:
                    event = next_event.result()
                except errors.FabricError as error:
                    yield format_event(encode(status_and_problem(error)[1]), name="error")
                    return
                if event is None:
                    return
                yield event
                next_event = asyncio.ensure_future(anext(events, None))
            if request.rejection is not None:
                yield UNAUTHORIZED_EVENT
            elif request.app.closing.is_set():
                yield SHUTDOWN_EVENT
        finally:
            for task in (next_event, ended):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await next_event
