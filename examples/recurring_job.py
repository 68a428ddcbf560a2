"""A cron-like job that runs every second: never twice for the same time, and no run is lost.

Each run submits the next one before it works. The idempotency key is the time of the run: however often the submit is
repeated after crashes, there is one run for each time.

    python examples/recurring_job.py
"""

from __future__ import annotations

import asyncio
import time

from stage import say, store, working

from flowfabric import Context, Fabric, Retry

app = Fabric(store())

EVERY_S = 1  # 3600 for every hour
LAST: dict[str, int] = {}
finished = asyncio.Event()


async def schedule(slot: int) -> None:
    """Submit the run for a time; repeating it is harmless."""
    delay = max(0.0, slot - time.time())
    run = await report.options(delay=delay, key=f"report-{slot}").submit(slot)
    if not run.created:
        say(f"(the run for …{slot % 1000} exists already)")


@app.task(retry=Retry(max=3, base="100ms"))
async def report(ctx: Context, slot: int) -> str:
    if slot + EVERY_S <= LAST["slot"]:  # a real job continues forever
        await ctx.step(schedule, slot + EVERY_S)
        await ctx.step(schedule, slot + EVERY_S, name="schedule again, as after a crash")
    late_ms = (await ctx.now()) - slot * 1000
    say(f"report for …{slot % 1000}, {late_ms} ms after its time")
    if slot == LAST["slot"]:
        finished.set()
    return f"report {slot}"


async def main() -> None:
    first = int(time.time()) + 1
    LAST["slot"] = first + 2 * EVERY_S
    async with working(app):
        await asyncio.gather(*(schedule(first) for _ in range(3)))  # every process of a deployment may do this at start
        engine = await app.engine()
        await finished.wait()
        known = (await engine.search_executions()).executions
        say(f"{len(known)} runs for 3 times")


if __name__ == "__main__":
    asyncio.run(main())
