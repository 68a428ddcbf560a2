"""A trip that is rolled back: what was booked is cancelled, and what failed is not tried again.

python examples/saga.py
"""

from __future__ import annotations

import asyncio

from stage import say, store, working

from flowfabric import Context, Fabric, Retry

app = Fabric(store())
calls = {"tell": 0}


class SoldOut(Exception):
    """The other side says no; asking again does not help."""

    def __init__(self, what: str, nights: int) -> None:
        super().__init__(f"no {what} for {nights} nights")
        self.nights = nights


async def book_flight(traveller: str) -> str:
    say(f"flight booked for {traveller}")
    return "flight-7"


async def book_hotel(traveller: str) -> str:
    say(f"hotel asked for {traveller}")
    raise SoldOut("hotel", nights=3)


async def cancel_flight(booking: str) -> None:
    say(f"{booking} cancelled")


async def cancel_hotel(booking: str) -> None:
    say(f"{booking} cancelled")


async def tell(traveller: str, text: str) -> None:
    """Fail once: the task is retried, and goes through the rollback again without doing it."""
    calls["tell"] += 1
    if calls["tell"] == 1:
        say("the mail server does not answer")
        raise ConnectionError("no mail server")
    say(f"{traveller} is told: {text}")


@app.task(retry=Retry(max=5, base="100ms", jitter=False))
async def trip(ctx: Context, traveller: str) -> str:
    undo = []
    outcome = "booked"
    try:
        for book, cancel in ((book_flight, cancel_flight), (book_hotel, cancel_hotel)):
            booked = await ctx.step(book, traveller)
            undo.append((cancel, booked))
    except SoldOut as why:  # with its fields, also when a later attempt comes here again
        for cancel, booked in reversed(undo):
            await ctx.options(retry=Retry(max=None, cap="1h")).step(cancel, booked)
        outcome = f"rolled back: {why} ({why.nights})"
    await ctx.step(tell, traveller, outcome)
    return outcome


async def main() -> None:
    async with working(app):
        run = await trip.submit("ana")
        say(await run.result(timeout=20))
        say(f"in {len(await run.attempts())} attempts")


if __name__ == "__main__":
    asyncio.run(main())
