"""Flows: build them, look at them, cancel them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowfabric import ids
from flowfabric.api.encoding import CURSOR, LIMIT, Body, Whole, checked, variants
from flowfabric.engine.operations.flow_cancels import NoWait, Wait, WaitIndefinite, WaitTimeout
from flowfabric.engine.operations.flow_reads import FlowPage
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.types import EdgeSnapshot, FlowSnapshot
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.api_token import Scope
from flowfabric.model.flow import FlowSummary
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Ask, execution_in, found, json, same, tagged, uuid_in
from flowfabric.server.routes.executions import CreateBody, creation
from flowfabric.server.routing import BULK_LIMIT, Param, Reply, Routes, Subject

routes = Routes("flows")

ONE = "/v1/flows/{id}"
NO_FLOW = "not found: flow"
TEXT = {"type": "string"}

Revision = Annotated[int, Meta(ge=0)]


class FlowBody(Body, frozen=True):
    flow_id: str
    flow_kind: str
    namespace: str
    now: Whole | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.flow_id)


@routes.post(
    "/v1/flows",
    {201: variants(flow_answers.Created), 200: variants(flow_answers.AlreadySatisfied)},
    body=FlowBody,
    scope=Scope.SUBMIT,
    subject=Subject.OWN,
)
async def create_flow(ask: Ask[FlowBody]) -> Reply:
    """Create a flow; one that exists stays as it is."""
    body = ask.body
    ask.within(body.namespace)
    answer = await ask.engine.create_flow(body.flow_id, flow_kind=body.flow_kind, namespace=body.namespace)
    return tagged(answer, 201 if isinstance(answer, flow_answers.Created) else 200)


class EdgeSpec(Body, frozen=True):
    upstream_execution_id: str
    downstream_execution_id: str
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None
    edge_id: str | None = None


class GraphBody(Body, frozen=True):
    """A flow with all its members, edges and joins; a join that is not named waits for all."""

    nodes: list[CreateBody]
    flow_id: str | None = None
    edges: tuple[EdgeSpec, ...] = ()
    policies: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    flow_kind: str = "dag"
    namespace: str = "default"

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.flow_id)


@routes.post(
    "/v1/flows/graph",
    {201: variants(flow_answers.GraphCreated), 200: variants(flow_answers.AlreadySatisfied)},
    body=GraphBody,
    limit=BULK_LIMIT,
    scope=Scope.SUBMIT,
    subject=Subject.OWN,
)
async def create_flow_graph(ask: Ask[GraphBody]) -> Reply:
    """Create a whole flow, all of it or nothing; repeating the call is harmless."""
    body = ask.body
    ask.within(body.namespace)
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
    answer = await ask.engine.create_flow_graph(
        body.flow_id or ask.engine.minter.uuid(),
        [await creation(ask, node) for node in body.nodes],
        edges,
        policies=body.policies,
        flow_kind=body.flow_kind,
        namespace=body.namespace,
    )
    return tagged(answer, 201 if isinstance(answer, flow_answers.GraphCreated) else 200)


class MemberBody(Body, frozen=True):
    flow_id: str
    execution_id: str
    now: Whole | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.flow_id)
        checked(ids.parse_execution_id, self.execution_id)


@routes.post(
    f"{ONE}/members",
    {201: variants(flow_answers.Added), 200: variants(flow_answers.AlreadyMember)},
    body=MemberBody,
    scope=Scope.SUBMIT,
    subject=Subject.FLOW,
)
async def add_execution_to_flow(ask: Ask[MemberBody]) -> Reply:
    """Make an execution a member of a flow on its partition."""
    flow_id, body = ask.flow_id, ask.body
    same("flow_id", flow_id, ids.parse_uuid(body.flow_id))
    await ask.may_touch(body.execution_id)
    answer = await ask.engine.add_execution_to_flow(flow_id, body.execution_id)
    return tagged(answer, 201 if isinstance(answer, flow_answers.Added) else 200)


class EdgeBody(Body, frozen=True):
    flow_id: str
    edge_id: str
    upstream_execution_id: str
    downstream_execution_id: str
    data_passing_ref: str | None = None
    now: Whole | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.flow_id, self.edge_id)
        checked(ids.parse_execution_id, self.upstream_execution_id, self.downstream_execution_id)

    def edge(self, path_flow_id: str) -> dict[str, Any]:
        """What the engine wants to know of an edge, which is one of the path's flow."""
        same("flow_id", path_flow_id, ids.parse_uuid(self.flow_id))
        ends = {"upstream": self.upstream_execution_id, "downstream": self.downstream_execution_id}
        return ends | self.told("upstream_execution_id", "downstream_execution_id")


class StageBody(EdgeBody, frozen=True):
    dependency_kind: str = "success_only"
    expected_graph_revision: Revision | None = None


@routes.post(
    f"{ONE}/edges",
    {201: variants(flow_answers.Staged)},
    body=StageBody,
    scope=Scope.SUBMIT,
    subject=Subject.FLOW,
)
async def stage_dependency_edge(ask: Ask[StageBody]) -> Reply:
    """Add an edge to the graph; without an expected revision none is asked for."""
    return tagged(await ask.engine.stage_dependency_edge(**ask.body.edge(ask.flow_id)), 201)


class ApplyBody(EdgeBody, frozen=True):
    graph_revision: Revision | None = None
    dependency_kind: str | None = None


