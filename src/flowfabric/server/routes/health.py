"""Whether the server lives, whether it is ready, what it counts, what it can be asked."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.server import logging
from flowfabric.server.errors import Problem
from flowfabric.server.metrics import CONTENT_TYPE, exposition
from flowfabric.server.request import JSON, Ask, encode, json
from flowfabric.server.routing import METRICS, Reply, Routes

routes = Routes("health")

LEVELS_S = 5.0  # how long the store may take to count; whoever scrapes does not wait much longer


class Status(msgspec.Struct, frozen=True):
    status: str


@routes.get("/healthz", {200: Status}, scope=None)
async def healthz(ask: Ask[None]) -> Reply:
    """Whether the store answers."""
    await ask.engine.ping()
    return json(Status("ok"))


@routes.get("/readyz", {200: Status}, scope=None)
async def readyz(ask: Ask[None]) -> Reply:
    """Whether this server should be sent requests: not while it shuts down, nor while its store is away."""
    if ask.app.closing.is_set():
        return Reply(503, encode(Problem("shutting down", "unavailable", False)), JSON)
    try:
        await ask.engine.ping()
    except errors.StoreUnavailable:
        return Reply(503, encode(Problem("the store is away", "unavailable", True)), JSON)
    return json(Status("ready"))


@routes.get(METRICS, {200: CONTENT_TYPE}, scope=None, refusals=(404,))
async def metrics(ask: Ask[None]) -> Reply:
    """What was counted, as Prometheus reads it."""
    if not ask.app.settings.serve_metrics:
        return Reply(404)
    try:
        async with asyncio.timeout(LEVELS_S):
            await ask.engine.read_levels()
    except (errors.StoreUnavailable, TimeoutError):
        logging.logger.warning("the levels could not be read; the counters are told all the same")
    return Reply(200, exposition(ask.app.http.meters, ask.engine.meters), CONTENT_TYPE)


@routes.get("/openapi.json", {200: dict[str, Any]}, scope=None)
async def openapi_document(ask: Ask[None]) -> Reply:
    """This document."""
    return Reply(200, ask.app.openapi, JSON)
