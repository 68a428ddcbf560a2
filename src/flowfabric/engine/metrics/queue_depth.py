"""Gauges: waiting, active and suspended executions and live workers of each lane.

They are counted through indexes, up to a bound, and at most every few seconds however often they are scraped. A gauge
that equals its bound means at least that many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.deployment import LaneNearCeiling, ServerReport, SnapshotHolder
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import CancelBacklog, EdgeGroup
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.suspension import Suspension
from flowfabric.rules.scheduling import queue_depth
from flowfabric.rules.scheduling.lane_spread import lanes_near_ceiling
from flowfabric.rules.scheduling.queue import HELD_PREFIX
from flowfabric.rules.scheduling.queue_depth import GROUP_BY_COLUMNS, CountedIndex, LaneLevels
from flowfabric.stores.port import SupportsServerReport, SupportsSnapshotHolders
from flowfabric.stores.queries import GroupedCount, Scan, Where

MAX_GAUGE_AGE_S = 5.0
MAX_COUNTED = 50_000  # executions per index
MAX_SHOWN = 2_000  # executions per index that a page counts; each costs half a microsecond
MIN_COUNTED_PER_QUEUE = 1_000
MAX_WORKERS = 10_000
MAX_FLOWS = 10_000
MAX_LANES = 1000
MAX_HELD = 10_000
CANCEL_BACKLOG_METRIC = "ff_cancel_backlog_depth"
HELD_METRIC = "ff_held_runs"


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
            counts, _ = await self._counts(MAX_COUNTED)
            workers = await self._live_workers(await self.runtime.store.ping())
            lanes = await self.runtime.store.lanes(None, self.runtime.metrics.max_lane_labels)
            backlog = await self.runtime.store.scan(Scan(CancelBacklog, (), ("flow_id",), limit=MAX_FLOWS))
            for (name, lane, state), level in queue_depth.queue_depths(counts, workers, lanes).items():
                labels = {"lane": self.runtime.metrics.lane_label(lane)} | ({} if state is None else {"state": state})
                self.runtime.metrics.add_to_gauge(name, level, **labels)
            self.runtime.metrics.set_gauge(CANCEL_BACKLOG_METRIC, len(backlog))
            for task, level in (await self.count_held()).most_common():
                self.runtime.metrics.add_to_gauge(HELD_METRIC, level, task=self.runtime.metrics.task_label(task))
            self._refreshed_at = clock()

    async def count_held(self, namespaces: Sequence[str] | None = None) -> Counter[str]:
        """Count the executions that wait for other code, by task; all of them together up to MAX_HELD."""
        where: tuple[Where, ...] = (Where("blocked_on", "starts", HELD_PREFIX),)
        if namespaces is not None:
            where += (Where("namespace", "in", tuple(namespaces)),)
        order = ("blocked_on", "rank", "execution_id")
        rows = await self.runtime.scan(Scan(Execution, where, order, limit=MAX_HELD))
        return Counter((row.blocked_on or "").removeprefix(HELD_PREFIX) for row in rows)

    async def read_lanes(self, most: int = MAX_COUNTED) -> tuple[int, list[LaneLevels]]:
        """Return the store's time and the levels of all lanes, at most MAX_LANES; nothing is cached.

        At most `most` executions of each index are counted.
        """
        store = self.runtime.store
        now = await self.runtime.retry_while_unavailable(store.ping)
        lanes = await store.lanes(None, MAX_LANES)
        queues = tuple(await store.queues())
        heads: list[Execution] = []
        if queues:
            first = Scan(Execution, (Where("line", "in", queues),), ("rank", "execution_id"), limit=1, limit_by="line")
            heads = await store.scan(first)
        (counts, bounds), workers = await self._counts(most), await self._live_workers(now)
        return now, queue_depth.lane_levels(counts, workers, lanes, heads, bounds)

    async def _counts(self, most: int) -> tuple[dict[CountedIndex, Any], dict[CountedIndex, int]]:
        queries = await self._grouped_counts(most)
        counts = {index: await self.runtime.store.count_grouped(query) for index, query in queries.items()}
        return counts, {index: query.limit for index, query in queries.items()}

    async def _live_workers(self, now: int) -> list[RegisteredWorker]:
        live = (Where("lapses_at", ">", now),)
        return await self.runtime.store.scan(Scan(RegisteredWorker, live, ("lapses_at",), limit=MAX_WORKERS))

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

    async def lanes_near_ceiling(self, report: ServerReport, spreads: Mapping[str, int]) -> list[LaneNearCeiling]:
        """Return the lanes that have most of the work of a busy server."""
        _, levels = await self.read_lanes()
        unfinished = {lane.lane_id: sum(lane.states.values()) for lane in levels}
        return lanes_near_ceiling(report.nodes, unfinished, spreads, self.runtime.partitions)

    async def _grouped_counts(self, most: int) -> dict[CountedIndex, GroupedCount]:
        queues: list[QueueKey] = await self.runtime.store.queues()
        per_queue = max(MIN_COUNTED_PER_QUEUE, most // max(1, len(queues)))
        return {
            CountedIndex.QUEUE: GroupedCount(Execution, "line", GROUP_BY_COLUMNS, per_queue, values=tuple(queues)),
            CountedIndex.DELAY: GroupedCount(Execution, "delay_until", GROUP_BY_COLUMNS, most),
            CountedIndex.LIMIT: GroupedCount(Execution, "blocked_on", GROUP_BY_COLUMNS, most),
            CountedIndex.JOIN: GroupedCount(
                EdgeGroup, "waiting_since", GROUP_BY_COLUMNS, most, "downstream_execution_id"
            ),
            CountedIndex.LEASE: GroupedCount(Execution, "lease_expires_at", GROUP_BY_COLUMNS, most),
            CountedIndex.SUSPENSION: GroupedCount(Suspension, "due_at", GROUP_BY_COLUMNS, most),
        }
