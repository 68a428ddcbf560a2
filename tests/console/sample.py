"""A shop with runs in every state, for the pages of the console and their pictures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from flowfabric import Budget, Context, Engine, Fabric, Retry, Run
from flowfabric.sdk.worker.worker import Worker
from flowfabric.server import ServerSettings
from flowfabric.server.lifecycle import seed_signing_key

TOKEN = "s3cret-token-of-the-settings"
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e{{7*7}}"


@dataclass
class Decision:
    verdict: Literal["ship", "hold"]
    comment: str = ""


class PaymentDeclined(Exception):
    """The bank said no."""


class Sample:
    """The app, its worker and the runs by name."""

    engine: Engine

    def __init__(self, url: str) -> None:
        self.app = app = Fabric(url, public_url="http://127.0.0.1:9090")
        self.runs: dict[str, Run[Any]] = {}
        self.may_end = asyncio.Event()  # the running run waits for it
        self.lines: asyncio.Queue[str] = asyncio.Queue()  # what the running run writes
        llm = Budget("llm", limits={"tokens": 20_000}, soft=0.8, per="tenant", on_hard="suspend")
        self.llm = llm
        sample = self

        @app.task(name="purchase")
        async def purchase(what: str) -> dict[str, Any]:
            return {"bought": what, "price": 12345678901234567890, "note": HOSTILE}

        @app.task(name="charge", retry=Retry(max=1, base="1ms"))
        async def charge(card: str) -> None:
            raise PaymentDeclined(f"card {card} was declined by the bank {HOSTILE}")

        async def outline(topic: str) -> list[str]:
            return [f"what is {topic}", f"why {topic}", "who pays"]

        async def search_web(question: str) -> str:
            await asyncio.sleep(0.02)
            return f"three sources on: {question}"

        @app.task(name="research", budgets=[llm])
        async def research(ctx: Context, tenant: str, topic: str, tokens: int) -> str:
            out = ctx.stream("log")
            questions = await ctx.step(outline, topic)
            for question in questions:
                found = await ctx.step(search_web, question)
                await out.write(f"{question}: {found}\n")
            await ctx.spend(llm, tokens=tokens)
            return f"a report on {topic}"

        @app.task(name="deploy")
        async def deploy(ctx: Context, version: str) -> str:
            await ctx.step(outline, version)
            votes = await ctx.approval(
                "deploy_to_production",
                Decision,
                need=2,
                approvers=3,
                expires="2d",
                show={"version": version, "diff": HOSTILE},
            )
            await votes
            return f"{version} is live"

        @app.task(name="watch")
        async def watch(ctx: Context, what: str) -> str:
            out = ctx.stream("log")
            await out.write(f"watching {what}\n")
            while not sample.may_end.is_set():
                try:
                    await out.write(await asyncio.wait_for(sample.lines.get(), 0.05))
                except TimeoutError:
                    continue
            return "seen"

        @app.task(name="encode", lane="gpu", needs=["cuda"])
        async def encode(film: str) -> str:
            return film

        @app.task(name="price_row")
        async def price_row(row: int) -> int:
            return row * 2

        @app.task(name="import_batch")
        async def import_batch(ctx: Context, rows: int) -> int:
            return sum(await ctx.gather(*(price_row.s(row) for row in range(rows))))

        @app.task(name="basket", inbox={"add": str, "later": str})
        async def basket(ctx: Context, owner: str) -> None:
            while message := await ctx.inbox(add=str).next():
                await ctx.set("last", f"{message.value} of {owner}, {HOSTILE}")
                await message.reply(HOSTILE)

        self.basket = basket
        self.purchase, self.charge, self.research, self.deploy = purchase, charge, research, deploy
        self.watch, self.encode, self.price_row, self.import_batch = watch, encode, price_row, import_batch

    async def fill(self) -> None:
        """Create the runs and wait until each is in its state; a worker must be running."""
        runs = self.runs
        runs["purchase"] = await self.purchase.submit("3 apples")
        runs["charge"] = await self.charge.submit("4711")
        runs["research"] = await self.research.options(tags={"shop.tenant": "acme"}).submit(
            "acme", "durable execution", 17_500
        )
        runs["deploy"] = await self.deploy.submit("1.4.0")
        runs["import"] = await self.import_batch.submit(4)
        runs["encode"] = await self.encode.submit("summer.mov")
        runs["delayed"] = await self.purchase.options(delay="6h").submit("a calendar")
        runs["basket"] = await self.basket.submit("ana")
        await runs["basket"].ask("add", "a secret present", timeout=60)
        await runs["basket"].signal("later", "another")
        runs["watch"] = await self.watch.submit("the harbour")
        await self.app.schedules.create("yearly", self.purchase.s("a calendar"), cron="@yearly", tz="Europe/Berlin")
        flow = self.app.flow("film")
        parts = [flow.add(self.price_row, number) for number in range(6)]
        shop = flow.add(self.import_batch, 2, after=parts)
        flow.add(self.charge, "4712", after=[shop])
        flow.add(self.encode, "film.mov", after=[parts[0]])
        self.flow = await flow.submit()
        for name in ("purchase", "research", "import"):
            await runs[name].result(timeout=60)
        await self.reach("deploy", "suspended")
        await self.reach("basket", "suspended")
        await self.reach("watch", "active")
        await self.reach("charge", "failed")

    async def reach(self, name: str, state: str, seconds: float = 60) -> None:
        """Wait until a run has a state."""
        async with asyncio.timeout(seconds):
            while await self.runs[name].state() != state:  # noqa: ASYNC110 - the state lies in a store
                await asyncio.sleep(0.01)


@asynccontextmanager
async def sample_world(url: str) -> AsyncIterator[Sample]:
    """A filled sample with a running worker of the lane `default`."""
    sample = Sample(url)
    async with sample.app:
        engine = await sample.app.engine()
        assert isinstance(engine, Engine)
        await seed_signing_key(engine, ServerSettings())
        sample.engine = engine
        worker = Worker(sample.app, lanes=["default"])
        working = asyncio.create_task(worker.work())
        try:
            await sample.fill()
            yield sample
        finally:
            sample.may_end.set()
            worker.stop()
            await working
