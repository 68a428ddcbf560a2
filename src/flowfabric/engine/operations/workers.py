"""The worker registry, and what the capabilities of live workers mean for work that nobody could run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from flowfabric import errors
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.validation import execution as validate
from flowfabric.model.execution import Execution
from flowfabric.model.states import BlockingReason
from flowfabric.model.worker import (
    MarkedDead,
    NotRegistered,
    RegisteredWorker,
    WorkerEvent,
    WorkerPage,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.rules import validation
from flowfabric.rules.scheduling import capabilities as capability_rules
from flowfabric.rules.scheduling import queue, workers
from flowfabric.rules.scheduling.workers import Registration
from flowfabric.stores.queries import Read, Scan, Where

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
LiveWorkers = dict[str, list[RegisteredWorker]]  # by namespace, as one call has seen them
NO_WORKER = "no connected worker satisfies required_capabilities"


class WorkerOperations(Unblocker):
    """Who is there to work."""

    async def register_worker(
        self,
        *,
        namespace: str = "default",
        worker_instance_id: str,
        worker_id: str,
        lanes: Collection[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int,
    ) -> WorkerRegistered | WorkerRefreshed:
        """Enter the registry; work that waited for these capabilities is claimable again before this answers."""
        offered = validate.validate_capabilities(capabilities)
        served = frozenset(validate.validate_lane_id(lane) for lane in validate.validate_iterable("lanes", lanes))
        if not served:
            raise errors.InvalidInput("lanes: empty")
        ask = Registration(
            _namespace(namespace),
            validate.validate_instance_id(worker_instance_id),
            validate.validate_worker_id(worker_id),
            served,
            offered,
            validation.duration_ms("liveness_ttl_ms", liveness_ttl_ms),
        )
        answer = await self.runtime.decide_and_commit(
            _wants(ask.namespace, ask.worker_instance_id),
            lambda rows, now: workers.register(rows[0][0] if rows[0] else None, ask, now),
        )
        for lane in sorted(ask.lanes):
            await self._open_route(ask.namespace, lane, offered)
        return answer

    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered:
        """Stay in the registry for another while; a record that lapsed is not revived."""
        instance = validate.validate_instance_id(worker_instance_id)
        return await self.runtime.decide_and_commit(
            _wants(_namespace(namespace), instance),
            lambda rows, now: workers.heartbeat(rows[0][0] if rows[0] else None, instance, now),
        )

    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered:
        """Take a worker out of the registry; its leases end by their own time."""
        instance = validate.validate_instance_id(worker_instance_id)
        if refused := workers.check_reason(validation.text("reason", reason)):
            raise refused
        return await self.runtime.decide_and_commit(
            _wants(_namespace(namespace), instance),
            lambda rows, now: workers.mark_dead(rows[0][0] if rows[0] else None, instance, reason, now),
        )

    async def remove_expired_worker(self, row: RegisteredWorker) -> bool:
        """Remove a record that lapsed."""
        return await self.runtime.decide_and_commit(
            _wants(row.namespace, row.worker_instance_id),
            lambda rows, now: workers.remove_expired(rows[0][0] if rows[0] else None, now),
        )

    async def list_workers(
        self, namespace: str | None = None, *, after: str | None = None, limit: int = DEFAULT_PAGE_SIZE
    ) -> WorkerPage:
        """The live workers of a namespace by instance id, strictly after a place."""
        if namespace is None:
            raise errors.Unavailable("list_workers", "of all namespaces")
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE_SIZE)
        if not wanted:
            return WorkerPage([])
        place_after = None if after is None else (validation.text("after", after),)
        rows = await self._live_workers(_namespace(namespace), place_after, wanted + 1)
        entries = [workers.worker_view(row) for row in rows[:wanted]]
        return WorkerPage(entries, entries[-1].worker_instance_id if len(rows) > wanted else None)

    async def list_worker_events(self, namespace: str, worker_instance_id: str) -> list[WorkerEvent]:
        """The log of one instance, oldest first."""
        instance = validate.validate_instance_id(worker_instance_id)
        loaded = await self.runtime.load((Read(WorkerEvent, (_namespace(namespace), instance)),))
        return loaded.rows[0]

    # -- routes ---------------------------------------------------------------------------------------------------

    async def list_live_workers(self, namespace: str) -> list[RegisteredWorker]:
        """All live workers of a namespace."""
        found: list[RegisteredWorker] = []
        after: tuple[str] | None = None
        while True:
            rows = await self._live_workers(namespace, after, PAGE_SIZE)
            found += rows
            if len(rows) < PAGE_SIZE:
                return found
            after = (rows[-1].worker_instance_id,)

    async def block_if_unserved(self, row: Execution, live: LiveWorkers) -> None:
        """Say of an execution that nobody can run it, unless somebody can or comes meanwhile."""
        if row.namespace not in live:
            live[row.namespace] = await self.list_live_workers(row.namespace)
        if _is_open(row, live[row.namespace]):
            return
        if not await self.block_row(row, BlockingReason.WAITING_FOR_CAPABLE_WORKER, NO_WORKER):
            return
        if _is_open(row, await self.list_live_workers(row.namespace)):
            await self.unblock_row(row.execution_id, BlockingReason.WAITING_FOR_CAPABLE_WORKER)

    async def _open_route(self, namespace: str, lane_id: str, offered: frozenset[str]) -> None:
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
            await asyncio.gather(*(self.unblock_row(row.execution_id, row.blocking_reason) for row in rows))
            if len(rows) < PAGE_SIZE:
                return
            after = rows[-1].rank, rows[-1].execution_id

    async def _live_workers(self, namespace: str, after: tuple[str] | None, limit: int) -> list[RegisteredWorker]:
        now = await self.runtime.store.ping()
        where = (Where("namespace", "=", namespace), Where("lapses_at", ">", now))
        return await self.runtime.store.scan(Scan(RegisteredWorker, where, ("worker_instance_id",), after, limit))


def _is_open(row: Execution, live: Iterable[RegisteredWorker]) -> bool:
    """Whether one of these workers serves the lane with all that is required."""
    return any(workers.serves(worker, row.lane_id, row.required_capabilities) for worker in live)


def _namespace(text: str) -> str:
    return validation.text("namespace", text, limit=validation.MAX_NAME_BYTES)


def _wants(namespace: str, worker_instance_id: str) -> tuple[Read, ...]:
    return (Read(RegisteredWorker, (namespace, worker_instance_id)),)
