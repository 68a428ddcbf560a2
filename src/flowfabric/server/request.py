"""A request as a route sees it, and the words in which routes answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from flowfabric import errors, ids
from flowfabric.api.encoding import variant_name
from flowfabric.engine.engine import Engine
from flowfabric.handles import Handle
from flowfabric.model.api_token import ApiScope
from flowfabric.model.owned_id import DEFAULT_NAMESPACE
from flowfabric.server.auth import ANONYMOUS, Principal
from flowfabric.server.errors import HttpError, bad_request, not_found
from flowfabric.server.routing import Response

if TYPE_CHECKING:
    from flowfabric.server.app import App

B = TypeVar("B")
T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

JSON = "application/json"
MAX_QUERY_PARAMS = 100
encode = msgspec.json.Encoder().encode


class Request(Generic[B]):
    """One request: who asks, with which words."""

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
        params: list[str],
        query_string: bytes,
        headers: dict[bytes, bytes],
        principal: Principal,
        request_id: str,
        receive: Receive,
        peer: str = "",
    ) -> None:
        self.app = app
        self.path_params = params
        self.headers = headers
        self.principal = principal
        self.request_id = request_id
        self.receive = receive
        self.execution_namespace: str | None = None  # the namespace of the execution that a bound token was last let to
        self.client_address = peer  # the address that the request came from
        self.required_scope: ApiScope | None = None  # what the caller had to be allowed
        self.authenticated_at = 0.0  # when the caller's token was last found to be good
        self.rejection: Exception | None = None  # why it is no longer, or cannot be told to be
        self.is_abandoned = False  # whether nobody may hear the answer: the caller hung up, or was barred
        self.body: B = None  # type: ignore[assignment]
        self.handle: Handle = None  # type: ignore[assignment]  # the checked handle of a body that has one
        self._query_string = query_string
        self._query: dict[str, str] | None = None

    @property
    def engine(self) -> Engine:
        return self.app.engine

    # -- the path -------------------------------------------------------------------------------------------------

    @property
    def execution_id(self) -> str:
        """The execution in the path."""
        return path_execution_id(self.path_params[0])

    @property
    def flow_id(self) -> str:
        """The flow in the path."""
        return path_uuid("flow_id", self.path_params[0])

    # -- the query ------------------------------------------------------------------------------------------------

    def query_param(self, name: str) -> str | None:
        """A query parameter; None when it is not given."""
        if self._query is None:
            text = self._query_string.decode("utf-8", "replace")
            try:
                self._query = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_PARAMS))
            except ValueError:
                raise bad_request(f"query: more than {MAX_QUERY_PARAMS} parameters") from None
        return self._query.get(name)

    def int_param(self, name: str, default: int | None = None) -> int:
        """A query parameter that is a whole number from 0."""
        text = self.query_param(name)
        if text is None:
            if default is None:
                raise bad_request(f"{name}: missing")
            return default
        if not text.isascii() or not text.isdecimal() or len(text) > 18:
            raise bad_request(f"{name}: {text[:40]!r} is not a whole number")
        return int(text)

    # -- who asks -------------------------------------------------------------------------------------------------

    @property
    def caller_key(self) -> str:
        """The name under which the caller's requests are counted and remembered; by address without a token."""
        return self.principal.name if self.principal is not ANONYMOUS else f"{ANONYMOUS.name} at {self.client_address}"

    def require_namespace(self, namespace: str) -> None:
        """Refuse what is beyond the namespaces of the token."""
        if not self.principal.can_see(namespace):
            raise HttpError(403, f"token is not good for namespace {namespace}", kind="forbidden", retryable=False)

    def resolve_namespace(self, given: str | None = None) -> str:
        """The namespace of a budget or quota: the one given, else the token's only one, else `default`."""
        mine = self.principal.namespaces
        only = next(iter(mine)) if mine is not None and len(mine) == 1 else DEFAULT_NAMESPACE
        namespace = only if given is None else given
        self.require_namespace(namespace)
        return namespace

    @property
    def may_use_shared_budgets(self) -> bool:
        """Whether budgets of the default namespace stand in for those that an execution's own does not have."""
        return self.principal.namespaces is None

    async def require_execution_access(self, execution_id: str) -> None:
        """Act as if an execution beyond the token's namespaces did not exist."""
        if self.principal.namespaces is None:
            return
        namespace = await self.engine.get_execution_namespace(execution_id)
        if namespace is None or not self.principal.can_see(namespace):
            raise errors.NotFound("execution", execution_id=execution_id)
        self.execution_namespace = namespace

    async def require_flow_access(self, flow_id: str) -> None:
        """The same for a flow."""
        if self.principal.namespaces is None:
            return
        flow = await self.engine.describe_flow(flow_id)
        if flow is None or not self.principal.can_see(flow.namespace):
            raise errors.NotFound("flow", flow_id=flow_id)

    def trace_attempt_end(self, outcome: str) -> None:
        """The attempt whose handle the body shows ended, or was put away, by this request."""
        if self.app.tracing.is_on:
            self.app.tracing.record_attempt_end(self.handle.fields, outcome)

    async def check_authentication(self, after_s: float | None = None) -> None:
        """Bar a caller whose token is not good any more, or cannot be looked up: it hears no answer but that."""
        try:
            await self.app.reauthenticate(self, after_s)
        except (HttpError, errors.FabricError) as refused:
            self.rejection, self.is_abandoned = refused, True

    @asynccontextmanager
    async def watch_disconnect(self, on_end: Callable[[], None]) -> AsyncIterator[Callable[[], bool]]:
        """While a request waits: whether its caller is still there and the server goes on; `on_end` when not."""

        async def hang_up() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            self.is_abandoned = True
            on_end()

        async def stay_admitted() -> None:
            while self.rejection is None:
                await asyncio.sleep(self.app.reauthenticate_s)
                await self.check_authentication(after_s=0)
            on_end()

        watchers = [asyncio.create_task(hang_up())]
        if self.required_scope is not None and self.principal is not ANONYMOUS:
            watchers.append(asyncio.create_task(stay_admitted()))
        self.app.on_closing.add(on_end)
        if self.app.closing.is_set():  # it was on its way here when the others were told
            on_end()
        try:
            yield lambda: not self.is_abandoned and not self.app.closing.is_set()
        finally:
            self.app.on_closing.discard(on_end)
            for watcher in watchers:
                watcher.cancel()

    async def wait_while_connected(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of some waiting; None when the caller or the server goes first."""
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


def path_execution_id(text: str) -> str:
    """An execution id of a path."""
    try:
        return ids.parse_execution_id(text)
    except errors.InvalidInput as fault:
        raise bad_request(f"invalid execution_id: {fault.detail}") from None


def path_uuid(field: str, text: str, prefix: str = "invalid ") -> str:
    """A UUID of a path."""
    try:
        return ids.parse_uuid(text, field)
    except errors.InvalidInput as fault:
        raise bad_request(f"{prefix}{field}: {fault.detail.removeprefix(f'{field}: ')}") from None


def check_same_id(field: str, path: str, body: str) -> None:
    """A body that names the path's id names the same."""
    if path != body:
        raise bad_request(f"path {field} does not match body {field}")


# ---------------------------------------------------------------------------------------------------------------
# Answers


def json_response(value: Any, status: int = 200, *headers: tuple[str, str]) -> Response:
    """A JSON answer."""
    return Response(status, encode(value), JSON, headers)


def variant_response(answer: msgspec.Struct, status: int = 200, name: str = "") -> Response:
    """A variant of an answer: an object with the variant's name, or the bare name of one without fields."""
    return Response(status, encode(as_variant(answer, name)), JSON)


def as_variant(answer: msgspec.Struct, name: str = "") -> Any:
    """The same, not yet encoded."""
    known = name or variant_name(type(answer))
    return {known: answer} if type(answer).__struct_fields__ else known


def require_found(thing: B | None, text: str) -> B:
    """What was looked for, or 404 with this text."""
    if thing is None:
        raise not_found(text)
    return thing
