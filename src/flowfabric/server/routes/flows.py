"""Routes for flows: build, read, cancel."""

from __future__ import annotations

from typing import Any

from flowfabric import ids
from flowfabric.api import flows as api
from flowfabric.api.encoding import BULK_LIMIT
from flowfabric.engine.operations.flows import GraphEdge, NoWait, Wait, WaitIndefinite, WaitTimeout
from flowfabric.engine.operations.pages import FlowPage
from flowfabric.engine.types import FlowGraph, FlowSnapshot
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import FlowSummary
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, check_same_id, path_execution_id, path_uuid, require_found
from flowfabric.server.routes.executions import to_create_execution
from flowfabric.server.routing import PAGE_PARAMS, PARTITION_PARAM, QueryParam, RouteGroup, Subject, one_of

routes = RouteGroup("flows")
flow_routes = routes.with_defaults(subject=Subject.FLOW)
submitter_routes = routes.with_defaults(scope=ApiScope.SUBMIT, subject=Subject.FLOW)

FLOW_PATH = "/v1/flows/{id}"
FLOW_NOT_FOUND = "not found: flow"
STRING_SCHEMA = {"type": "string"}


@routes.post(
    "/v1/flows",
    {201: one_of(flow_answers.FlowCreated), 200: one_of(flow_answers.FlowExists)},
    body=api.CreateFlowRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def create_flow(request: Request[api.CreateFlowRequest]) -> flow_answers.FlowCreated | flow_answers.FlowExists:
    """Create a flow; an existing one stays unchanged."""
    body = request.body
    request.require_namespace(body.namespace)
    return await request.engine.create_flow(body.flow_id, flow_kind=body.flow_kind, namespace=body.namespace)


@routes.post(
    "/v1/flows/graph",
    {201: one_of(flow_answers.GraphCreated), 200: one_of(flow_answers.FlowExists)},
    body=api.CreateFlowGraphRequest,
    limit=BULK_LIMIT,
    scope=ApiScope.SUBMIT,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def create_flow_graph(
    request: Request[api.CreateFlowGraphRequest],
) -> flow_answers.GraphCreated | flow_answers.FlowExists:
    """Create a whole flow atomically; a repeated call is harmless."""
    body = request.body
    request.require_namespace(body.namespace)
    edges = [
        GraphEdge(
            edge.upstream_execution_id,
            edge.downstream_execution_id,
            edge.dependency_kind,
            edge.data_passing_ref,
            edge.edge_id,
        )
        for edge in body.edges
    ]
    return await request.engine.create_flow_graph(
        body.flow_id or request.engine.minter.uuid(),
        [await to_create_execution(request, node) for node in body.nodes],
        edges,
        policies=body.policies,
        flow_kind=body.flow_kind,
        namespace=body.namespace,
    )


@submitter_routes.post(
    f"{FLOW_PATH}/members",
    {201: one_of(flow_answers.Added), 200: one_of(flow_answers.AlreadyMember)},
    body=api.AddMemberRequest,
)
async def add_execution_to_flow(
    request: Request[api.AddMemberRequest],
) -> flow_answers.Added | flow_answers.AlreadyMember:
    """Add an execution to a flow on its partition."""
    flow_id, body = request.flow_id, request.body
    check_same_id("flow_id", flow_id, ids.parse_uuid(body.flow_id))
    await request.require_execution_access(body.execution_id)
    return await request.engine.add_execution_to_flow(flow_id, body.execution_id)


def _edge_kwargs(request: Request[Any]) -> dict[str, Any]:
    """Return the keywords of the engine's edge operations; refuse a body that names another flow than the path."""
    body: api.EdgeRequest = request.body
    check_same_id("flow_id", request.flow_id, ids.parse_uuid(body.flow_id))
    ends = {"upstream": body.upstream_execution_id, "downstream": body.downstream_execution_id}
    return ends | body.to_kwargs("upstream_execution_id", "downstream_execution_id")


@submitter_routes.post(f"{FLOW_PATH}/edges", {201: one_of(flow_answers.Staged)}, body=api.StageEdgeRequest)
async def stage_dependency_edge(request: Request[api.StageEdgeRequest]) -> flow_answers.Staged:
    """Add an edge to the graph; the graph revision is checked only if one is expected."""
    return await request.engine.stage_dependency_edge(**_edge_kwargs(request))


@submitter_routes.post(
    f"{FLOW_PATH}/edges/apply",
    {200: one_of(flow_answers.DependencyApplied, flow_answers.DependencyAlreadyApplied)},
    body=api.ApplyEdgeRequest,
)
async def apply_dependency_to_child(
    request: Request[api.ApplyEdgeRequest],
) -> flow_answers.DependencyApplied | flow_answers.DependencyAlreadyApplied:
    """Make the downstream of a staged edge wait for its upstream."""
    edge = _edge_kwargs(request)
    # Without this the response would reveal the flow of a foreign execution.
    await request.require_execution_access(edge["downstream"])
    return await request.engine.apply_dependency_to_child(**edge)


@flow_routes.post(
    f"{FLOW_PATH}/cancel",
    {200: one_of(flow_answers.FlowCancelled, flow_answers.CancellationScheduled, flow_answers.PartiallyCancelled)},
    body=api.CancelFlowRequest,
    scope=ApiScope.OPERATE,
    query=(
        QueryParam("wait", {"type": "string", "enum": ["true", "1", "false", "0"]}),
        QueryParam("timeout_ms", {"type": "integer", "minimum": 0}),
    ),
    long=True,
    audit=True,
)
async def cancel_flow(
    request: Request[api.CancelFlowRequest],
) -> flow_answers.FlowCancelled | flow_answers.CancellationScheduled | flow_answers.PartiallyCancelled:
    """Cancel a flow and the members that the policy selects."""
    flow_id, body = request.flow_id, request.body
    check_same_id("flow_id", flow_id, ids.parse_uuid(body.flow_id))
    return await request.engine.cancel_flow(
        flow_id, policy=body.cancellation_policy, reason=body.reason, wait=_wait(request)
    )


def _wait(request: Request[api.CancelFlowRequest]) -> Wait:
    if request.query_param("wait") not in ("true", "1"):
        return NoWait()
    return (
        WaitIndefinite() if request.query_param("timeout_ms") is None else WaitTimeout(request.int_param("timeout_ms"))
    )


# ---------------------------------------------------------------------------------------------------------------
# Reads


@routes.get("/v1/flows", {200: FlowPage}, query=(PARTITION_PARAM, *PAGE_PARAMS))
async def list_flows(request: Request[None]) -> FlowPage:
    """List the flows of one partition by id."""
    cursor = request.query_param("cursor")
    return await request.engine.list_flows(
        request.int_param("partition"),
        cursor=path_uuid("cursor", cursor) if cursor else None,
        limit=request.int_param("limit", 50),
    )


@flow_routes.get(FLOW_PATH, {200: FlowSnapshot})
async def describe_flow(request: Request[None]) -> FlowSnapshot:
    """Return a flow with its joins and its graph revision."""
    return require_found(await request.engine.describe_flow(request.flow_id), FLOW_NOT_FOUND)


@flow_routes.get(f"{FLOW_PATH}/summary", {200: FlowSummary})
async def get_flow_summary(request: Request[None]) -> FlowSummary:
    """Return the number of members by public state, as last projected."""
    flow_id = request.flow_id
    summary = await request.engine.get_flow_summary(flow_id)
    if summary is None:
        require_found(await request.engine.describe_flow(flow_id), FLOW_NOT_FOUND)
    return require_found(summary, "not found: flow_summary")


@flow_routes.get(f"{FLOW_PATH}/members", {200: api.ListMembersResponse})
async def list_flow_members(request: Request[None]) -> api.ListMembersResponse:
    """List every member that was ever added."""
    flow_id = request.flow_id
    require_found(await request.engine.describe_flow(flow_id), FLOW_NOT_FOUND)
    return api.ListMembersResponse(await request.engine.list_flow_members(flow_id))


@flow_routes.get(f"{FLOW_PATH}/graph", {200: FlowGraph})
async def read_flow_graph(request: Request[None]) -> FlowGraph:
    """Return the whole graph: nodes as [id, kind, state], edges as [from, to, kind] by the nodes' places, and joins."""
    return await request.engine.read_flow_graph(request.flow_id)


@flow_routes.get(
    f"{FLOW_PATH}/edges",
    {200: api.ListEdgesResponse},
    query=(QueryParam("outgoing", STRING_SCHEMA), QueryParam("incoming", STRING_SCHEMA)),
)
async def list_edges(request: Request[None]) -> api.ListEdgesResponse:
    """List the edges from an execution or to it."""
    flow_id, outgoing, incoming = request.flow_id, request.query_param("outgoing"), request.query_param("incoming")
    if (outgoing is None) == (incoming is None):
        raise bad_request("name the execution: either outgoing or incoming")
    return api.ListEdgesResponse(
        await request.engine.list_edges(
            flow_id,
            outgoing=outgoing if outgoing is None else path_execution_id(outgoing),
            incoming=incoming if incoming is None else path_execution_id(incoming),
        )
    )


@submitter_routes.put(f"{FLOW_PATH}/joins/{{execution_id}}", {200: api.SetJoinResponse}, body=api.SetJoinRequest)
async def set_edge_group_policy(request: Request[api.SetJoinRequest]) -> api.SetJoinResponse:
    """Set how an execution joins its upstreams, before any edge into it is staged."""
    answer = await request.engine.set_edge_group_policy(
        request.flow_id, path_execution_id(request.path_params[1]), request.body.policy
    )
    return api.SetJoinResponse(answer)
