"""The sweeps of budgets, quotas, workers, messages and expiring rows."""

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
from flowfabric.stores.catalog import key_of

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine


def limit_sweeps(engine: Engine, unblocking: UnblockSweep, chosen: Filter | None = None) -> tuple[Sweep, ...]:
    """Return these sweeps; `chosen` restricts those of executions."""
    choice = SweepFilter.of(engine.runtime.settings.sweeps, chosen)

    async def reset(row: Budget) -> bool:
        return await engine.unblocker.change_budget(_owned(row), usage.reset_if_due) is not None

    async def expire(row: Budget) -> bool:
        return await engine.unblocker.change_budget(_owned(row), reservation.expire_reservations)

    async def delete(row: msgspec.Struct) -> bool:
        # A root is deleted only if it is unchanged. The key of any other row holds an instant, so a newer row stays.
        key = key_of(row)
        guards = (Guard(type(row), key, row.revision),) if isinstance(row, IdempotencyKey) else ()
        change = Change(guards=guards, writes=(Delete(type(row), key),), id=engine.runtime.minter.change_id())
        return await engine.runtime.commit_queue.add(change) is not None

    def each_partition(
        count: int, reconcile: Callable[[int], Awaitable[Any]]
    ) -> Callable[[int], Awaitable[SweepResult]]:
        async def run(_: int) -> SweepResult:
            results = [await reconcile(partition) for partition in range(count)]
            return SweepResult(sum(done.processed for done in results), sum(done.errors for done in results))

        return run

    return (
        Sweep("budget_reset", "next_reset_at", reset, row=Budget),
        Sweep("budget_reservations", "lapse_at", expire, row=Budget),
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
        Sweep("idempotency_keys", "expires_at", delete, row=IdempotencyKey),
        Sweep("usage_keys", "expires_at", delete, row=UsageKey),
        Sweep("worker_events", "expires_at", delete, row=WorkerEvent),
    )


def _owned(row: Budget) -> NamespacedId:
    return NamespacedId(row.namespace, row.budget_id)
