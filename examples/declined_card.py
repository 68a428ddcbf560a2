"""A declined card: the failure is remembered while the run waits for another card, so no card is charged twice.

python examples/declined_card.py
"""

from __future__ import annotations

import asyncio

from stage import reached, say, store, working

from flowfabric import Context, Fabric

app = Fabric(store())


class Declined(Exception):
    """The bank says no."""


async def charge(card: str, cents: int) -> str:
    say(f"{card} is charged {cents} cents")
    if card == "visa":
        raise Declined(f"{card} has no money")
    return f"receipt of {card}"


@app.task
async def pay(ctx: Context, card: str, cents: int) -> str:
    while True:
        try:
            return await ctx.step(charge, card, cents)
        except Declined as why:
            say(f"please send another card: {why}")
            card = await ctx.receive("card", str, timeout="1d")  # the run gives its slot back meanwhile


async def main() -> None:
    async with working(app):
        run = await pay.submit("visa", 500)
        await reached(run, "suspended")
        await run.signal("card", "amex")
        say(await run.result(timeout=20))


if __name__ == "__main__":
    asyncio.run(main())
