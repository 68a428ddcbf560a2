"""Reads of flows for people: the whole graph in one call, and flows newest first."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric import errors
from flowfabric.engine.operations.pages import FlowListPage
from flowfabric.engine.runtime.read_set import ReadSet, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution_filter import validate_namespaces
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, EdgeGroup, Flow, FlowMember, FlowSummary
from flowfabric.rules import validation
from flowfabric.rules.flow import views
from flowfabric.rules.flow.views import FlowGraph
from flowfabric.stores.queries import Scan

MEMBERS_PER_LOAD = 500
KINDS_PER_READ = 2000
MAX_PAGE = 1000
FLOW_BUDGET = 2000  # flows that one call reads to find those of some namespaces


class FlowLists:
    """Operations that read whole flows."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def search_flows(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> FlowListPage:
        """List flows of all partitions, newest first, after the cursor, with the counts of the last projection."""
        wanted = validate_namespaces(namespace, namespaces)
        after = None if cursor is None else _parse_cursor(cursor)
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        if not size:
            return FlowListPage([])
        budget = size + 1 if wanted is None else FLOW_BUDGET
        scan = Scan(Flow, (), ("created_at", "flow_id"), after, budget, descending=True)
        read: list[Flow] = await self.runtime.scan(scan)
        found = [flow for flow in read if wanted is None or flow.namespace in wanted]
        page = found[:size]
        last = page[-1] if len(found) > size else read[-1] if len(read) == budget else None
        summaries = await load_each(self.runtime, FlowSummary, ((flow.flow_id,) for flow in page))
        return FlowListPage(
            [views.flow_listing(flow, summary) for flow, summary in zip(page, summaries, strict=True)],
            None if last is None else f"{last.created_at}/{last.flow_id}",
            last is not None and len(page) < size,
        )

    async def read_flow_graph(self, flow_id: str) -> FlowGraph:
        """Return the members of a flow with their kinds and states, the edges between them, and the joins."""
        flow_id = validate.validate_flow_id(flow_id)
        reads = ReadSet()
        flow, members = reads.one(Flow, flow_id), reads.many(FlowMember, flow_id)
        edges, groups = reads.many(Edge, flow_id), reads.many(EdgeGroup, flow_id)
        rows = (await self.runtime.load(reads)).rows
        found = flow(rows)
        if found is None:
            raise errors.NotFound("flow", flow_id=flow_id)
        names = [member.execution_id for member in members(rows)]
        executions: dict[str, Execution] = {}
        kinds: dict[str, str] = {}
        for part in _parts(names, MEMBERS_PER_LOAD):
            loaded = await load_each(self.runtime, Execution, ((name,) for name in part))
            executions |= {row.execution_id: row for row in loaded if row is not None}
        for part in _parts(names, KINDS_PER_READ):
            kinds |= await self.runtime.kinds(part)
        return views.flow_graph(found, names, edges(rows), groups(rows), executions, kinds)


def _parse_cursor(cursor: object) -> tuple[int, str]:
    instant, flow_id = validate.parse_cursor(cursor, "flows")
    return instant, validate.validate_flow_id(flow_id)


def _parts(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
