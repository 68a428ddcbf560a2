"""The application: one request from its first byte to its last.

The layers, from outside in: request id, CORS, metrics, host, bearer token, rate, size, body, handler. A route is a line
of the table (`table.py`); what it may not decide for itself is decided here, once for all.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from functools import cached_property
from json import dumps
from time import perf_counter
from typing import Any

from flowfabric import errors
from flowfabric.api.encoding import HolderRequest
from flowfabric.engine.engine import Engine
from flowfabric.server import logging, openapi, request_body, tracing
from flowfabric.server.auth import (
    ANONYMOUS,
    ROOT_PRINCIPAL,
    UNAUTHENTICATED_MESSAGE,
    Authenticator,
    FeedLimiter,
    Principal,
    RateLimiter,
    rate_limit_address,
)
from flowfabric.server.cors import Cors
from flowfabric.server.errors import HttpError, Problem, error_details, status_and_problem
from flowfabric.server.handle_signer import HandleSigner
from flowfabric.server.host_filter import HostFilter
from flowfabric.server.idempotency import IdempotencyCache, cache_key, content_digest
from flowfabric.server.metrics import HttpMetrics
from flowfabric.server.request import JSON, Request, encode, path_execution_id, path_uuid
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Resource, Response, Route, Router, StreamingResponse, Subject
from flowfabric.server.settings import ServerSettings

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_TIMED_OUT = "timeout: request"
MAX_ERROR_HEADER_BYTES = 4096
MAX_HEADER_BYTES = 32 * 1024
REAUTHENTICATE_S = 10.0  # with the moment that a token is trusted for, well below the 15 s that are promised
ROUTE_NOT_FOUND = errors.NotFound("route")


def create_app(engine: Engine, settings: ServerSettings | None = None) -> App:
    """The server on an engine, as an ASGI application. Closing the engine is left to whoever opened it."""
    return App(engine, settings or ServerSettings())


class App:
    """An ASGI application."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.router = Router(*ROUTE_GROUPS)
        self.http_metrics = HttpMetrics()
        self.closing = asyncio.Event()
        self.on_closing: set[Callable[[], None]] = set()
        self.schema_too_new: errors.SchemaTooNew | None = None  # why this server can answer nothing any more
        self.on_schema_too_new: Callable[[], None] = lambda: None
        self.rotation_lock = asyncio.Lock()
        self.idempotency = IdempotencyCache()
        self.waiting_claims: dict[tuple[str, str], set[Callable[[], None]]] = {}  # by who asks, and worker instance
        self.handle_signer = HandleSigner(engine, settings)
        self._rate = RateLimiter(settings.rate_limit)
        self.authenticator = Authenticator(settings, engine, self._rate)
        self.tracing: tracing.Tracing = tracing.make_tracing()
        self._feeds = FeedLimiter(settings.max_feeds)
        self._hosts = HostFilter(settings)
        self._cors = Cors(settings)
        self.reauthenticate_s = REAUTHENTICATE_S
        self._timeout_s = settings.request_timeout_ms / 1000 or None

    def begin_closing(self) -> None:
        """Let everything that waits come to its end, cleanly and at once."""
        self.closing.set()
        for end in list(self.on_closing):
            end()

    @cached_property
    def openapi(self) -> bytes:
        """What can be asked, as a document; made once, for the table does not change."""
        return encode(openapi.build_document(self.router))

    async def authenticate(self, ask: Request[Any]) -> None:
        """Let in who shows a good token; 401 or 429 for others."""
        ask.principal = await self.authenticator.authenticate(ask.headers.get(b"authorization"), ask.client_address)
        ask.authenticated_at = asyncio.get_running_loop().time()

    async def reauthenticate(self, ask: Request[Any], after_s: float | None = None) -> None:
        """Refuse a caller that was let in `after_s` ago, or `readmit_s`, and would not be now."""
        before, scope = ask.principal, ask.required_scope
        # Tokens of the settings hold as long as this process does.
        if scope is None or before is ANONYMOUS or before is ROOT_PRINCIPAL:
            return
        if asyncio.get_running_loop().time() - ask.authenticated_at < (
            self.reauthenticate_s if after_s is None else after_s
        ):
            return
        await self.authenticate(ask)
        ask.principal.require_scope(scope)
        if ask.principal.namespaces != before.namespaces:
            raise HttpError(401, UNAUTHENTICATED_MESSAGE)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        method: str = scope["method"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        peer = rate_limit_address(scope.get("client"))
        shown = headers.get(b"x-request-id")
        request_id = shown.decode() if shown and _REQUEST_ID(shown) else self.engine.minter.uuid()
        resource, params = self.router.resolve(_path(scope))
        is_apart = resource is not None and resource.bypasses_layers
        if not is_apart and (preflight := self._cors.preflight(method, headers)) is not None:
            await _whole(send, preflight, request_id, method)
            return
        ask: Request[Any] = Request(self, params, scope["query_string"], headers, ANONYMOUS, request_id, receive, peer)
        operation = None if resource is None else resource.route_for(method)
        template = "unknown" if resource is None else resource.template
        with self.tracing.request_span(method, template, headers):
            reply = await self._answered(ask, method, scope, resource, operation)
        allowing = self._cors.response_headers(headers) if self._cors.is_on and not is_apart else ()
        if isinstance(reply, StreamingResponse):
            status = 200
            try:
                await _live(send, reply, request_id, method, allowing)
            finally:
                self._feeds.release(ask.caller_key)
        else:
            status = reply.status
            await _whole(send, reply, request_id, method, allowing)
        if not is_apart:
            seconds = perf_counter() - began
            self.http_metrics.observe(method, template, status, seconds)
            logging.log_request(method, template, status, seconds, request_id, ask.principal.name)

    async def _answered(
        self, ask: Request[Any], method: str, scope: AsgiScope, resource: Resource | None, operation: Route | None
    ) -> Response | StreamingResponse:
        """The handler's answer, or the refusal that came before or instead of it."""
        try:
            self._check_head(ask, scope)
            if (operation is None or operation.needs_token) and not (resource and resource.bypasses_layers):
                await self.authenticate(ask)
                self._rate.acquire(ask.caller_key)
            elif resource is not None:
                self._rate.acquire(f"{resource.template} from {ask.client_address}")
            if resource is None:
                return Response(404, headers=_named(ROUTE_NOT_FOUND))
            if operation is None:
                return Response(405, headers=(("allow", resource.allow_header), *_named(ROUTE_NOT_FOUND)))
            if operation.scope is not None:
                ask.principal.require_scope(operation.scope)
                ask.required_scope = operation.scope
            body = b"" if method in ("GET", "HEAD") else await request_body.read_body(ask, operation)
            # Who may not ask (any more) hears no remembered answer either: this comes after the checks above.
            if (key := cache_key(ask.caller_key, method, _path(scope), ask.headers)) is not None:
                known, content = operation, content_digest(scope["query_string"], ask.headers, body)
                return await self.idempotency.get_or_run(
                    key, content, lambda: self._performed(ask, method, known, body)
                )
            return await self._performed(ask, method, operation, body)
        except HttpError as refused:
            body = b"" if refused.body is None else encode(refused.body)
            if operation is not None and operation.is_audited and refused.status != 401:
                self._audit(ask, operation, f"refused: {refused.status}")
            named = _named(refused.client_error)
            return Response(refused.status, body, JSON if body else "", (*refused.headers.items(), *named))
        except errors.FabricError as error:
            return self._problem(ask, operation, error)
        except TimeoutError:
            return Response(504, encode(Problem(_TIMED_OUT, "timeout", False)), JSON)
        except Exception:
            logging.logger.exception("a request failed", extra={"fields": {"request_id": ask.request_id}})
            return Response(500, encode(Problem("engine: bug", None, False)), JSON)

    def _check_head(self, ask: Request[Any], scope: AsgiScope) -> None:
        """Refuse what the headers alone show to be wrong."""
        sent: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(value) for _, value in sent) > MAX_HEADER_BYTES:
            raise HttpError(431, "headers too large")
        self._hosts.check(scope, [value for name, value in sent if name == b"host"])
        if len(sent) != len(ask.headers) and sum(name == b"authorization" for name, _ in sent) > 1:
            raise HttpError(400, "more than one Authorization header")

    async def _performed(
        self, ask: Request[Any], method: str, operation: Route, body: bytes
    ) -> Response | StreamingResponse:
        """The handler's answer to a caller that may ask."""
        await self.reauthenticate(ask)  # the body, or the answer to the same request, may have taken long
        if method not in ("GET", "HEAD"):
            ask.body = request_body.decode_body(ask, operation, body)
        if isinstance(ask.body, HolderRequest):
            ask.handle = await self.handle_signer.verify(ask.body.handle)
        if ask.principal.namespaces is not None and operation.scope is not None:
            await _within_namespaces(ask, operation)
        if operation.is_streaming:
            reply = await self._fed(ask, operation)
        elif self._timeout_s is not None and not operation.is_long_poll:
            async with asyncio.timeout(self._timeout_s):
                reply = await operation.handler(ask)
        else:
            reply = await self._waited(ask, operation)
        if operation.is_audited:
            self._audit(ask, operation, "done")
        return reply

    async def _waited(self, ask: Request[Any], operation: Route) -> Response | StreamingResponse:
        """The answer of an operation that may wait long; 401 when its caller's token is not good any more."""
        try:
            reply: Response | StreamingResponse = await operation.handler(ask)
        except (HttpError, errors.FabricError):
            if ask.rejection is not None:
                raise ask.rejection from None
            raise
        if ask.rejection is not None:
            raise ask.rejection
        await self.reauthenticate(ask)
        return reply

    async def _fed(self, ask: Request[Any], operation: Route) -> Response | StreamingResponse:
        """The beginning of a stream, of which each caller may have so many."""
        self._feeds.acquire(ask.caller_key)
        try:
            reply: Response | StreamingResponse = await operation.handler(ask)
        except BaseException:
            self._feeds.release(ask.caller_key)
            raise
        assert isinstance(reply, StreamingResponse), operation.name  # whose end closes the feed
        return reply

    def note_newer_schema(self, error: errors.SchemaTooNew) -> None:
        """Keep why this server can answer nothing any more, and let it be stopped."""
        if self.schema_too_new is None:
            self.schema_too_new = error
            self.on_schema_too_new()

    def _problem(self, ask: Request[Any], operation: Route | None, error: errors.FabricError) -> Response:
        status, problem = status_and_problem(error)
        if isinstance(error, errors.SchemaTooNew):
            self.note_newer_schema(error)
        self.engine.metrics.count("ff_errors", kind=error.kind)
        if operation is not None and operation.is_audited:
            self._audit(ask, operation, f"refused: {error.kind}")
        if status >= 500:
            logging.logger.error(
                "a request failed", extra={"fields": {"request_id": ask.request_id, "cause": str(error)}}
            )
        wait_ms = getattr(error, "retry_after_ms", None)
        headers = (("retry-after", str(max(1, round(wait_ms / 1000)))),) if wait_ms else ()
        headers = (*headers, *_named(error))
        return Response(status, encode(problem), JSON, headers)

    def _audit(self, ask: Request[Any], operation: Route, outcome: str) -> None:
        about = ask.path_params[0] if ask.path_params else None
        if about is None and ask.handle is not None:
            about = ask.handle.fields.execution_id
        logging.log_audit(
            operation.name,
            {"who": ask.principal.name, "about": about, "outcome": outcome, "request_id": ask.request_id},
        )


