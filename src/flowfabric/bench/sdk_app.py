"""The app that `ff bench sdk` measures: a task that does nothing, and a durable function of ten steps."""

from __future__ import annotations

from typing import Any

from flowfabric import Context, Fabric
from flowfabric.bench.peers.starts import note

STEPS = 10

app = Fabric()


@app.task(name="noop", lane="noop")
async def noop(job: dict[str, Any]) -> dict[str, bool]:
    """Do nothing."""
    note()
    return {"ok": True}


@app.task(name="ten_steps", lane="durable")
async def ten_steps(ctx: Context, number: int) -> int:
    """Run ten steps, each recorded before the next one starts."""
    for _ in range(STEPS):
        number = await ctx.step(add_one, number)
    return number


async def add_one(number: int) -> int:
    """Run a step that costs nothing but its record."""
    return number + 1
