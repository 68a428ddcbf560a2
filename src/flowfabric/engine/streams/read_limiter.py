"""Read limiter: bounds the stream reads and tails that one engine serves concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowfabric import errors

RETRY_HINT_MS = 25


class StreamReadLimiter:
    """Counts the reads and tails in progress and refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.closing = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Hold one slot; `ResourceExhausted` if all are in use, `Unavailable` during shutdown."""
        if self.closing.is_set():
            raise errors.Unavailable("stream_ops")
        if self.running >= self.limit:
            available = self.limit - self.running
            hint = max(RETRY_HINT_MS, RETRY_HINT_MS * self.limit // (available + 1))
            raise errors.ResourceExhausted("stream_ops", self.limit, hint)
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
