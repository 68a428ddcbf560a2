"""Ask five models, use the first two answers and cancel the others. The tokens are streamed.

python examples/llm_race.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from stage import say, store, working

from flowfabric import Context, Fabric, Quorum

app = Fabric(store())

MODELS = {"swift": 0.01, "steady": 0.02, "careful": 5.0, "slow": 10.0, "asleep": 30.0}  # seconds per token


async def fake_model(name: str, question: str) -> AsyncIterator[str]:
    """A fake model that streams tokens."""
    for token in f"{name} says: because of the {len(question)} reasons.".split():
        await asyncio.sleep(MODELS[name])
        yield f"{token} "


@dataclass
class Answer:
    model: str
    text: str


@app.task(lane="models")
async def ask(ctx: Context, model: str, question: str) -> Answer:
    out = ctx.stream("answer")  # belongs to this attempt, so a retry does not repeat the text
    async for token in fake_model(model, question):
        await out.write(token)
    return Answer(model, out.text().strip())


@app.task
async def best_of(ctx: Context, question: str) -> str:
    calls = [ask.s(model, question) for model in MODELS]
    answers = await ctx.gather(calls, join=Quorum(2, cancel_rest=True))  # the slot is free meanwhile
    return " / ".join(answer.text for answer in answers if answer is not None)


async def main() -> None:
    async with working(app):
        single = await ask.options(lane="default").submit("swift", "why?")
        print("       one model, as it speaks: ", end="", flush=True)
        async for frame in single.stream("answer"):
            print(getattr(frame, "text", "\n"), end="", flush=True)
        print()

        run = await best_of.submit("why is the sky blue?")
        say("the first two of five:", await run.result(timeout=30))

        engine = await app.engine()
        ends = [one.public_state.value for one in (await engine.search_executions(lane_id="models")).executions]
        say(f"{ends.count('completed')} models answered, {ends.count('cancelled')} were stopped")


if __name__ == "__main__":
    asyncio.run(main())
