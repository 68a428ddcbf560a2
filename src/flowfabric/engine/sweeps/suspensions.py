"""The sweeps of waiting work: timeouts, waitpoints that were never used, children nobody took in, lost queues, old
events."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

from flowfabric import errors
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.sweeps.sweeper import Sweep, SweepResult
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.suspension.resume import SuspensionExpiry
from flowfabric.settings import FEED_RETENTION_MS

logger = logging.getLogger("flowfabric.sweeper")

T = TypeVar("T")

UNTOUCHED = (SuspensionExpiry.NOT_DUE, SuspensionExpiry.NOT_SUSPENDED)


class SuspensionSweepEngine(Protocol):
    """What these sweeps need of an engine."""

    runtime: Runtime

    async def expire_suspension(self, execution_id: str) -> SuspensionExpiry: ...
    async def expire_pending_waitpoint(self, waitpoint: Waitpoint) -> bool: ...
    async def deliver_child_completions(self, parent_id: str) -> int: ...
    async def trim_feed(self) -> int: ...
    async def restore_queue(self, execution_id: str) -> bool: ...


def suspension_sweeps(engine: SuspensionSweepEngine) -> tuple[Sweep, ...]:
    """All of them."""

    async def time_out(row: Suspension) -> bool:
        return await engine.expire_suspension(row.execution_id) not in UNTOUCHED

    async def take_in(row: ChildCompletion) -> bool:
        return await engine.deliver_child_completions(row.parent_id) > 0

    async def trim(_: int) -> SweepResult:
        return SweepResult(await engine.trim_feed(), 0)

    async def restore(batch: int) -> SweepResult:
        return await _restore_queues(engine, batch)

    # Processes may be told to keep events for different times. The shortest holds, whoever else sweeps.
    kept_ms = engine.runtime.settings.feed_retention_ms
    keeps = "" if kept_ms == FEED_RETENTION_MS else str(kept_ms)

    return (
        Sweep("suspension_timeout", "due_at", time_out, row=Suspension, owner="execution_id"),
        Sweep(
            "pending_wp_expiry",
            "pending_until",
            engine.expire_pending_waitpoint,
            row=Waitpoint,
            owner="execution_id",
        ),
        Sweep("child_ends", "due_at", take_in, row=ChildCompletion),
        Sweep("feed_trimmer", run_pass=trim, variant=keeps),
        Sweep("queue_reconciler", run_pass=restore),
    )


async def _restore_queues(engine: SuspensionSweepEngine, batch: int) -> SweepResult:
    """Put executions whose ready queue was lost back into their queues. One that cannot be read holds up no other."""
    restored = failed = 0
    for execution_id in await engine.runtime.retry_while_unavailable(
        lambda: engine.runtime.store.executions_in_missing_queues(batch)
    ):
        try:
            restored += await engine.restore_queue(execution_id)
            logger.warning("%s: its ready queue was missing and was restored", execution_id)
        except errors.FabricError as fault:
            failed += 1
            logger.warning("%s: its ready queue is missing and could not be restored: %s", execution_id, fault)
    return SweepResult(restored, failed)
