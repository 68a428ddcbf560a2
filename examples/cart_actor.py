"""An actor: a cart is a run with a key. Its first message starts it, and it continues as new before its past is long.

python examples/cart_actor.py
"""

from __future__ import annotations

import asyncio

from stage import say, store, working

from flowfabric import Context, Fabric

app = Fabric(store())
MOST = 3  # messages of one life; `ctx.should_continue` says when in earnest: over 1,000 operations


@app.task
async def cart(ctx: Context, owner: str, items: tuple[str, ...] = ()) -> str:
    received = 0
    while (item := await ctx.receive("add", str)) != "checkout":
        items, received = (*items, item), received + 1
        if received == MOST or ctx.should_continue:
            await ctx.continue_as_new(cart.s(owner, items))  # the same run, with an empty past
    return f"{owner} bought {', '.join(items)} in life {ctx.life}"


async def main() -> None:
    async with working(app):
        for item in ("milk", "eggs", "flour", "sugar"):
            run = await cart.at("cart-7").or_start("ana").signal("add", item)
            say(f"{item}: {'a new cart' if run.created else 'the same cart'}")
        await cart.at("cart-7").signal("add", "checkout")
        say(await run.result(timeout=20))
        say("found by its key:", (found := await cart.find("cart-7")) is not None and found.id == run.id)


if __name__ == "__main__":
    asyncio.run(main())
