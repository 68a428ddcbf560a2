"""Reads of flows: what people and consoles look at, and the summary that is projected for them."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.completion_dispatcher import outgoing_edges, scan_edges
from flowfabric.engine.operations.base import Operations
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.validation import execution as validate
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, EdgeGroup, Flow, FlowMember, FlowSummary
from flowfabric.rules import validation
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.flow import views
from flowfabric.rules.flow.build import EdgeSnapshot, edge_snapshot
from flowfabric.rules.flow.views import FlowSnapshot, FlowStatus
from flowfabric.stores.queries import Read, Scan, Where

MAX_PAGE = 1000
MAX_MEMBERS_PER_LOAD = 500  # members that are looked at together


class FlowPage(msgspec.Struct, frozen=True):
    """Flows, and the cursor of the next page when there is one."""

    flows: list[FlowStatus]
    next_cursor: str | None = None


class FlowReadOperations(Operations):
    """What can be asked about flows."""

    async def describe_flow(self, flow_id: str) -> FlowSnapshot | None:
        """The flow with its joins; None when there is none."""
        flow = validate.validate_flow_id(flow_id)
        found, groups = (await self.runtime.load((Read(Flow, (flow,)), Read(EdgeGroup, (flow,))))).rows
        return views.flow_snapshot(found[0], groups) if found else None

    async def list_flows(self, partition: int | str, *, cursor: str | None = None, limit: int = 50) -> FlowPage:
        """Flows of one partition (its number or its key) by id, strictly after the cursor."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        after = None if cursor is None else (index, validate.validate_flow_id(cursor))
        if not wanted:
            return FlowPage([])
        where = (Where("partition", "=", index),)
        rows = await self.runtime.store.scan(Scan(Flow, where, ("partition", "flow_id"), after, wanted + 1))
        page = [views.flow_status(row) for row in rows[:wanted]]
        return FlowPage(page, page[-1].flow_id if len(rows) > wanted else None)

    async def list_flow_members(self, flow_id: str) -> list[str]:
        """Every member that was ever added, ascending."""
        found = (await self.runtime.load((Read(FlowMember, (validate.validate_flow_id(flow_id),)),))).rows[0]
        return [row.execution_id for row in found]

    async def list_outgoing_edges(self, flow_id: str, execution_id: str) -> list[EdgeSnapshot]:
        """The edges that lead away from an execution, by id."""
        flow, upstream = validate.validate_flow_id(flow_id), validate.validate_execution_id(execution_id)
        return [edge_snapshot(edge) for edge in await outgoing_edges(self.runtime, [upstream]) if edge.flow_id == flow]

    async def list_incoming_edges(self, flow_id: str, execution_id: str) -> list[EdgeSnapshot]:
        """The edges that lead to an execution, by id."""
        flow, downstream = validate.validate_flow_id(flow_id), validate.validate_execution_id(execution_id)
        found = await scan_edges(self.runtime, "downstream_execution_id", [downstream])
        return [edge_snapshot(edge) for edge in found if edge.flow_id == flow]

    async def list_edges(
        self, flow_id: str, *, outgoing: str | None = None, incoming: str | None = None
    ) -> list[EdgeSnapshot]:
        """The edges away from one execution, or to one."""
        if (outgoing is None) == (incoming is None):
            raise errors.InvalidInput("edges are listed either outgoing from or incoming to one execution")
        if outgoing is not None:
            return await self.list_outgoing_edges(flow_id, outgoing)
        return await self.list_incoming_edges(flow_id, incoming or "")

    async def describe_edge(self, flow_id: str, edge_id: str) -> EdgeSnapshot | None:
        """One edge; None when this flow has no such edge."""
        key = (validate.validate_flow_id(flow_id), validate.validate_edge_id(edge_id))
        found = (await self.runtime.load((Read(Edge, key),))).rows[0]
        return edge_snapshot(found[0]) if found else None

    async def resolve_execution_flow_id(self, execution_id: str) -> str | None:
        """The flow of an execution; None when it has none or does not exist."""
        found = (await self.runtime.load((Read(Execution, (validate.validate_execution_id(execution_id),)),))).rows[0]
        return found[0].flow_id if found else None

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        """One tag; None when the flow or the tag is missing."""
        if refused := tag_rules.check_tag_key(validation.text("key", key)):
            raise refused
        found = (await self.runtime.load((Read(Flow, (validate.validate_flow_id(flow_id),)),))).rows[0]
        return views.tags_of(found[0]).get(key) if found else None

    async def get_flow_summary(self, flow_id: str) -> FlowSummary | None:
        """What the projector last counted; None before it did."""
        found = (await self.runtime.load((Read(FlowSummary, (validate.validate_flow_id(flow_id),)),))).rows[0]
        return found[0] if found else None

    async def project_flow_summary(self, flow_id: str) -> bool:
        """Count the members of a flow and write its summary; False when there is nothing to count."""
        flow = validate.validate_flow_id(flow_id)

        async def members(rows: Rows) -> Rows:
            names = [member.execution_id for member in rows[1]]
            found: list[Any] = []
            for start in range(0, len(names), MAX_MEMBERS_PER_LOAD):
                part = names[start : start + MAX_MEMBERS_PER_LOAD]
                found += (await self.runtime.load([Read(Execution, (name,)) for name in part])).rows
            return [[row for each in found for row in each]]

        return await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)), Read(FlowMember, (flow,))),
            lambda rows, _: views.project_summary(rows[0][0] if rows[0] else None, len(rows[1]), rows[2]),
            load_more=members,
        )
