"""A worker process of the demo: `python -m flowfabric.demo.worker URL NAME`.

It claims orders, processes them step by step, and renews their leases. It ends with SIGTERM or with its parent. SIGKILL
ends it like a power failure: nothing is released.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from flowfabric import Engine, FabricError
from flowfabric.connector import open_engine
from flowfabric.demo.orders import FAILURE, LANE, LEASE_MS, STEP_S, DemoOrder, receipt
from flowfabric.demo.release import APPROVE
from flowfabric.engine.types import ByName, FreshWaitpoint, Single, SuspendArgs
from flowfabric.model.answers.execution import Claimed


async def run_worker(url: str, name: str) -> None:
    """Claim and process orders until SIGTERM."""
    stop, parent = asyncio.Event(), os.getppid()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await open_engine(url, migrate=False) as engine:
        engine.start_sweeps()
        while not stop.is_set() and os.getppid() == parent:
            claimed = await engine.claim(
                LANE, worker_id="demo", worker_instance_id=name, lease_ttl_ms=LEASE_MS, max_wait_ms=200
            )
            if claimed is not None:
                try:
                    await process_order(engine, claimed)
                except FabricError as error:  # this worker was too slow; another one has claimed the order
                    print(f"{claimed.execution_id}: {error}", file=sys.stderr)


async def process_order(engine: Engine, claimed: Claimed) -> None:
    """Process one order: complete it, fail it, or suspend it for its approval."""
    payload = claimed.payload.input_payload if claimed.payload else None
    order = msgspec.json.decode(payload or b"", type=DemoOrder)
    if order.needs_approval and not await engine.observe_signals(claimed.handle):
        await suspend_for_approval(engine, claimed)
        return
    for step in range(1, order.steps + 1):
        await asyncio.sleep(STEP_S)
        await engine.renew(claimed.handle)
        await engine.progress(claimed.handle, pct=100 * step // order.steps)
        if claimed.attempt_index < order.fails and step == order.steps // 2:
            await engine.fail(claimed.handle, reason=FAILURE)
            return
    await engine.complete(claimed.handle, result=receipt(order.name))


async def suspend_for_approval(engine: Engine, claimed: Claimed) -> None:
    """Suspend the order until it is approved; this frees the worker."""
    args = SuspendArgs(
        suspension_id=engine.minter.uuid(),
        waitpoints=(FreshWaitpoint(engine.minter.uuid(), APPROVE),),
        resume_condition=Single(APPROVE, ByName(APPROVE)),
        reason_code="waiting_for_approval",
        now=engine.estimate.now(),
    )
    await engine.suspend(claimed.handle, args)


if __name__ == "__main__":
    asyncio.run(run_worker(*sys.argv[1:]))
