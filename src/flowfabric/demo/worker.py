"""A worker of the demo, one process: `python -m flowfabric.demo.worker URL NAME`.

It claims an order, works on it step by step and keeps its lease alive meanwhile. It ends with SIGTERM, with its parent,
or with SIGKILL, which leaves everything lying about as a power cut does.
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
    """Take orders until told to stop."""
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
                except FabricError as lost:  # this worker was too slow; whoever took the order over goes on with it
                    print(f"{claimed.execution_id}: {lost}", file=sys.stderr)


async def process_order(engine: Engine, claimed: Claimed) -> None:
    """Work on one order and end its attempt."""
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
    """Put the order away until somebody says yes; the worker is free meanwhile."""
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
