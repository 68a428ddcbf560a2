"""The background sweeps in one table: what falls due, and the operation on it.

The interval of a sweep is the field of its name in `settings.Sweeps`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric import errors
from flowfabric.engine.operations.suspensions import decide_on_waitpoint
from flowfabric.engine.sweeps.bulk_operations import BulkWorker
from flowfabric.engine.sweeps.flows import FlowSweeps
from flowfabric.engine.sweeps.sweeper import Sweep, SweepFilter, SweepResult
from flowfabric.engine.sweeps.unblock import UnblockSweep
from flowfabric.model.answers import execution as answers
from flowfabric.model.bulk_operation import BulkOperation
from flowfabric.model.change import Change, Delete
from flowfabric.model.execution import IdempotencyKey
from flowfabric.model.flow import Flow
from flowfabric.model.gate import ChildCancel, ChildCompletion
from flowfabric.model.limits.budget import Budget, UsageKey
from flowfabric.model.limits.quota import QuotaRequest
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.model.scheduling.worker import RegisteredWorker, WorkerEvent
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.feed import Filter
from flowfabric.rules.limits import reservation, usage
from flowfabric.rules.scheduling import queue
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.resume import SuspensionExpiry
from flowfabric.settings import FEED_RETENTION_MS
from flowfabric.stores.catalog import key_of
from flowfabric.stores.queries import Where

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

logger = logging.getLogger("flowfabric.sweeper")

UNTOUCHED = (SuspensionExpiry.NOT_DUE, SuspensionExpiry.NOT_SUSPENDED)


def all_sweeps(
    engine: Engine, flows: FlowSweeps, unblocking: UnblockSweep, chosen: Filter | None = None
) -> tuple[Sweep, ...]:
    """Return all sweeps; `chosen` restricts those that act on executions which no row of the sweep names."""
    choice = SweepFilter.of(engine.runtime.settings.sweeps, chosen)
    partitions = engine.runtime.partitions

    async def mark(execution_id: str) -> bool:
        return isinstance(await engine.mark_lease_expired_if_due(execution_id), answers.MarkedExpired)

    async def promote(execution_id: str) -> bool:
        promoted = await engine.promote_delayed(execution_id)
        if promoted is answers.Promotion.NOT_YET_DUE:  # it may have to forget its former life
            return await engine.lives.forget(execution_id)
        return promoted is answers.Promotion.PROMOTED

    def expire(reason: str) -> Callable[[str], Awaitable[bool]]:
        async def act(execution_id: str) -> bool:
            return isinstance(await engine.expire_if_due(execution_id, reason), answers.Expired)

        return act

    async def time_out(row: Suspension) -> bool:
        return await engine.expire_suspension(row.execution_id) not in UNTOUCHED

    async def deliver(row: ChildCompletion) -> bool:
        return await engine.child_completions.deliver_soon(row.parent_id) > 0

    async def cancel_children(row: ChildCancel) -> bool:
        return await engine.child_cancels.cancel_children_of(row.parent_id) > 0

    async def trim(_: int) -> SweepResult:
        return SweepResult(await engine.trim_feed(), 0)

    async def restore(batch: int) -> SweepResult:
        return await _restore_queues(engine, batch)

    async def reset_budget(row: Budget) -> bool:
        return await engine.unblocker.change_budget(_budget(row), usage.reset_if_due) is not None

    async def expire_reservations(row: Budget) -> bool:
        return await engine.unblocker.change_budget(_budget(row), reservation.expire_reservations)

    async def delete(row: msgspec.Struct) -> bool:
        # The key holds an instant, so a newer row stays.
        change = Change(guards=(), writes=(Delete(type(row), key_of(row)),), id=engine.runtime.minter.change_id())
        return await engine.runtime.commit_queue.add(change) is not None

    async def fire(row: Schedule) -> bool:
        return await engine.scheduler.fire(row.schedule_id)

    # Processes may keep events for different times. Each variant has its own lease, so the shortest time applies.
    kept_ms = engine.runtime.settings.feed_retention_ms
    keeps = "" if kept_ms == FEED_RETENTION_MS else str(kept_ms)

    return (
        Sweep("lease_expiry", "lease_expires_at", mark, (Where("lease_expired_at", "unset"),)),
        Sweep("delayed_promoter", "delay_until", promote),
        Sweep("attempt_timeout", "attempt_timeout_at", expire(expire_rules.ATTEMPT_TIMEOUT)),
        Sweep("execution_deadline", "deadline_at", expire(expire_rules.EXECUTION_DEADLINE)),
        Sweep("retention_trimmer", "purge_at", engine.purge_execution),
        Sweep("suspension_timeout", "due_at", time_out, row=Suspension, owner="execution_id"),
        Sweep(
            "pending_wp_expiry",
            "pending_until",
            lambda row: decide_on_waitpoint(engine.runtime, row, waitpoint_rules.expire_pending),
            row=Waitpoint,
            owner="execution_id",
        ),
        Sweep("child_ends", "due_at", deliver, row=ChildCompletion),
        Sweep("child_cancels", "due_at", cancel_children, row=ChildCancel),
        Sweep("feed_trimmer", run_pass=trim, variant=keeps),
        Sweep("queue_reconciler", run_pass=restore),
        Sweep("completion_dispatch", run_pass=flows.dispatch_completions),
        Sweep("dependency_reconciler", run_pass=lambda _: flows.reconcile_dependencies(choice)),
        Sweep("flow_projector", run_pass=flows.project_flows, cyclic=True),
        Sweep("flow_retention", "purge_check_at", lambda row: engine.purge_flow(row.flow_id), row=Flow),
        Sweep("cancel_reconciler", run_pass=lambda _: flows.reconcile_cancels(choice)),
        Sweep("edge_cancel_dispatcher", run_pass=flows.dispatch_sibling_cancels),
        Sweep("edge_cancel_reconciler", run_pass=flows.reconcile_sibling_cancels),
        Sweep("budget_reset", "next_reset_at", reset_budget, row=Budget),
        Sweep("budget_reservations", "lapse_at", expire_reservations, row=Budget),
        Sweep("budget_reconciler", run_pass=_each_partition(partitions.budget, engine.reconcile_budget_counters)),
        Sweep("quota_reconciler", run_pass=_each_partition(partitions.quota, engine.reconcile_quota_counters)),
        Sweep("unblock", run_pass=lambda batch: unblocking.run(batch, choice)),
        Sweep("worker_registry_ttl_sweep", "lapses_at", engine.routes.remove_expired, row=RegisteredWorker),
        Sweep("outbox_relay", "due_at", engine.outbox.redeliver_outbox_message, row=OutboxMessage),
        Sweep("idempotency_keys", "expires_at", engine.keyed_runs.delete_expired, row=IdempotencyKey),
        Sweep("usage_keys", "expires_at", delete, row=UsageKey),
        Sweep("worker_events", "expires_at", delete, row=WorkerEvent),
        Sweep("quota_windows", "expires_at", engine.quota_slots.delete_expired_request, row=QuotaRequest),
        Sweep("bulk_operations", "due_at", BulkWorker(engine).work_off, row=BulkOperation),
        Sweep("schedules", "next_at", fire, row=Schedule),  # it sleeps until the next one is due
    )


def _budget(row: Budget) -> NamespacedId:
    return NamespacedId(row.namespace, row.budget_id)


def _each_partition(count: int, reconcile: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[SweepResult]]:
    async def run(_: int) -> SweepResult:
        results = [await reconcile(partition) for partition in range(count)]
        return SweepResult(sum(done.processed for done in results), sum(done.errors for done in results))

    return run


async def _restore_queues(engine: Engine, batch: int) -> SweepResult:
    """Enqueue executions again whose ready queue was lost. An unreadable one does not block the others."""
    restored = failed = 0
    for execution_id in await engine.runtime.retry_while_unavailable(
        lambda: engine.runtime.store.executions_in_missing_queues(batch)
    ):
        try:
            restored += await engine.runtime.decide_execution(execution_id, lambda row, _: queue.restore_queue(row))
            logger.warning("%s: its ready queue was missing and was restored", execution_id)
        except errors.FabricError as fault:
            failed += 1
            logger.warning("%s: its ready queue is missing and could not be restored: %s", execution_id, fault)
    return SweepResult(restored, failed)
