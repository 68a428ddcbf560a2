"""Routes for lists of executions: search, children, ids by prefix."""

from __future__ import annotations

from typing import Any

from flowfabric.engine.operations.pages import ExecutionListPage, IdMatches
from flowfabric.engine.operations.search import MAX_MATCHES
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request
from flowfabric.server.routing import NAMESPACE_PARAM, PAGE_PARAMS, QueryParam, RouteGroup, Subject

routes = RouteGroup("lookups")
list_routes = routes.with_defaults(subject=Subject.CHECKED_BY_HANDLER)

STRING_SCHEMA = {"type": "string"}
INSTANT_SCHEMA = {"type": "integer", "minimum": 0}
FILTER_PARAMS = (
    NAMESPACE_PARAM,
    QueryParam("kind", {"type": "string", "description": "the name of the task"}),
    QueryParam("state", {"type": "string", "description": "public states, separated by commas"}),
    QueryParam("lane", STRING_SCHEMA),
    QueryParam("tag", {"type": "string", "description": "key=value"}),
    QueryParam("flow_id", STRING_SCHEMA),
    QueryParam("parent_id", STRING_SCHEMA),
    QueryParam("worker", {"type": "string", "description": "the instance that holds it or held it last"}),
    QueryParam("error", {"type": "string", "description": "a text in the reason of the failure"}),
    QueryParam("created_from", INSTANT_SCHEMA),
    QueryParam("created_before", INSTANT_SCHEMA),
)


def query_filter(request: Request[Any]) -> dict[str, Any]:
    """Return the filter of a query as arguments of a search, within the namespaces of the token."""
    namespace, namespaces = request.visible_namespaces()
    tag = request.query_param("tag")
    if tag is not None and "=" not in tag:
        raise bad_request("tag: not key=value")
    key, _, value = (tag or "").partition("=")
    state = request.query_param("state")
    return {
        "namespace": namespace,
        "namespaces": namespaces,
        "kind": request.query_param("kind"),
        "public_state": None if state is None else tuple(state.split(",")),
        "lane_id": request.query_param("lane"),
        "tag": None if tag is None else (key, value),
        "flow_id": request.query_param("flow_id"),
        "parent_id": request.query_param("parent_id"),
        "worker_instance_id": request.query_param("worker"),
        "error": request.query_param("error"),
        "created_from": request.int_param("created_from") if request.query_param("created_from") else None,
        "created_before": request.int_param("created_before") if request.query_param("created_before") else None,
    }


@list_routes.get("/v1/executions/search", {200: ExecutionListPage}, query=(*FILTER_PARAMS, *PAGE_PARAMS))
async def search_executions(request: Request[None]) -> ExecutionListPage:
    """Return executions of all partitions that match every filter, newest first, within the token's namespaces."""
    return await request.engine.search_executions(
        **query_filter(request), cursor=request.cursor, limit=request.int_param("limit", 50)
    )


@routes.get("/v1/executions/{id}/children", {200: ExecutionListPage}, subject=Subject.EXECUTION, query=PAGE_PARAMS)
async def list_children(request: Request[None]) -> ExecutionListPage:
    """Return the executions whose parent this is, oldest first."""
    return await request.engine.list_children(
        request.execution_id, cursor=request.cursor, limit=request.int_param("limit", 100)
    )


@list_routes.get(
    "/v1/executions/ids",
    {200: IdMatches},
    query=(
        QueryParam(
            "prefix", {"type": "string", "description": "the beginning of an id; its partition may be left out"}
        ),
        QueryParam("limit", {"type": "integer", "minimum": 1, "maximum": MAX_MATCHES}),
    ),
)
async def find_executions(request: Request[None]) -> IdMatches:
    """Return executions whose id begins with a prefix, within the namespaces of the token."""
    return await request.engine.find_executions(
        request.query_param("prefix") or "",
        namespaces=request.bound_namespaces(),
        limit=request.int_param("limit", 10),
    )
