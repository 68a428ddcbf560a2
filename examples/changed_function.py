"""A deploy while runs are under way: a renamed step is held before it repeats its effect, and the fix continues it.

python examples/changed_function.py
"""

from __future__ import annotations

import asyncio

from stage import reached, say, store, working

from flowfabric import Context, Fabric, Run
from flowfabric.model.obstacles import Held

URL = store()
first, renamed, fixed = (Fabric(URL, version=version) for version in ("1", "2", "3"))


async def charge(order: str) -> str:
    say(f"{order} is charged")
    return f"receipt of {order}"


async def charge_card(order: str) -> str:
    say(f"{order} is charged by the new function")
    return f"receipt of {order}"


async def check_fraud(order: str) -> None:
    say(f"{order} is checked")


@first.task(name="order")
async def order_first(ctx: Context, order: str) -> str:
    receipt = await ctx.step(charge, order)
    await ctx.receive("ship", str)
    return receipt


@renamed.task(name="order")
async def order_renamed(ctx: Context, order: str) -> str:
    receipt = await ctx.step(charge_card, order)  # a new name: runs under way would pay twice
    await ctx.receive("ship", str)
    return receipt


@fixed.task(name="order")
async def order_fixed(ctx: Context, order: str) -> str:
    if await ctx.patched("fraud-check"):  # False for runs that had passed this place
        await ctx.step(check_fraud, order)
    receipt = await ctx.options(name="charge").step(charge_card, order)
    await ctx.receive("ship", str)
    return receipt


async def held(run: Run[str]) -> Held:
    """Wait until the run is held."""
    while not isinstance(obstacle := (await run.explain()).obstacle, Held):  # noqa: ASYNC110 - an example polls
        await asyncio.sleep(0.02)
    return obstacle


async def main() -> None:
    async with working(first):
        early = await order_first.submit("early")
        await reached(early, "suspended")
    async with working(renamed):
        early = order_renamed.run(early.id)
        await early.signal("ship", "now")
        say(f"held by version {(await held(early)).version}: {(await held(early)).why}")
    async with working(fixed):
        early, late = order_fixed.run(early.id), await order_fixed.submit("late")
        await late.signal("ship", "now")
        for receipt in await asyncio.gather(early.result(timeout=20), late.result(timeout=20)):
            say(receipt)


if __name__ == "__main__":
    asyncio.run(main())
