"""Levels: how much waits, runs and sleeps in each lane, and how many workers there are.

Read by indexes, within bounds, and at most every few seconds, however often somebody looks. A level that is as high as
the bound is at least that high.
"""

from __future__ import annotations

import asyncio

from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import CancelBacklog, EdgeGroup
from flowfabric.model.suspension import Suspension
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.scheduling import queue_depth
from flowfabric.rules.scheduling.queue_depth import GROUP_BY_COLUMNS, CountedIndex
from flowfabric.stores.port import SupportsSnapshotHolders
from flowfabric.stores.queries import GroupedCount, Scan, Where

MAX_GAUGE_AGE_S = 5.0
MAX_COUNTED = 50_000  # executions of a place
MIN_COUNTED_PER_QUEUE = 1_000
MAX_WORKERS = 10_000
MAX_FLOWS = 10_000
CANCEL_BACKLOG_METRIC = "ff_cancel_backlog_depth"


class GaugeReader:
    """Reads the gauges of queue depth."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._refresh = asyncio.Lock()
        self._refreshed_at: float | None = None

    async def refresh_gauges(self, *, max_age_s: float = MAX_GAUGE_AGE_S) -> None:
        """See to it that the meters show levels that are not older than this; StoreUnavailable: they show none."""
        async with self._refresh:  # whoever comes meanwhile wants the same
            clock = asyncio.get_running_loop().time
            if self._refreshed_at is not None and clock() - self._refreshed_at < max_age_s:
                return
            self.runtime.metrics.gauges.clear()
            stands = {
                place: await self.runtime.store.count_grouped(tally) for place, tally in (await self._tallies()).items()
            }
            live = (Where("lapses_at", ">", await self.runtime.store.ping()),)
            workers = await self.runtime.store.scan(Scan(RegisteredWorker, live, ("lapses_at",), limit=MAX_WORKERS))
            lanes = await self.runtime.store.lanes(None, self.runtime.metrics.max_lane_labels)
            backlog = await self.runtime.store.scan(Scan(CancelBacklog, (), ("flow_id",), limit=MAX_FLOWS))
            for (name, lane, state), level in queue_depth.queue_depths(stands, workers, lanes).items():
                labels = {"lane": self.runtime.metrics.lane_label(lane)} | ({} if state is None else {"state": state})
                self.runtime.metrics.add_to_gauge(name, level, **labels)
            self.runtime.metrics.set_gauge(CANCEL_BACKLOG_METRIC, len(backlog))
            self._refreshed_at = clock()

    async def executions_without_queue(self, limit: int) -> list[str]:
        """The executions that no claim finds, since their ready queue is missing from the store."""
        return await self.runtime.retry_while_unavailable(
            lambda: self.runtime.store.executions_in_missing_queues(limit)
        )

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder] | None:
        """Who keeps the store from removing dead rows, the oldest first; None where nobody can."""
        store = self.runtime.store
        if not isinstance(store, SupportsSnapshotHolders):
            return None
        return await self.runtime.retry_while_unavailable(lambda: store.snapshot_holders(limit))

    async def _tallies(self) -> dict[CountedIndex, GroupedCount]:
        lines: list[QueueKey] = await self.runtime.store.queues()
        of_a_line = max(MIN_COUNTED_PER_QUEUE, MAX_COUNTED // max(1, len(lines)))
        return {
            CountedIndex.QUEUE: GroupedCount(Execution, "line", GROUP_BY_COLUMNS, of_a_line, values=tuple(lines)),
            CountedIndex.DELAY: GroupedCount(Execution, "delay_until", GROUP_BY_COLUMNS, MAX_COUNTED),
            CountedIndex.LIMIT: GroupedCount(Execution, "blocked_on", GROUP_BY_COLUMNS, MAX_COUNTED),
            CountedIndex.JOIN: GroupedCount(
                EdgeGroup, "waiting_since", GROUP_BY_COLUMNS, MAX_COUNTED, "downstream_execution_id"
            ),
            CountedIndex.LEASE: GroupedCount(Execution, "lease_expires_at", GROUP_BY_COLUMNS, MAX_COUNTED),
            CountedIndex.SUSPENSION: GroupedCount(Suspension, "due_at", GROUP_BY_COLUMNS, MAX_COUNTED),
        }
