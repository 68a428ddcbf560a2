"""The sweeps of suspensions: timeouts, unused waitpoints, undelivered child completions, lost queues, old events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flowfabric import errors
from flowfabric.engine.operations.suspensions import decide_on_waitpoint
from flowfabric.engine.sweeps.sweeper import Sweep, SweepResult
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.scheduling import queue
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.resume import SuspensionExpiry
from flowfabric.settings import FEED_RETENTION_MS

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

logger = logging.getLogger("flowfabric.sweeper")

UNTOUCHED = (SuspensionExpiry.NOT_DUE, SuspensionExpiry.NOT_SUSPENDED)


def suspension_sweeps(engine: Engine) -> tuple[Sweep, ...]:
    """Return these sweeps."""

    async def time_out(row: Suspension) -> bool:
        return await engine.expire_suspension(row.execution_id) not in UNTOUCHED

    async def deliver(row: ChildCompletion) -> bool:
        return await engine.child_completions.deliver(row.parent_id) > 0

    async def trim(_: int) -> SweepResult:
        return SweepResult(await engine.trim_feed(), 0)

    async def restore(batch: int) -> SweepResult:
        return await _restore_queues(engine, batch)

    # Processes may keep events for different times. Each variant has its own lease, so the shortest time applies.
    kept_ms = engine.runtime.settings.feed_retention_ms
    keeps = "" if kept_ms == FEED_RETENTION_MS else str(kept_ms)

    return (
        Sweep("suspension_timeout", "due_at", time_out, row=Suspension, owner="execution_id"),
        Sweep(
            "pending_wp_expiry",
            "pending_until",
            lambda row: decide_on_waitpoint(engine.runtime, row, waitpoint_rules.expire_pending),
            row=Waitpoint,
            owner="execution_id",
        ),
        Sweep("child_ends", "due_at", deliver, row=ChildCompletion),
        Sweep("feed_trimmer", run_pass=trim, variant=keeps),
        Sweep("queue_reconciler", run_pass=restore),
    )


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
