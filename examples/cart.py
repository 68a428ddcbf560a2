"""An actor with a query and an update: a cart shows its total, answers each item, and refuses what it cannot take.

Nobody keeps its id: it is the run that has the key "cart-7".

python examples/cart.py
"""

from __future__ import annotations

import asyncio

import msgspec
from stage import say, store, working

from flowfabric import Context, Fabric, Message, Refused

app = Fabric(store())


class Item(msgspec.Struct):
    """What a customer puts into the cart."""

    name: str
    cents: int


async def place_order(owner: str, items: list[Item]) -> str:
    return f"order of {owner}: {', '.join(item.name for item in items)}"


@app.task(inbox={"add": Item, "remove": str, "close": None})  # every sender is checked against it
async def cart(ctx: Context, owner: str) -> str:
    inbox, items = ctx.inbox(), list[Item]()
    while True:
        await ctx.set("total", sum(item.cents for item in items))  # a query reads it, also while nothing runs
        match await inbox.next(timeout="30d"):
            case Message("add", item) as ask:
                if len(items) == 2:
                    await ask.refuse("the cart is full")
                else:
                    items.append(item)
                    await ask.reply(len(items))
            case Message("remove", name):
                items = [item for item in items if item.name != name]
            case Message("close") | None:
                if await inbox.close():  # only if nothing is unread; from then on senders are refused
                    return await ctx.step(place_order, owner, items)


async def main() -> None:
    async with working(app):
        cart7 = cart.at("cart-7")
        for item in (Item("apples", 300), Item("bread", 250)):
            say(f"{item.name} is in, {await cart7.or_start('ana').ask('add', item, int, timeout='20s')} in the cart")
        try:
            await cart7.ask("add", Item("cheese", 900), int, timeout="20s")
        except Refused as why:
            say(f"cheese is refused: {why}")
        await cart7.signal("remove", "apples")
        say(f"cheese is in, {await cart7.ask('add', Item('cheese', 900), int, timeout='20s')} in the cart")
        await cart7.signal("close")
        say(await cart7.result(timeout=20))
        say(f"the total was {await cart7.get('total', int)} cents")


if __name__ == "__main__":
    asyncio.run(main())
