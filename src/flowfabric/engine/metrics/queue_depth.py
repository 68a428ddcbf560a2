"""Levels: how much waits, runs and sleeps in each lane, and how many workers there are.

Read by indexes, within bounds, and at most every few seconds, however often somebody looks. A level that is as high as
the bound is at least that high.
"""

from __future__ import annotations

import asyncio
from functools import cached_property

from flowfabric.engine.runtime.runtime import Core
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.model.execution import Execution, LineKey
from flowfabric.model.flow import CancelBacklog, EdgeGroup
from flowfabric.model.suspension import Suspension
from flowfabric.model.worker import Worker
from flowfabric.rules.scheduling import queue_depth
from flowfabric.rules.scheduling.queue_depth import BY, Place
from flowfabric.stores.port import NamesSnapshotHolders
from flowfabric.stores.queries import Scan, Tally, Where

FRESH_S = 5.0
MOST_COUNTED = 50_000  # executions of a place
LEAST_OF_A_LINE = 1_000
MOST_WORKERS = 10_000
MOST_FLOWS = 10_000
BACKLOG = "ff_cancel_backlog_depth"


class Levels(Core):
    """What stands where, for those who watch."""

    _levels_read_at: float | None = None

    @cached_property
    def _reading_levels(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def read_levels(self, *, max_age_s: float = FRESH_S) -> None:
        """See to it that the meters show levels that are not older than this; StoreUnavailable: they show none."""
        async with self._reading_levels:  # whoever comes meanwhile wants the same
            clock = asyncio.get_running_loop().time
            if self._levels_read_at is not None and clock() - self._levels_read_at < max_age_s:
                return
            self.meters.levels.clear()
            stands = {place: await self.store.tally(tally) for place, tally in (await self._tallies()).items()}
            live = (Where("lapses_at", ">", await self.store.ping()),)
            workers = await self.store.scan(Scan(Worker, live, ("lapses_at",), limit=MOST_WORKERS))
            lanes = await self.store.lanes(None, self.meters.most_lanes)
            backlog = await self.store.scan(Scan(CancelBacklog, (), ("flow_id",), limit=MOST_FLOWS))
            for (name, lane, state), level in queue_depth.levels(stands, workers, lanes).items():
                labels = {"lane": self.meters.lane(lane)} | ({} if state is None else {"state": state})
                self.meters.rises(name, level, **labels)
            self.meters.stands_at(BACKLOG, len(backlog))
            self._levels_read_at = clock()

    async def executions_without_queue(self, limit: int) -> list[str]:
        """The executions that no claim finds, since their ready queue is missing from the store."""
        return await self.patiently(lambda: self.store.unlisted(limit))

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder] | None:
        """Who keeps the store from removing dead rows, the oldest first; None where nobody can."""
        store = self.store
        if not isinstance(store, NamesSnapshotHolders):
            return None
        return await self.patiently(lambda: store.snapshot_holders(limit))

    async def _tallies(self) -> dict[Place, Tally]:
        lines: list[LineKey] = await self.store.lines()
        of_a_line = max(LEAST_OF_A_LINE, MOST_COUNTED // max(1, len(lines)))
        return {
            Place.LINE: Tally(Execution, "line", BY, of_a_line, each=tuple(lines)),
            Place.DELAY: Tally(Execution, "delay_until", BY, MOST_COUNTED),
            Place.LIMIT: Tally(Execution, "blocked_on", BY, MOST_COUNTED),
            Place.JOIN: Tally(EdgeGroup, "waiting_since", BY, MOST_COUNTED, "downstream_execution_id"),
            Place.LEASE: Tally(Execution, "lease_expires_at", BY, MOST_COUNTED),
            Place.SUSPENSION: Tally(Suspension, "due_at", BY, MOST_COUNTED),
        }
