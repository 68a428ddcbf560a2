"""Once: a request that is repeated because its answer got lost is answered again, not done again.

A client that sends `Idempotency-Key` with a request may send the same request with the same key until it hears an
answer. The answer is remembered for a while in this process; a repetition that comes while the first is still under way
waits for it. What was refused for a passing reason is not remembered. Ids in the requests hold beyond that memory: it
only spares what has none, such as a claim. The same key with another query or body is a conflict.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from time import monotonic

from flowfabric.errors import IdempotencyConflict
from flowfabric.server.routing import FIELDS, Live, Reply

KEPT_S = 120.0
MOST_KEPT = 10_000
MOST_BYTES = 64 * 1024 * 1024
LONGEST_KEY = 128
PASSING = frozenset({401, 403, 408, 429})

_FIELDS = FIELDS.encode()

Key = tuple[str, bytes, bytes, bytes]


class Once:
    """The latest answers to requests that may be repeated, by who asked, what for, and their key."""

    def __init__(self) -> None:
        self._under_way: dict[Key, tuple[bytes, asyncio.Future[Reply | None]]] = {}
        self._kept: OrderedDict[Key, tuple[float, bytes, Reply]] = OrderedDict()
        self._bytes = 0

    async def answer(self, key: Key, content: bytes, ask: Callable[[], Awaitable[Reply | Live]]) -> Reply | Live:
        """The answer that this request had, or has now; `content` is the digest of what it says."""
        while (first := self._under_way.get(key)) is not None:
            _same(first[0], content)
            reply = await asyncio.shield(first[1])
            if reply is not None:
                return reply
        self._forget_old()
        if (kept := self._kept.get(key)) is not None:
            _same(kept[1], content)
            return kept[2]
        answering: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = (content, answering)
        answered: Reply | None = None
        try:
            reply_now = await ask()
            if isinstance(reply_now, Reply) and reply_now.status < 500 and reply_now.status not in PASSING:
                answered = reply_now
                self._keep(key, content, answered)
            return reply_now
        finally:
            del self._under_way[key]
            answering.set_result(answered)

    def _keep(self, key: Key, content: bytes, reply: Reply) -> None:
        self._kept[key] = (monotonic(), content, reply)
        self._bytes += len(reply.body)
        while len(self._kept) > MOST_KEPT or self._bytes > MOST_BYTES:
            self._drop_oldest()

    def _forget_old(self) -> None:
        too_old = monotonic() - KEPT_S
        while self._kept and next(iter(self._kept.values()))[0] < too_old:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, _, reply) = self._kept.popitem(last=False)
        self._bytes -= len(reply.body)


def _same(known: bytes, content: bytes) -> None:
    if known != content:
        raise IdempotencyConflict("this Idempotency-Key was used for another request; take a new key for a new one")


def key_of(who: str, method: str, path: bytes, headers: dict[bytes, bytes]) -> Key | None:
    """What a request is remembered by; None for one that did not ask to be."""
    given = headers.get(b"idempotency-key")
    if not given or method in ("GET", "HEAD") or len(given) > LONGEST_KEY:
        return None
    # Who asks is part of it: nobody hears an answer that was meant for somebody else.
    return who, headers.get(b"authorization", b""), method.encode() + b" " + path, given


def content_of(query: bytes, headers: dict[bytes, bytes], body: bytes) -> bytes:
    """The digest of what a request says: its query, the fields in its header, its body."""
    parts = (query, headers.get(_FIELDS, b""), body)
    return hashlib.sha256(b"".join(b"%d:%s" % (len(part), part) for part in parts)).digest()
