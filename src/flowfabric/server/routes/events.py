"""What happened, as it happens: the subscribable feeds as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from flowfabric import errors
from flowfabric.engine.operations.subscriptions import Subscription
from flowfabric.engine.types import Filter
from flowfabric.server import sse
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Ask, encode
from flowfabric.server.routing import EVENTS, Live, Param, Routes, Subject

routes = Routes("feeds")

_START = b"\x02" + bytes(8)
_QUERY = (
    Param("namespace", {"type": "string"}),
    Param("instance_tag", {"type": "string", "description": "key=value"}),
    Param("from", {"type": "string", "enum": ["now", "start"]}),
)


@routes.get("/v1/events/completions", {200: EVENTS}, subject=Subject.OWN, query=_QUERY, long=True)
async def follow_completions(ask: Ask[None]) -> Live:
    """Every end of a life."""
    return _live(ask, "completion", await ask.engine.subscribe_completion(_cursor(ask), _filter(ask)))


@routes.get("/v1/events/leases", {200: EVENTS}, subject=Subject.OWN, query=_QUERY, long=True)
async def follow_leases(ask: Ask[None]) -> Live:
    """Every change of every lease."""
    return _live(ask, "lease", await ask.engine.subscribe_lease_history(_cursor(ask), _filter(ask)))


@routes.get("/v1/events/signals", {200: EVENTS}, subject=Subject.OWN, query=_QUERY, long=True)
async def follow_signals(ask: Ask[None]) -> Live:
    """Every signal that was accepted, buffered or recognised as a repetition."""
    return _live(ask, "signal", await ask.engine.subscribe_signal_delivery(_cursor(ask), _filter(ask)))


@routes.get("/v1/events/operators", {200: EVENTS}, subject=Subject.OWN, query=_QUERY, long=True)
async def follow_operators(ask: Ask[None]) -> Live:
    """What operators did."""
    return _live(ask, "operator", await ask.engine.subscribe_operator_event(_cursor(ask), _filter(ask)))


def _live(ask: Ask[None], name: str, subscription: Subscription[Any]) -> Live:
    return Live(sse.kept_alive(ask, _events(name, subscription)))


async def _events(name: str, subscription: Subscription[Any]) -> AsyncIterator[bytes]:
    # The place to begin with comes first: who is cut off before the first event goes on from here.
    yield sse.event(b"{}", name="open", cursor=subscription.cursor.hex())
    while True:
        try:
            news = await subscription.next(timeout_s=sse.WAIT_MS / 1000)
        except errors.StreamBackpressure as gap:
            reason = encode({"reason": gap.detail or "events are no longer kept"})
            yield sse.event(reason, name="gap", cursor=subscription.cursor.hex())
            continue
        except errors.Corruption:
            continue
        if news is not None:
            yield sse.event(encode(news), name=name, cursor=subscription.cursor.hex())


def _cursor(ask: Ask[None]) -> bytes:
    if last := sse.last_event_id(ask):
        try:
            return bytes.fromhex(last)
        except ValueError:
            raise bad_request("Last-Event-ID: not an id of these events") from None
    match ask.query("from"):
        case None | "" | "now":
            return b""
        case "start":
            return _START
        case _:
            raise bad_request("from: neither now nor start")


def _filter(ask: Ask[None]) -> Filter:
    namespace, tag = ask.query("namespace"), ask.query("instance_tag")
    if ask.principal.namespaces is not None:
        if namespace is None:
            raise bad_request("namespace: needed by a token that is bound to namespaces")
        ask.within(namespace)
    if tag is None:
        return Filter(namespace)
    key, found, value = tag.partition("=")
    if not found:
        raise bad_request("instance_tag: not key=value")
    return Filter(namespace, (key, value))
