"""Worker routes: which executions the registered workers can run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.states import BlockingReason
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.scheduling import capabilities as capability_rules
from flowfabric.rules.scheduling import queue, workers
from flowfabric.stores.queries import Read, Scan, Where

LiveWorkers = dict[str, list[RegisteredWorker]]  # by namespace, as one call has seen them
NO_WORKER = "no connected worker satisfies required_capabilities"


class WorkerRoutes:
    """Blocks executions that no live worker can run, and unblocks them when one registers."""

    def __init__(self, runtime: Runtime, unblocker: Unblocker) -> None:
        self.runtime = runtime
        self.unblocker = unblocker

    async def list_live_workers(self, namespace: str) -> list[RegisteredWorker]:
        """All live workers of a namespace."""
        found: list[RegisteredWorker] = []
        after: tuple[str] | None = None
        while True:
            rows = await self.live_workers(namespace, after, PAGE_SIZE)
            found += rows
            if len(rows) < PAGE_SIZE:
                return found
            after = (rows[-1].worker_instance_id,)

    async def remove_expired(self, row: RegisteredWorker) -> bool:
        """Remove a registration that expired."""
        return await self.runtime.decide_and_commit(
            (Read(RegisteredWorker, (row.namespace, row.worker_instance_id)),),
            lambda rows, now: workers.remove_expired(rows[0][0] if rows[0] else None, now),
        )

    async def block_if_unserved(self, row: Execution, live: LiveWorkers) -> None:
        """Say of an execution that nobody can run it, unless somebody can or comes meanwhile."""
        if row.namespace not in live:
            live[row.namespace] = await self.list_live_workers(row.namespace)
        if _is_open(row, live[row.namespace]):
            return
        if not await self.unblocker.block_row(row, BlockingReason.WAITING_FOR_CAPABLE_WORKER, NO_WORKER):
            return
        if _is_open(row, await self.list_live_workers(row.namespace)):
            await self.unblocker.unblock_row(row.execution_id, BlockingReason.WAITING_FOR_CAPABLE_WORKER)

    async def open_route(self, namespace: str, lane_id: str, offered: frozenset[str]) -> None:
        """Set everything free that waits for a worker like this one; what requires nothing waits for any."""
        covered = {
            line.required
            for line in await self.runtime.store.queues(lane_id)
            if line.required and capability_rules.covers(line.required, offered)
        }
        waits = (
            Where("blocked_on", "=", queue.blocked_on_key(BlockingReason.WAITING_FOR_CAPABLE_WORKER, lane_id)),
            Where("namespace", "=", namespace),
        )
        await self._let_all_go((*waits, Where("required_capabilities", "unset")))
        if covered:
            await self._let_all_go((*waits, Where("required_capabilities", "in", tuple(sorted(covered)))))

    async def _let_all_go(self, where: tuple[Where, ...]) -> None:
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
        now = await self.runtime.store.ping()
        where = (Where("namespace", "=", namespace), Where("lapses_at", ">", now))
        return await self.runtime.store.scan(Scan(RegisteredWorker, where, ("worker_instance_id",), after, limit))


def _is_open(row: Execution, live: Iterable[RegisteredWorker]) -> bool:
    """Whether one of these workers serves the lane with all that is required."""
    return any(workers.serves(worker, row.lane_id, row.required_capabilities) for worker in live)
