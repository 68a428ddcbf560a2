"""Routes and the router.

A route declares its path, scope, subject, body and responses. The application enforces these declarations, and the
OpenAPI document is built from them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from flowfabric.api.encoding import MAX_WAIT_MS, variant_name
from flowfabric.model.security.api_token import ApiScope

if TYPE_CHECKING:
    from flowfabric.server.request import Request

CONTROL_LIMIT = 65_536
SIGNAL_LIMIT = 262_144

OCTET_STREAM = "application/octet-stream"
FIELDS_HEADER = "x-ff-fields"  # header with the other fields when the body is the raw bytes of one field
EVENT_STREAM = "text/event-stream"
HTML = "text/html; charset=utf-8"
METRICS_PATH = "/metrics"


class Subject(StrEnum):
    """What a route accesses. A token bound to namespaces needs access to the namespace of the subject."""

    EXECUTION = "execution"  # the execution in the path
    FLOW = "flow"  # the flow in the path
    HANDLE = "handle"  # the execution of the handle in the body
    CHECKED_BY_HANDLER = "own"  # the handler checks access itself


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int = 200
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class StreamingResponse(msgspec.Struct, frozen=True):
    """A response that is sent event by event."""

    events: AsyncGenerator[bytes]
    content_type: str = EVENT_STREAM


class QueryParam(msgspec.Struct, frozen=True):
    """A query parameter as it is documented."""

    name: str
    schema: dict[str, Any]
    required: bool = False


CURSOR_PARAM = QueryParam("cursor", {"type": "string"})
LIMIT_PARAM = QueryParam("limit", {"type": "integer", "minimum": 0})
PAGE_PARAMS = (CURSOR_PARAM, LIMIT_PARAM)
POSITIVE_LIMIT_PARAM = QueryParam("limit", {"type": "integer", "minimum": 1})
PARTITION_PARAM = QueryParam("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True)
WAIT_MS_PARAM = QueryParam("wait_ms", {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS})
NAMESPACE_PARAM = QueryParam("namespace", {"type": "string"})


class VariantSchema(msgspec.Struct, frozen=True):
    """A response that is one of several variants, by name (see `api.encoding`)."""

    variants: tuple[tuple[str, Any], ...]


def one_of(*types: Any, **named: Any) -> VariantSchema:
    """Declare variants, named by their types or by keyword."""
    return VariantSchema((*((variant_name(each), each) for each in types), *named.items()))


Handler = Callable[["Request[Any]"], Awaitable[Any]]  # a response, or an answer of a type that its route declares
H = TypeVar("H", bound=Handler)
ErrorPage = Callable[["Request[Any]", int, str], Response]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path."""

    method: str
    path: str
    handler: Any
    responses: dict[int, Any]  # a type, None for an empty body, or the name of another content type
    scope: ApiScope | None  # None: no token is needed
    subject: Subject | None = None
    body: Any = None
    limit: int = CONTROL_LIMIT  # bytes of the body
    query: tuple[QueryParam, ...] = ()
    long: bool = False  # no request timeout applies
    audit: bool = False  # written to the audit log
    refusals: tuple[int, ...] = ()  # further statuses of errors
    decoder: Any = None
    variants: Mapping[str, int]  # the status of each declared variant, by name; empty if a response has no variants
    error_page: ErrorPage | None = None  # renders errors for people; None: they are JSON

    @property
    def name(self) -> str:
        function: str = self.handler.__name__
        return function

    @property
    def needs_token(self) -> bool:
        """True if a valid token is required, of a certain scope or any."""
        return self.scope is not None or 401 in self.refusals

    @property
    def is_streaming(self) -> bool:
        """True if the response is an event stream."""
        return EVENT_STREAM in self.responses.values()

    @property
    def octets_field(self) -> str | None:
        """The field that may be sent as the raw body, or None."""
        return _find_octets_field(self.body)

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().partition("\n")[0]


@cache
def _find_octets_field(body: Any) -> str | None:
    fields: tuple[str, ...] = getattr(body, "__struct_fields__", ())
    octets_fields = [name for name in fields if name.endswith("_b64")]
    return octets_fields[0] if len(octets_fields) == 1 else None


class RouteGroup:
    """The routes of one module, under one tag. The defaults are options of each route that does not name its own."""

    def __init__(self, tag: str, *, is_documented: bool = True, **defaults: Any) -> None:
        self.tag = tag
        self.is_documented = is_documented  # False for pages, which are not part of the API
        self.entries: list[Route] = []
        self._defaults = defaults

    def with_defaults(self, **defaults: Any) -> RouteGroup:
        """Return a view of this group that adds routes with further defaults."""
        view = RouteGroup(self.tag, is_documented=self.is_documented, **(self._defaults | defaults))
        view.entries = self.entries
        return view

    def _add(self, method: str, path: str, responses: dict[int, Any], **options: Any) -> Callable[[H], H]:
        body = options.get("body")
        decoder = None if body is None or body is bytes else msgspec.json.Decoder(body)
        variants = {
            name: status
            for status, kind in responses.items()
            if isinstance(kind, VariantSchema)
            for name, _ in kind.variants
        }

        def add(handler: H) -> H:
            route = Route(
                method=method,
                path=path,
                handler=handler,
                responses=responses,
                decoder=decoder,
                variants=variants,
                **options,
            )
            self.entries.append(route)
            return handler

        return add

    def get(self, path: str, responses: dict[int, Any], **options: Any) -> Callable[[H], H]:
        return self._add("GET", path, responses, **({"scope": ApiScope.READ} | self._defaults | options))

    def post(self, path: str, responses: dict[int, Any], **options: Any) -> Callable[[H], H]:
        return self._add("POST", path, responses, **(self._defaults | options))

    def put(self, path: str, responses: dict[int, Any], **options: Any) -> Callable[[H], H]:
        return self._add("PUT", path, responses, **(self._defaults | options))

    def delete(self, path: str, responses: dict[int, Any], **options: Any) -> Callable[[H], H]:
        return self._add("DELETE", path, responses, **(self._defaults | options))


class Resource:
    """A path and its routes by method."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.methods: dict[str, Route] = {}

    @property
    def bypasses_layers(self) -> bool:
        """True for /metrics, which needs no token, has no CORS headers and is not counted."""
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
    """Resolves a path segment by segment; a literal goes before a placeholder."""

    def __init__(self, *groups: RouteGroup) -> None:
        self._root = _Node()
        self.groups = groups
        self.resources: dict[str, Resource] = {}
        for group in groups:
            for route in group.entries:
                self._insert(route)

    def _insert(self, route: Route) -> None:
        node = self._root
        for segment in route.path.encode()[1:].split(b"/"):
            if segment.startswith(b"{"):
                node.other = node.other or _Node()
                node = node.other
            else:
                node = node.children.setdefault(segment, _Node())
        resource = self.resources.setdefault(route.path, Resource(route.path))
        assert route.method not in resource.methods, route.path
        assert node.resource in (None, resource), f"{route.path} hides another path"
        resource.methods[route.method] = route
        node.resource = resource

    def resolve(self, raw_path: bytes) -> tuple[Resource | None, list[str]]:
        """Return the resource of a path and the values of its placeholders."""
        node, values = self._root, list[bytes]()
        for segment in raw_path[1:].split(b"/"):
            child = node.children.get(segment)
            if child is None:
                if node.other is None or not segment:
                    return None, []
                child = node.other
                values.append(segment)
            node = child
        return node.resource, [_decode_segment(value) for value in values]


def _decode_segment(segment: bytes) -> str:
    return (unquote_to_bytes(segment) if b"%" in segment else segment).decode("utf-8", "replace")
