"""Routes for flows: build, read, cancel."""

from __future__ import annotations

from typing import Any

from flowfabric import ids
from flowfabric.api.encoding import BULK_LIMIT
from flowfabric.api.flows import (
    AddMemberRequest,
    ApplyEdgeRequest,
    CancelFlowRequest,
    CreateFlowGraphRequest,
    CreateFlowRequest,
    EdgeRequest,
    ListEdgesResponse,
    ListMembersResponse,
    SetJoinRequest,
    SetJoinResponse,
    StageEdgeRequest,
)
from flowfabric.engine.operations.flows import GraphEdge, NoWait, Wait, WaitIndefinite, WaitTimeout
from flowfabric.engine.operations.pages import FlowPage
from flowfabric.engine.types import FlowSnapshot
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.api_token import ApiScope
from flowfabric.model.flow import FlowSummary
from flowfabric.server.errors import bad_request
from flowfabric.server.request import (
    Request,
    check_same_id,
    json_response,
    path_execution_id,
    path_uuid,
    require_found,
    variant_response,
)
from flowfabric.server.routes.executions import to_create_execution
from flowfabric.server.routing import CURSOR_PARAM, LIMIT_PARAM, QueryParam, Response, RouteGroup, Subject, one_of

routes = RouteGroup("flows")

FLOW_PATH = "/v1/flows/{id}"
FLOW_NOT_FOUND = "not found: flow"
STRING_SCHEMA = {"type": "string"}


