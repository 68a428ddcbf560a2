"""A job that runs every second by a schedule: once for each instant, whatever happens to workers.

The schedule is declared in code, and a worker puts it in place when it starts. A person pauses it and runs it once more
by hand. A backfill creates the runs of earlier instants, and skips those that ran.

    python examples/recurring_job.py
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from stage import say, store, working

from flowfabric import Context, Fabric

app = Fabric(store())

reported: list[datetime] = []
three_reports = asyncio.Event()


@app.task
async def report(ctx: Context, region: str) -> str:
    assert ctx.scheduled_at is not None
    late_ms = (datetime.now(UTC) - ctx.scheduled_at).total_seconds() * 1000
    reported.append(ctx.scheduled_at)
    say(f"{ctx.schedule}: report of {region} for …{ctx.scheduled_at:%S}, {late_ms:.0f} ms after its time")
    if len(reported) == 3:
        three_reports.set()
    return f"report of {region}"


# Every night it would be: cron="0 3 * * *", tz="Europe/Berlin", jitter="5m"
every_second = app.schedule("reports", report.s("eu"), every="1s")


async def main() -> None:
    async with working(app):
        await three_reports.wait()
        await every_second.pause("three are enough")
        run = await every_second.trigger()
        say(f"by hand: {await run.result()}")

        end = min(reported) + timedelta(seconds=1)
        done = await every_second.backfill(end - timedelta(seconds=3), end, overlap="allow")
        say(f"{done.created} instants made up for, {done.known} had a run")
        status = (await every_second.describe()).status
        say(f"paused: {status.note}; {status.fired} runs so far")


if __name__ == "__main__":
    asyncio.run(main())
