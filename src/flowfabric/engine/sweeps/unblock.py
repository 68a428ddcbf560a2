"""UnblockSweep: unblocks executions whose unblocking was lost.

An operation that frees capacity unblocks the executions that wait for it. If that is lost (a process died, or a window
opened with time), this sweep finds executions that nothing blocks any more. It scans blocked executions by what they
are blocked on. Of a policy without capacity it reads one page, then takes the next policy; each pass begins where
the last one ended.
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
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.states import BlockingReason, LifecyclePhase
from flowfabric.rules.limits.capacity import Capacity
from flowfabric.rules.scheduling import workers
from flowfabric.rules.scheduling.queue import ASLEEP_ON_PREFIX, BLOCKED_ON_PREFIX
from flowfabric.stores.queries import Scan, Where

ORDER = ("blocked_on", "rank", "execution_id")
LAST_POSITION = 2**63 - 1  # no `rank` is greater


class UnblockSweep:
    """The passes of one engine over blocked executions."""

    def __init__(self, unblocker: Unblocker, budget_suspender: BudgetSuspender, routes: WorkerRoutes) -> None:
        self.runtime = unblocker.runtime
        self.unblocker = unblocker
        self.budget_suspender = budget_suspender
        self.routes = routes
        self._cursors: dict[str, tuple[Any, ...] | None] = {}

    async def run(self, batch: int, choice: SweepFilter) -> SweepResult:
        """Make one pass over each kind of blocked executions."""
        unblocked = failed = 0
        for prefix in (*BLOCKED_ON_PREFIX.values(), ASLEEP_ON_PREFIX):
            done = await self._scan_blocked(prefix, batch, choice)
            unblocked, failed = unblocked + done.processed, failed + done.errors
        return SweepResult(unblocked, failed)

    async def _scan_blocked(self, prefix: str, batch: int, choice: SweepFilter) -> SweepResult:
        capacity, live = Capacity(), LiveWorkers(self.routes)
        cursor = self._cursors.get(prefix)
        scanned = unblocked = failed = 0
        while scanned < batch:
            where = (Where("blocked_on", "starts", prefix),)
            scan = Scan(Execution, where, ORDER, cursor, PAGE_SIZE, partial=True)
            page: list[Execution] = await self.runtime.scan(scan)
            for blocked_on, group in groupby(page, key=lambda row: row.blocked_on or ""):
                rows = [row for row in group if _is_blocked(row, prefix) and choice.accepts(row)]
                try:
                    unblocked += await self._unblock(prefix, rows, capacity, live)
                except errors.FabricError:
                    failed += 1  # an unreadable row stays blocked
                last = page[-1]
                full = capacity.is_list_full(blocked_on)
                cursor = (blocked_on, LAST_POSITION) if full else (blocked_on, last.rank, last.execution_id)
            scanned += len(page)
            if len(page) < PAGE_SIZE:
                cursor = None
                break
        self._cursors[prefix] = cursor
        return SweepResult(unblocked, failed + len(capacity.unreadable))

    async def _unblock(self, prefix: str, rows: list[Execution], capacity: Capacity, live: LiveWorkers) -> int:
        if not rows:
            return 0
        if prefix == ASLEEP_ON_PREFIX:
            return await self.budget_suspender.resume_budget_suspended(rows)
        if prefix != BLOCKED_ON_PREFIX[BlockingReason.WAITING_FOR_CAPABLE_WORKER]:
            return await self.unblocker.unblock_rows(rows, capacity)
        unblocked = 0
        for row in rows:
            if await live.has_capable_worker(row):
                unblocked += await self.unblocker.unblock_row(row.execution_id, row.blocking_reason)
        return unblocked


def _is_blocked(row: Execution, prefix: str) -> bool:
    """Return whether an execution is still blocked for the reason that its index entry names."""
    if prefix == ASLEEP_ON_PREFIX:
        return row.lifecycle_phase is LifecyclePhase.SUSPENDED
    return BLOCKED_ON_PREFIX.get(row.blocking_reason) == prefix


class LiveWorkers:
    """The live workers of each namespace, loaded once per pass."""

    def __init__(self, routes: WorkerRoutes) -> None:
        self._routes = routes
        self._workers: dict[str, list[RegisteredWorker] | None] = {}

    async def has_capable_worker(self, row: Execution) -> bool:
        """Return whether a worker can run this; True if that is unknown, because a claim would block it again."""
        if row.namespace not in self._workers:
            try:
                self._workers[row.namespace] = await self._routes.list_live_workers(row.namespace)
            except errors.StoreUnavailable:
                self._workers[row.namespace] = None
        known = self._workers[row.namespace]
        if known is None or not row.required_capabilities:
            return True
        return any(workers.serves(worker, row.lane_id, row.required_capabilities) for worker in known)
