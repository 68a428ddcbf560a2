"""Server-sent events: lines that a browser or a script can follow, resumable by the id of the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from flowfabric import errors
from flowfabric.server.errors import status_and_problem
from flowfabric.server.request import Request, encode

POLL_WAIT_MS = 10_000  # how long one look waits: also how often a quiet line shows that it lives
SHUTDOWN_EVENT = b'event: end\ndata: {"reason":"shutdown"}\n\n'
UNAUTHORIZED_EVENT = b'event: end\ndata: {"reason":"unauthorized"}\n\n'
KEEP_ALIVE_COMMENT = b": alive\n\n"


def format_event(data: bytes, *, name: str = "", cursor: str = "") -> bytes:
    """One event; the data are a line of JSON."""
    head = f"id: {cursor}\n" if cursor else ""
    head += f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + data + b"\n\n"


def last_event_id(ask: Request[Any]) -> str:
    """Where a follower stands."""
    return ask.headers.get(b"last-event-id", b"").decode("ascii", "replace")


async def with_keep_alive(ask: Request[Any], events: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The events, a sign of life in between, and a clean end when the server or its caller goes."""
    over = asyncio.Event()
    yield b"retry: 1000\n\n"
    async with ask.watch_disconnect(over.set) as goes_on:
        waiting = asyncio.ensure_future(anext(events, None))
        ending = asyncio.ensure_future(over.wait())
        try:
            while goes_on():
                await asyncio.wait((waiting, ending), timeout=POLL_WAIT_MS / 1000, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    if goes_on():
                        yield KEEP_ALIVE_COMMENT
                    continue
                if ask.rejection is not None:
                    break
                try:
                    told = waiting.result()
                except errors.FabricError as error:
                    yield format_event(encode(status_and_problem(error)[1]), name="error")
                    return
                if told is None:
                    return
                yield told
                waiting = asyncio.ensure_future(anext(events, None))
            if ask.rejection is not None:
                yield UNAUTHORIZED_EVENT
            elif ask.app.closing.is_set():
                yield SHUTDOWN_EVENT
        finally:
            for task in (waiting, ending):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await waiting
