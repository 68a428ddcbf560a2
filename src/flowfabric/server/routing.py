"""The table of routes: what may be asked, by whom, and how it looks. The server answers by it, documents tell it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from flowfabric.api.encoding import variant_name
from flowfabric.model.api_token import ApiScope

if TYPE_CHECKING:
    from flowfabric.server.request import Request

CONTROL_LIMIT = 65_536
SIGNAL_LIMIT = 262_144

OCTET_STREAM = "application/octet-stream"
FIELDS_HEADER = "x-ff-fields"  # the header with the other fields of a body that is sent as the bytes themselves
EVENT_STREAM = "text/event-stream"
HTML = "text/html; charset=utf-8"
METRICS_PATH = "/metrics"


class Subject(StrEnum):
    """What an operation is about; a token that is bound to namespaces is asked whether that is within them."""

    EXECUTION = "execution"  # the execution in the path
    FLOW = "flow"  # the flow in the path
    HANDLE = "handle"  # the execution that the handle in the body holds
    CHECKED_BY_HANDLER = "own"  # the operation looks by itself


class Response(msgspec.Struct, frozen=True):
    """An answer that is whole."""

    status: int = 200
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class StreamingResponse(msgspec.Struct, frozen=True):
    """An answer that goes on as long as there is something to tell."""

    events: AsyncGenerator[bytes]
    content_type: str = EVENT_STREAM


class QueryParam(msgspec.Struct, frozen=True):
    """A query parameter, for the documents."""

    name: str
    schema: dict[str, Any]
    required: bool = False


CURSOR_PARAM = QueryParam("cursor", {"type": "string"})
LIMIT_PARAM = QueryParam("limit", {"type": "integer", "minimum": 0})
NAMESPACE_PARAM = QueryParam("namespace", {"type": "string"})


class VariantSchema(msgspec.Struct, frozen=True):
    """One of several answers, each an object with one key, its name, or the bare name of one without fields."""

    variants: tuple[tuple[str, Any], ...]


def one_of(*types: Any, **named: Any) -> VariantSchema:
    """Variants by the names of their types, or by others."""
    return VariantSchema((*((variant_name(each), each) for each in types), *named.items()))


Handler = Callable[["Request[Any]"], Awaitable[Response | StreamingResponse]]
H = TypeVar("H", bound=Handler)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that may be asked."""

    method: str
    path: str
    handler: Any
    responses: dict[int, Any]  # a type, None for an empty body, or the name of another content type
    scope: ApiScope | None  # None is for everybody
    subject: Subject | None
    body: Any
    max_body_bytes: int
    query: tuple[QueryParam, ...]
    is_long_poll: bool  # waits on purpose: no time limit applies
    is_audited: bool  # noted as an operator's action
    error_statuses: frozenset[int]
    decoder: Any = None

    @property
    def name(self) -> str:
        function: str = self.handler.__name__
        return function

    @property
    def needs_token(self) -> bool:
        """Whether it is for those with a good token, of a certain scope or any."""
        return self.scope is not None or 401 in self.error_statuses

    @property
    def is_streaming(self) -> bool:
        """Whether the answer goes on as long as there is something to tell."""
        return EVENT_STREAM in self.responses.values()

    @property
    def octets_field(self) -> str | None:
        """The field that may be the whole body, as the bytes themselves; None for a route that has no such."""
        return _octets_of(self.body)

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().partition("\n")[0]


@cache
def _octets_of(body: Any) -> str | None:
    fields: tuple[str, ...] = getattr(body, "__struct_fields__", ())
    found = [name for name in fields if name.endswith("_b64")]
    return found[0] if len(found) == 1 else None


class RouteGroup:
    """Operations of one page."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.entries: list[Route] = []

    def _add(
        self,
        method: str,
        path: str,
        answers: dict[int, Any],
        *,
        scope: ApiScope | None,
        subject: Subject | None = None,
        body: Any = None,
        limit: int = CONTROL_LIMIT,
        query: tuple[QueryParam, ...] = (),
        long: bool = False,
        audit: bool = False,
        refusals: tuple[int, ...] = (),
    ) -> Callable[[H], H]:
        def add(handle: H) -> H:
            self.entries.append(
                Route(
                    method=method,
                    path=path,
                    handler=handle,
                    responses=answers,
                    scope=scope,
                    subject=subject,
                    body=body,
                    max_body_bytes=limit,
                    query=query,
                    is_long_poll=long,
                    is_audited=audit,
                    error_statuses=frozenset(refusals),
                    decoder=None if body is None or body is bytes else msgspec.json.Decoder(body),
                )
            )
            return handle

        return add

    def get(self, path: str, answers: dict[int, Any], **given: Any) -> Callable[[H], H]:
        return self._add("GET", path, answers, **({"scope": ApiScope.READ} | given))

    def post(self, path: str, answers: dict[int, Any], **given: Any) -> Callable[[H], H]:
        return self._add("POST", path, answers, **given)

    def put(self, path: str, answers: dict[int, Any], **given: Any) -> Callable[[H], H]:
        return self._add("PUT", path, answers, **given)

    def delete(self, path: str, answers: dict[int, Any], **given: Any) -> Callable[[H], H]:
        return self._add("DELETE", path, answers, **given)


class Resource:
    """A path and what may be done with it."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.methods: dict[str, Route] = {}

    @property
    def bypasses_layers(self) -> bool:
        """Whether the layers around the others pass this by: it needs no token, has no CORS, and is not counted."""
        return self.template == METRICS_PATH

    @property
    def allow_header(self) -> str:
        names = sorted(self.methods)
        return ", ".join([*names, "HEAD"] if "GET" in self.methods else names)

    def route_for(self, method: str) -> Route | None:
        return self.methods.get("GET" if method == "HEAD" else method)


class _Node:
    __slots__ = ("children", "other", "resource")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.other: _Node | None = None
        self.resource: Resource | None = None


class Router:
    """All operations, found by path: segment by segment, a literal before a placeholder."""

    def __init__(self, *pages: RouteGroup) -> None:
        self._root = _Node()
        self.groups = pages
        self.resources: dict[str, Resource] = {}
        for page in pages:
            for operation in page.entries:
                self._place(operation)

    def _place(self, operation: Route) -> None:
        node = self._root
        for segment in operation.path.encode()[1:].split(b"/"):
            if segment.startswith(b"{"):
                node.other = node.other or _Node()
                node = node.other
            else:
                node = node.children.setdefault(segment, _Node())
        resource = self.resources.setdefault(operation.path, Resource(operation.path))
        assert operation.method not in resource.methods, operation.path
        assert node.resource in (None, resource), f"{operation.path} hides another path"
        resource.methods[operation.method] = operation
        node.resource = resource

    def resolve(self, raw_path: bytes) -> tuple[Resource | None, list[str]]:
        """What a path leads to, and what stands in its placeholders."""
        node, given = self._root, list[bytes]()
        for segment in raw_path[1:].split(b"/"):
            child = node.children.get(segment)
            if child is None:
                if node.other is None or not segment:
                    return None, []
                child = node.other
                given.append(segment)
            node = child
        return node.resource, [_decoded(one) for one in given]


def _decoded(segment: bytes) -> str:
    return (unquote_to_bytes(segment) if b"%" in segment else segment).decode("utf-8", "replace")
