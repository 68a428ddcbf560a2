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
from flowfabric.server.routing import FIELDS_HEADER, Response, StreamingResponse

TTL_S = 120.0
MAX_ENTRIES = 10_000
MAX_BYTES = 64 * 1024 * 1024
MAX_KEY_BYTES = 128
TRANSIENT_STATUSES = frozenset({401, 403, 408, 429})

_FIELDS = FIELDS_HEADER.encode()

CacheKey = tuple[str, bytes, bytes, bytes]


class IdempotencyCache:
    """The latest answers to requests that may be repeated, by who asked, what for, and their key."""

    def __init__(self) -> None:
        self._under_way: dict[CacheKey, tuple[bytes, asyncio.Future[Response | None]]] = {}
        self._kept: OrderedDict[CacheKey, tuple[float, bytes, Response]] = OrderedDict()
        self._bytes = 0

    async def get_or_run(
        self, key: CacheKey, content: bytes, ask: Callable[[], Awaitable[Response | StreamingResponse]]
    ) -> Response | StreamingResponse:
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
        answering: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = (content, answering)
        answered: Response | None = None
        try:
            reply_now = await ask()
            if (
                isinstance(reply_now, Response)
                and reply_now.status < 500
                and reply_now.status not in TRANSIENT_STATUSES
            ):
                answered = reply_now
                self._keep(key, content, answered)
            return reply_now
        finally:
            del self._under_way[key]
            answering.set_result(answered)

    def _keep(self, key: CacheKey, content: bytes, reply: Response) -> None:
        self._kept[key] = (monotonic(), content, reply)
        self._bytes += len(reply.body)
        while len(self._kept) > MAX_ENTRIES or self._bytes > MAX_BYTES:
            self._drop_oldest()

    def _forget_old(self) -> None:
        too_old = monotonic() - TTL_S
        while self._kept and next(iter(self._kept.values()))[0] < too_old:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, _, reply) = self._kept.popitem(last=False)
        self._bytes -= len(reply.body)


def _same(known: bytes, content: bytes) -> None:
    if known != content:
        raise IdempotencyConflict("this Idempotency-Key was used for another request; take a new key for a new one")


def cache_key(who: str, method: str, path: bytes, headers: dict[bytes, bytes]) -> CacheKey | None:
    """What a request is remembered by; None for one that did not ask to be."""
    given = headers.get(b"idempotency-key")
    if not given or method in ("GET", "HEAD") or len(given) > MAX_KEY_BYTES:
        return None
    # Who asks is part of it: nobody hears an answer that was meant for somebody else.
    return who, headers.get(b"authorization", b""), method.encode() + b" " + path, given


def content_digest(query: bytes, headers: dict[bytes, bytes], body: bytes) -> bytes:
    """The digest of what a request says: its query, the fields in its header, its body."""
    parts = (query, headers.get(_FIELDS, b""), body)
    return hashlib.sha256(b"".join(b"%d:%s" % (len(part), part) for part in parts)).digest()
