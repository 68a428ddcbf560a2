"""The request that a route handler gets, and the functions that build its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from flowfabric import errors, ids
from flowfabric.api.encoding import MAX_WAIT_MS, variant_name
from flowfabric.engine.engine import Engine
from flowfabric.handles import Handle
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.server.errors import HttpError, bad_request, not_found
from flowfabric.server.routing import Response, Route, StreamingResponse
from flowfabric.server.security.auth import ANONYMOUS, Principal

if TYPE_CHECKING:
    from flowfabric.server.app import App

B = TypeVar("B")
T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

JSON = "application/json"
MAX_QUERY_PARAMS = 100
MAX_INTEGER = 2**63 - 1  # positions of a feed need all of it
encode = msgspec.json.Encoder().encode


class Request(Generic[B]):
    """One HTTP request: principal, path, query and decoded body."""

    __slots__ = (
        "_query",
        "_query_string",
        "app",
        "authenticated_at",
        "body",
        "client_address",
        "execution_namespace",
        "handle",
        "headers",
        "is_abandoned",
        "method",
        "mount_path",
        "path",
        "path_params",
        "principal",
        "receive",
        "rejection",
        "request_id",
        "required_scope",
    )

    def __init__(
        self,
        app: App,
        path_params: list[str],
        query_string: bytes,
        headers: dict[bytes, bytes],
        principal: Principal,
        request_id: str,
        receive: Receive,
        client_address: str = "",
        method: str = "GET",
        path: str = "",
        mount_path: str = "",
    ) -> None:
        self.app = app
        self.path_params = path_params
        self.headers = headers
        self.principal = principal
        self.request_id = request_id
        self.receive = receive
        self.execution_namespace: str | None = None  # namespace of the last execution that a bound token got access to
        self.client_address = client_address
        self.method = method
        self.path = path  # path below the mount point
        self.mount_path = mount_path  # where this application is mounted in another one; empty at the root
        self.required_scope: ApiScope | None = None  # the scope of the route
        self.authenticated_at = 0.0  # event loop time of the last token check
        self.rejection: Exception | None = None  # why the token is no longer valid, or could not be checked
        self.is_abandoned = False  # the caller disconnected or was rejected: the response is discarded
        self.body: B = None  # type: ignore[assignment]
        self.handle: Handle = None  # type: ignore[assignment]  # the verified handle of a HolderRequest
        self._query_string = query_string
        self._query: dict[str, str] | None = None

    @property
    def engine(self) -> Engine:
        return self.app.engine

    # -- the path -------------------------------------------------------------------------------------------------

    @property
    def execution_id(self) -> str:
        """The execution id in the path; raises 400 if it is malformed."""
        return path_execution_id(self.path_params[0])

    @property
    def flow_id(self) -> str:
        """The flow id in the path; raises 400 if it is malformed."""
        return path_uuid("flow_id", self.path_params[0])

    @property
    def budget_id(self) -> str:
        """The budget id in the path; raises 400 if it is malformed."""
        return path_uuid("budget_id", self.path_params[0])

    # -- the query ------------------------------------------------------------------------------------------------

    def query_param(self, name: str) -> str | None:
        """Return a query parameter, or None."""
        if self._query is None:
            text = self._query_string.decode("utf-8", "replace")
            try:
                self._query = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_PARAMS))
            except ValueError:
                raise bad_request(f"query: more than {MAX_QUERY_PARAMS} parameters") from None
        return self._query.get(name)

    @property
    def query(self) -> dict[str, str]:
        """All query parameters; the last of a repeated name."""
        self.query_param("")
        return self._query or {}

    def int_param(self, name: str, default: int | None = None) -> int:
        """Return a query parameter that is a non-negative integer; raise 400 otherwise."""
        text = self.query_param(name)
        if text is None:
            if default is None:
                raise bad_request(f"{name}: missing")
            return default
        if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > MAX_INTEGER:
            raise bad_request(f"{name}: {text[:40]!r} is not a whole number")
        return int(text)

    @property
    def cursor(self) -> str | None:
        """The cursor in the query; None for the first page."""
        return self.query_param("cursor") or None

    @property
    def namespace(self) -> str:
        """The namespace of `resolve_namespace` for the one that the query names, if any."""
        return self.resolve_namespace(self.query_param("namespace"))

    # -- the caller -------------------------------------------------------------------------------------------------

    @property
    def caller_key(self) -> str:
        """The key for rate limits and the idempotency cache: the principal, or the address without a token."""
        return self.principal.name if self.principal is not ANONYMOUS else f"{ANONYMOUS.name} at {self.client_address}"

    def require_namespace(self, namespace: str) -> None:
        """Raise 403 if the token may not use a namespace."""
        if not self.principal.can_see(namespace):
            raise HttpError(403, f"token is not good for namespace {namespace}", kind="forbidden", retryable=False)

    def visible_namespaces(self) -> tuple[str | None, list[str] | None]:
        """Return the namespace that the query names, which the token must be good for, and those of the token."""
        namespace = self.query_param("namespace")
        if namespace is not None:
            self.require_namespace(namespace)
        return namespace, self.bound_namespaces()

    def bound_namespaces(self) -> list[str] | None:
        """Return the namespaces that the token is bound to; None for all."""
        namespaces = self.principal.namespaces
        return None if namespaces is None else sorted(namespaces)

    def resolve_namespace(self, given: str | None = None) -> str:
        """Return the namespace of a budget or quota: the given one, else the only one of the token, else `default`."""
        namespaces = self.principal.namespaces
        only = next(iter(namespaces)) if namespaces is not None and len(namespaces) == 1 else DEFAULT_NAMESPACE
        namespace = only if given is None else given
        self.require_namespace(namespace)
        return namespace

    @property
    def may_use_shared_budgets(self) -> bool:
        """True if budgets of the default namespace may replace those missing in the execution's own."""
        return self.principal.namespaces is None

    async def require_execution_access(self, execution_id: str) -> None:
        """Raise NotFound for an execution outside the namespaces of the token."""
        if self.principal.namespaces is None:
            return
        namespace = await self.engine.get_execution_namespace(execution_id)
        if namespace is None or not self.principal.can_see(namespace):
            raise errors.NotFound("execution", execution_id=execution_id)
        self.execution_namespace = namespace

    async def require_flow_access(self, flow_id: str) -> None:
        """Raise NotFound for a flow outside the namespaces of the token."""
        if self.principal.namespaces is None:
            return
        flow = await self.engine.describe_flow(flow_id)
        if flow is None or not self.principal.can_see(flow.namespace):
            raise errors.NotFound("flow", flow_id=flow_id)

    def trace_attempt_end(self, outcome: str) -> None:
        """Record in the trace that this request ended or suspended the attempt of its handle."""
        if self.app.tracing.is_on:
            self.app.tracing.record_attempt_end(self.handle.fields, outcome)

    async def check_authentication(self, after_s: float | None = None) -> None:
        """Check the token again; on failure set `rejection`, which becomes the response."""
        try:
            await self.app.reauthenticate(self, after_s)
        except (HttpError, errors.FabricError) as refused:
            self.rejection, self.is_abandoned = refused, True

    @asynccontextmanager
    async def watch_disconnect(self, on_end: Callable[[], None]) -> AsyncIterator[Callable[[], bool]]:
        """Yield a predicate: the caller is connected and the server is running. `on_end` is called when that ends.

        The token is checked again from time to time; an invalid one also ends the wait.
        """

        async def watch_connection() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            self.is_abandoned = True
            on_end()

        async def watch_token() -> None:
            while self.rejection is None:
                await asyncio.sleep(self.app.reauthenticate_s)
                await self.check_authentication(after_s=0)
            on_end()

        watchers = [asyncio.create_task(watch_connection())]
        if self.required_scope is not None and self.principal is not ANONYMOUS:
            watchers.append(asyncio.create_task(watch_token()))
        self.app.on_closing.add(on_end)
        if self.app.closing.is_set():  # shutdown began before this request was registered
            on_end()
        try:
            yield lambda: not self.is_abandoned and not self.app.closing.is_set()
        finally:
            self.app.on_closing.discard(on_end)
            for watcher in watchers:
                watcher.cancel()

    async def wait_while_connected(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await a coroutine; return None if the caller disconnects or the server stops first."""
        over = asyncio.Event()
        async with self.watch_disconnect(over.set):
            tasks = (asyncio.create_task(work), asyncio.create_task(over.wait()))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return tasks[0].result() if tasks[0].done() else None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def long_poll(self, read: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """Return what is read within the `wait_ms` of the query, or without such a wait what there is now."""
        if wait_ms := min(self.int_param("wait_ms", 0), MAX_WAIT_MS):
            found = await self.wait_while_connected(read(wait_ms))
            if found is not None:
                return found
        return await read(0)


def path_execution_id(text: str) -> str:
    """Parse an execution id; raise 400 if it is malformed."""
    try:
        return ids.parse_execution_id(text)
    except errors.InvalidInput as fault:
        raise bad_request(f"invalid execution_id: {fault.detail}") from None


def path_uuid(field: str, text: str, prefix: str = "invalid ") -> str:
    """Parse a UUID; raise 400 if it is malformed."""
    try:
        return ids.parse_uuid(text, field)
    except errors.InvalidInput as fault:
        raise bad_request(f"{prefix}{field}: {fault.detail.removeprefix(f'{field}: ')}") from None


def check_same_id(field: str, path: str, body: str) -> None:
    """Raise 400 if the id in the body differs from the id in the path."""
    if path != body:
        raise bad_request(f"path {field} does not match body {field}")


# ---------------------------------------------------------------------------------------------------------------
# Responses


def to_response(answer: Any, route: Route) -> Response | StreamingResponse:
    """Build the response for what a handler returns: a response, or an answer of a type that its route declares."""
    if isinstance(answer, Response | StreamingResponse):
        return answer
    if route.variants:
        return variant_response(answer, route.variants[variant_name(type(answer))])
    return json_response(answer)


def json_response(value: Any, status: int = 200, *headers: tuple[str, str]) -> Response:
    """Build a JSON response."""
    return Response(status, encode(value), JSON, headers)


def variant_response(answer: msgspec.Struct, status: int = 200, name: str = "") -> Response:
    """Build the response for one variant, named by its class unless `name` is given."""
    return Response(status, encode(as_variant(answer, name)), JSON)


def as_variant(answer: msgspec.Struct, name: str = "") -> Any:
    """Return `{name: struct}`, or the bare name if the struct has no fields."""
    name = name or variant_name(type(answer))
    return {name: answer} if type(answer).__struct_fields__ else name


def require_found(thing: B | None, text: str) -> B:
    """Return the value; raise 404 with this text if it is None."""
    if thing is None:
        raise not_found(text)
    return thing
