"""An application whose worker process tests start, signal and kill.

    python -m tests.sdk.service URL SLOTS GRACE

It prints one line per action: `began TASK ATTEMPT PID`, `cancelled TASK`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

from flowfabric import Context, Fabric

app = Fabric(os.environ.get("SERVICE_URL", "memory://"))


def say(*words: object) -> None:
    print(*words, flush=True)


@app.task
async def quick(ctx: Context, length: float) -> str:
    say("began", "quick", ctx.attempt, os.getpid())
    await asyncio.sleep(length)
    return "done"


@app.task
async def endless(ctx: Context) -> int:
    say("began", "endless", ctx.attempt, os.getpid())
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        say("cancelled", "endless")
        raise
    return ctx.attempt


@app.task
def deaf(ctx: Context) -> None:
    say("began", "deaf", ctx.attempt, os.getpid())
    time.sleep(3600)


@app.task(isolation="process")
def squares(ctx: Context, most: int) -> tuple[int, int]:
    """Compute a sum that keeps a processor busy; return it with the process id. Its first half is a step."""
    half = ctx.sync.step(total, most)
    return half * 2, os.getpid()


@app.task(isolation="process")
def scheduled_for(ctx: Context) -> str | None:
    """Return the schedule of the run with its instant."""
    return None if ctx.scheduled_at is None else f"{ctx.schedule} {ctx.scheduled_at:%Y-%m-%d %H:%M}"


def total(most: int) -> int:
    return sum(n * n for n in range(most))


@app.task
async def deaf_to_cancels() -> None:
    """Ignore cancellation."""
    print("began deaf_to_cancels", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            print("not listening", flush=True)


@app.task(isolation="process")
def sleeper(ctx: Context, marks: str) -> str:
    """Park, and resume in perhaps another process."""
    ctx.sync.step(note, marks)
    ctx.sync.sleep("1200ms")
    return f"slept after {ctx.sync.receive('go', str)}"


def note(marks: str) -> None:
    with open(marks, "a") as file:  # noqa: PTH123
        file.write("step\n")


@app.task(isolation="process", timeout="700ms")
def stubborn(pid_file: str) -> None:
    with open(pid_file, "w") as file:  # noqa: PTH123
        file.write(str(os.getpid()))
    while True:
        time.sleep(0.01)


@app.task(isolation="process")
def hopeless() -> None:
    os._exit(7)


@app.task(isolation="process")
async def awaiting(ctx: Context, length: float) -> int:
    await asyncio.sleep(length)
    return os.getpid()


@app.task(isolation="process")
async def leaving() -> None:
    sys.exit(3)


@app.task(isolation="process")
def wrong() -> int:
    raise ValueError("no good")


if __name__ == "__main__":
    app.url = sys.argv[1]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    app.run(slots=int(sys.argv[2]), grace=sys.argv[3], lease_ttl="1s")
