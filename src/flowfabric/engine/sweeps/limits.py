"""The sweeps over budgets, quotas, workers, messages and whatever else has a life of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from flowfabric.engine.claiming.admitted_claimer import Scheduler
from flowfabric.engine.sweeps.sweeper import Choice, Pass, Sweep
from flowfabric.engine.sweeps.unblock import Unblocking
from flowfabric.model.budget import Budget, UsageKey
from flowfabric.model.change import Change, Delete, Guard
from flowfabric.model.execution import IdempotencyKey
from flowfabric.model.outbox import Message
from flowfabric.model.worker import Worker, WorkerEvent
from flowfabric.rules.feed import Filter
from flowfabric.stores.catalog import TABLE


def admission_sweeps(engine: Scheduler, unblocking: Unblocking, chosen: Filter | None = None) -> tuple[Sweep, ...]:
    """These sweeps, for an engine; `chosen` restricts those over executions."""
    choice = Choice.of(engine.settings.sweeps, chosen)

    async def reset(row: Budget) -> bool:
        return await engine.reset_budget_if_due(row.budget_id, namespace=row.namespace)

    async def lapse(row: Budget) -> bool:
        return await engine.lapse_reservations(row.budget_id, namespace=row.namespace)

    def each_partition(count: int, reconcile: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Pass]]:
        async def run(_: int) -> Pass:
            done = [await reconcile(partition) for partition in range(count)]
            return Pass(sum(one.processed for one in done), sum(one.errors for one in done))

        return run

    return (
        Sweep("budget_reset", "next_reset_at", reset, row=Budget),
        Sweep("budget_reservations", "lapse_at", lapse, row=Budget),
        Sweep("budget_reconciler", whole=each_partition(engine.partitions.budget, engine.reconcile_budget_counters)),
        Sweep("quota_reconciler", whole=each_partition(engine.partitions.quota, engine.reconcile_quota_counters)),
        Sweep("unblock", whole=lambda batch: unblocking.run(batch, choice)),
        Sweep("worker_registry_ttl_sweep", "lapses_at", engine.sweep_worker, row=Worker),
        Sweep("outbox_relay", "due_at", engine.redeliver, row=Message),
        Sweep("idempotency_keys", "expires_at", _forget(engine), row=IdempotencyKey),
        Sweep("usage_keys", "expires_at", _forget(engine), row=UsageKey),
        Sweep("worker_events", "expires_at", _forget(engine), row=WorkerEvent),
    )


def _forget(engine: Scheduler) -> Callable[[Any], Awaitable[bool]]:
    """Remove a row whose life is over. A root is removed only as it was seen; others are named by their end, too."""

    async def forget(row: msgspec.Struct) -> bool:
        table = TABLE[type(row)]
        key = tuple(getattr(row, name) for name in table.key)
        guards = (Guard(type(row), key, row.revision),) if isinstance(row, IdempotencyKey) else ()
        change = Change(guards=guards, writes=(Delete(type(row), key),), id=engine.minter.change_id())
        return await engine.commits.add(change) is not None

    return forget
