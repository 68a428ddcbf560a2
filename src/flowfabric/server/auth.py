"""Who may ask: bearer tokens, what they are good for, and how often."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import Counter, OrderedDict
from typing import Any

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.model.api_token import ApiScope
from flowfabric.server.errors import HttpError
from flowfabric.server.settings import ServerSettings

UNAUTHENTICATED_MESSAGE = "missing or invalid Authorization header"
MAX_TRACKED_CALLERS = 10_000
TOKEN_CACHE_S = 2.0
ALL_SCOPES = frozenset(ApiScope)


class Principal(msgspec.Struct, frozen=True):
    """Somebody with a token: a name for logs, never the token."""

    name: str
    scopes: frozenset[ApiScope] = ALL_SCOPES
    namespaces: frozenset[str] | None = None  # None is all

    def can_see(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    def require_scope(self, scope: ApiScope) -> None:
        """Refuse what the token is not good for."""
        if scope not in self.scopes:
            raise HttpError(403, f"token lacks scope: {scope.value}", kind="forbidden", retryable=False)


ANONYMOUS = Principal("anybody")
ROOT_PRINCIPAL = Principal("root")


class Authenticator:
    """Lets in who shows a token: the one of the settings, which is good for everything, or one of the store's.

    A good token of the store is trusted for a moment without another look; revoking one takes that long elsewhere.
    """

    def __init__(self, settings: ServerSettings, engine: Engine, rate: RateLimiter) -> None:
        given = (settings.api_token, settings.previous_api_token if settings.api_token else None)
        self._digests = tuple(_digest(secret.reveal().encode()) for secret in given if secret is not None)
        self._engine = engine
        self._rate = rate
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def authenticate(self, authorization: bytes | None, peer: str = "") -> Principal:
        """Who asks; 401 when that cannot be told, 429 when too many from this address could not be told."""
        if not self._digests:
            return ANONYMOUS
        nobody = f"nobody at {peer}"
        if authorization is None or not authorization.startswith(b"Bearer "):
            self._rate.acquire(nobody)
            raise HttpError(401, UNAUTHENTICATED_MESSAGE)
        shown = _digest(authorization[7:])
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(shown, kept) for kept in self._digests]
        if any(matches):
            return ROOT_PRINCIPAL
        now = asyncio.get_running_loop().time()
        trusted = self._known.get(shown)
        if trusted is not None and now - trusted[0] < TOKEN_CACHE_S:
            return trusted[1]
        if trusted is None:  # a token that was good before is looked up, whatever its neighbours send
            self._rate.check(nobody)
        holder = await self._engine.authenticate_token(authorization[7:].decode("ascii", "replace"))
        if holder is None:
            self._known.pop(shown, None)
            self._rate.acquire(nobody)
            raise HttpError(401, UNAUTHENTICATED_MESSAGE)
        principal = Principal(f"{holder.name} ({holder.token_id})", holder.scopes, holder.namespaces)
        self._known[shown] = (now, principal)
        if len(self._known) > MAX_TRACKED_CALLERS:
            self._known.popitem(last=False)
        return principal

    def clear_cache(self) -> None:
        """Look again at every token."""
        self._known.clear()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def rate_limit_address(client: tuple[str, int] | list[Any] | None) -> str:
    """The address that a caller without a token is counted by; of IPv6 its network, for a host has many addresses."""
    host = str(client[0]) if client else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class RateLimiter:
    """So many requests a second for each name, with a second's worth in reserve."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._depth = max(1.0, per_second)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def acquire(self, name: str) -> None:
        """Count a request; 429 when there were too many."""
        if not self._rate:
            return
        left, now = self._left(name)
        self._buckets.pop(name, None)
        self._buckets[name] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > MAX_TRACKED_CALLERS:
            self._buckets.popitem(last=False)
        self._refuse_without(left)

    def check(self, name: str) -> None:
        """429 when there were too many; nothing is counted."""
        if self._rate:
            self._refuse_without(self._left(name)[0])

    def _left(self, name: str) -> tuple[float, float]:
        now = asyncio.get_running_loop().time()
        left, at = self._buckets.get(name, (self._depth, now))
        return min(self._depth, left + (now - at) * self._rate), now

    def _refuse_without(self, left: float) -> None:
        if left < 1:
            wait = str(max(1, round((1 - left) / self._rate)))
            raise HttpError(
                429,
                f"rate_limit_exceeded: {self._rate:g} requests a second",
                kind="rate_limit_exceeded",
                retryable=True,
                **{"retry-after": wait},
            )


class FeedLimiter:
    """So many live streams at a time for each name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def acquire(self, name: str) -> None:
        """Count a stream that begins; 429 when there are too many."""
        if self._most and self._open[name] >= self._most:
            raise HttpError(
                429,
                f"too many open feeds (server max for each token: {self._most}); close one, or raise FF_MAX_FEEDS",
                kind="resource_exhausted",
                retryable=True,
                **{"retry-after": "1"},
            )
        self._open[name] += 1

    def release(self, name: str) -> None:
        """A stream is over."""
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
