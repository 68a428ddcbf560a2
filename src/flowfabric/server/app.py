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
from flowfabric.api.encoding import Held
from flowfabric.engine.engine import Engine
from flowfabric.server import logging, openapi, request_body, tracing
from flowfabric.server.auth import ANYBODY, ROOT, UNAUTHENTICATED, Guard, OpenFeeds, Principal, RateLimit, peer_of
from flowfabric.server.cors import Cors
from flowfabric.server.errors import Problem, Refused, exact, problem_of
from flowfabric.server.handle_signer import HandleSigner
from flowfabric.server.host_filter import Hosts
from flowfabric.server.idempotency import Once, content_of, key_of
from flowfabric.server.metrics import HttpMeters
from flowfabric.server.request import JSON, Ask, encode, execution_in, uuid_in
from flowfabric.server.routes import PAGES
from flowfabric.server.routing import Live, Operation, Reply, Resource, Subject, Table
from flowfabric.server.settings import ServerSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_TIMED_OUT = "timeout: request"
LONGEST_HEADER = 4096
MOST_HEADER_BYTES = 32 * 1024
READMIT_S = 10.0  # with the moment that a token is trusted for, well below the 15 s that are promised
NO_ROUTE = errors.NotFound("route")


def create_app(engine: Engine, settings: ServerSettings | None = None) -> App:
    """The server on an engine, as an ASGI application. Closing the engine is left to whoever opened it."""
    return App(engine, settings or ServerSettings())


