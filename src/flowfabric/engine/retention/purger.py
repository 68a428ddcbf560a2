"""Purging: the end of what was kept long enough.

Whoever removes a member of a flow checks at once whether it was the last one, and removes the flow. What a crash leaves
in between is found by the flow's own instant (`purge_check_at`).
"""

from __future__ import annotations

import asyncio
import logging

from flowfabric import errors
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, Flow, FlowMember
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules import retention
from flowfabric.rules.decision import Decision
from flowfabric.stores.queries import Read, Scan, Where

WAITPOINTS_PAGE = 1000
EDGES_PAGE = 500
MEMBERS_PAGE = 200
MAX_REMEMBERED_MEMBERS = 1000
logger = logging.getLogger("flowfabric.retention")


class Purger:
    """Deletes ended executions and flows with everything that belongs to them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._members_left: dict[str, str] = {}  # by flow: the member that was left when it was last checked
        self._flow_checks: dict[str, asyncio.Task[bool]] = {}  # by flow: the check that concurrent purges share

    async def purge_execution(self, execution_id: str, default_retention_ms: int | None) -> bool:
        """Remove a finished execution whose retention is over, with everything it owns.

        Its flow goes as well if no other member is left; that is no part of the answer.
        """
        flows: set[str] = set()
        gone = await self._purge_rows(execution_id, default_retention_ms, flows)
        if gone:
            for flow_id in flows:
                await self._check_flow(flow_id)
        return gone

    async def purge_flow(self, flow_id: str) -> bool:
        """Remove a flow whose last member retention has removed, with its members, edges, joins and summary."""

        async def left(rows: Rows) -> Rows:
            return [[await self._member_left(flow_id)]] if rows[0] else [[]]

        return await self.runtime.decide_and_commit(
            (Read(Flow, (flow_id,)),),
            lambda rows, now: retention.purge_flow(first(rows[0]), first(rows[1]), now),
            load_more=left,
        )

    async def _member_left(self, flow_id: str) -> retention.RemainingMember | None:
        """A member that is still there. The one that was there last time mostly still is."""
        remembered = self._members_left.pop(flow_id, None)
        if remembered is not None and (found := await self._first_left(flow_id, [remembered])):
            return found
        after = None
        while True:
            where = (Where("flow_id", "=", flow_id),)
            page = await self.runtime.scan(Scan(FlowMember, where, ("flow_id", "execution_id"), after, MEMBERS_PAGE))
            if found := await self._first_left(flow_id, [one.execution_id for one in page]):
                return found
            if len(page) < MEMBERS_PAGE:
                return None
            after = (flow_id, page[-1].execution_id)

    async def _first_left(self, flow_id: str, names: list[str]) -> retention.RemainingMember | None:
        rows = await load_readable(self.runtime, names)
        for name in names:
            # One that cannot be read is there.
            found = retention.remaining_member(flow_id, rows[name]) if name in rows else retention.RemainingMember()
            if found is not None:
                if len(self._members_left) < MAX_REMEMBERED_MEMBERS:
                    self._members_left[flow_id] = name
                return found
        return None

    async def _check_flow(self, flow_id: str) -> None:
        """Remove the flow of a purged member if no other is left; a failure leaves it to the sweep."""
        check = self._flow_checks.get(flow_id)
        if check is None:
            check = self._flow_checks[flow_id] = asyncio.create_task(self._checked_flow(flow_id))
        try:
            await asyncio.shield(check)
        except errors.FabricError as fault:
            logger.warning("flow %s is left to the sweep: %s", flow_id, fault)

    async def _checked_flow(self, flow_id: str) -> bool:
        await asyncio.sleep(0)  # members that were removed in one batch share a check
        del self._flow_checks[flow_id]
        return await self.purge_flow(flow_id)

    async def _purge_rows(self, execution: str, default: int | None, flows: set[str]) -> bool:
        gone = await self._purged(execution, None, default, flows)
        if isinstance(gone, bool):
            return gone
        named: list[str] = []
        where, order = (Where("execution_id", "=", execution),), ("execution_id", "waitpoint_id")
        while True:
            after = (execution, named[-1]) if named else None
            found = await self.runtime.scan(Scan(Waitpoint, where, order, after, WAITPOINTS_PAGE))
            named += [one.waitpoint_id for one in found]
            if len(found) < WAITPOINTS_PAGE:
                break
        return await self._purged(execution, named, default, flows) is True

    async def _purged(
        self, execution_id: str, waitpoint_ids: list[str] | None, default_ms: int | None, flows: set[str]
    ) -> bool | retention.NeedsWaitpoints:
        """Whether it was removed; `flows` gets the flow that it was a member of."""

        def decide(rows: Rows, now: int) -> Decision[bool | retention.NeedsWaitpoints]:
            row = first(rows[0])
            if row is not None and row.flow_id is not None:
                flows.add(row.flow_id)
            others = [one for found in rows[1:] for one in found]
            return retention.purge(row, now, waitpoint_ids, default_ms, others)

        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution_id,)),), decide, load_more=self._kept_for
        )

    async def _kept_for(self, rows: Rows) -> Rows:
        """Those that may still need a loaded execution; of very many, as many as it takes to find one that does."""
        row = first(rows[0])
        if row is None:
            return []
        names = retention.retained_for(row)
        named = (await self.runtime.load([Read(Execution, (one,)) for one in names])).rows if names else []
        if not retention.is_retained_for_many(row) or any(
            one and retention.may_still_need(one[0], row) for one in named
        ):
            return named
        after = None
        where = (Where("upstream_execution_id", "=", row.execution_id),)
        while True:
            edges = await self.runtime.scan(Scan(Edge, where, ("upstream_execution_id", "edge_id"), after, EDGES_PAGE))
            found = (await self.runtime.load([Read(Execution, (one.downstream_execution_id,)) for one in edges])).rows
            needing = [one for one in found if one and retention.may_still_need(one[0], row)]
            if needing or len(edges) < EDGES_PAGE:
                return needing
            after = (row.execution_id, edges[-1].edge_id)