async def _within_namespaces(ask: Request[Any], operation: Route) -> None:
    match operation.subject:
        case Subject.EXECUTION:
            await ask.require_execution_access(path_execution_id(ask.path_params[0]))
        case Subject.FLOW:
            await ask.require_flow_access(path_uuid("flow_id", ask.path_params[0]))
        case Subject.HANDLE:
            await ask.require_execution_access(ask.handle.fields.execution_id)
        case Subject.CHECKED_BY_HANDLER:
            pass
        case None:
            raise HttpError(403, "token is bound to namespaces; this concerns all", kind="forbidden", retryable=False)


def _named(error: errors.FabricError | None) -> tuple[tuple[str, str], ...]:
    """The header by which clients tell a refusal of ours from what a proxy answers."""
    return () if error is None else (("x-ff-error", _one_line(error)),)


def _one_line(error: errors.FabricError) -> str:
    """What an error is exactly, for clients that raise it again; just its code when it would be a long story."""
    line = dumps(error_details(error))  # ASCII only, as headers want it
    return line if len(line) <= MAX_ERROR_HEADER_BYTES else dumps({"code": error.kind})


# ---------------------------------------------------------------------------------------------------------------
# The wire


def _path(scope: AsgiScope) -> bytes:
    """The path as it was sent, below the place where the application is mounted."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    mounted: str = scope.get("root_path", "")
    return raw.removeprefix(mounted.encode()) if mounted else raw


async def _whole(
    send: Send, reply: Response, request_id: str, method: str, more: tuple[tuple[str, str], ...] = ()
) -> None:
    head = [(b"x-request-id", request_id.encode())]
    if reply.status not in (204, 304):
        head.append((b"content-length", str(len(reply.body)).encode()))
    if reply.content_type:
        head.append((b"content-type", reply.content_type.encode()))
    if reply.headers or more:
        head += [(name.encode(), value.encode("latin-1", "replace")) for name, value in (*reply.headers, *more)]
    await send({"type": "http.response.start", "status": reply.status, "headers": head})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else reply.body})


async def _live(
    send: Send, live: StreamingResponse, request_id: str, method: str, more: tuple[tuple[str, str], ...] = ()
) -> None:
    head = [
        (b"x-request-id", request_id.encode()),
        (b"content-type", live.content_type.encode()),
        (b"cache-control", b"no-store"),
        *((name.encode(), value.encode("latin-1", "replace")) for name, value in more),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    if method != "HEAD":
        async with aclosing(live.events):
            async for part in live.events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


__all__ = ["App", "Principal", "create_app"]
