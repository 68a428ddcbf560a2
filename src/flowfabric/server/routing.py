"""The table of routes: what may be asked, by whom, and how it looks. The server answers by it, documents tell it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from flowfabric.model.api_token import Scope

if TYPE_CHECKING:
    from flowfabric.server.request import Ask

CONTROL_LIMIT = 65_536
SIGNAL_LIMIT = 262_144
CREATE_LIMIT = 1_048_576
WORK_LIMIT = 4 * 1_048_576  # results and batches of frames
BULK_LIMIT = 16 * 1_048_576

OCTETS = "application/octet-stream"
FIELDS = "x-ff-fields"  # the header with the other fields of a body that is sent as the bytes themselves
EVENTS = "text/event-stream"
HTML = "text/html; charset=utf-8"
METRICS = "/metrics"


class Subject(StrEnum):
    """What an operation is about; a token that is bound to namespaces is asked whether that is within them."""

    EXECUTION = "execution"  # the execution in the path
    FLOW = "flow"  # the flow in the path
    HANDLE = "handle"  # the execution that the handle in the body holds
    OWN = "own"  # the operation looks by itself


class Reply(msgspec.Struct, frozen=True):
    """An answer that is whole."""

    status: int = 200
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class Live(msgspec.Struct, frozen=True):
    """An answer that goes on as long as there is something to tell."""

    events: AsyncGenerator[bytes]
    content_type: str = EVENTS


class Param(msgspec.Struct, frozen=True):
    """A query parameter, for the documents."""

    name: str
    schema: dict[str, Any]
    required: bool = False


Handler = Callable[["Ask[Any]"], Awaitable[Reply | Live]]
H = TypeVar("H", bound=Handler)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that may be asked."""

    method: str
    path: str
    handle: Any
    answers: dict[int, Any]  # a type, None for an empty body, or the name of another content type
    scope: Scope | None  # None is for everybody
    subject: Subject | None
    body: Any
    limit: int
    query: tuple[Param, ...]
    long: bool  # waits on purpose: no time limit applies
    audit: bool  # noted as an operator's action
    refusals: frozenset[int]
    decoder: Any = None

    @property
    def name(self) -> str:
        function: str = self.handle.__name__
        return function

    @property
    def needs_token(self) -> bool:
        """Whether it is for those with a good token, of a certain scope or any."""
        return self.scope is not None or 401 in self.refusals

    @property
    def is_feed(self) -> bool:
        """Whether the answer goes on as long as there is something to tell."""
        return EVENTS in self.answers.values()

    @property
    def octets(self) -> str | None:
        """The field that may be the whole body, as the bytes themselves; None for a route that has no such."""
        return _octets_of(self.body)

    @property
    def summary(self) -> str:
        return (self.handle.__doc__ or "").strip().partition("\n")[0]


@cache
def _octets_of(body: Any) -> str | None:
    fields: tuple[str, ...] = getattr(body, "__struct_fields__", ())
    found = [name for name in fields if name.endswith("_b64")]
    return found[0] if len(found) == 1 else None


class Routes:
    """Operations of one page."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.operations: list[Operation] = []

    def _add(
        self,
        method: str,
        path: str,
        answers: dict[int, Any],
        *,
        scope: Scope | None,
        subject: Subject | None = None,
        body: Any = None,
        limit: int = CONTROL_LIMIT,
        query: tuple[Param, ...] = (),
        long: bool = False,
        audit: bool = False,
        refusals: tuple[int, ...] = (),
    ) -> Callable[[H], H]:
        def add(handle: H) -> H:
            self.operations.append(
                Operation(
                    method=method,
                    path=path,
                    handle=handle,
                    answers=answers,
                    scope=scope,
                    subject=subject,
                    body=body,
                    limit=limit,
                    query=query,
                    long=long,
                    audit=audit,
                    refusals=frozenset(refusals),
                    decoder=None if body is None or body is bytes else msgspec.json.Decoder(body),
                )
            )
            return handle

        return add

    def get(self, path: str, answers: dict[int, Any], **given: Any) -> Callable[[H], H]:
        return self._add("GET", path, answers, **({"scope": Scope.READ} | given))

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
        self.methods: dict[str, Operation] = {}

    @property
    def is_apart(self) -> bool:
        """Whether the layers around the others pass this by: it needs no token, has no CORS, and is not counted."""
        return self.template == METRICS

    @property
    def allow(self) -> str:
        names = sorted(self.methods)
        return ", ".join([*names, "HEAD"] if "GET" in self.methods else names)

    def operation(self, method: str) -> Operation | None:
        return self.methods.get("GET" if method == "HEAD" else method)


class _Node:
    __slots__ = ("children", "other", "resource")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.other: _Node | None = None
        self.resource: Resource | None = None


class Table:
    """All operations, found by path: segment by segment, a literal before a placeholder."""

    def __init__(self, *pages: Routes) -> None:
        self._root = _Node()
        self.pages = pages
        self.resources: dict[str, Resource] = {}
        for page in pages:
            for operation in page.operations:
                self._place(operation)

    def _place(self, operation: Operation) -> None:
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

    def find(self, raw_path: bytes) -> tuple[Resource | None, list[str]]:
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
