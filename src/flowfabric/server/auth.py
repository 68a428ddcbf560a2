"""Who may ask: bearer tokens, what they are good for, and how often."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.model.api_token import Scope
from flowfabric.server.problems import Refused
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

    def __init__(self, settings: ServerSettings, engine: Engine) -> None:
        given = (settings.api_token, settings.previous_api_token if settings.api_token else None)
        self._digests = tuple(_digest(secret.reveal().encode()) for secret in given if secret is not None)
        self._engine = engine
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def admit(self, authorization: bytes | None) -> Principal:
        """Who asks; 401 when that cannot be told."""
        if not self._digests:
            return ANYBODY
        if authorization is None or not authorization.startswith(b"Bearer "):
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
        holder = await self._engine.holder_of(authorization[7:].decode("ascii", "replace"))
        if holder is None:
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


class RateLimit:
    """So many requests a second for each token, with a second's worth in reserve."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._depth = max(1.0, per_second)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> None:
        """Count a request; 429 when there were too many."""
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        left, at = self._buckets.pop(name, (self._depth, now))
        left = min(self._depth, left + (now - at) * self._rate)
        allowed = left >= 1
        self._buckets[name] = (left - 1 if allowed else left, now)
        if len(self._buckets) > BUCKETS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = str(max(1, round((1 - left) / self._rate)))
            raise Refused(
                429,
                f"rate_limit_exceeded: {self._rate:g} requests a second",
                kind="rate_limit_exceeded",
                retryable=True,
                **{"retry-after": wait},
            )
