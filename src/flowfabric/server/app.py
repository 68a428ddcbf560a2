"""The ASGI application: how one request is handled.

The layers, from outside in: request id, CORS, metrics, host, bearer token, rate limit, body size, body, handler. A
route (`routing.py`) declares its scope, subject and limits; this module enforces them for all routes.
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

import msgspec

from flowfabric import errors
from flowfabric.api.encoding import HolderRequest
from flowfabric.engine.engine import Engine
from flowfabric.server import logging, openapi, request_body, tracing
from flowfabric.server.content_encoding import encode_response
from flowfabric.server.errors import HttpError, Problem, error_details, status_and_problem
from flowfabric.server.idempotency import IdempotencyCache, cache_key, content_digest
from flowfabric.server.metrics import HttpMetrics
from flowfabric.server.request import JSON, Request, encode, path_execution_id, path_uuid, to_response
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Resource, Response, Route, Router, StreamingResponse, Subject
from flowfabric.server.security.auth import (
    ANONYMOUS,
    ROOT_PRINCIPAL,
    UNAUTHENTICATED_MESSAGE,
    Authenticator,
    FeedLimiter,
    Principal,
    RateLimiter,
    rate_limit_address,
)
from flowfabric.server.security.console_session import (
    LOGIN_ATTEMPTS,
    LOGIN_ATTEMPTS_PER_S,
    is_read_by_console,
    session_cookie,
)
from flowfabric.server.security.handle_signer import HandleSigner
from flowfabric.server.security.origin_policy import Cors, HostFilter
from flowfabric.server.settings import Redact, ServerSettings

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_TIMED_OUT = "timeout: request"
MAX_ERROR_HEADER_BYTES = 4096
MAX_HEADER_BYTES = 32 * 1024
REAUTHENTICATE_S = 10.0  # plus TOKEN_CACHE_S, well below the documented 15 s
ROUTE_NOT_FOUND = errors.NotFound("route")


def create_app(engine: Engine, settings: ServerSettings | None = None, *, redact: Redact | None = None) -> App:
    """Create the server of an engine as an ASGI application. The caller closes the engine.

    `redact` gets the kind of a payload (`input`, `result`, …) and its bytes, and returns what the console shows.
    """
    return App(engine, settings or ServerSettings(), redact)


class App:
    """The server as an ASGI application."""

    def __init__(self, engine: Engine, settings: ServerSettings, redact: Redact | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.redact = redact
        from flowfabric.console import routes as console  # which imports modules of this package

        pages = (console.page_routes,) if settings.serve_console else ()
        self.router = Router(*ROUTE_GROUPS, console.static_routes, *pages)
        self.http_metrics = HttpMetrics()
        self.closing = asyncio.Event()
        self.on_closing: set[Callable[[], None]] = set()
        # Set once the store has a newer schema; every request fails from then on.
        self.schema_too_new: errors.SchemaTooNew | None = None
        self.on_schema_too_new: Callable[[], None] = lambda: None
        self.rotation_lock = asyncio.Lock()
        self.idempotency = IdempotencyCache()
        # Their key is the name of the principal and the worker instance.
        self.waiting_claims: dict[tuple[str, str], set[Callable[[], None]]] = {}
        self.handle_signer = HandleSigner(engine, settings)
        self._rate = RateLimiter(settings.rate_limit)
        self.authenticator = Authenticator(settings, engine, self._rate)
        self.tracing = tracing.make_tracing()
        self.login_limiter = RateLimiter(LOGIN_ATTEMPTS_PER_S, burst=LOGIN_ATTEMPTS)
        self._feeds = FeedLimiter(settings.max_feeds)
        self._hosts = HostFilter(settings)
        self._cors = Cors(settings)
        self.reauthenticate_s = REAUTHENTICATE_S
        self._timeout_s = settings.request_timeout_ms / 1000 or None

    def begin_closing(self) -> None:
        """End all long polls and feeds at once, cleanly."""
        self.closing.set()
        for end in list(self.on_closing):
            end()

    @cached_property
    def openapi(self) -> bytes:
        """The OpenAPI document, rendered once."""
        return encode(openapi.build_document(self.router))

    async def authenticate(self, request: Request[Any]) -> None:
        """Set the principal of a request; raise 401 without a valid token, 429 after too many failures.

        The cookie of the console counts for reads by its own pages only; a write needs the header.
        """
        if is_read_by_console(request) and (secret := session_cookie(request)) is not None:
            principal = await self.authenticator.authenticate_session(secret)
            if principal is not None:
                request.principal = principal
                request.authenticated_at = asyncio.get_running_loop().time()
                return
        request.principal = await self.authenticator.authenticate(
            request.headers.get(b"authorization"), request.client_address
        )
        request.authenticated_at = asyncio.get_running_loop().time()

    async def reauthenticate(self, request: Request[Any], after_s: float | None = None) -> None:
        """Check the token again if the last check is older than `after_s` (default `reauthenticate_s`); raise 401."""
        before, scope = request.principal, request.required_scope
        # Tokens of the settings do not change while the process lives.
        if scope is None or before is ANONYMOUS or before is ROOT_PRINCIPAL:
            return
        if asyncio.get_running_loop().time() - request.authenticated_at < (
            self.reauthenticate_s if after_s is None else after_s
        ):
            return
        await self.authenticate(request)
        request.principal.require_scope(scope)
        if request.principal.namespaces != before.namespaces:
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
        started_s = perf_counter()
        method: str = scope["method"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        client_address = rate_limit_address(scope.get("client"))
        sent_id = headers.get(b"x-request-id")
        request_id = sent_id.decode() if sent_id and _REQUEST_ID(sent_id) else self.engine.minter.uuid()
        resource, params = self.router.resolve(_path(scope))
        bypasses_layers = resource is not None and resource.bypasses_layers
        if not bypasses_layers and (preflight := self._cors.preflight(method, headers)) is not None:
            await _send_response(send, preflight, request_id, method)
            return
        request: Request[Any] = Request(
            self,
            params,
            scope["query_string"],
            headers,
            ANONYMOUS,
            request_id,
            receive,
            client_address,
            method,
            _path(scope).decode("latin-1"),
            scope.get("root_path", ""),
        )
        route = None if resource is None else resource.route_for(method)
        template = "unknown" if resource is None else resource.template
        with self.tracing.request_span(method, template, headers):
            response = await self._respond(request, method, scope, resource, route)
        cors_headers = self._cors.response_headers(headers) if self._cors.is_on and not bypasses_layers else ()
        if isinstance(response, StreamingResponse):
            status = 200
            try:
                await _send_stream(send, response, request_id, method, cors_headers)
            finally:
                self._feeds.release(request.caller_key)
        else:
            response = encode_response(method, headers, response)
            status = response.status
            await _send_response(send, response, request_id, method, cors_headers)
        if not bypasses_layers:
            seconds = perf_counter() - started_s
            self.http_metrics.observe(method, template, status, seconds)
            logging.log_request(method, template, status, seconds, request_id, request.principal.name)

    async def _respond(
        self, request: Request[Any], method: str, scope: AsgiScope, resource: Resource | None, route: Route | None
    ) -> Response | StreamingResponse:
        """Return the response of the handler, or the error response of a check or of the handler."""
        try:
            self._check_head(request, scope)
            if (route is None or route.needs_token) and not (resource and resource.bypasses_layers):
                await self.authenticate(request)
                self._rate.acquire(request.caller_key)
            elif resource is not None:
                self._rate.acquire(f"{resource.template} from {request.client_address}")
            if resource is None:
                return Response(404, headers=_error_headers(ROUTE_NOT_FOUND))
            if route is None:
                return Response(405, headers=(("allow", resource.allow_header), *_error_headers(ROUTE_NOT_FOUND)))
            if route.scope is not None:
                request.principal.require_scope(route.scope)
                request.required_scope = route.scope
            body = b"" if method in ("GET", "HEAD") else await request_body.read_body(request, route)
            # After the checks above: a caller without access must not get a cached response either.
            if (key := cache_key(request.caller_key, method, _path(scope), request.headers)) is not None:
                known, content = route, content_digest(scope["query_string"], request.headers, body)
                return await self.idempotency.get_or_run(
                    key, content, lambda: self._run_handler(request, method, known, body)
                )
            return await self._run_handler(request, method, route, body)
        except HttpError as refused:
            body = b"" if refused.body is None else encode(refused.body)
            if route is not None and route.audit and refused.status != 401:
                self._audit(request, route, f"refused: {refused.status}")
            if route is not None and route.error_page is not None:
                page = route.error_page(request, refused.status, str(refused))
                return msgspec.structs.replace(page, headers=(*page.headers, *refused.headers.items()))
            error_headers = _error_headers(refused.client_error)
            return Response(refused.status, body, JSON if body else "", (*refused.headers.items(), *error_headers))
        except errors.FabricError as error:
            return self._problem(request, route, error)
        except TimeoutError:
            return Response(504, encode(Problem(_TIMED_OUT, "timeout", False)), JSON)
        except Exception:
            logging.logger.exception("a request failed", extra={"fields": {"request_id": request.request_id}})
            return Response(500, encode(Problem("engine: bug", None, False)), JSON)

    def _check_head(self, request: Request[Any], scope: AsgiScope) -> None:
        """Check size of the headers, host and authorization header."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(value) for _, value in headers) > MAX_HEADER_BYTES:
            raise HttpError(431, "headers too large")
        self._hosts.check(scope, [value for name, value in headers if name == b"host"])
        if len(headers) != len(request.headers) and sum(name == b"authorization" for name, _ in headers) > 1:
            raise HttpError(400, "more than one Authorization header")

    async def _run_handler(
        self, request: Request[Any], method: str, route: Route, body: bytes
    ) -> Response | StreamingResponse:
        """Decode the body, check namespaces and run the handler."""
        await self.reauthenticate(request)  # reading the body or waiting for the same request may have taken long
        if method not in ("GET", "HEAD"):
            request.body = request_body.decode_body(request, route, body)
        if isinstance(request.body, HolderRequest):
            request.handle = await self.handle_signer.verify(request.body.handle)
        if request.principal.namespaces is not None and route.scope is not None:
            await _check_namespaces(request, route)
        if route.is_streaming:
            response = await self._open_feed(request, route)
        elif self._timeout_s is not None and not route.long:
            async with asyncio.timeout(self._timeout_s):
                response = to_response(await route.handler(request), route)
        else:
            response = await self._run_long_poll(request, route)
        if route.audit:
            self._audit(request, route, "done")
        return response

    async def _run_long_poll(self, request: Request[Any], route: Route) -> Response | StreamingResponse:
        """Run a handler that may wait; raise 401 if the token became invalid meanwhile."""
        try:
            response = to_response(await route.handler(request), route)
        except (HttpError, errors.FabricError):
            if request.rejection is not None:
                raise request.rejection from None
            raise
        if request.rejection is not None:
            raise request.rejection
        await self.reauthenticate(request)
        return response

    async def _open_feed(self, request: Request[Any], route: Route) -> Response | StreamingResponse:
        """Run a streaming handler within the feed limit of the caller; the end of the stream releases the slot."""
        self._feeds.acquire(request.caller_key)
        try:
            response = to_response(await route.handler(request), route)
        except BaseException:
            self._feeds.release(request.caller_key)
            raise
        assert isinstance(response, StreamingResponse), route.name
        return response

    def note_newer_schema(self, error: errors.SchemaTooNew) -> None:
        """Record that the schema is newer than this release, and stop the server."""
        if self.schema_too_new is None:
            self.schema_too_new = error
            self.on_schema_too_new()

    def _problem(self, request: Request[Any], route: Route | None, error: errors.FabricError) -> Response:
        status, problem = status_and_problem(error)
        if isinstance(error, errors.SchemaTooNew):
            self.note_newer_schema(error)
        self.engine.metrics.count("ff_errors", kind=error.kind)
        if route is not None and route.audit:
            self._audit(request, route, f"refused: {error.kind}")
        if status >= 500:
            logging.logger.error(
                "a request failed", extra={"fields": {"request_id": request.request_id, "cause": str(error)}}
            )
        wait_ms = getattr(error, "retry_after_ms", None)
        headers = (("retry-after", str(max(1, round(wait_ms / 1000)))),) if wait_ms else ()
        if route is not None and route.error_page is not None:
            return route.error_page(request, status, str(error) or problem.error)
        headers = (*headers, *_error_headers(error))
        return Response(status, encode(problem), JSON, headers)

    def _audit(self, request: Request[Any], route: Route, outcome: str) -> None:
        about = request.path_params[0] if request.path_params else None
        if about is None and request.handle is not None:
            about = request.handle.fields.execution_id
        logging.log_audit(
            route.name,
            {"who": request.principal.name, "about": about, "outcome": outcome, "request_id": request.request_id},
        )


