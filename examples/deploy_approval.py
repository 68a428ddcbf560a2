"""A deploy that two people have to approve. While they think, no worker is held, and a restart loses nothing.

python examples/deploy_approval.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stage import reached, say, store, working

from flowfabric import Context, Fabric

app = Fabric(store())

inbox: asyncio.Queue[str] = asyncio.Queue()  # in place of the approvers' mail


@dataclass
class Plan:
    version: str
    diff: str


@dataclass
class Decision:
    ok: bool
    why: str = ""


async def make_plan(version: str) -> Plan:
    say(f"planning {version}")
    return Plan(version, "+12 −3 lines")


async def mail(links: list[str]) -> None:
    for link in links:  # signed: its holder can vote once, and nothing else
        await inbox.put(link)
    say(f"{len(links)} links were mailed")


async def apply(plan: Plan) -> str:
    return f"{plan.version} is live"


@app.task
async def deploy(ctx: Context, version: str) -> str:
    plan = await ctx.step(make_plan, version)  # runs once; later attempts get its stored result
    gate = await ctx.approval("approve", Decision, need=2, expires="3d", show={"diff": plan.diff})
    await ctx.step(mail, gate.links)
    votes = await gate  # the run is parked here, and resumes after the second vote
    if votes.expired or not all(vote.value.ok for vote in votes):
        return f"{version} was rejected: " + "; ".join(vote.value.why for vote in votes if not vote.value.ok)
    say("approved by", " and ".join(vote.by for vote in votes))
    return await ctx.step(apply, plan)


async def main() -> None:
    for version, decisions in (
        ("v7", {"ana": Decision(True), "bo": Decision(True)}),
        ("v8", {"ana": Decision(True), "bo": Decision(False, "it is Friday")}),
    ):
        async with working(app):
            run = await deploy.submit(version)
            links = [await inbox.get() for _ in decisions]
            await reached(run, "suspended")
        say(f"{version} waits, and no worker runs at all")

        async with working(app):  # a day later, on another machine, after a deploy of the worker itself
            for link, (person, decision) in zip(links, decisions.items(), strict=True):
                await run.vote(link, decision, by=person)
            say(await run.result(timeout=20))


if __name__ == "__main__":
    asyncio.run(main())
