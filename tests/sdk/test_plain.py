"""Plain `def` handlers have the features of `async def` handlers through `ctx.sync`."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest

from flowfabric import Context, Fabric, Quorum, Retry, RunFailed, current
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker

app = Fabric("sqlite:////nowhere/at/all.db")
effects: list[str] = []
links: list[list[str]] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    effects.clear()
    links.clear()


@dataclass
class Answer:
    ok: bool


def charge(amount: int) -> str:
    effects.append(f"charge {amount} in {threading.current_thread().name}")
    return f"receipt for {amount}"


async def fetch(n: int) -> int:
    await asyncio.sleep(0)
    effects.append(f"fetch {n}")
    return n


def mail(sent: list[str]) -> None:
    links.append(sent)


@app.task(retry=Retry(max=3, base="1s", jitter=False))
def pay(ctx: Context, amounts: list[int]) -> list[str]:
    receipts = [ctx.sync.step(charge, amount) for amount in amounts]
    ctx.sync.step(fetch, 7)
    if ctx.attempt < 2:
        raise ValueError("after the steps")
    return receipts


@app.task
def nap(ctx: Context) -> tuple[int, int]:
    before = ctx.sync.now()
    effects.append(f"{ctx.sync.uuid()} {ctx.sync.random.random()}")
    ctx.sync.sleep("3d")
    ctx.sync.sleep("200ms")
    return before, ctx.engine.estimate.now()


@app.task
def deploy(ctx: Context) -> str:
    gate = ctx.sync.approval("approve", Answer, need=2, expires="3d")
    ctx.sync.step(mail, gate.links)
    votes = gate.votes()
    return "rejected" if votes.expired else "applied by " + ",".join(vote.by for vote in votes)


@app.task
def double(ctx: Context, n: int) -> int:
    ctx.sync.sleep(f"{n}s")
    return n * 2


@app.task
def family(ctx: Context) -> tuple[list[int | None], int, int]:
    numbers = ctx.sync.gather([double.s(n) for n in (2, 3, 400)], join=Quorum(2, cancel_rest=True))
    fastest = ctx.sync.race(double.s(50), double.s(4))
    child = ctx.sync.spawn(double.s(5))
    return numbers, fastest, child.result()


@app.task
def branches(ctx: Context) -> list[str]:
    def one(number: int) -> str:
        ctx.sync.sleep(f"{20 - number}s")
        return ctx.sync.step(charge, number)

    return ctx.sync.gather(lambda: one(1), lambda: one(2), lambda: str(ctx.sync.receive("go", str)))


@app.task
def talking(ctx: Context) -> str:
    ctx.sync.progress({"phase": "one", "pct": 10})
    out = ctx.sync.stream("answer")
    for word in ("never ", "twice"):
        out.write(word)
    ctx.sync.progress({"phase": None, "pct": 100})
    assert current() is ctx
    return out.text()


async def test_finished_steps_do_not_run_again_and_run_in_the_handlers_own_thread() -> None:
    async with World(app) as world:
        assert await (await pay.submit([3, 3])).result() == ["receipt for 3", "receipt for 3"]
        await world.assert_invariants()
    assert [effect.rpartition("-")[0] for effect in effects[:2]] == ["charge 3 in flowfabric-task"] * 2
    assert effects[2:] == ["fetch 7"]


async def test_a_sleep_of_days_occupies_no_thread_and_no_time() -> None:
    async with World(app, slots=1):
        runs = [await nap.submit() for _ in range(3)]
        for before, after in await asyncio.gather(*(run.result() for run in runs)):
            assert 3 * 86_400_000 <= after - before < 3 * 86_400_000 + 10_000
    assert len(effects) == 6
    assert len(set(effects)) == 3, "ids and numbers are the same after the sleep"


async def test_a_plain_handler_asks_for_approval() -> None:
    async with World(app) as world:
        run = await deploy.submit()
        gate = await world.approval(run, "approve")
        await gate.answer_as("ana", Answer(True))
        await gate.answer_as("bo", Answer(True))
        assert await run.result() == "applied by ana,bo"
    assert len(links) == 1
    assert len(links[0]) == 2


async def test_a_plain_handler_gathers_and_races_children() -> None:
    async with World(app) as world:
        assert await (await family.submit()).result() == ([4, 6, None], 8, 10)
        await world.assert_invariants()


async def test_branches_in_threads_keep_their_own_results() -> None:
    async with World(app) as world:
        run = await branches.submit()
        await world.advance("1m")
        assert len(effects) == 2, "both branches paid while the third still waits"
        await run.signal("go", "go")
        assert await run.result() == ["receipt for 1", "receipt for 2", "go"]
    assert len(effects) == 2


async def test_a_plain_handler_reports_progress_and_streams() -> None:
    async with World(app):
        run = await talking.submit()
        assert await run.result() == "never twice"
        assert await run.progress() == {"pct": 100}
        assert [frame.text async for frame in run.stream("answer")] == ["never ", "twice"]  # type: ignore[union-attr]


async def test_a_blocking_method_on_the_loop_is_refused_with_the_alternative() -> None:
    @app.task(name="mistaken")
    async def mistaken(ctx: Context) -> None:
        ctx.sync.sleep("1s")

    async with World(app):
        with pytest.raises(RunFailed, match=r"await the method without \.sync"):
            await (await mistaken.submit()).result()


async def test_plain_handlers_wait_and_step_on_every_store(app: Fabric) -> None:
    ran: list[int] = []

    @app.task
    def function(ctx: Context, n: int) -> str:
        ctx.sync.step(ran.append, n)
        got = ctx.sync.receive("go", str)
        time.sleep(0.001)
        return f"{n} {got}"

    async with running_worker(app, slots=4):
        runs = [await function.submit(n) for n in range(4)]
        for run in runs:
            await run.signal("go", "went")
        assert await asyncio.gather(*(run.result(20) for run in runs)) == [f"{n} went" for n in range(4)]
    assert sorted(ran) == [0, 1, 2, 3]
