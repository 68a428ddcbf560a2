"""Worker routes: which executions the registered workers can run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.states import BlockingReason
from flowfabric.rules.scheduling import capabilities as capability_rules
from flowfabric.rules.scheduling import queue as queue_rules
from flowfabric.rules.scheduling import workers
from flowfabric.stores.queries import Scan, Where

LiveWorkers = dict[str, list[RegisteredWorker]]  # by namespace, as one call has loaded them
NO_WORKER = "no connected worker satisfies required_capabilities"


class WorkerRoutes:
    """Blocks executions that no live worker can run, and unblocks them when one registers."""

    def __init__(self, runtime: Runtime, unblocker: Unblocker) -> None:
        self.runtime = runtime
        self.unblocker = unblocker

    async def list_live_workers(self, namespace: str) -> list[RegisteredWorker]:
        """Return all live workers of a namespace."""
        found: list[RegisteredWorker] = []
        after: tuple[str] | None = None
        while True:
            rows = await self.live_workers(namespace, after, PAGE_SIZE)
            found += rows
            if len(rows) < PAGE_SIZE:
                return found
            after = (rows[-1].worker_instance_id,)

    async def remove_expired(self, row: RegisteredWorker) -> bool:
        """Remove a registration if it has expired."""
        reads = ReadSet()
        current = reads.one(RegisteredWorker, row.namespace, row.worker_instance_id)
        return await self.runtime.decide_and_commit(reads, lambda rows, now: workers.remove_expired(current(rows), now))

    async def block_if_unserved(self, row: Execution, live: LiveWorkers) -> None:
        """Block an execution that no live worker can run; unblock it if one registers meanwhile."""
        if row.namespace not in live:
            live[row.namespace] = await self.list_live_workers(row.namespace)
        if _has_route(row, live[row.namespace]):
            return
        if not await self.unblocker.block_row(row, BlockingReason.WAITING_FOR_CAPABLE_WORKER, NO_WORKER):
            return
        if _has_route(row, await self.list_live_workers(row.namespace)):
            await self.unblocker.unblock_row(row.execution_id, BlockingReason.WAITING_FOR_CAPABLE_WORKER)

    async def open_route(self, namespace: str, lane_id: str, offered: frozenset[str]) -> None:
        """Unblock executions of a lane that wait for a worker with these capabilities."""
        covered = {
            queue.required
            for queue in await self.runtime.store.queues(lane_id)
            if queue.required and capability_rules.covers(queue.required, offered)
        }
        blocked_on = queue_rules.blocked_on_key(BlockingReason.WAITING_FOR_CAPABLE_WORKER, lane_id)
        waits = (Where("blocked_on", "=", blocked_on), Where("namespace", "=", namespace))
        await self._unblock_all((*waits, Where("required_capabilities", "unset")))
        if covered:
            await self._unblock_all((*waits, Where("required_capabilities", "in", tuple(sorted(covered)))))

    async def _unblock_all(self, where: tuple[Where, ...]) -> None:
        after: tuple[int, str] | None = None
        while True:
            rows: list[Execution] = await self.runtime.store.scan(
                Scan(Execution, where, ("rank", "execution_id"), after, PAGE_SIZE)
            )
            await asyncio.gather(*(self.unblocker.unblock_row(row.execution_id, row.blocking_reason) for row in rows))
            if len(rows) < PAGE_SIZE:
                return
            after = rows[-1].rank, rows[-1].execution_id

    async def live_workers(self, namespace: str, after: tuple[str] | None, limit: int) -> list[RegisteredWorker]:
        """Return a page of the live workers of a namespace."""
        now = await self.runtime.store.ping()
        where = (Where("namespace", "=", namespace), Where("lapses_at", ">", now))
        return await self.runtime.store.scan(Scan(RegisteredWorker, where, ("worker_instance_id",), after, limit))


def _has_route(row: Execution, live: Iterable[RegisteredWorker]) -> bool:
    """True if one of these workers serves the lane and has all required capabilities."""
    return any(workers.serves(worker, row.lane_id, row.required_capabilities) for worker in live)