@routes.post(
    f"{ONE}/edges/apply",
    {200: variants(flow_answers.Applied, flow_answers.AlreadyApplied)},
    body=ApplyBody,
    scope=Scope.SUBMIT,
    subject=Subject.FLOW,
)
async def apply_dependency_to_child(ask: Ask[ApplyBody]) -> Reply:
    """Let the downstream of a staged edge wait for its upstream."""
    edge = ask.body.edge(ask.flow_id)
    await ask.may_touch(edge["downstream"])  # the flow that another one belongs to would be told
    return tagged(await ask.engine.apply_dependency_to_child(**edge))


class FlowCancelBody(Body, frozen=True):
    flow_id: str
    reason: str
    cancellation_policy: str
    now: Whole | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.flow_id)


@routes.post(
    f"{ONE}/cancel",
    {200: variants(flow_answers.Cancelled, flow_answers.CancellationScheduled, flow_answers.PartiallyCancelled)},
    body=FlowCancelBody,
    scope=Scope.OPERATE,
    subject=Subject.FLOW,
    query=(
        Param("wait", {"type": "string", "enum": ["true", "1", "false", "0"]}),
        Param("timeout_ms", {"type": "integer", "minimum": 0}),
    ),
    long=True,
    audit=True,
)
async def cancel_flow(ask: Ask[FlowCancelBody]) -> Reply:
    """Cancel a flow and those of its members that the policy selects."""
    flow_id, body = ask.flow_id, ask.body
    same("flow_id", flow_id, ids.parse_uuid(body.flow_id))
    answer = await ask.engine.cancel_flow(flow_id, policy=body.cancellation_policy, reason=body.reason, wait=_wait(ask))
    return tagged(answer)


def _wait(ask: Ask[FlowCancelBody]) -> Wait:
    if ask.query("wait") not in ("true", "1"):
        return NoWait()
    return WaitIndefinite() if ask.query("timeout_ms") is None else WaitTimeout(ask.number("timeout_ms"))


# ---------------------------------------------------------------------------------------------------------------
# Reads


@routes.get(
    "/v1/flows",
    {200: FlowPage},
    query=(Param("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True), CURSOR, LIMIT),
)
async def list_flows(ask: Ask[None]) -> Reply:
    """Flows of one partition by id."""
    cursor = ask.query("cursor")
    return json(
        await ask.engine.list_flows(
            ask.number("partition"),
            cursor=uuid_in("cursor", cursor) if cursor else None,
            limit=ask.number("limit", 50),
        )
    )


@routes.get(ONE, {200: FlowSnapshot}, subject=Subject.FLOW)
async def describe_flow(ask: Ask[None]) -> Reply:
    """A flow with its joins and its graph revision."""
    return json(found(await ask.engine.describe_flow(ask.flow_id), NO_FLOW))


@routes.get(f"{ONE}/summary", {200: FlowSummary}, subject=Subject.FLOW)
async def get_flow_summary(ask: Ask[None]) -> Reply:
    """Members by public state, as the projector last counted them."""
    flow_id = ask.flow_id
    summary = await ask.engine.get_flow_summary(flow_id)
    if summary is None:
        found(await ask.engine.describe_flow(flow_id), NO_FLOW)
    return json(found(summary, "not found: flow_summary"))


class Members(msgspec.Struct, frozen=True):
    members: list[str]


@routes.get(f"{ONE}/members", {200: Members}, subject=Subject.FLOW)
async def list_flow_members(ask: Ask[None]) -> Reply:
    """Every member that was ever added."""
    flow_id = ask.flow_id
    found(await ask.engine.describe_flow(flow_id), NO_FLOW)
    return json(Members(await ask.engine.list_flow_members(flow_id)))


class Edges(msgspec.Struct, frozen=True):
    edges: list[EdgeSnapshot]


@routes.get(
    f"{ONE}/edges",
    {200: Edges},
    subject=Subject.FLOW,
    query=(Param("outgoing", TEXT), Param("incoming", TEXT)),
)
async def list_edges(ask: Ask[None]) -> Reply:
    """The edges away from one execution, or to one."""
    flow_id, outgoing, incoming = ask.flow_id, ask.query("outgoing"), ask.query("incoming")
    if (outgoing is None) == (incoming is None):
        raise bad_request("name the execution: either outgoing or incoming")
    return json(
        Edges(
            await ask.engine.list_edges(
                flow_id,
                outgoing=outgoing if outgoing is None else execution_in(outgoing),
                incoming=incoming if incoming is None else execution_in(incoming),
            )
        )
    )


class JoinBody(Body, frozen=True):
    policy: Annotated[dict[str, Any], Meta(description="all_of, any_of or quorum, as an edge policy is written")]


class JoinSet(msgspec.Struct, frozen=True):
    status: flow_answers.PolicySet


@routes.put(f"{ONE}/joins/{{execution_id}}", {200: JoinSet}, body=JoinBody, scope=Scope.SUBMIT, subject=Subject.FLOW)
async def set_edge_group_policy(ask: Ask[JoinBody]) -> Reply:
    """Say how an execution joins its upstreams, before any edge into it is staged."""
    answer = await ask.engine.set_edge_group_policy(ask.flow_id, execution_in(ask.params[1]), ask.body.policy)
    return json(JoinSet(answer))
