"""Routes for health, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric import errors
from flowfabric.api.admin import HealthStatus, WhoAmI
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import logging
from flowfabric.server.errors import Problem
from flowfabric.server.metrics import CONTENT_TYPE, exposition
from flowfabric.server.request import JSON, Request, encode
from flowfabric.server.routing import METRICS_PATH, Response, RouteGroup, Subject

routes = RouteGroup("health")

QUEUE_DEPTH_TIMEOUT_S = 5.0  # below the usual timeout of a scrape


@routes.get("/healthz", {200: HealthStatus}, scope=None)
async def healthz(request: Request[None]) -> HealthStatus:
    """Check that the store answers."""
    await request.engine.ping()
    return HealthStatus("ok")


@routes.get("/readyz", {200: HealthStatus}, scope=None)
async def readyz(request: Request[None]) -> HealthStatus | Response:
    """Check that this server accepts requests: it is not shutting down, and its store is available."""
    if request.app.closing.is_set():
        return Response(503, encode(Problem("shutting down", "unavailable", False)), JSON)
    try:
        await request.engine.ping()
    except errors.StoreUnavailable:
        return Response(503, encode(Problem("the store is unavailable", "unavailable", True)), JSON)
    return HealthStatus("ready")


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


@routes.get("/v1/whoami", {200: WhoAmI}, scope=None, subject=Subject.CHECKED_BY_HANDLER, refusals=(401,))
async def whoami(request: Request[None]) -> WhoAmI:
    """Return the name, the scopes and the namespaces of the token."""
    principal = request.principal
    scopes = [scope for scope in ApiScope if scope in principal.scopes]
    return WhoAmI(principal.name, scopes, request.bound_namespaces())


@routes.get("/openapi.json", {200: dict[str, Any]}, scope=None)
async def openapi_document(request: Request[None]) -> Response:
    """Return this document."""
    return Response(200, request.app.openapi, JSON)
