"""Polling: a step with retries asks until the other side is ready; n polls are n calls, and no slot is held meanwhile.

python examples/polling.py
"""

from __future__ import annotations

import asyncio

from stage import say, store, working

from flowfabric import Context, Fabric, Retry, RunFailed

app = Fabric(store())
asked = {"render-7": 0, "render-8": 0}


class NotReady(Exception):
    """The other side is still at work."""


async def check(job: str) -> str:
    asked[job] += 1
    if job == "render-8" or asked[job] < 3:
        say(f"{job}: asked {asked[job]} times, not ready")
        raise NotReady(job)
    return f"{job} is ready"


@app.task
async def render(ctx: Context, job: str, within: str) -> str:
    # A pause of more than a second parks the run: its slot is free, and each try is counted in the store.
    polling = ctx.options(retry=Retry(max=None, base="1100ms", factor=1, jitter=False, within=within, only=(NotReady,)))
    return await polling.step(check, job)


async def main() -> None:
    async with working(app):
        run, endless = await render.submit("render-7", "2d"), await render.submit("render-8", "2s")
        say(await run.result(timeout=20), f"after {asked['render-7']} calls")
        try:
            await endless.result(timeout=20)
        except RunFailed as failed:
            say(f"given up: {failed.category} after {asked['render-8']} calls")


if __name__ == "__main__":
    asyncio.run(main())
