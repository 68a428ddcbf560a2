"""The sweeps over budgets, quotas, workers, messages and whatever else has a life of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.engine.sweeps.sweeper import Sweep, SweepFilter, SweepResult
from flowfabric.engine.sweeps.unblock import UnblockSweep
from flowfabric.model.budget import Budget, UsageKey
from flowfabric.model.change import Change, Delete, Guard
from flowfabric.model.execution import IdempotencyKey
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.owned_id import NamespacedId
from flowfabric.model.worker import RegisteredWorker, WorkerEvent
from flowfabric.rules.feed import Filter
from flowfabric.rules.limits import reservation, usage
from flowfabric.stores.catalog import TABLE

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine


def limit_sweeps(engine: Engine, unblocking: UnblockSweep, chosen: Filter | None = None) -> tuple[Sweep, ...]:
    """These sweeps, for an engine; `chosen` restricts those over executions."""
    choice = SweepFilter.of(engine.runtime.settings.sweeps, chosen)

    async def reset(row: Budget) -> bool:
        return await engine.unblocker.change_budget(_owned(row), usage.reset_if_due) is not None

    async def lapse(row: Budget) -> bool:
        return await engine.unblocker.change_budget(_owned(row), reservation.expire_reservations)

    def each_partition(
        count: int, reconcile: Callable[[int], Awaitable[Any]]
    ) -> Callable[[int], Awaitable[SweepResult]]:
        async def run(_: int) -> SweepResult:
            done = [await reconcile(partition) for partition in range(count)]
            return SweepResult(sum(one.processed for one in done), sum(one.errors for one in done))

        return run

    return (
        Sweep("budget_reset", "next_reset_at", reset, row=Budget),
        Sweep("budget_reservations", "lapse_at", lapse, row=Budget),
        Sweep(
            "budget_reconciler",
            run_pass=each_partition(engine.runtime.partitions.budget, engine.reconcile_budget_counters),
        ),
        Sweep(
            "quota_reconciler",
            run_pass=each_partition(engine.runtime.partitions.quota, engine.reconcile_quota_counters),
        ),
        Sweep("unblock", run_pass=lambda batch: unblocking.run(batch, choice)),
        Sweep("worker_registry_ttl_sweep", "lapses_at", engine.routes.remove_expired, row=RegisteredWorker),
        Sweep("outbox_relay", "due_at", engine.outbox.redeliver_outbox_message, row=OutboxMessage),
        Sweep("idempotency_keys", "expires_at", _forget(engine), row=IdempotencyKey),
        Sweep("usage_keys", "expires_at", _forget(engine), row=UsageKey),
        Sweep("worker_events", "expires_at", _forget(engine), row=WorkerEvent),
    )


def _owned(row: Budget) -> NamespacedId:
    return NamespacedId(row.namespace, row.budget_id)


def _forget(engine: Engine) -> Callable[[Any], Awaitable[bool]]:
    """Remove a row whose life is over. A root is removed only as it was seen; others are named by their end, too."""

    async def forget(row: msgspec.Struct) -> bool:
        table = TABLE[type(row)]
        key = tuple(getattr(row, name) for name in table.key)
        guards = (Guard(type(row), key, row.revision),) if isinstance(row, IdempotencyKey) else ()
        change = Change(guards=guards, writes=(Delete(type(row), key),), id=engine.runtime.minter.change_id())
        return await engine.runtime.commit_queue.add(change) is not None

    return forget
