"""Progress of durable functions never goes back when they are replayed."""

from __future__ import annotations

import pytest

from flowfabric import Context, Fabric, Retry
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

app = Fabric("sqlite:////nowhere/at/all.db")
seen: list[int] = []
RETRY = Retry(max=3, base="10ms", jitter=False)


@pytest.fixture(autouse=True)
def _clean() -> None:
    seen.clear()


async def report(ctx: Context, pct: int) -> None:
    await ctx.progress(pct=pct)
    now, _ = await ctx.engine.read_progress(ctx.run_id)
    assert now is not None
    seen.append(now)


async def note(number: int) -> None:
    pass


@pytest.mark.parametrize("moment", ["before_effect", "after_effect", "after_commit"])
async def test_progress_never_goes_back_when_the_process_dies(app: Fabric, moment: str) -> None:
    @app.task(retry=RETRY)
    async def job(ctx: Context) -> None:
        await ctx.step(note, 0)
        for number in (1, 2, 3):
            await report(ctx, 20 * number)
            await report(ctx, 20 * number + 10)
            await ctx.options(name=f"note{number}").step(note, number)

    points = [("step:note1", moment), ("step:note3", moment)]
    crashes = Crashes(app, points)
    async with running_worker(app):
        run = await job.submit()
        await run.result(20)
    assert not crashes.left
    assert seen == sorted(seen)
    assert seen[-1] == 70
    assert await run.progress() == {"pct": 70}


@app.task
async def sleeping(ctx: Context) -> None:
    await report(ctx, 10)
    await report(ctx, 50)
    await ctx.sleep("1h")
    await report(ctx, 60)


async def test_progress_never_goes_back_after_a_wait() -> None:
    async with World(app):
        await (await sleeping.submit()).result()
    assert seen == [10, 50, 50, 50, 60]


@app.task
async def branching(ctx: Context) -> None:
    async def branch(name: str, hours: int) -> None:
        for number in range(1, 4):
            await ctx.progress({name: number})
            await ctx.sleep(f"{hours}h")

    await ctx.gather(branch("a", 1), branch("b", 2))


async def test_each_branch_counts_its_own_reports() -> None:
    async with World(app) as world:
        run = await branching.submit()
        last = {"a": 0, "b": 0}
        for _ in range(14):
            progress = await run.progress()
            assert all(progress.get(name, 0) >= number for name, number in last.items())
            last |= progress
            await world.advance("30m")
        assert last == {"a": 3, "b": 3}


@app.task(retry=Retry(max=1, base="1s", jitter=False))
async def plain(ctx: Context) -> None:
    await report(ctx, 10)
    await report(ctx, 90)
    if ctx.attempt == 0:
        raise ValueError("once more")


async def test_a_plain_task_that_is_retried_starts_from_zero() -> None:
    async with World(app):
        await (await plain.submit()).result()
    assert seen == [10, 90, 10, 90]


@app.task(retry=Retry(max=1, base="1s", jitter=False))
async def with_step(ctx: Context) -> None:
    async def work() -> None:
        await report(ctx, 30)
        await report(ctx, 40)
        if ctx.attempt == 0:
            raise ValueError("once more")

    await report(ctx, 20)
    await ctx.step(note, 1)
    await ctx.options(name="work").step(work)


async def test_a_step_that_runs_again_reports_again() -> None:
    async with World(app):
        await (await with_step.submit()).result()
    assert seen == [20, 30, 40, 40, 30, 40]
