"""The HTTP transport: requests with retries, on two connection pools.

Every request is retried with backoff until `retry_for_s` is over. Writes are safe to retry: each carries an idempotency
key under which the server caches its response, besides the ids that the caller minted. A restart of the server is thus
hardly noticed.

After a timeout all connections opened so far are retired: they took the same route, and the next request would wait on
another dead one. Requests in flight on them may still be answered.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx2
import msgspec

from flowfabric import errors
from flowfabric.client.decoding import decode_as
from flowfabric.client.errors import BACKEND, error_from_headers, proxy_error
from flowfabric.ids import Minter
from flowfabric.settings import Deadlines, Secret

T = TypeVar("T")

RETRY_FOR_S = 30.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
MAX_SHORT_CONNECTIONS = 24
KEEPALIVE_EXPIRY_S = 30.0
_RANDOM = random.SystemRandom()  # leaves the generator of the application alone
MAY_BE_REPEAT_NOTE = "it may have been received before, without an answer"

_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_encode = msgspec.json.Encoder().encode


class HttpResponse(msgspec.Struct, frozen=True):
    """A response of the server."""

    status: int
    body: bytes
    may_be_repeat: bool = False  # an earlier try may have reached the server


class HttpTransport:
    """Keep-alive connections to one server; long polls have a pool of their own."""

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
        self.url = _check_url(url)
        self.retry_for_s = retry_for_s
        self._minter = minter
        self._headers = {"accept": "application/json"}
        if token is not None:
            if not (text := token.reveal()).isascii() or not text.isprintable() or " " in text:
                raise errors.InvalidInput("token: not printable ASCII without spaces")
            self._headers["authorization"] = f"Bearer {text}"
        self._test_transport = transport
        self._short_pool, self._long_poll_pool = self._pool(MAX_SHORT_CONNECTIONS), self._pool(None)

    @property
    def is_networked(self) -> bool:
        """True unless a test replaced the network."""
        return self._test_transport is None

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
        """Send a request, with retries; raise the error of the server.

        `wait_ms` marks a long poll and its length. `answer_timeout_s` replaces the default timeout, which starts after
        `wait_ms`. `idempotency_key` repeats an earlier request. `allow_not_found` returns a 404 instead of raising it.
        """
        url = self.url + path
        params = {name: value for name, value in (query or {}).items() if value is not None}
        if params:
            url += "?" + urlencode(params)
        headers = self._headers
        content = None
        if body is not None:
            content = _encode(body)
            headers = {**headers, "content-type": "application/json"}
        if method != "GET":
            headers = {**headers, "idempotency-key": idempotency_key or self._minter.uuid(), **_trace_headers()}
        timeout_s = (self.deadlines.command_s if answer_timeout_s is None else answer_timeout_s) or None
        read_s = None if timeout_s is None else timeout_s + (wait_ms or 0) / 1000
        limits = {"connect": self.deadlines.connect_s or None, "read": read_s, "write": timeout_s, "pool": timeout_s}
        request = httpx2.Request(method, url, headers=headers, content=content, extensions={"timeout": limits})
        patience = self.retry_for_s if retry_for_s is None else retry_for_s
        return await self._request_with_retries(
            request, patience, is_long_poll=wait_ms is not None, allow_not_found=allow_not_found
        )

    async def fetch(self, kind: type[T], method: str, path: str, body: Any = None, **options: Any) -> T:
        """Send a request as `request` does; return its response as one type."""
        return decode_as((await self.request(method, path, body, **options)).body, kind)

    async def find(self, kind: type[T], path: str, *, query: Mapping[str, Any] | None = None) -> T | None:
        """Return what is at a path as one type, or None."""
        response = await self.request("GET", path, query=query, allow_not_found=True)
        return None if response.status == 404 else decode_as(response.body, kind)

    async def _request_with_retries(
        self, request: httpx2.Request, retry_for_s: float, *, is_long_poll: bool, allow_not_found: bool
    ) -> HttpResponse:
        clock = asyncio.get_running_loop().time
        until = clock() + retry_for_s
        backoff_s, is_repeat = FIRST_BACKOFF_S, False
        fault: errors.FabricError
        while True:
            try:
                status, answer, body = await self._once(request, is_long_poll)
            except httpx2.TransportError as failure:
                if isinstance(failure, httpx2.TimeoutException):
                    await self._replace_pools()
                is_repeat = is_repeat or not isinstance(failure, _NOT_SENT)
                fault = _unavailable(failure, in_doubt=is_repeat)
                fault.__cause__ = failure
            else:
                refused = error_from_headers(answer) if status >= 400 else None
                if 200 <= status < 300 or (allow_not_found and status == 404 and refused is not None):
                    return HttpResponse(status, body, is_repeat)
                if refused is None:
                    is_repeat, fault = True, proxy_error(status, body)
                elif isinstance(refused, errors.ResourceExhausted):  # the server has not processed the request
                    fault = refused
                elif isinstance(refused, errors.SchemaTooNew):  # until the server is replaced by a newer release
                    fault = _outdated(refused)
                else:
                    refused.add_note(f"{request.method} {str(request.url).partition('?')[0]}")
                    if is_repeat:
                        refused.add_note(MAY_BE_REPEAT_NOTE)
                    raise refused
                backoff_s = max(backoff_s, _retry_after_s(answer))
            if clock() + backoff_s >= until:
                raise fault
            await asyncio.sleep(backoff_s * _RANDOM.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _once(self, request: httpx2.Request, is_long_poll: bool) -> tuple[int, Mapping[str, str], bytes]:
        pool = self._long_poll_pool if is_long_poll else self._short_pool
        async with pool:
            response = await pool.transport.handle_async_request(request)
            try:
                return response.status_code, response.headers, await response.aread()
            finally:
                await response.aclose()

    async def _replace_pools(self) -> None:
        """Use new connections for all further requests."""
        if self._test_transport is None:
            retired = self._short_pool, self._long_poll_pool
            self._short_pool, self._long_poll_pool = self._pool(MAX_SHORT_CONNECTIONS), self._pool(None)
            for pool in retired:
                await pool.retire()

    def _pool(self, max_connections: int | None) -> _Pool:
        return _Pool(self._test_transport or _transport(max_connections, self.deadlines))

    async def close(self) -> None:
        """Close all connections."""
        await self._short_pool.transport.aclose()
        await self._long_poll_pool.transport.aclose()


class _Pool:
    """A connection pool that closes once it is retired and its last request is done."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self.transport = transport
        self._in_flight = 0
        self._is_retired = False

    async def __aenter__(self) -> None:
        self._in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        self._in_flight -= 1
        await self._close_if_idle()

    async def retire(self) -> None:
        self._is_retired = True
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        if self._is_retired and not self._in_flight:
            await self.transport.aclose()


