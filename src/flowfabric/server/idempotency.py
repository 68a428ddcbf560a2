"""Idempotency keys: a retried request whose response was lost gets the same response again.

A client that sends `Idempotency-Key` may retry with the same key until it gets a response. This process
caches the response for TTL_S; a retry that arrives while the first request is in flight waits for it. Transient errors
are not cached. Most operations are idempotent by the ids in their requests; the cache serves those that are not, such
as a claim. The same key with a different query or body is a conflict.
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
    """Recent responses by caller, method, path and idempotency key."""

    def __init__(self) -> None:
        self._running: dict[CacheKey, tuple[bytes, asyncio.Future[Response | None]]] = {}
        self._cached: OrderedDict[CacheKey, tuple[float, bytes, Response]] = OrderedDict()
        self._bytes = 0

    async def get_or_run(
        self, key: CacheKey, content: bytes, run: Callable[[], Awaitable[Response | StreamingResponse]]
    ) -> Response | StreamingResponse:
        """Return the cached response, or run the request; `content` is the digest of its query and body."""
        while (running := self._running.get(key)) is not None:
            _check_same(running[0], content)
            earlier = await asyncio.shield(running[1])
            if earlier is not None:
                return earlier
        self._evict_expired()
        if (cached := self._cached.get(key)) is not None:
            _check_same(cached[1], content)
            return cached[2]
        outcome: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        self._running[key] = (content, outcome)
        cacheable: Response | None = None
        try:
            response = await run()
            if isinstance(response, Response) and response.status < 500 and response.status not in TRANSIENT_STATUSES:
                cacheable = response
                self._store(key, content, cacheable)
            return response
        finally:
            del self._running[key]
            outcome.set_result(cacheable)

    def _store(self, key: CacheKey, content: bytes, response: Response) -> None:
        self._cached[key] = (monotonic(), content, response)
        self._bytes += len(response.body)
        while len(self._cached) > MAX_ENTRIES or self._bytes > MAX_BYTES:
            self._evict_oldest()

    def _evict_expired(self) -> None:
        oldest = monotonic() - TTL_S
        while self._cached and next(iter(self._cached.values()))[0] < oldest:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, (_, _, response) = self._cached.popitem(last=False)
        self._bytes -= len(response.body)


def _check_same(known: bytes, content: bytes) -> None:
    if known != content:
        raise IdempotencyConflict("this Idempotency-Key was used for another request; take a new key for a new one")


def cache_key(caller_key: str, method: str, path: bytes, headers: dict[bytes, bytes]) -> CacheKey | None:
    """Return the cache key of a request; None if it has no idempotency key."""
    header = headers.get(b"idempotency-key")
    if not header or method in ("GET", "HEAD") or len(header) > MAX_KEY_BYTES:
        return None
    # The caller is part of the key: nobody gets a response that was meant for another caller.
    return caller_key, headers.get(b"authorization", b""), method.encode() + b" " + path, header


def content_digest(query: bytes, headers: dict[bytes, bytes], body: bytes) -> bytes:
    """Return the digest of query, fields header and body."""
    parts = (query, headers.get(_FIELDS, b""), body)
    return hashlib.sha256(b"".join(b"%d:%s" % (len(part), part) for part in parts)).digest()
