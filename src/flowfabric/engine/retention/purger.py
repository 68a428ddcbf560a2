"""Purger: deletes executions and flows whose retention is over.

Purging a member of a flow checks whether it was the last one, and then purges the flow. If a crash comes in between,
the sweep finds the flow by its `purge_check_at`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from flowfabric import errors
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, Flow, FlowMember
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules import retention
from flowfabric.rules.decision import Decision
from flowfabric.stores.queries import Scan, Where

WAITPOINTS_PAGE = 1000
EDGES_PAGE = 500
MEMBERS_PAGE = 200
MAX_REMEMBERED_MEMBERS = 1000
logger = logging.getLogger("flowfabric.retention")


class Purger:
    """Deletes ended executions and flows with everything that belongs to them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._members_left: dict[str, str] = {}  # by flow: a member that the last check found
        self._flow_checks: dict[str, asyncio.Task[bool]] = {}  # by flow: the check that concurrent purges share

    async def purge_execution(self, execution_id: str, default_retention_ms: int | None) -> bool:
        """Purge an ended execution whose retention is over, with everything it owns; True if it was purged.

        Its flow is purged as well if no other member is left; the answer does not say so.
        """
        flows: set[str] = set()
        purged = await self._purge_rows(execution_id, default_retention_ms, flows)
        if purged:
            for flow_id in flows:
                await self._check_flow(flow_id)
        return purged

    async def purge_flow(self, flow_id: str) -> bool:
        """Purge a flow without remaining members, with its member list, edges, joins and summary."""
        reads = ReadSet()
        flow, remaining = reads.one(Flow, flow_id), reads.more_one(retention.RemainingMember)

        async def load_remaining(rows: Rows) -> Rows:
            return [[await self._find_remaining(flow_id)]] if flow(rows) is not None else [[]]

        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: retention.purge_flow(flow(rows), remaining(rows), now),
            load_more=load_remaining,
        )

    async def _find_remaining(self, flow_id: str) -> retention.RemainingMember | None:
        """Return a member that still exists. The one that the last check found usually does."""
        remembered = self._members_left.pop(flow_id, None)
        if remembered is not None and (found := await self._first_remaining(flow_id, [remembered])):
            return found
        after = None
        while True:
            where = (Where("flow_id", "=", flow_id),)
            page = await self.runtime.scan(Scan(FlowMember, where, ("flow_id", "execution_id"), after, MEMBERS_PAGE))
            if found := await self._first_remaining(flow_id, [member.execution_id for member in page]):
                return found
            if len(page) < MEMBERS_PAGE:
                return None
            after = (flow_id, page[-1].execution_id)

    async def _first_remaining(self, flow_id: str, names: list[str]) -> retention.RemainingMember | None:
        rows = await load_readable(self.runtime, names)
        for name in names:
            # A member that cannot be decoded still exists.
            found = retention.remaining_member(flow_id, rows[name]) if name in rows else retention.RemainingMember()
            if found is not None:
                if len(self._members_left) < MAX_REMEMBERED_MEMBERS:
                    self._members_left[flow_id] = name
                return found
        return None

    async def _check_flow(self, flow_id: str) -> None:
        """Purge the flow of a purged member if no other is left; after a failure, the sweep does it."""
        check = self._flow_checks.get(flow_id)
        if check is None:
            check = self._flow_checks[flow_id] = asyncio.create_task(self._purge_checked_flow(flow_id))
        try:
            await asyncio.shield(check)
        except errors.FabricError as fault:
            logger.warning("flow %s is left to the sweep: %s", flow_id, fault)

    async def _purge_checked_flow(self, flow_id: str) -> bool:
        await asyncio.sleep(0)  # members that are purged in one batch share a check
        del self._flow_checks[flow_id]
        return await self.purge_flow(flow_id)

    async def _purge_rows(self, execution: str, default: int | None, flows: set[str]) -> bool:
        purged = await self._decide_purge(execution, None, default, flows)
        if isinstance(purged, bool):
            return purged
        waitpoint_ids: list[str] = []
        where, order = (Where("execution_id", "=", execution),), ("execution_id", "waitpoint_id")
        while True:
            after = (execution, waitpoint_ids[-1]) if waitpoint_ids else None
            page = await self.runtime.scan(Scan(Waitpoint, where, order, after, WAITPOINTS_PAGE))
            waitpoint_ids += [waitpoint.waitpoint_id for waitpoint in page]
            if len(page) < WAITPOINTS_PAGE:
                break
        return await self._decide_purge(execution, waitpoint_ids, default, flows) is True

    async def _decide_purge(
        self, execution_id: str, waitpoint_ids: list[str] | None, default_ms: int | None, flows: set[str]
    ) -> bool | retention.NeedsWaitpoints:
        """Purge an execution; `flows` collects the flow that it was a member of."""
        reads = ReadSet()
        execution, others = reads.one(Execution, execution_id), reads.more_many(Execution)

        def decide(rows: Rows, now: int) -> Decision[bool | retention.NeedsWaitpoints]:
            row = execution(rows)
            if row is not None and row.flow_id is not None:
                flows.add(row.flow_id)
            return retention.purge(row, now, waitpoint_ids, default_ms, others(rows))

        async def load_others(rows: Rows) -> Rows:
            row = execution(rows)
            return [[] if row is None else await self._load_retaining(row)]

        return await self.runtime.decide_and_commit(reads, decide, load_more=load_others)

    async def _load_retaining(self, row: Execution) -> list[Execution]:
        """Load the executions that may still need this one; of very many, only until one is found that does."""
        named = await self._load_executions(retention.retained_for(row))
        if not retention.is_retained_for_many(row) or any(retention.may_still_need(one, row) for one in named):
            return named
        after = None
        where = (Where("upstream_execution_id", "=", row.execution_id),)
        while True:
            edges = await self.runtime.scan(Scan(Edge, where, ("upstream_execution_id", "edge_id"), after, EDGES_PAGE))
            found = await self._load_executions([edge.downstream_execution_id for edge in edges])
            needing = [one for one in found if retention.may_still_need(one, row)]
            if needing or len(edges) < EDGES_PAGE:
                return needing
            after = (row.execution_id, edges[-1].edge_id)

    async def _load_executions(self, names: Iterable[str]) -> list[Execution]:
        found = await load_each(self.runtime, Execution, ((name,) for name in names))
        return [row for row in found if row is not None]
