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
from flowfabric.model.api_token import Scope
from flowfabric.server.errors import Refused
from flowfabric.server.settings import ServerSettings

UNAUTHENTICATED = "missing or invalid Authorization header"
BUCKETS = 10_000
TRUSTED_S = 2.0
ALL_SCOPES = frozenset(Scope)


class Principal(msgspec.Struct, frozen=True):
    """Somebody with a token: a name for logs, never the token."""

    name: str
    scopes: frozenset[Scope] = ALL_SCOPES
    namespaces: frozenset[str] | None = None  # None is all

    def sees(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    def needs(self, scope: Scope) -> None:
        """Refuse what the token is not good for."""
        if scope not in self.scopes:
            raise Refused(403, f"token lacks scope: {scope.value}", kind="forbidden", retryable=False)


ANYBODY = Principal("anybody")
ROOT = Principal("root")


class Guard:
    """Lets in who shows a token: the one of the settings, which is good for everything, or one of the store's.

    A good token of the store is trusted for a moment without another look; revoking one takes that long elsewhere.
    """

    def __init__(self, settings: ServerSettings, engine: Engine, rate: RateLimit) -> None:
        given = (settings.api_token, settings.previous_api_token if settings.api_token else None)
        self._digests = tuple(_digest(secret.reveal().encode()) for secret in given if secret is not None)
        self._engine = engine
        self._rate = rate
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def admit(self, authorization: bytes | None, peer: str = "") -> Principal:
        """Who asks; 401 when that cannot be told, 429 when too many from this address could not be told."""
        if not self._digests:
            return ANYBODY
        nobody = f"nobody at {peer}"
        if authorization is None or not authorization.startswith(b"Bearer "):
            self._rate.take(nobody)
            raise Refused(401, UNAUTHENTICATED)
        shown = _digest(authorization[7:])
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(shown, kept) for kept in self._digests]
        if any(matches):
            return ROOT
        now = asyncio.get_running_loop().time()
        trusted = self._known.get(shown)
        if trusted is not None and now - trusted[0] < TRUSTED_S:
            return trusted[1]
        if trusted is None:  # a token that was good before is looked up, whatever its neighbours send
            self._rate.check(nobody)
        holder = await self._engine.holder_of(authorization[7:].decode("ascii", "replace"))
        if holder is None:
            self._known.pop(shown, None)
            self._rate.take(nobody)
            raise Refused(401, UNAUTHENTICATED)
        principal = Principal(f"{holder.name} ({holder.token_id})", holder.scopes, holder.namespaces)
        self._known[shown] = (now, principal)
        if len(self._known) > BUCKETS:
            self._known.popitem(last=False)
        return principal

    def forget(self) -> None:
        """Look again at every token."""
        self._known.clear()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def peer_of(client: tuple[str, int] | list[Any] | None) -> str:
    """The address that a caller without a token is counted by; of IPv6 its network, for a host has many addresses."""
    host = str(client[0]) if client else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class RateLimit:
    """So many requests a second for each name, with a second's worth in reserve."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._depth = max(1.0, per_second)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> None:
        """Count a request; 429 when there were too many."""
        if not self._rate:
            return
        left, now = self._left(name)
        self._buckets.pop(name, None)
        self._buckets[name] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > BUCKETS:
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
            raise Refused(
                429,
                f"rate_limit_exceeded: {self._rate:g} requests a second",
                kind="rate_limit_exceeded",
                retryable=True,
                **{"retry-after": wait},
            )


class OpenFeeds:
    """So many live streams at a time for each name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def open(self, name: str) -> None:
        """Count a stream that begins; 429 when there are too many."""
        if self._most and self._open[name] >= self._most:
            raise Refused(
                429,
                f"too many open feeds (server max for each token: {self._most}); close one, or raise FF_MAX_FEEDS",
                kind="resource_exhausted",
                retryable=True,
                **{"retry-after": "1"},
            )
        self._open[name] += 1

    def close(self, name: str) -> None:
        """A stream is over."""
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
