"""Schemas of flows: graphs, members, edges and joins."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import I64, RequestBody
from flowfabric.api.executions import CreateExecutionRequest
from flowfabric.engine.types import EdgeSnapshot
from flowfabric.model.answers import flow as flow_answers

Revision = Annotated[int, Meta(ge=0)]


class CreateFlowRequest(RequestBody, frozen=True):
    flow_id: str
    flow_kind: str
    namespace: str
    now: I64 | None = None
    uuid_fields: ClassVar = ("flow_id",)


class EdgeSpec(RequestBody, frozen=True):
    upstream_execution_id: str
    downstream_execution_id: str
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None
    edge_id: str | None = None


class CreateFlowGraphRequest(RequestBody, frozen=True):
    """A flow with all its members, edges and joins; a join without a policy waits for all upstreams."""

    nodes: list[CreateExecutionRequest]
    flow_id: str | None = None
    edges: tuple[EdgeSpec, ...] = ()
    policies: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    flow_kind: str = "dag"
    namespace: str = "default"
    uuid_fields: ClassVar = ("flow_id",)


class AddMemberRequest(RequestBody, frozen=True):
    flow_id: str
    execution_id: str
    now: I64 | None = None
    uuid_fields: ClassVar = ("flow_id",)
    execution_id_fields: ClassVar = ("execution_id",)


class EdgeRequest(RequestBody, frozen=True):
    flow_id: str
    edge_id: str
    upstream_execution_id: str
    downstream_execution_id: str
    data_passing_ref: str | None = None
    now: I64 | None = None
    uuid_fields: ClassVar = ("flow_id", "edge_id")
    execution_id_fields: ClassVar = ("upstream_execution_id", "downstream_execution_id")


class StageEdgeRequest(EdgeRequest, frozen=True):
    dependency_kind: str = "success_only"
    expected_graph_revision: Revision | None = None


class ApplyEdgeRequest(EdgeRequest, frozen=True):
    graph_revision: Revision | None = None
    dependency_kind: str | None = None


class CancelFlowRequest(RequestBody, frozen=True):
    flow_id: str
    reason: str
    cancellation_policy: str
    now: I64 | None = None
    uuid_fields: ClassVar = ("flow_id",)


class ListMembersResponse(msgspec.Struct, frozen=True):
    members: list[str]


class ListEdgesResponse(msgspec.Struct, frozen=True):
    edges: list[EdgeSnapshot]


class SetJoinRequest(RequestBody, frozen=True):
    policy: Annotated[dict[str, Any], Meta(description="all_of, any_of or quorum, as an edge policy is written")]


class SetJoinResponse(msgspec.Struct, frozen=True):
    status: flow_answers.SetJoinPolicyResult
