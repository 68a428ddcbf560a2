"""A budget for tokens and money: counted once per run despite retries, with a warning, and never exceeded.

python examples/token_budget.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stage import reached, say, store, working

from flowfabric import Budget, Context, Fabric, Limit, Retry, RunFailed

app = Fabric(store())

# Per tenant: 1,000 tokens and half a dollar a day; from 80 % on, `ff budgets` and the log warn.
llm = Budget("llm", limits={"tokens": 1000, "usd": 0.5}, soft=0.8, per="tenant", reset="1d", on_hard="fail")
# Shared by all. A run that needs more than is left is suspended until there is capacity; it holds no worker.
nightly = Budget("nightly", limits={"tokens": 1000}, on_hard="suspend")


@dataclass
class Question:
    tenant: str
    text: str
    tokens: int


attempts = 0


@app.task(budgets=[llm], limits=[Limit(concurrency=2, key="tenant")], retry=Retry(max=2, base="50ms"))
async def ask(ctx: Context, question: Question) -> str:
    global attempts
    await ctx.spend(llm, tokens=question.tokens, usd=question.tokens / 10_000)
    attempts += 1
    if attempts == 1:
        raise ConnectionError("the answer got lost, after the tokens were paid for")
    return f"{question.tenant}: answered for {question.tokens} tokens"


@app.task(budgets=[nightly])
async def digest(ctx: Context, pages: int) -> str:
    await ctx.spend(nightly, tokens=pages * 100)
    return f"a digest of {pages} pages"


async def main() -> None:
    async with working(app):
        say(await (await ask.submit(Question("acme", "why?", 700))).result(timeout=20))
        engine = await app.engine()
        for name in await engine.list_budgets():
            status = await engine.get_budget_status(name)
            if status.scope_id == "llm:acme":
                say(f"two attempts, paid for once: {status.usage['tokens']} of {status.hard_limits['tokens']} tokens")

        try:
            await (await ask.submit(Question("acme", "and why?", 700))).result(timeout=20)
        except RunFailed as failed:
            say("acme has spent its day:", failed.reason.splitlines()[0])
        say(await (await ask.submit(Question("zeta", "why?", 700))).result(timeout=20))

        say(await (await digest.submit(8)).result(timeout=20))
        waiting = await digest.submit(5)
        await reached(waiting, "suspended")
        say("the second digest sleeps:", (await waiting.explain()).sentence)
        await engine.reset_budget(nightly.id(app.namespace))  # as the next night does
        say("after the reset:", await waiting.result(timeout=20))


if __name__ == "__main__":
    asyncio.run(main())
