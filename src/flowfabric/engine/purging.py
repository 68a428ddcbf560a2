"""Purging: the end of what was kept long enough."""

from __future__ import annotations

from flowfabric.engine import intake
from flowfabric.engine.core import Core
from flowfabric.engine.noting import Rows, first
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules import retention
from flowfabric.stores.base import Scan, Want, Where

WAITPOINTS_PAGE = 1000


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
        async def parent(rows: Rows) -> Rows:
            if not rows[0] or rows[0][0].parent_id is None:
                return [[]]
            return (await self.load((Want(Execution, (rows[0][0].parent_id,)),))).rows

        return await self.settle(
            (Want(Execution, (execution_id,)),),
            lambda rows, now: retention.purge(first(rows[0]), now, waitpoint_ids, default_ms, first(rows[1])),
            further=parent,
        )
