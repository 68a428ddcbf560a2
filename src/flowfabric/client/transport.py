"""The wire: requests that are asked again until somebody answers, or patience is over.

Whatever may be asked again is: reads anyway, and writes because each carries a key under which the server remembers its
answer, beside the ids that its caller minted. A server that restarts in between is thus hardly noticed.

A request that nobody answers in time costs all connections that were made until then: they went the same way, and the
next request would wait on another dead one. Requests that are under way on them may still be answered.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx2
import msgspec

from flowfabric import errors
from flowfabric.client.errors import BACKEND, error_from_headers, proxy_error
from flowfabric.ids import Minter
from flowfabric.settings import Deadlines, Secret

RETRY_FOR_S = 30.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
MAX_SHORT_CONNECTIONS = 24
KEEPALIVE_EXPIRY_S = 30.0
_RANDOM = random.SystemRandom()  # the application's own generator is left alone
MAY_BE_REPEAT_NOTE = "it may have been heard before, without an answer"

_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_encode = msgspec.json.Encoder().encode


class HttpResponse(msgspec.Struct, frozen=True):
    """What the server said."""

    status: int
    body: bytes
    may_be_repeat: bool = False  # whether an earlier request may have been heard without an answer


class HttpTransport:
    """Keep-alive connections to one server; those that wait on purpose do not keep others from theirs."""

    def __init__(
        self,
        url: str,
        *,
        token: Secret | None,
        minter: Minter,
        retry_for_s: float = RETRY_FOR_S,
        deadlines: Deadlines | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network, for tests."""
        self.deadlines = deadlines or Deadlines()
        self.url = _checked(url)
        self.retry_for_s = retry_for_s
        self._minter = minter
        self._headers = {"accept": "application/json"}
        if token is not None:
            if not (shown := token.reveal()).isascii() or not shown.isprintable() or " " in shown:
                raise errors.InvalidInput("token: not one that can be shown")
            self._headers["authorization"] = f"Bearer {shown}"
        self._given = transport
        self._quick, self._waiting = self._pool(MAX_SHORT_CONNECTIONS), self._pool(None)

    @property
    def is_networked(self) -> bool:
        """True if there is a network in between."""
        return self._given is None

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        wait_ms: int | None = None,
        answer_timeout_s: float | None = None,
        retry_for_s: float | None = None,
        idempotency_key: str | None = None,
        allow_not_found: bool = False,
    ) -> HttpResponse:
        """The answer to one request; raises what the server raised.

        `wait_ms` is for requests that wait on purpose, `answer_s` is how long after that the answer may take if not as
        long as others, `key` names a request that may have been heard before, and `misses` makes an answer of "there is
        no such thing".
        """
        where = self.url + path
        given = {name: value for name, value in (query or {}).items() if value is not None}
        if given:
            where += "?" + urlencode(given)
        headers = self._headers
        content = None
        if body is not None:
            content = _encode(body)
            headers = {**headers, "content-type": "application/json"}
        if method != "GET":
            headers = {**headers, "idempotency-key": idempotency_key or self._minter.uuid(), **_place()}
        in_s = (self.deadlines.command_s if answer_timeout_s is None else answer_timeout_s) or None
        read_s = None if in_s is None else in_s + (wait_ms or 0) / 1000
        limits = {"connect": self.deadlines.connect_s or None, "read": read_s, "write": in_s, "pool": in_s}
        request = httpx2.Request(method, where, headers=headers, content=content, extensions={"timeout": limits})
        patience = self.retry_for_s if retry_for_s is None else retry_for_s
        return await self._persist(request, patience, waits=wait_ms is not None, misses=allow_not_found)

    async def _persist(self, request: httpx2.Request, patience_s: float, *, waits: bool, misses: bool) -> HttpResponse:
        clock = asyncio.get_running_loop().time
        until = clock() + patience_s
        pause_s, doubted = FIRST_BACKOFF_S, False
        fault: errors.FabricError
        while True:
            try:
                status, answer, body = await self._once(request, waits)
            except httpx2.TransportError as away:
                if isinstance(away, httpx2.TimeoutException):
                    await self._leave_connections()
                doubted = doubted or not isinstance(away, _NOT_SENT)
                fault = _unavailable(away, in_doubt=doubted)
                fault.__cause__ = away
            else:
                refused = error_from_headers(answer) if status >= 400 else None
                if 200 <= status < 300 or (misses and status == 404 and refused is not None):
                    return HttpResponse(status, body, doubted)
                if refused is None:
                    doubted, fault = True, proxy_error(status, body)
                elif isinstance(refused, errors.ResourceExhausted):  # the server has not looked at the request yet
                    fault = refused
                elif isinstance(refused, errors.SchemaTooNew):  # it has to be replaced by one of the newer release
                    fault = _outdated(refused)
                else:
                    refused.add_note(f"{request.method} {str(request.url).partition('?')[0]}")
                    if doubted:
                        refused.add_note(MAY_BE_REPEAT_NOTE)
                    raise refused
                pause_s = max(pause_s, _asked_pause(answer))
            if clock() + pause_s >= until:
                raise fault
            await asyncio.sleep(pause_s * _RANDOM.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)

    async def _once(self, request: httpx2.Request, waits: bool) -> tuple[int, Mapping[str, str], bytes]:
        pool = self._waiting if waits else self._quick
        async with pool:
            response = await pool.transport.handle_async_request(request)
            try:
                return response.status_code, response.headers, await response.aread()
            finally:
                await response.aclose()

    async def _leave_connections(self) -> None:
        """Send what follows over new connections."""
        if self._given is None:
            left = self._quick, self._waiting
            self._quick, self._waiting = self._pool(MAX_SHORT_CONNECTIONS), self._pool(None)
            for pool in left:
                await pool.retire()

    def _pool(self, most: int | None) -> _Pool:
        return _Pool(self._given or _transport(most, self.deadlines))

    async def close(self) -> None:
        """Let go of the connections."""
        await self._quick.transport.aclose()
        await self._waiting.transport.aclose()


