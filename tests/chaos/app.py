"""An app whose steps leave a trace outside of the store: what ran, in which process, when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from flowfabric import Context, Fabric, Retry

TRACE_VARIABLE = "FF_KILL_TRACE"
STEPS = ("reserve", "charge", "ship")

app = Fabric()


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """A step that ran."""

    run: str
    step: str
    pid: int
    attempt: int


@app.task(name="order", lane="orders", retry=Retry(max=0))
async def order(ctx: Context, number: int, step_s: float) -> int:
    """Three steps, each of which takes a while and may be the last thing that its process does."""
    for name in STEPS:
        number += await ctx.step(effect(ctx, name, step_s), name=name)
    return number


def effect(ctx: Context, step: str, step_s: float) -> Callable[[], Awaitable[int]]:
    """Make a function that does something outside that cannot be undone."""

    async def leave_trace() -> int:
        await asyncio.sleep(step_s)
        leave(Trace(ctx.run_id, step, os.getpid(), ctx.attempt))
        return 1

    return leave_trace


def leave(trace: Trace) -> None:
    """One append: whole, or not at all."""
    file = os.open(os.environ[TRACE_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, msgspec.json.encode(trace) + b"\n")
    os.close(file)


def traces(path: Path) -> list[Trace]:
    """Everything that ran, in the order in which it ended."""
    decode = msgspec.json.Decoder(Trace).decode
    return [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
