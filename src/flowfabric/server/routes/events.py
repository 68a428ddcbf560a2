"""Routes for event feeds, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from flowfabric import errors
from flowfabric.engine.streams.subscription import Subscription
from flowfabric.engine.types import Filter
from flowfabric.server import sse
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, encode
from flowfabric.server.routing import EVENT_STREAM, QueryParam, RouteGroup, StreamingResponse, Subject

routes = RouteGroup("feeds")

_START = b"\x02" + bytes(8)
_QUERY = (
    QueryParam("namespace", {"type": "string"}),
    QueryParam("instance_tag", {"type": "string", "description": "key=value"}),
    QueryParam("from", {"type": "string", "enum": ["now", "start"]}),
)


@routes.get("/v1/events/completions", {200: EVENT_STREAM}, subject=Subject.CHECKED_BY_HANDLER, query=_QUERY, long=True)
async def follow_completions(request: Request[None]) -> StreamingResponse:
    """Stream the end of every life of an execution."""
    return _stream(request, "completion", await request.engine.subscribe_completion(_cursor(request), _filter(request)))


@routes.get("/v1/events/leases", {200: EVENT_STREAM}, subject=Subject.CHECKED_BY_HANDLER, query=_QUERY, long=True)
async def follow_leases(request: Request[None]) -> StreamingResponse:
    """Stream every lease event."""
    return _stream(request, "lease", await request.engine.subscribe_lease_history(_cursor(request), _filter(request)))


@routes.get("/v1/events/signals", {200: EVENT_STREAM}, subject=Subject.CHECKED_BY_HANDLER, query=_QUERY, long=True)
async def follow_signals(request: Request[None]) -> StreamingResponse:
    """Stream every signal that was accepted, buffered or recognised as a duplicate."""
    return _stream(
        request, "signal", await request.engine.subscribe_signal_delivery(_cursor(request), _filter(request))
    )


@routes.get("/v1/events/operators", {200: EVENT_STREAM}, subject=Subject.CHECKED_BY_HANDLER, query=_QUERY, long=True)
async def follow_operators(request: Request[None]) -> StreamingResponse:
    """Stream the actions of operators."""
    return _stream(
        request, "operator", await request.engine.subscribe_operator_event(_cursor(request), _filter(request))
    )


def _stream(request: Request[None], name: str, subscription: Subscription[Any]) -> StreamingResponse:
    return StreamingResponse(sse.with_keep_alive(request, _events(name, subscription)))


async def _events(name: str, subscription: Subscription[Any]) -> AsyncIterator[bytes]:
    # The start cursor comes first, so that a client that is cut off before the first event can resume.
    yield sse.format_event(b"{}", name="open", cursor=subscription.cursor.hex())
    while True:
        try:
            event = await subscription.next(timeout_s=sse.POLL_WAIT_MS / 1000)
        except errors.StreamBackpressure as gap:
            reason = encode({"reason": gap.detail or "events are no longer kept"})
            yield sse.format_event(reason, name="gap", cursor=subscription.cursor.hex())
            continue
        except errors.Corruption:
            continue
        if event is not None:
            yield sse.format_event(encode(event), name=name, cursor=subscription.cursor.hex())


def _cursor(request: Request[None]) -> bytes:
    if last := sse.last_event_id(request):
        try:
            return bytes.fromhex(last)
        except ValueError:
            raise bad_request("Last-Event-ID: not an id of these events") from None
    match request.query_param("from"):
        case None | "" | "now":
            return b""
        case "start":
            return _START
        case _:
            raise bad_request("from: neither now nor start")


def _filter(request: Request[None]) -> Filter:
    namespace, tag = request.query_param("namespace"), request.query_param("instance_tag")
    if request.principal.namespaces is not None:
        if namespace is None:
            raise bad_request("namespace: needed by a token that is bound to namespaces")
        request.require_namespace(namespace)
    if tag is None:
        return Filter(namespace)
    key, separator, value = tag.partition("=")
    if not separator:
        raise bad_request("instance_tag: not key=value")
    return Filter(namespace, (key, value))
