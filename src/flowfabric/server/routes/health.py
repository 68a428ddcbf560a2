"""Routes for health, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric import errors
from flowfabric.api.admin import HealthStatus
from flowfabric.server import logging
from flowfabric.server.errors import Problem
from flowfabric.server.metrics import CONTENT_TYPE, exposition
from flowfabric.server.request import JSON, Request, encode, json_response
from flowfabric.server.routing import METRICS_PATH, Response, RouteGroup

routes = RouteGroup("health")

QUEUE_DEPTH_TIMEOUT_S = 5.0  # below the usual timeout of a scrape


@routes.get("/healthz", {200: HealthStatus}, scope=None)
async def healthz(request: Request[None]) -> Response:
    """Check that the store answers."""
    await request.engine.ping()
    return json_response(HealthStatus("ok"))


@routes.get("/readyz", {200: HealthStatus}, scope=None)
async def readyz(request: Request[None]) -> Response:
    """Check that this server accepts requests: it is not shutting down, and its store is available."""
    if request.app.closing.is_set():
        return Response(503, encode(Problem("shutting down", "unavailable", False)), JSON)
    try:
        await request.engine.ping()
    except errors.StoreUnavailable:
        return Response(503, encode(Problem("the store is unavailable", "unavailable", True)), JSON)
    return json_response(HealthStatus("ready"))


@routes.get(METRICS_PATH, {200: CONTENT_TYPE}, scope=None, refusals=(404,))
async def metrics(request: Request[None]) -> Response:
    """Return the metrics in the text format of Prometheus."""
    if not request.app.settings.serve_metrics:
        return Response(404)
    try:
        async with asyncio.timeout(QUEUE_DEPTH_TIMEOUT_S):
            await request.engine.gauges.refresh_gauges()
    except (errors.StoreUnavailable, TimeoutError):
        logging.logger.warning("the gauges could not be read; the counters are exposed without them")
    return Response(200, exposition(request.app.http_metrics.registry, request.engine.metrics), CONTENT_TYPE)


@routes.get("/openapi.json", {200: dict[str, Any]}, scope=None)
async def openapi_document(request: Request[None]) -> Response:
    """Return this document."""
    return Response(200, request.app.openapi, JSON)
