"""Routes that read across executions: levels, flows newest first, what workers hold, spending, past events."""

from __future__ import annotations

from flowfabric.engine.operations.overview import EventPage, Levels, QuotaPage, SpendingPage
from flowfabric.engine.operations.pages import ExecutionListPage, FlowListPage
from flowfabric.model.event import Topic
from flowfabric.model.scheduling.worker import WorkerEvent
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request
from flowfabric.server.routing import (
    CURSOR_PARAM,
    NAMESPACE_PARAM,
    PAGE_PARAMS,
    POSITIVE_LIMIT_PARAM,
    QueryParam,
    RouteGroup,
    Subject,
)

routes = RouteGroup("overview", subject=Subject.CHECKED_BY_HANDLER)


@routes.get("/v1/levels", {200: Levels}, subject=None)
async def read_levels(request: Request[None]) -> Levels:
    """Return how many executions of each lane wait, run, sleep and are blocked, and how many workers serve it."""
    return await request.engine.read_levels()


@routes.get("/v1/flows/search", {200: FlowListPage}, query=(NAMESPACE_PARAM, *PAGE_PARAMS))
async def search_flows(request: Request[None]) -> FlowListPage:
    """Return flows of all partitions, newest first, within the token's namespaces."""
    namespace, namespaces = request.visible_namespaces()
    return await request.engine.search_flows(
        namespace=namespace, namespaces=namespaces, cursor=request.cursor, limit=request.int_param("limit", 50)
    )


@routes.get("/v1/workers/{worker_id}/executions", {200: ExecutionListPage}, query=(POSITIVE_LIMIT_PARAM,))
async def list_worker_executions(request: Request[None]) -> ExecutionListPage:
    """Return the executions whose lease this worker instance holds, within the token's namespaces."""
    return await request.engine.list_worker_executions(
        request.path_params[0],
        namespaces=request.visible_namespaces()[1],
        limit=request.int_param("limit", 100),
    )


@routes.get(
    "/v1/workers/{worker_id}/events",
    {200: list[WorkerEvent]},
    query=(QueryParam("namespace", {"type": "string"}, required=True),),
)
async def list_worker_events(request: Request[None]) -> list[WorkerEvent]:
    """Return the registrations and ends of this worker instance, oldest first."""
    namespace = request.query_param("namespace")
    if namespace is None:
        raise bad_request("namespace: missing")
    request.require_namespace(namespace)
    return await request.engine.list_worker_events(namespace, request.path_params[0])


@routes.get("/v1/executions/{id}/spending", {200: SpendingPage}, subject=Subject.EXECUTION)
async def read_spending(request: Request[None]) -> SpendingPage:
    """Return what an execution has spent and reserved; of budgets outside the token's namespaces nothing."""
    found = await request.engine.read_spending(request.execution_id)
    return SpendingPage([each for each in found if request.principal.can_see(each.namespace)])


@routes.get(
    "/v1/budgets/{id}/spenders", {200: SpendingPage}, query=(NAMESPACE_PARAM, CURSOR_PARAM, POSITIVE_LIMIT_PARAM)
)
async def list_spenders(request: Request[None]) -> SpendingPage:
    """Return who has spent from a budget since its last reset, by execution and dimension."""
    return await request.engine.list_spenders(
        request.budget_id, namespace=request.namespace, cursor=request.cursor, limit=request.int_param("limit", 100)
    )


@routes.get("/v1/quotas", {200: QuotaPage}, query=(NAMESPACE_PARAM, CURSOR_PARAM, POSITIVE_LIMIT_PARAM))
async def list_quotas(request: Request[None]) -> QuotaPage:
    """Return the quota policies of a namespace by id, with what they admit and who holds their slots."""
    return await request.engine.list_quotas(
        namespace=request.namespace, cursor=request.cursor, limit=request.int_param("limit", 50)
    )


@routes.get(
    "/v1/events",
    {200: EventPage},
    query=(
        QueryParam("topics", {"type": "string", "description": f"some of {', '.join(Topic)}, separated by commas"}),
        QueryParam("before", {"type": "integer", "minimum": 0}),
        POSITIVE_LIMIT_PARAM,
    ),
)
async def list_events(request: Request[None]) -> EventPage:
    """Return past events, newest first, before a position, within the token's namespaces."""
    topics = request.query_param("topics")
    return await request.engine.list_events(
        topics=tuple(Topic) if topics is None else tuple(topics.split(",")),
        namespaces=request.visible_namespaces()[1],
        before=request.int_param("before") if request.query_param("before") else None,
        limit=request.int_param("limit", 50),
    )
