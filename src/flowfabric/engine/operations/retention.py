"""Retention on request: what the sweep does for all, an operator can do for one lane of one partition."""

from __future__ import annotations

import asyncio
import logging

from flowfabric.engine.operations.executions import ExecutionOperations
from flowfabric.engine.validation import execution as validate
from flowfabric.model.execution import Execution
from flowfabric.rules import retention, validation
from flowfabric.rules.feed import Filter
from flowfabric.stores.queries import Scan, Where

logger = logging.getLogger("flowfabric.retention")

DEFAULT_BATCH = 20
PAGE_SIZE = 500  # how many are looked at in one trip: not all that stand here are over
MAX_BATCH = 10_000


class RetentionOperations(ExecutionOperations):
    """Removes what has been kept long enough."""

    async def trim_retention(
        self,
        partition: int,
        lane_id: str,
        *,
        default_retention_ms: int | None = None,
        batch: int = DEFAULT_BATCH,
        chosen: Filter | None = None,
    ) -> int:
        """Purge up to `batch` finished executions of a lane and partition, oldest end first; how many went.

        The default is for those whose policy does not say how long they are kept; without one, what was the default
        when they ended. One that cannot be purged does not keep the others.
        """
        place = validate.validate_flow_partition(partition, self.runtime.partitions)
        default = validate.optional_duration("default_retention_ms", default_retention_ms)
        wanted = validation.integer("batch", batch, least=0, most=MAX_BATCH)
        accepted = validate.validate_filter(chosen)
        where = (
            Where("partition", "=", place),
            Where("lane_id", "=", validate.validate_lane_id(lane_id)),
            Where("purge_at", "set"),
        )
        purged, after, now = 0, None, await self.runtime.retry_while_unavailable(self.runtime.store.ping)
        while purged < wanted:
            scan = Scan(Execution, where, ("purge_at", "execution_id"), after, PAGE_SIZE)
            rows: list[Execution] = await self.runtime.scan(scan)
            over = [row for row in rows if accepted.accepts(row) and retention.is_retention_over(row, now, default)]
            while over and purged < wanted:
                due, over = over[: wanted - purged], over[wanted - purged :]
                purged += sum(await asyncio.gather(*(self._purge(row.execution_id, default) for row in due)))
            if len(rows) < PAGE_SIZE:
                break
            after = rows[-1].purge_at, rows[-1].execution_id
        return purged

    async def _purge(self, execution_id: str, default_ms: int | None) -> bool:
        try:
            return await self.purge_execution(execution_id, default_retention_ms=default_ms)
        except Exception:  # whatever it is, the others can go
            logger.exception("%s could not be purged, and is left", execution_id)
            return False
