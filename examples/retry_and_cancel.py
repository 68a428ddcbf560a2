"""Retries, a requested delay, a permanent failure, and a cancel.

python examples/retry_and_cancel.py
"""

from __future__ import annotations

import asyncio

from stage import reached, say, store, working

from flowfabric import Context, Fabric, Fatal, Retry, RetryAfter, RunCancelled, RunFailed

app = Fabric(store())


class GatewayDown(Exception):
    """A transient failure."""


cleaned_up = asyncio.Event()
calls = {"charge": 0, "quota": 0}


@app.task(retry=Retry(max=3, base="200ms", factor=2, jitter=False))
async def charge(ctx: Context, order: str) -> str:
    """Fail twice; another attempt follows after 200 ms, then after 400 ms."""
    calls["charge"] += 1
    say(f"charge {order}: attempt {ctx.attempt + 1}, with the key {ctx.key('charge')[:8]} as before")
    if calls["charge"] < 3:
        raise GatewayDown("the gateway did not answer")
    return f"{order} is paid"


@app.task
async def quota(order: str) -> str:
    """Retry when the other system says so: this is not a failure and uses up no retry."""
    calls["quota"] += 1
    if calls["quota"] == 1:
        say("quota: 429, come back in 300 ms")
        raise RetryAfter(0.3)
    return f"{order} was accepted"


@app.task(retry=Retry(max=5))
async def refund(order: str) -> str:
    """Fail for good: a retry cannot fix this, so none follows."""
    raise Fatal(f"{order} was never paid")


@app.task
async def export(rows: int) -> None:
    """Run for an hour, unless it is cancelled."""
    say(f"export of {rows} rows begins")
    try:
        await asyncio.sleep(3600)
    finally:
        say("export is cancelled, and cleans up")
        cleaned_up.set()


async def main() -> None:
    async with working(app):
        say(await (await charge.submit("order-7")).result(timeout=20))
        say(await (await quota.submit("order-7")).result(timeout=20))

        try:
            await (await refund.submit("order-8")).result(timeout=20)
        except RunFailed as failed:
            say("refund failed at once:", failed.reason.splitlines()[0])

        long = await export.submit(1_000_000)
        await reached(long, "active")
        await long.cancel("nobody needs it any more")
        try:
            await long.result(timeout=20)
        except RunCancelled as cancelled:
            say("export was cancelled:", cancelled.reason)
        await cleaned_up.wait()  # the worker notices at its next heartbeat


if __name__ == "__main__":
    asyncio.run(main())
