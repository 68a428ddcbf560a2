"""The unblock sweep: a net under the wakes.

Whatever makes room wakes what waits for it. Should that get lost (a process died in between, a window opened by the
passing of time), this pass finds what nothing holds up any more. It goes through what is blocked by what it is blocked
on; of a policy without room it looks at a page and then goes on to the next one, and each pass begins where the last
one ended.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from flowfabric import errors
from flowfabric.engine.claiming.worker_routes import WorkerRoutes
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.sweeps.sweeper import SweepFilter, SweepResult
from flowfabric.model.execution import Execution
from flowfabric.model.states import BlockingReason, LifecyclePhase
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.limits.capacity import Capacity
from flowfabric.rules.scheduling import workers
from flowfabric.rules.scheduling.queue import ASLEEP_ON_PREFIX, BLOCKED_ON_PREFIX
from flowfabric.stores.queries import Scan, Where

ORDER = ("blocked_on", "rank", "execution_id")
LAST_POSITION = 2**63 - 1  # no rank comes after it


class UnblockSweep:
    """The passes of one engine over what is blocked."""

    def __init__(self, unblocker: Unblocker, budget_suspender: BudgetSuspender, routes: WorkerRoutes) -> None:
        self.runtime = unblocker.runtime
        self.unblocker = unblocker
        self.budget_suspender = budget_suspender
        self.routes = routes
        self._places: dict[str, tuple[Any, ...] | None] = {}

    async def run(self, batch: int, choice: SweepFilter) -> SweepResult:
        """One pass over each kind of block."""
        freed = failed = 0
        for start in (*BLOCKED_ON_PREFIX.values(), ASLEEP_ON_PREFIX):
            done = await self._pass_over(start, batch, choice)
            freed, failed = freed + done.processed, failed + done.errors
        return SweepResult(freed, failed)

    async def _pass_over(self, start: str, batch: int, choice: SweepFilter) -> SweepResult:
        room, live = Capacity(), LiveWorkers(self.routes)
        place = self._places.get(start)
        seen = freed = failed = 0
        while seen < batch:
            where = (Where("blocked_on", "starts", start),)
            scan = Scan(Execution, where, ORDER, place, PAGE_SIZE, partial=True)
            page: list[Execution] = await self.runtime.scan(scan)
            for on, group in groupby(page, key=lambda row: row.blocked_on or ""):
                rows = [row for row in group if _waits(row, start) and choice.accepts(row)]
                try:
                    freed += await self._free(start, rows, room, live)
                except errors.FabricError:
                    failed += 1  # what cannot be read stays blocked
                place = (on, LAST_POSITION) if room.is_list_full(on) else (on, page[-1].rank, page[-1].execution_id)
            seen += len(page)
            if len(page) < PAGE_SIZE:
                place = None
                break
        self._places[start] = place
        return SweepResult(freed, failed + len(room.unreadable))

    async def _free(self, start: str, rows: list[Execution], room: Capacity, live: LiveWorkers) -> int:
        if not rows:
            return 0
        if start == ASLEEP_ON_PREFIX:
            return await self.budget_suspender.resume_budget_suspended(rows)
        if start != BLOCKED_ON_PREFIX[BlockingReason.WAITING_FOR_CAPABLE_WORKER]:
            return await self.unblocker.unblock_rows(rows, room)
        freed = 0
        for row in rows:
            if await live.has_capable_worker(row):
                freed += await self.unblocker.unblock_row(row.execution_id, row.blocking_reason)
        return freed


def _waits(row: Execution, start: str) -> bool:
    """Whether an execution still waits for what its place in the lists says."""
    if start == ASLEEP_ON_PREFIX:
        return row.lifecycle_phase is LifecyclePhase.SUSPENDED
    return BLOCKED_ON_PREFIX.get(row.blocking_reason) == start


class LiveWorkers:
    """The live workers of each namespace, as seen in one pass."""

    def __init__(self, routes: WorkerRoutes) -> None:
        self._routes = routes
        self._workers: dict[str, list[RegisteredWorker] | None] = {}

    async def has_capable_worker(self, row: Execution) -> bool:
        """Whether somebody can run this; when that cannot be found out it may be tried, and will be blocked again."""
        if row.namespace not in self._workers:
            try:
                self._workers[row.namespace] = await self._routes.list_live_workers(row.namespace)
            except errors.StoreUnavailable:
                self._workers[row.namespace] = None
        known = self._workers[row.namespace]
        if known is None or not row.required_capabilities:
            return True
        return any(workers.serves(worker, row.lane_id, row.required_capabilities) for worker in known)
