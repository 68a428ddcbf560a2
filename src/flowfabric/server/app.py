"""The application: one request from its first byte to its last.

The layers, from outside in: request id, CORS, metrics, bearer token, rate, size, body, handler. A route is a line of
the table (`table.py`); what it may not decide for itself is decided here, once for all.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from json import dumps
from time import perf_counter
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.server import logs, openapi, traces
from flowfabric.server.ask import JSON, Ask, encode, execution_in, uuid_in
from flowfabric.server.auth import ANYBODY, Guard, Principal, RateLimit
from flowfabric.server.cors import Cors
from flowfabric.server.metrics import HttpMeters
from flowfabric.server.once import Once, key_of
from flowfabric.server.problems import Problem, Refused, TooLarge, exact, problem_of
from flowfabric.server.routes import PAGES
from flowfabric.server.settings import ServerSettings
from flowfabric.server.table import FIELDS, Live, Operation, Reply, Resource, Subject, Table

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_JSON_TYPE = re.compile(rb"application/(?:[^;\s]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL).fullmatch
_OCTETS_TYPE = re.compile(rb"application/octet-stream\s*(?:;.*)?", re.IGNORECASE | re.DOTALL).fullmatch
_FIELDS = FIELDS.encode()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_UNSUPPORTED = "invalid JSON: Unsupported Media Type"
_MALFORMED = "invalid JSON: Bad Request"
_UNPROCESSABLE = "invalid JSON: Unprocessable Entity"
_TIMED_OUT = "timeout: request"
LONGEST_HEADER = 4096
MOST_HEADER_BYTES = 32 * 1024
BODY_S = 60.0
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
        self.guard = Guard(settings, engine)
        self.spans: traces.Spans = traces.spans()
        self._rate = RateLimit(settings.rate_limit)
        self._cors = Cors(settings)
        self._timeout_s = settings.request_timeout_ms / 1000 or None

    def begin_closing(self) -> None:
        """Let everything that waits come to its end, cleanly and at once."""
        self.closing.set()
        for end in list(self.on_closing):
            end()

    def openapi(self) -> dict[str, Any]:
        """What can be asked, as a document."""
        return openapi.document(self.table)

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
        shown = headers.get(b"x-request-id")
        request_id = shown.decode() if shown and _REQUEST_ID(shown) else self.engine.minter.uuid()
        resource, params = self.table.find(_path(scope))
        is_apart = resource is not None and resource.is_apart
        if not is_apart and (preflight := self._cors.preflight(method, headers)) is not None:
            await _whole(send, preflight, request_id, method)
            return
        ask: Ask[Any] = Ask(self, params, scope["query_string"], headers, ANYBODY, request_id, receive)
        operation = None if resource is None else resource.operation(method)
        template = "unknown" if resource is None else resource.template
        with self.spans.request(method, template, headers):
            reply = await self._answered(ask, method, _path(scope), resource, operation)
        allowing = self._cors.allowing(headers) if self._cors.is_on and not is_apart else ()
        if isinstance(reply, Live):
            status = 200
            await _live(send, reply, request_id, method, allowing)
        else:
            status = reply.status
            await _whole(send, reply, request_id, method, allowing)
        if not is_apart:
            seconds = perf_counter() - began
            self.http.note(method, template, status, seconds)
            logs.note_request(method, template, status, seconds, request_id, ask.principal.name)

    async def _answered(
        self, ask: Ask[Any], method: str, path: bytes, resource: Resource | None, operation: Operation | None
    ) -> Reply | Live:
        """The handler's answer, or the refusal that came before or instead of it."""
        try:
            if sum(map(len, ask.headers.values())) > MOST_HEADER_BYTES:
                raise Refused(431, "headers too large")
            if (operation is None or operation.scope is not None) and not (resource and resource.is_apart):
                ask.principal = await self.guard.admit(ask.headers.get(b"authorization"))
                self._rate.take(ask.principal.name)
            if resource is None:
                return Reply(404, headers=_named(NO_ROUTE))
            if operation is None:
                return Reply(405, headers=(("allow", resource.allow), *_named(NO_ROUTE)))
            if operation.scope is not None:
                ask.principal.needs(operation.scope)
            # Who may not ask (any more) hears no remembered answer either: this comes after the checks above.
            if (key := key_of(method, path, ask.headers)) is not None:
                known = operation
                return await self.once.answer(key, lambda: self._performed(ask, method, known))
            return await self._performed(ask, method, operation)
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
            logs.logger.exception("a request failed", extra={"fields": {"request_id": ask.request_id}})
            return Reply(500, encode(Problem("engine: bug", None, False)), JSON)

    async def _performed(self, ask: Ask[Any], method: str, operation: Operation) -> Reply | Live:
        """The handler's answer to a caller that may ask."""
        if method not in ("GET", "HEAD"):
            await self._read(ask, operation)
        if ask.principal.namespaces is not None and operation.scope is not None:
            await _within_namespaces(ask, operation)
        if self._timeout_s is not None and not operation.long:
            async with asyncio.timeout(self._timeout_s):
                reply: Reply | Live = await operation.handle(ask)
        else:
            reply = await operation.handle(ask)
        if operation.audit:
            self._audit(ask, operation, "done")
        return reply

    def _problem(self, ask: Ask[Any], operation: Operation | None, error: errors.FabricError) -> Reply:
        status, problem = problem_of(error)
        if isinstance(error, errors.SchemaTooNew) and self.newer is None:
            self.newer = error
            self.on_newer()
        self.engine.meters.count("ff_errors", kind=error.kind)
        if operation is not None and operation.audit:
            self._audit(ask, operation, f"refused: {error.kind}")
        if status >= 500:
            logs.logger.error("a request failed", extra={"fields": {"request_id": ask.request_id, "cause": str(error)}})
        wait_ms = getattr(error, "retry_after_ms", None)
        headers = (("retry-after", str(max(1, round(wait_ms / 1000)))),) if wait_ms else ()
        headers = (*headers, *_named(error))
        return Reply(status, encode(problem), JSON, headers)

    def _audit(self, ask: Ask[Any], operation: Operation, outcome: str) -> None:
        about = ask.params[0] if ask.params else None
        logs.note_audit(
            operation.name,
            {"who": ask.principal.name, "about": about, "outcome": outcome, "request_id": ask.request_id},
        )

    # -- the body -------------------------------------------------------------------------------------------------

    async def _read(self, ask: Ask[Any], operation: Operation) -> None:
        """Read the body within its limit and make of it what the route expects."""
        limit = operation.limit
        length = ask.headers.get(b"content-length")
        if length is not None and length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise TooLarge(limit, operation.path)
        decoder, kind = operation.decoder, ask.headers.get(b"content-type", b"")
        is_bytes = operation.octets is not None and _OCTETS_TYPE(kind)
        if decoder is not None and not is_bytes and not _JSON_TYPE(kind):
            raise Refused(415, _UNSUPPORTED)
        try:
            async with asyncio.timeout(BODY_S):
                message = await ask.receive()
                body: bytes = message.get("body", b"")
                if message.get("more_body"):
                    body = await _rest(ask.receive, body, limit, operation.path)
        except TimeoutError:
            raise Refused(408, "the body took too long", connection="close") from None
        if len(body) > limit:
            raise TooLarge(limit, operation.path)
        if decoder is None:
            ask.body = body
            return
        try:
            ask.body = _around(body, ask.headers.get(_FIELDS, b"{}"), operation) if is_bytes else decoder.decode(body)
        except msgspec.ValidationError:
            raise (Refused(422, _UNPROCESSABLE) if is_bytes or _is_json(body) else Refused(400, _MALFORMED)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Refused(400, _MALFORMED) from None


def _is_json(body: bytes) -> bool:
    """Whether all of a body is well-formed; of a wrong shape the decoder tells before it has read to the end."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _around(octets: bytes, fields: bytes, operation: Operation) -> Any:
    """The body of which one field came as bytes, and the others in a header."""
    given = msgspec.json.decode(fields, type=dict[str, Any])
    if operation.octets in given:
        raise msgspec.ValidationError(f"{operation.octets} is given twice")
    given[operation.octets or ""] = octets
    return msgspec.convert(given, operation.body)


async def _rest(receive: Receive, body: bytes, limit: int, route: str) -> bytes:
    parts, size, more = [body], len(body), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, _MALFORMED)
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLarge(limit, route)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def _within_namespaces(ask: Ask[Any], operation: Operation) -> None:
    match operation.subject:
        case Subject.EXECUTION:
            await ask.may_touch(execution_in(ask.params[0]))
        case Subject.FLOW:
            await ask.may_touch_flow(uuid_in("flow_id", ask.params[0]))
        case Subject.HANDLE:
            await ask.may_touch(ask.body.holder.fields.execution_id)
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