@routes.post(
    "/v1/flows",
    {201: one_of(flow_answers.FlowCreated), 200: one_of(flow_answers.FlowExists)},
    body=CreateFlowRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def create_flow(request: Request[CreateFlowRequest]) -> Response:
    """Create a flow; an existing one stays unchanged."""
    body = request.body
    request.require_namespace(body.namespace)
    answer = await request.engine.create_flow(body.flow_id, flow_kind=body.flow_kind, namespace=body.namespace)
    return variant_response(answer, 201 if isinstance(answer, flow_answers.FlowCreated) else 200)


@routes.post(
    "/v1/flows/graph",
    {201: one_of(flow_answers.GraphCreated), 200: one_of(flow_answers.FlowExists)},
    body=CreateFlowGraphRequest,
    limit=BULK_LIMIT,
    scope=ApiScope.SUBMIT,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def create_flow_graph(request: Request[CreateFlowGraphRequest]) -> Response:
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
    answer = await request.engine.create_flow_graph(
        body.flow_id or request.engine.minter.uuid(),
        [await to_create_execution(request, node) for node in body.nodes],
        edges,
        policies=body.policies,
        flow_kind=body.flow_kind,
        namespace=body.namespace,
    )
    return variant_response(answer, 201 if isinstance(answer, flow_answers.GraphCreated) else 200)


@routes.post(
    f"{FLOW_PATH}/members",
    {201: one_of(flow_answers.Added), 200: one_of(flow_answers.AlreadyMember)},
    body=AddMemberRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.FLOW,
)
async def add_execution_to_flow(request: Request[AddMemberRequest]) -> Response:
    """Add an execution to a flow on its partition."""
    flow_id, body = request.flow_id, request.body
    check_same_id("flow_id", flow_id, ids.parse_uuid(body.flow_id))
    await request.require_execution_access(body.execution_id)
    answer = await request.engine.add_execution_to_flow(flow_id, body.execution_id)
    return variant_response(answer, 201 if isinstance(answer, flow_answers.Added) else 200)


def _edge_kwargs(request: Request[Any]) -> dict[str, Any]:
    """Return the keywords of the engine's edge operations; refuse a body that names another flow than the path."""
    body: EdgeRequest = request.body
    check_same_id("flow_id", request.flow_id, ids.parse_uuid(body.flow_id))
    ends = {"upstream": body.upstream_execution_id, "downstream": body.downstream_execution_id}
    return ends | body.to_kwargs("upstream_execution_id", "downstream_execution_id")


@routes.post(
    f"{FLOW_PATH}/edges",
    {201: one_of(flow_answers.Staged)},
    body=StageEdgeRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.FLOW,
)
async def stage_dependency_edge(request: Request[StageEdgeRequest]) -> Response:
    """Add an edge to the graph; the graph revision is checked only if one is expected."""
    return variant_response(await request.engine.stage_dependency_edge(**_edge_kwargs(request)), 201)


@routes.post(
    f"{FLOW_PATH}/edges/apply",
    {200: one_of(flow_answers.DependencyApplied, flow_answers.DependencyAlreadyApplied)},
    body=ApplyEdgeRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.FLOW,
)
async def apply_dependency_to_child(request: Request[ApplyEdgeRequest]) -> Response:
    """Make the downstream of a staged edge wait for its upstream."""
    edge = _edge_kwargs(request)
    await request.require_execution_access(
        edge["downstream"]
    )  # else the response would reveal the flow of a foreign execution
    return variant_response(await request.engine.apply_dependency_to_child(**edge))


@routes.post(
    f"{FLOW_PATH}/cancel",
    {200: one_of(flow_answers.FlowCancelled, flow_answers.CancellationScheduled, flow_answers.PartiallyCancelled)},
    body=CancelFlowRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.FLOW,
    query=(
        QueryParam("wait", {"type": "string", "enum": ["true", "1", "false", "0"]}),
        QueryParam("timeout_ms", {"type": "integer", "minimum": 0}),
    ),
    long=True,
    audit=True,
)
async def cancel_flow(request: Request[CancelFlowRequest]) -> Response:
    """Cancel a flow and the members that the policy selects."""
    flow_id, body = request.flow_id, request.body
    check_same_id("flow_id", flow_id, ids.parse_uuid(body.flow_id))
    answer = await request.engine.cancel_flow(
        flow_id, policy=body.cancellation_policy, reason=body.reason, wait=_wait(request)
    )
    return variant_response(answer)


def _wait(request: Request[CancelFlowRequest]) -> Wait:
    if request.query_param("wait") not in ("true", "1"):
        return NoWait()
    return (
        WaitIndefinite() if request.query_param("timeout_ms") is None else WaitTimeout(request.int_param("timeout_ms"))
    )


# ---------------------------------------------------------------------------------------------------------------
# Reads


@routes.get(
    "/v1/flows",
    {200: FlowPage},
    query=(
        QueryParam("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True),
        CURSOR_PARAM,
        LIMIT_PARAM,
    ),
)
async def list_flows(request: Request[None]) -> Response:
    """List the flows of one partition by id."""
    cursor = request.query_param("cursor")
    return json_response(
        await request.engine.list_flows(
            request.int_param("partition"),
            cursor=path_uuid("cursor", cursor) if cursor else None,
            limit=request.int_param("limit", 50),
        )
    )


@routes.get(FLOW_PATH, {200: FlowSnapshot}, subject=Subject.FLOW)
async def describe_flow(request: Request[None]) -> Response:
    """Return a flow with its joins and its graph revision."""
    return json_response(require_found(await request.engine.describe_flow(request.flow_id), FLOW_NOT_FOUND))


@routes.get(f"{FLOW_PATH}/summary", {200: FlowSummary}, subject=Subject.FLOW)
async def get_flow_summary(request: Request[None]) -> Response:
    """Return the number of members by public state, as last projected."""
    flow_id = request.flow_id
    summary = await request.engine.get_flow_summary(flow_id)
    if summary is None:
        require_found(await request.engine.describe_flow(flow_id), FLOW_NOT_FOUND)
    return json_response(require_found(summary, "not found: flow_summary"))


@routes.get(f"{FLOW_PATH}/members", {200: ListMembersResponse}, subject=Subject.FLOW)
async def list_flow_members(request: Request[None]) -> Response:
    """List every member that was ever added."""
    flow_id = request.flow_id
    require_found(await request.engine.describe_flow(flow_id), FLOW_NOT_FOUND)
    return json_response(ListMembersResponse(await request.engine.list_flow_members(flow_id)))


@routes.get(
    f"{FLOW_PATH}/edges",
    {200: ListEdgesResponse},
    subject=Subject.FLOW,
    query=(QueryParam("outgoing", STRING_SCHEMA), QueryParam("incoming", STRING_SCHEMA)),
)
async def list_edges(request: Request[None]) -> Response:
    """List the edges from an execution or to it."""
    flow_id, outgoing, incoming = request.flow_id, request.query_param("outgoing"), request.query_param("incoming")
    if (outgoing is None) == (incoming is None):
        raise bad_request("name the execution: either outgoing or incoming")
    return json_response(
        ListEdgesResponse(
            await request.engine.list_edges(
                flow_id,
                outgoing=outgoing if outgoing is None else path_execution_id(outgoing),
                incoming=incoming if incoming is None else path_execution_id(incoming),
            )
        )
    )


@routes.put(
    f"{FLOW_PATH}/joins/{{execution_id}}",
    {200: SetJoinResponse},
    body=SetJoinRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.FLOW,
)
async def set_edge_group_policy(request: Request[SetJoinRequest]) -> Response:
    """Set how an execution joins its upstreams, before any edge into it is staged."""
    answer = await request.engine.set_edge_group_policy(
        request.flow_id, path_execution_id(request.path_params[1]), request.body.policy
    )
    return json_response(SetJoinResponse(answer))
