"""A nightly job by cron: a winter of it, with the change to summer time at its end, is played in virtual time.

It runs at half past two in Berlin. On 31 March 2024 there is no such time, and it runs once, right after the gap.

    python examples/nightly_report.py
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from zoneinfo import ZoneInfo

from stage import say

from flowfabric import Context, Fabric
from flowfabric.testing import World

app = Fabric("memory://")
BERLIN = ZoneInfo("Europe/Berlin")
nights: list[datetime] = []


@app.task
async def report(ctx: Context, region: str) -> None:
    assert ctx.scheduled_at is not None
    nights.append(ctx.scheduled_at)


nightly = app.schedule("nightly", report.s("eu"), cron="30 2 * * *", tz="Europe/Berlin", jitter="5m")


async def main() -> None:
    async with World(app) as world:  # an application starts workers, and any of them fires what is due
        while not nights or nights[-1] < datetime(2024, 4, 1, tzinfo=BERLIN):
            await world.advance("1d")
        status = (await nightly.describe()).status
    say(f"{status.fired} nights, {status.skipped} skipped, {status.missed} missed")
    for at in nights[-3:]:
        say(f"{at.astimezone(BERLIN):%d %b at %H:%M} in Berlin, {at:%H:%M} UTC")


if __name__ == "__main__":
    asyncio.run(main())
