"""Purging: the end of what was kept long enough."""

from __future__ import annotations

from flowfabric.engine import intake
from flowfabric.engine.core import Core
from flowfabric.engine.noting import Rows, first
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules import retention
from flowfabric.stores.base import Scan, Want, Where

WAITPOINTS_PAGE = 1000
EDGES_PAGE = 500


class Purging(Core):
    """Removes finished executions, one by one."""

    async def purge_execution(self, execution_id: str, *, default_retention_ms: int | None = None) -> bool:
        """Remove a finished execution whose retention is over, with everything it owns."""
        execution = intake.execution(execution_id)
        default = intake.optional_duration("default_retention_ms", default_retention_ms)
        gone = await self._purged(execution, None, default)
        if isinstance(gone, bool):
            return gone
        named: list[str] = []
        where, order = (Where("execution_id", "=", execution),), ("execution_id", "waitpoint_id")
        while True:
            after = (execution, named[-1]) if named else None
            found = await self.scan(Scan(Waitpoint, where, order, after, WAITPOINTS_PAGE))
            named += [one.waitpoint_id for one in found]
            if len(found) < WAITPOINTS_PAGE:
                break
        return await self._purged(execution, named, default) is True

    async def _purged(
        self, execution_id: str, waitpoint_ids: list[str] | None, default_ms: int | None
    ) -> bool | retention.NeedsWaitpoints:
        return await self.settle(
            (Want(Execution, (execution_id,)),),
            lambda rows, now: retention.purge(
                first(rows[0]), now, waitpoint_ids, default_ms, [one for found in rows[1:] for one in found]
            ),
            further=self._kept_for,
        )

    async def _kept_for(self, rows: Rows) -> Rows:
        """Those that may still need a loaded execution; of very many, as many as it takes to find one that does."""
        row = first(rows[0])
        if row is None:
            return []
        names = retention.kept_for(row)
        named = (await self.load([Want(Execution, (one,)) for one in names])).rows if names else []
        if not retention.is_kept_for_many(row) or any(one and retention.needs(one[0], row) for one in named):
            return named
        after = None
        where = (Where("upstream_execution_id", "=", row.execution_id),)
        while True:
            edges = await self.scan(Scan(Edge, where, ("upstream_execution_id", "edge_id"), after, EDGES_PAGE))
            found = (await self.load([Want(Execution, (one.downstream_execution_id,)) for one in edges])).rows
            needing = [one for one in found if one and retention.needs(one[0], row)]
            if needing or len(edges) < EDGES_PAGE:
                return needing
            after = (row.execution_id, edges[-1].edge_id)