async def _check_namespaces(request: Request[Any], route: Route) -> None:
    match route.subject:
        case Subject.EXECUTION:
            await request.require_execution_access(path_execution_id(request.path_params[0]))
        case Subject.FLOW:
            await request.require_flow_access(path_uuid("flow_id", request.path_params[0]))
        case Subject.HANDLE:
            await request.require_execution_access(request.handle.fields.execution_id)
        case Subject.CHECKED_BY_HANDLER:
            pass
        case None:
            raise HttpError(403, "token is bound to namespaces; this concerns all", kind="forbidden", retryable=False)


def _error_headers(error: errors.FabricError | None) -> tuple[tuple[str, str], ...]:
    """Return the header by which a client recognises an error of this server, as opposed to one of a proxy."""
    return () if error is None else (("x-ff-error", _error_header_value(error)),)


def _error_header_value(error: errors.FabricError) -> str:
    """Encode an error for clients that raise it again; only its code if the details are too long."""
    value = dumps(error_details(error))  # ASCII only, as headers require
    return value if len(value) <= MAX_ERROR_HEADER_BYTES else dumps({"code": error.kind})


# ---------------------------------------------------------------------------------------------------------------
# ASGI messages


def _path(scope: AsgiScope) -> bytes:
    """Return the raw path below the mount point."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    mounted: str = scope.get("root_path", "")
    return raw.removeprefix(mounted.encode()) if mounted else raw


async def _send_response(
    send: Send, response: Response, request_id: str, method: str, extra_headers: tuple[tuple[str, str], ...] = ()
) -> None:
    headers = [(b"x-request-id", request_id.encode())]
    if response.status not in (204, 304):
        headers.append((b"content-length", str(len(response.body)).encode()))
    if response.content_type:
        headers.append((b"content-type", response.content_type.encode()))
    if response.headers or extra_headers:
        headers += [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in (*response.headers, *extra_headers)
        ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else response.body})


async def _send_stream(
    send: Send, live: StreamingResponse, request_id: str, method: str, extra_headers: tuple[tuple[str, str], ...] = ()
) -> None:
    headers = [
        (b"x-request-id", request_id.encode()),
        (b"content-type", live.content_type.encode()),
        (b"cache-control", b"no-store"),
        *((name.encode(), value.encode("latin-1", "replace")) for name, value in extra_headers),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
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
