"""An app whose steps record outside of the store which step ran in which process and when."""

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
    """Run three steps, each of which takes a while and may be the last that its process runs."""
    for name in STEPS:
        number += await ctx.options(name=name).step(effect(ctx, name, step_s))
    return number


def effect(ctx: Context, step: str, step_s: float) -> Callable[[], Awaitable[int]]:
    """Return a function with an external side effect that cannot be undone."""

    async def append_trace() -> int:
        await asyncio.sleep(step_s)
        append(Trace(ctx.run_id, step, os.getpid(), ctx.attempt))
        return 1

    return append_trace


def append(trace: Trace) -> None:
    """Append one trace atomically."""
    file = os.open(os.environ[TRACE_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, msgspec.json.encode(trace) + b"\n")
    os.close(file)


def traces(path: Path) -> list[Trace]:
    """Return all traces in the order in which the steps finished."""
    decode = msgspec.json.Decoder(Trace).decode
    return [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