class App:
    """An ASGI application."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.table = Table(*PAGES)
        self.http = HttpMeters()
        self.closing = asyncio.Event()
        self.on_closing: set[Callable[[], None]] = set()
        self.newer: errors.SchemaTooNew | None = None  # why this server can answer nothing any more
        self.on_newer: Callable[[], None] = lambda: None
        self.rotating = asyncio.Lock()
        self.once = Once()
        self.waiting_claims: dict[tuple[str, str], set[Callable[[], None]]] = {}  # by who asks, and worker instance
        self.handles = HandleSigner(engine, settings)
        self._rate = RateLimit(settings.rate_limit)
        self.guard = Guard(settings, engine, self._rate)
        self.spans: tracing.Spans = tracing.spans()
        self._feeds = OpenFeeds(settings.max_feeds)
        self._hosts = Hosts(settings)
        self._cors = Cors(settings)
        self.readmit_s = READMIT_S
        self._timeout_s = settings.request_timeout_ms / 1000 or None

    def begin_closing(self) -> None:
        """Let everything that waits come to its end, cleanly and at once."""
        self.closing.set()
        for end in list(self.on_closing):
            end()

    @cached_property
    def openapi(self) -> bytes:
        """What can be asked, as a document; made once, for the table does not change."""
        return encode(openapi.document(self.table))

    async def admit(self, ask: Ask[Any]) -> None:
        """Let in who shows a good token; 401 or 429 for others."""
        ask.principal = await self.guard.admit(ask.headers.get(b"authorization"), ask.peer)
        ask.admitted_at = asyncio.get_running_loop().time()

    async def readmit(self, ask: Ask[Any], after_s: float | None = None) -> None:
        """Refuse a caller that was let in `after_s` ago, or `readmit_s`, and would not be now."""
        before, scope = ask.principal, ask.scope
        # Tokens of the settings hold as long as this process does.
        if scope is None or before is ANYBODY or before is ROOT:
            return
        if asyncio.get_running_loop().time() - ask.admitted_at < (self.readmit_s if after_s is None else after_s):
            return
        await self.admit(ask)
        ask.principal.needs(scope)
        if ask.principal.namespaces != before.namespaces:
            raise Refused(401, UNAUTHENTICATED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        method: str = scope["method"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        peer = peer_of(scope.get("client"))
        shown = headers.get(b"x-request-id")
        request_id = shown.decode() if shown and _REQUEST_ID(shown) else self.engine.minter.uuid()
        resource, params = self.table.find(_path(scope))
        is_apart = resource is not None and resource.is_apart
        if not is_apart and (preflight := self._cors.preflight(method, headers)) is not None:
            await _whole(send, preflight, request_id, method)
            return
        ask: Ask[Any] = Ask(self, params, scope["query_string"], headers, ANYBODY, request_id, receive, peer)
        operation = None if resource is None else resource.operation(method)
        template = "unknown" if resource is None else resource.template
        with self.spans.request(method, template, headers):
            reply = await self._answered(ask, method, scope, resource, operation)
        allowing = self._cors.allowing(headers) if self._cors.is_on and not is_apart else ()
        if isinstance(reply, Live):
            status = 200
            try:
                await _live(send, reply, request_id, method, allowing)
            finally:
                self._feeds.close(ask.who)
        else:
            status = reply.status
            await _whole(send, reply, request_id, method, allowing)
        if not is_apart:
            seconds = perf_counter() - began
            self.http.note(method, template, status, seconds)
            logging.note_request(method, template, status, seconds, request_id, ask.principal.name)

    async def _answered(
        self, ask: Ask[Any], method: str, scope: Scope, resource: Resource | None, operation: Operation | None
    ) -> Reply | Live:
        """The handler's answer, or the refusal that came before or instead of it."""
        try:
            self._check_head(ask, scope)
            if (operation is None or operation.needs_token) and not (resource and resource.is_apart):
                await self.admit(ask)
                self._rate.take(ask.who)
            elif resource is not None:
                self._rate.take(f"{resource.template} from {ask.peer}")
            if resource is None:
                return Reply(404, headers=_named(NO_ROUTE))
            if operation is None:
                return Reply(405, headers=(("allow", resource.allow), *_named(NO_ROUTE)))
            if operation.scope is not None:
                ask.principal.needs(operation.scope)
                ask.scope = operation.scope
            body = b"" if method in ("GET", "HEAD") else await request_body.received(ask, operation)
            # Who may not ask (any more) hears no remembered answer either: this comes after the checks above.
            if (key := key_of(ask.who, method, _path(scope), ask.headers)) is not None:
                known, content = operation, content_of(scope["query_string"], ask.headers, body)
                return await self.once.answer(key, content, lambda: self._performed(ask, method, known, body))
            return await self._performed(ask, method, operation, body)
        except Refused as refused:
            body = b"" if refused.body is None else encode(refused.body)
            if operation is not None and operation.audit and refused.status != 401:
                self._audit(ask, operation, f"refused: {refused.status}")
            named = _named(refused.verdict)
            return Reply(refused.status, body, JSON if body else "", (*refused.headers.items(), *named))
        except errors.FabricError as error:
            return self._problem(ask, operation, error)
        except TimeoutError:
            return Reply(504, encode(Problem(_TIMED_OUT, "timeout", False)), JSON)
        except Exception:
            logging.logger.exception("a request failed", extra={"fields": {"request_id": ask.request_id}})
            return Reply(500, encode(Problem("engine: bug", None, False)), JSON)

    def _check_head(self, ask: Ask[Any], scope: Scope) -> None:
        """Refuse what the headers alone show to be wrong."""
        sent: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(value) for _, value in sent) > MOST_HEADER_BYTES:
            raise Refused(431, "headers too large")
        self._hosts.check(scope, [value for name, value in sent if name == b"host"])
        if len(sent) != len(ask.headers) and sum(name == b"authorization" for name, _ in sent) > 1:
            raise Refused(400, "more than one Authorization header")

    async def _performed(self, ask: Ask[Any], method: str, operation: Operation, body: bytes) -> Reply | Live:
        """The handler's answer to a caller that may ask."""
        await self.readmit(ask)  # the body, or the answer to the same request, may have taken long
        if method not in ("GET", "HEAD"):
            ask.body = request_body.decoded(ask, operation, body)
        if isinstance(ask.body, Held):
            ask.holder = await self.handles.verify(ask.body.handle)
        if ask.principal.namespaces is not None and operation.scope is not None:
            await _within_namespaces(ask, operation)
        if operation.is_feed:
            reply = await self._fed(ask, operation)
        elif self._timeout_s is not None and not operation.long:
            async with asyncio.timeout(self._timeout_s):
                reply = await operation.handle(ask)
        else:
            reply = await self._waited(ask, operation)
        if operation.audit:
            self._audit(ask, operation, "done")
        return reply

    async def _waited(self, ask: Ask[Any], operation: Operation) -> Reply | Live:
        """The answer of an operation that may wait long; 401 when its caller's token is not good any more."""
        try:
            reply: Reply | Live = await operation.handle(ask)
        except (Refused, errors.FabricError):
            if ask.barred is not None:
                raise ask.barred from None
            raise
        if ask.barred is not None:
            raise ask.barred
        await self.readmit(ask)
        return reply

    async def _fed(self, ask: Ask[Any], operation: Operation) -> Reply | Live:
        """The beginning of a stream, of which each caller may have so many."""
        self._feeds.open(ask.who)
        try:
            reply: Reply | Live = await operation.handle(ask)
        except BaseException:
            self._feeds.close(ask.who)
            raise
        assert isinstance(reply, Live), operation.name  # whose end closes the feed
        return reply

    def note_newer_schema(self, error: errors.SchemaTooNew) -> None:
        """Keep why this server can answer nothing any more, and let it be stopped."""
        if self.newer is None:
            self.newer = error
            self.on_newer()

    def _problem(self, ask: Ask[Any], operation: Operation | None, error: errors.FabricError) -> Reply:
        status, problem = problem_of(error)
        if isinstance(error, errors.SchemaTooNew):
            self.note_newer_schema(error)
        self.engine.meters.count("ff_errors", kind=error.kind)
        if operation is not None and operation.audit:
            self._audit(ask, operation, f"refused: {error.kind}")
        if status >= 500:
            logging.logger.error(
                "a request failed", extra={"fields": {"request_id": ask.request_id, "cause": str(error)}}
            )
        wait_ms = getattr(error, "retry_after_ms", None)
        headers = (("retry-after", str(max(1, round(wait_ms / 1000)))),) if wait_ms else ()
        headers = (*headers, *_named(error))
        return Reply(status, encode(problem), JSON, headers)

    def _audit(self, ask: Ask[Any], operation: Operation, outcome: str) -> None:
        about = ask.params[0] if ask.params else None
        if about is None and ask.holder is not None:
            about = ask.holder.fields.execution_id
        logging.note_audit(
            operation.name,
            {"who": ask.principal.name, "about": about, "outcome": outcome, "request_id": ask.request_id},
        )


