"""An alert at night: diagnose, apply a safe fix, ask before an unsafe one, check again, and escalate.

python examples/incident_remediation.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stage import say, store, working

from flowfabric import Context, Fabric, Retry

app = Fabric(store())

service = {"healthy": False, "memory": 97}
pager: asyncio.Queue[str] = asyncio.Queue()


@dataclass
class Alert:
    service: str
    symptom: str


@dataclass
class Go:
    go: bool


async def diagnose(alert: Alert) -> str:
    say(f"{alert.service}: {alert.symptom}, memory at {service['memory']} %")
    return "memory leak" if service["memory"] > 90 else "unknown"


async def clear_caches() -> None:
    say("safe measure: caches cleared")
    service["memory"] = 95


async def restart() -> None:
    say("approved measure: restarted")
    service.update(memory=20, healthy=True)


async def page(person: str, link: str) -> None:
    say(f"{person} is paged")
    await pager.put(link)


async def is_healthy() -> bool:
    return bool(service["healthy"])


@app.task(retry=Retry(max=5, base="1s"))
async def remediate(ctx: Context, alert: Alert) -> str:
    cause = await ctx.step(diagnose, alert)
    await ctx.step(clear_caches)
    await ctx.sleep("500ms")  # an hour would do as well: long sleeps hold no worker and survive restarts
    if await ctx.step(is_healthy):
        return f"{cause}: caches were enough"
    for person, timeout in (("ana", "2s"), ("bo", "30m")):  # a restart affects customers, so a person has to approve it
        gate = await ctx.approval(f"restart-{person}", Go, expires=timeout)
        await ctx.step(page, person, gate.links[0])
        votes = await gate
        if votes.expired:
            say(f"{person} does not answer")
            continue
        if votes[0].value.go:
            await ctx.step(restart)
            healthy = await ctx.step(is_healthy)
            return f"{cause}: restart approved by {votes[0].by}, {'healthy again' if healthy else 'still unhealthy'}"
        return f"{cause}: {person} takes over"
    return f"{cause}: nobody answered"


async def main() -> None:
    async with working(app):
        run = await remediate.submit(Alert("checkout", "latency 9 s"))
        await pager.get()  # ana does not answer
        await run.vote(await pager.get(), Go(True), by="bo")
        say(await run.result(timeout=30))
        say("on record:", *[memo.name for memo in await (await app.engine()).read_steps(run.id)])


if __name__ == "__main__":
    asyncio.run(main())
