"""Authentication by bearer token, rate limits and limits on open feeds."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.admin import VerifiedToken
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.errors import HttpError
from flowfabric.server.settings import ServerSettings

UNAUTHENTICATED_MESSAGE = "missing or invalid Authorization header"
MAX_TRACKED_CALLERS = 10_000
TOKEN_CACHE_S = 2.0
ALL_SCOPES = frozenset(ApiScope)


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller: its name for logs (never the token), scopes and namespaces."""

    name: str
    scopes: frozenset[ApiScope] = ALL_SCOPES
    namespaces: frozenset[str] | None = None  # None is all

    def can_see(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    def can_see_all(self, namespaces: Sequence[str] | None) -> bool:
        """True if the token is good for all of these namespaces; None is every namespace."""
        return self.namespaces is None or (namespaces is not None and self.namespaces.issuperset(namespaces))

    def require_scope(self, scope: ApiScope) -> None:
        """Raise 403 if the token lacks a scope."""
        if scope not in self.scopes:
            raise HttpError(403, f"token lacks scope: {scope.value}", kind="forbidden", retryable=False)


ANONYMOUS = Principal("anybody")
ROOT_PRINCIPAL = Principal("root")


class Authenticator:
    """Authenticates by the token of the settings, which has every scope, or by a token of the store.

    A valid token of the store is cached for TOKEN_CACHE_S; a revocation on another server takes that long.
    """

    def __init__(self, settings: ServerSettings, engine: Engine, rate: RateLimiter) -> None:
        secrets = (settings.api_token, settings.previous_api_token if settings.api_token else None)
        self._digests = tuple(_digest(secret.reveal().encode()) for secret in secrets if secret is not None)
        self._engine = engine
        self._rate = rate
        self._cache: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def authenticate(self, authorization: bytes | None, client_address: str = "") -> Principal:
        """Return the principal; raise 401 without a valid token, 429 after too many failures from this address."""
        if not self._digests:
            return ANONYMOUS
        failure_key = f"unauthenticated at {client_address}"
        if authorization is None or not authorization.startswith(b"Bearer "):
            self._rate.acquire(failure_key)
            raise HttpError(401, UNAUTHENTICATED_MESSAGE)
        digest = _digest(authorization[7:])
        # Compare with all, so that the duration reveals nothing.
        matches = [hmac.compare_digest(digest, known_digest) for known_digest in self._digests]
        if any(matches):
            return ROOT_PRINCIPAL
        now = asyncio.get_running_loop().time()
        cached = self._cache.get(digest)
        if cached is not None and now - cached[0] < TOKEN_CACHE_S:
            return cached[1]
        if cached is None:  # a token that was valid before is not blocked by failures of its neighbours
            self._rate.check(failure_key)
        holder = await self._engine.authenticate_token(authorization[7:].decode("ascii", "replace"))
        if holder is None:
            self._cache.pop(digest, None)
            self._rate.acquire(failure_key)
            raise HttpError(401, UNAUTHENTICATED_MESSAGE)
        return self._remember(digest, now, holder)

    @property
    def root_parents(self) -> tuple[str, ...]:
        """The parents of sessions that a token of the settings opened; another token ends those sessions."""
        return tuple(_root_parent(digest) for digest in self._digests)

    def root_parent(self, token: bytes) -> str | None:
        """Return the parent of sessions that this token opens, if it is one of the settings."""
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, known_digest) for known_digest in self._digests]
        return _root_parent(digest) if any(matches) else None

    async def authenticate_session(self, secret: str) -> Principal | None:
        """Return the principal of a session of the console; None if it is not valid."""
        digest, now = _digest(secret.encode()), asyncio.get_running_loop().time()
        cached = self._cache.get(digest)
        if cached is not None and now - cached[0] < TOKEN_CACHE_S:
            return cached[1]
        holder = await self._engine.authenticate_session(secret, self.root_parents)
        if holder is None:
            self._cache.pop(digest, None)
            return None
        return self._remember(digest, now, holder)

    def _remember(self, digest: bytes, now: float, holder: VerifiedToken) -> Principal:
        principal = Principal(f"{holder.name} ({holder.token_id})", holder.scopes, holder.namespaces)
        self._cache[digest] = (now, principal)
        if len(self._cache) > MAX_TRACKED_CALLERS:
            self._cache.popitem(last=False)
        return principal

    def clear_cache(self) -> None:
        """Check every token again at its next use."""
        self._cache.clear()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _root_parent(digest: bytes) -> str:
    return f"root:{hashlib.sha256(digest).hexdigest()[:32]}"


def rate_limit_address(client: tuple[str, int] | list[Any] | None) -> str:
    """Return the address for rate limits; for IPv6 its /64 network, because a host has many addresses."""
    host = str(client[0]) if client else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class RateLimiter:
    """A token bucket per name: `per_second` requests, with a burst of one second unless another is given."""

    def __init__(self, per_second: float, burst: float | None = None) -> None:
        self._rate = per_second
        self._depth = max(1.0, per_second) if burst is None else burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def acquire(self, name: str) -> None:
        """Count a request; raise 429 above the limit."""
        if not self._rate:
            return
        tokens, now = self._tokens(name)
        self._buckets.pop(name, None)
        self._buckets[name] = (tokens - 1 if tokens >= 1 else tokens, now)
        if len(self._buckets) > MAX_TRACKED_CALLERS:
            self._buckets.popitem(last=False)
        self._require_token(tokens)

    def check(self, name: str) -> None:
        """Raise 429 above the limit without counting."""
        if self._rate:
            self._require_token(self._tokens(name)[0])

    def _tokens(self, name: str) -> tuple[float, float]:
        now = asyncio.get_running_loop().time()
        tokens, at = self._buckets.get(name, (self._depth, now))
        return min(self._depth, tokens + (now - at) * self._rate), now

    def _require_token(self, tokens: float) -> None:
        if tokens < 1:
            retry_after = str(max(1, round((1 - tokens) / self._rate)))
            raise HttpError(
                429,
                f"rate_limit_exceeded: {self._rate:g} requests a second",
                kind="rate_limit_exceeded",
                retryable=True,
                **{"retry-after": retry_after},
            )


class FeedLimiter:
    """Limits the open feeds of each name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    def acquire(self, name: str) -> None:
        """Count a feed that opens; raise 429 above the limit."""
        if self._limit and self._open[name] >= self._limit:
            raise HttpError(
                429,
                f"too many open feeds (server max for each token: {self._limit}); close one, or raise FF_MAX_FEEDS",
                kind="resource_exhausted",
                retryable=True,
                **{"retry-after": "1"},
            )
        self._open[name] += 1

    def release(self, name: str) -> None:
        """Count a feed that closed."""
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
