"""Who may ask: bearer tokens, what they are good for, and how often."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.server.problems import Refused
from flowfabric.server.settings import ServerSettings
from flowfabric.server.table import Scope

UNAUTHENTICATED = "missing or invalid Authorization header"
BUCKETS = 10_000
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
    """Lets in who shows a token."""

    def __init__(self, settings: ServerSettings, engine: Engine) -> None:
        given = (settings.api_token, settings.previous_api_token if settings.api_token else None)
        self._digests = tuple(_digest(secret.reveal().encode()) for secret in given if secret is not None)

    async def admit(self, authorization: bytes | None) -> Principal:
        """Who asks; 401 when that cannot be told."""
        if not self._digests:
            return ANYBODY
        if authorization is not None and authorization.startswith(b"Bearer "):
            shown = _digest(authorization[7:])
            # All are compared, so that the time tells nothing.
            matches = [hmac.compare_digest(shown, kept) for kept in self._digests]
            if any(matches):
                return ROOT
        raise Refused(401, UNAUTHENTICATED)


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
