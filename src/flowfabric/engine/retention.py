"""Retention on request: what the sweep does for all, an operator can do for one lane of one partition."""

from __future__ import annotations

import asyncio

from flowfabric import errors
from flowfabric.engine import intake
from flowfabric.engine.executions import Executions
from flowfabric.model.execution import Execution
from flowfabric.rules import limits, step
from flowfabric.rules.feeds import Filter
from flowfabric.stores.base import Scan, Where

BATCH = 20
MAX_BATCH = 10_000


class Retention(Executions):
    """Removes what has been kept long enough."""

    async def trim_retention(
        self,
        partition: int,
        lane_id: str,
        *,
        default_retention_ms: int = step.DEFAULT_RETENTION_MS,
        batch: int = BATCH,
        chosen: Filter | None = None,
    ) -> int:
        """Purge up to `batch` finished executions of a lane and partition, oldest end first; how many went.

        The default is for those whose policy does not say how long they are kept. One that cannot be purged does not
        keep the others.
        """
        limits.integer("partition", partition, least=0, most=65_535)
        default = limits.duration("default_retention_ms", default_retention_ms, least=0)
        wanted = limits.integer("batch", batch, least=0, most=MAX_BATCH)
        where = (
            Where("partition", "=", partition),
            Where("lane_id", "=", intake.lane(lane_id)),
            Where("purge_at", "set"),
        )
        purged, after = 0, None
        while purged < wanted:
            scan = Scan(Execution, where, ("purge_at", "execution_id"), after, wanted)
            rows: list[Execution] = await self.scan(scan)
            chosen_rows = [row for row in rows if chosen is None or chosen.accepts(row)]
            went = await asyncio.gather(
                *(self._purge(row.execution_id, default) for row in chosen_rows[: wanted - purged])
            )
            purged += sum(went)
            if len(rows) < wanted:
                break
            after = rows[-1].purge_at, rows[-1].execution_id
        return purged

    async def _purge(self, execution_id: str, default_ms: int) -> bool:
        try:
            return await self.purge_execution(execution_id, default_retention_ms=default_ms)
        except errors.FabricError:
            return False
