"""Gauges: waiting, active and suspended executions and live workers of each lane.

They are counted through indexes, up to a bound, and at most every few seconds however often they are scraped. A gauge
that equals its bound means at least that many.
"""

from __future__ import annotations

import asyncio

from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.deployment import ServerReport, SnapshotHolder
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import CancelBacklog, EdgeGroup
from flowfabric.model.suspension import Suspension
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.scheduling import queue_depth
from flowfabric.rules.scheduling.queue_depth import GROUP_BY_COLUMNS, CountedIndex
from flowfabric.stores.port import SupportsServerReport, SupportsSnapshotHolders
from flowfabric.stores.queries import GroupedCount, Scan, Where

MAX_GAUGE_AGE_S = 5.0
MAX_COUNTED = 50_000  # executions per index
MIN_COUNTED_PER_QUEUE = 1_000
MAX_WORKERS = 10_000
MAX_FLOWS = 10_000
CANCEL_BACKLOG_METRIC = "ff_cancel_backlog_depth"


class GaugeReader:
    """Reads the gauges from the store."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._refresh_lock = asyncio.Lock()
        self._refreshed_at: float | None = None

    async def refresh_gauges(self, *, max_age_s: float = MAX_GAUGE_AGE_S) -> None:
        """Read the gauges again if they are older than this. If the store is unavailable, no gauge is exposed."""
        async with self._refresh_lock:  # concurrent callers share one read
            clock = asyncio.get_running_loop().time
            if self._refreshed_at is not None and clock() - self._refreshed_at < max_age_s:
                return
            self.runtime.metrics.gauges.clear()
            counts = {
                index: await self.runtime.store.count_grouped(query)
                for index, query in (await self._grouped_counts()).items()
            }
            live = (Where("lapses_at", ">", await self.runtime.store.ping()),)
            workers = await self.runtime.store.scan(Scan(RegisteredWorker, live, ("lapses_at",), limit=MAX_WORKERS))
            lanes = await self.runtime.store.lanes(None, self.runtime.metrics.max_lane_labels)
            backlog = await self.runtime.store.scan(Scan(CancelBacklog, (), ("flow_id",), limit=MAX_FLOWS))
            for (name, lane, state), level in queue_depth.queue_depths(counts, workers, lanes).items():
                labels = {"lane": self.runtime.metrics.lane_label(lane)} | ({} if state is None else {"state": state})
                self.runtime.metrics.add_to_gauge(name, level, **labels)
            self.runtime.metrics.set_gauge(CANCEL_BACKLOG_METRIC, len(backlog))
            self._refreshed_at = clock()

    async def executions_without_queue(self, limit: int) -> list[str]:
        """Return executions that no claim finds because their ready queue is missing from the store."""
        return await self.runtime.retry_while_unavailable(
            lambda: self.runtime.store.executions_in_missing_queues(limit)
        )

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder] | None:
        """Return the snapshots that keep the store from removing dead rows, oldest first; None if it has no such."""
        store = self.runtime.store
        if not isinstance(store, SupportsSnapshotHolders):
            return None
        return await self.runtime.retry_while_unavailable(lambda: store.snapshot_holders(limit))

    async def server_report(self) -> ServerReport | None:
        """Return what acknowledged writes survive; None if that does not depend on settings of a server."""
        store = self.runtime.store
        if not isinstance(store, SupportsServerReport):
            return None
        return await self.runtime.retry_while_unavailable(lambda: store.server_report())

    async def _grouped_counts(self) -> dict[CountedIndex, GroupedCount]:
        queues: list[QueueKey] = await self.runtime.store.queues()
        per_queue = max(MIN_COUNTED_PER_QUEUE, MAX_COUNTED // max(1, len(queues)))
        return {
            CountedIndex.QUEUE: GroupedCount(Execution, "line", GROUP_BY_COLUMNS, per_queue, values=tuple(queues)),
            CountedIndex.DELAY: GroupedCount(Execution, "delay_until", GROUP_BY_COLUMNS, MAX_COUNTED),
            CountedIndex.LIMIT: GroupedCount(Execution, "blocked_on", GROUP_BY_COLUMNS, MAX_COUNTED),
            CountedIndex.JOIN: GroupedCount(
                EdgeGroup, "waiting_since", GROUP_BY_COLUMNS, MAX_COUNTED, "downstream_execution_id"
            ),
            CountedIndex.LEASE: GroupedCount(Execution, "lease_expires_at", GROUP_BY_COLUMNS, MAX_COUNTED),
            CountedIndex.SUSPENSION: GroupedCount(Suspension, "due_at", GROUP_BY_COLUMNS, MAX_COUNTED),
        }
