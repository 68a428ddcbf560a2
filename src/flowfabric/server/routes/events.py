"""Routes for event feeds, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from flowfabric import errors
from flowfabric.engine.streams.subscription import Subscription
from flowfabric.engine.types import Filter
from flowfabric.model.event import Topic
from flowfabric.server import sse
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, encode
from flowfabric.server.routing import EVENT_STREAM, QueryParam, RouteGroup, StreamingResponse, Subject

routes = RouteGroup("feeds", subject=Subject.CHECKED_BY_HANDLER)

_START = b"\x02" + bytes(8)
_QUERY = (
    QueryParam("namespace", {"type": "string"}),
    QueryParam("instance_tag", {"type": "string", "description": "key=value"}),
    QueryParam("from", {"type": "string", "enum": ["now", "start"]}),
)


@routes.get("/v1/events/completions", {200: EVENT_STREAM}, query=_QUERY, long=True)
async def follow_completions(request: Request[None]) -> StreamingResponse:
    """Stream the end of every life of an execution."""
    return _stream(request, "completion", await request.engine.subscribe_completion(_cursor(request), _filter(request)))


@routes.get("/v1/events/leases", {200: EVENT_STREAM}, query=_QUERY, long=True)
async def follow_leases(request: Request[None]) -> StreamingResponse:
    """Stream every lease event."""
    return _stream(request, "lease", await request.engine.subscribe_lease_history(_cursor(request), _filter(request)))


@routes.get("/v1/events/signals", {200: EVENT_STREAM}, query=_QUERY, long=True)
async def follow_signals(request: Request[None]) -> StreamingResponse:
    """Stream every signal that was accepted, buffered or recognised as a duplicate."""
    return _stream(
        request, "signal", await request.engine.subscribe_signal_delivery(_cursor(request), _filter(request))
    )


@routes.get("/v1/events/operators", {200: EVENT_STREAM}, query=_QUERY, long=True)
async def follow_operators(request: Request[None]) -> StreamingResponse:
    """Stream the actions of operators."""
    return _stream(
        request, "operator", await request.engine.subscribe_operator_event(_cursor(request), _filter(request))
    )


@routes.get(
    "/v1/events/all",
    {200: EVENT_STREAM},
    query=(*_QUERY, QueryParam("topics", {"type": "string", "description": "some of them, comma-separated"})),
    long=True,
)
async def follow_events(request: Request[None]) -> StreamingResponse:
    """Stream the events of several topics on one connection: each topic in its own order, resumable for all of them."""
    topics = _topics(request)
    cursors, chosen = _cursors(request, topics), _filter(request)
    engine = request.engine
    subscribe: dict[Topic, Callable[[bytes, Filter], Awaitable[Subscription[Any]]]] = {
        Topic.COMPLETION: engine.subscribe_completion,
        Topic.LEASE: engine.subscribe_lease_history,
        Topic.SIGNAL: engine.subscribe_signal_delivery,
        Topic.OPERATOR: engine.subscribe_operator_event,
    }
    subscriptions = {topic: await subscribe[topic](cursors[topic], chosen) for topic in topics}
    return StreamingResponse(sse.with_keep_alive(request, _merged(subscriptions)))


def _topics(request: Request[None]) -> list[Topic]:
    names = request.query_param("topics")
    known = {topic.value: topic for topic in Topic}
    asked = list(known) if not names else names.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise bad_request(f"topics: {unknown[0]!r} is not one of {', '.join(known)}")
    return [topic for name, topic in known.items() if name in asked]


def _cursors(request: Request[None], topics: list[Topic]) -> dict[Topic, bytes]:
    """Return the position of each topic to continue from; an event's id has those of all topics of its stream."""
    if last := sse.last_event_id(request):
        found = dict(part.partition(".")[::2] for part in last.split(","))
        try:
            cursors = {topic: bytes.fromhex(found[topic.value]) for topic in topics}
        except (KeyError, ValueError):
            cursors = {}
        if not cursors or not all(cursors.values()):
            raise bad_request("Last-Event-ID: not an id of these events")
        return cursors
    return dict.fromkeys(topics, _cursor(request))


async def _merged(subscriptions: Mapping[Topic, Subscription[Any]]) -> AsyncIterator[bytes]:
    delivered = {topic: subscription.cursor for topic, subscription in subscriptions.items()}

    def position() -> str:
        return ",".join(f"{topic.value}.{cursor.hex()}" for topic, cursor in delivered.items())

    yield sse.format_event(b"{}", name="open", cursor=position())
    waits: dict[asyncio.Task[tuple[str, bytes] | None], Topic] = {}
    try:
        for topic, subscription in subscriptions.items():
            waits[asyncio.create_task(_next_event(topic, subscription))] = topic
        while True:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                topic = waits.pop(task)
                event = task.result()
                # Only now: another topic's subscription may be ahead of what the client has.
                delivered[topic] = subscriptions[topic].cursor
                if event is not None:
                    yield sse.format_event(event[1], name=event[0], cursor=position())
                waits[asyncio.create_task(_next_event(topic, subscriptions[topic]))] = topic
    finally:
        for task in waits:
            task.cancel()


async def _next_event(topic: Topic, subscription: Subscription[Any]) -> tuple[str, bytes] | None:
    """Return the name and the data of the next event; None if there is none in time."""
    try:
        event = await subscription.next(timeout_s=sse.POLL_WAIT_MS / 1000)
    except errors.StreamBackpressure as gap:
        return "gap", encode({"topic": topic.value, "reason": gap.detail or "events are no longer kept"})
    except errors.Corruption:
        return None
    return None if event is None else (topic.value, encode(event))


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