class _Pool:
    """Connections, and how many requests are under way on them; closed when it is retired and the last one is over."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self.transport = transport
        self._under_way = 0
        self._is_retired = False

    async def __aenter__(self) -> None:
        self._under_way += 1

    async def __aexit__(self, *_: object) -> None:
        self._under_way -= 1
        await self._close_if_over()

    async def retire(self) -> None:
        self._is_retired = True
        await self._close_if_over()

    async def _close_if_over(self) -> None:
        if self._is_retired and not self._under_way:
            await self.transport.aclose()


def _place() -> dict[str, str]:
    """Where the caller stands in its own trace, for the server to go on from; nothing when it keeps none."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carried: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carried)
    return carried


def may_be_repeat(refused: errors.FabricError) -> bool:
    """Whether this is the answer to a repetition, so that it may say what the first one did."""
    return MAY_BE_REPEAT_NOTE in getattr(refused, "__notes__", ())


def quote_segment(text: str) -> str:
    """A text as one part of a path."""
    return quote(text, safe=":")


def _transport(most: int | None, deadlines: Deadlines) -> httpx2.AsyncHTTPTransport:
    return httpx2.AsyncHTTPTransport(
        limits=httpx2.Limits(
            max_connections=most, max_keepalive_connections=MAX_SHORT_CONNECTIONS, keepalive_expiry=KEEPALIVE_EXPIRY_S
        ),
        socket_options=deadlines.socket_options(),
    )


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.port != 0 else None  # a port that is none is told when it is looked at
    except ValueError as fault:
        raise errors.InvalidInput(f"url: {fault}") from fault
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise errors.InvalidInput("url: write http://host:port or https://host/path of a server")
    if parts.username or parts.password:
        raise errors.InvalidInput("url: a token goes into FLOWFABRIC_TOKEN or token=, not into the address")
    return url.rstrip("/")


def _unavailable(away: httpx2.TransportError, *, in_doubt: bool) -> errors.StoreUnavailable:
    source = errors.StoreFault.TIMEOUT if isinstance(away, httpx2.TimeoutException) else errors.StoreFault.TRANSPORT
    words = str(away) or type(away).__name__
    return errors.StoreUnavailable(f"server: {words}", backend=BACKEND, source=source, in_doubt=in_doubt)


def _outdated(newer: errors.SchemaTooNew) -> errors.StoreUnavailable:
    words = f"the server is of an older release than its store, which has schema version {newer.found}"
    return errors.StoreUnavailable(words, backend=BACKEND, source=errors.StoreFault.TRANSPORT, in_doubt=False)


def _asked_pause(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0