def _trace_headers() -> dict[str, str]:
    """Return the trace headers of the caller's current span; empty without tracing."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def may_be_repeat(refused: errors.FabricError) -> bool:
    """True if an earlier try may have reached the server, so that the error may describe its effect."""
    return MAY_BE_REPEAT_NOTE in getattr(refused, "__notes__", ())


def quote_segment(text: str) -> str:
    """Quote a text as one segment of a path."""
    return quote(text, safe=":")


def _transport(max_connections: int | None, deadlines: Deadlines) -> httpx2.AsyncHTTPTransport:
    return httpx2.AsyncHTTPTransport(
        limits=httpx2.Limits(
            max_connections=max_connections,
            max_keepalive_connections=MAX_SHORT_CONNECTIONS,
            keepalive_expiry=KEEPALIVE_EXPIRY_S,
        ),
        socket_options=deadlines.socket_options(),
    )


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.port != 0 else None  # reading an invalid port raises ValueError
    except ValueError as fault:
        raise errors.InvalidInput(f"url: {fault}") from fault
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise errors.InvalidInput("url: write http://host:port or https://host/path of a server")
    if parts.username or parts.password:
        raise errors.InvalidInput("url: a token goes into FLOWFABRIC_TOKEN or token=, not into the address")
    return url.rstrip("/")


def _unavailable(failure: httpx2.TransportError, *, in_doubt: bool) -> errors.StoreUnavailable:
    source = errors.StoreFault.TIMEOUT if isinstance(failure, httpx2.TimeoutException) else errors.StoreFault.TRANSPORT
    message = str(failure) or type(failure).__name__
    return errors.StoreUnavailable(f"server: {message}", backend=BACKEND, source=source, in_doubt=in_doubt)


def _outdated(newer: errors.SchemaTooNew) -> errors.StoreUnavailable:
    message = f"the server is of an older release than its store, which has schema version {newer.found}"
    return errors.StoreUnavailable(message, backend=BACKEND, source=errors.StoreFault.TRANSPORT, in_doubt=False)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0