async def _within_namespaces(ask: Ask[Any], operation: Operation) -> None:
    match operation.subject:
        case Subject.EXECUTION:
            await ask.may_touch(execution_in(ask.params[0]))
        case Subject.FLOW:
            await ask.may_touch_flow(uuid_in("flow_id", ask.params[0]))
        case Subject.HANDLE:
            await ask.may_touch(ask.holder.fields.execution_id)
        case Subject.OWN:
            pass
        case None:
            raise Refused(403, "token is bound to namespaces; this concerns all", kind="forbidden", retryable=False)


def _named(error: errors.FabricError | None) -> tuple[tuple[str, str], ...]:
    """The header by which clients tell a refusal of ours from what a proxy answers."""
    return () if error is None else (("x-ff-error", _one_line(error)),)


def _one_line(error: errors.FabricError) -> str:
    """What an error is exactly, for clients that raise it again; just its code when it would be a long story."""
    line = dumps(exact(error))  # ASCII only, as headers want it
    return line if len(line) <= LONGEST_HEADER else dumps({"code": error.kind})


# ---------------------------------------------------------------------------------------------------------------
# The wire


def _path(scope: Scope) -> bytes:
    """The path as it was sent, below the place where the application is mounted."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    mounted: str = scope.get("root_path", "")
    return raw.removeprefix(mounted.encode()) if mounted else raw


async def _whole(
    send: Send, reply: Reply, request_id: str, method: str, more: tuple[tuple[str, str], ...] = ()
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


async def _live(send: Send, live: Live, request_id: str, method: str, more: tuple[tuple[str, str], ...] = ()) -> None:
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
