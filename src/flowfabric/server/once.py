"""Once: a request that is repeated because its answer got lost is answered again, not done again.

A client that sends `Idempotency-Key` with a request may send the same request with the same key until it hears an
answer. The answer is remembered for a while in this process; a repetition that comes while the first is still under way
waits for it. What was refused for a passing reason is not remembered. Ids in the requests hold beyond that memory: it
only spares what has none, such as a claim.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from time import monotonic

from flowfabric.server.table import Live, Reply

KEPT_S = 120.0
MOST_KEPT = 10_000
MOST_BYTES = 64 * 1024 * 1024
LONGEST_KEY = 128
PASSING = frozenset({401, 403, 408, 429})

Key = tuple[bytes, bytes, bytes]


class Once:
    """The latest answers to requests that may be repeated, by who asked, what for, and their key."""

    def __init__(self) -> None:
        self._under_way: dict[Key, asyncio.Future[Reply | None]] = {}
        self._kept: OrderedDict[Key, tuple[float, Reply]] = OrderedDict()
        self._bytes = 0

    async def answer(self, key: Key, ask: Callable[[], Awaitable[Reply | Live]]) -> Reply | Live:
        """The answer that this request had, or has now."""
        while (first := self._under_way.get(key)) is not None:
            reply = await asyncio.shield(first)
            if reply is not None:
                return reply
        self._forget_old()
        if (kept := self._kept.get(key)) is not None:
            return kept[1]
        first = self._under_way[key] = asyncio.get_running_loop().create_future()
        answered: Reply | None = None
        try:
            reply_now = await ask()
            if isinstance(reply_now, Reply) and reply_now.status < 500 and reply_now.status not in PASSING:
                answered = reply_now
                self._keep(key, answered)
            return reply_now
        finally:
            del self._under_way[key]
            first.set_result(answered)

    def _keep(self, key: Key, reply: Reply) -> None:
        self._kept[key] = (monotonic(), reply)
        self._bytes += len(reply.body)
        while len(self._kept) > MOST_KEPT or self._bytes > MOST_BYTES:
            self._drop_oldest()

    def _forget_old(self) -> None:
        too_old = monotonic() - KEPT_S
        while self._kept and next(iter(self._kept.values()))[0] < too_old:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, reply) = self._kept.popitem(last=False)
        self._bytes -= len(reply.body)


def key_of(method: str, path: bytes, headers: dict[bytes, bytes]) -> Key | None:
    """What a request is remembered by; None for one that did not ask to be."""
    given = headers.get(b"idempotency-key")
    if not given or method in ("GET", "HEAD") or len(given) > LONGEST_KEY:
        return None
    # Who asks is part of it: nobody hears an answer that was meant for somebody else.
    return headers.get(b"authorization", b""), method.encode() + b" " + path, given
