"""Facts of durable functions: a query that needs no worker, and never goes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Context, Fabric, InvalidInput, Retry
from flowfabric.errors import FactTooLarge, NotFound
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

app = Fabric("sqlite:////nowhere/at/all.db")
RETRY = Retry(max=5, base="10ms", jitter=False)


@app.task
async def counting(ctx: Context) -> None:
    for number in range(1, 4):
        await ctx.set("n", number)
        await ctx.sleep("1h")


async def test_a_fact_never_goes_back() -> None:
    async with World(app) as world:
        run = await counting.submit()
        seen = [number async for number in run.watch("n", int)]
        assert seen == [1, 2, 3]
        [fact] = await world.engine.list_facts(run.id)
        assert fact.number == 3, "no replay repeated a set"
        world.assert_invariants()


@pytest.mark.parametrize("moment", ["before_effect", "after_effect", "after_commit"])
async def test_a_watcher_sees_a_growing_sequence_whenever_the_process_dies(app: Fabric, moment: str) -> None:
    @app.task(retry=RETRY)
    async def job(ctx: Context) -> None:
        for number in range(1, 6):
            await ctx.set("n", number)
            await ctx.options(name=f"note{number}").step(int)

    points = [("fact:n", moment), ("step:note2", moment), ("step:note4", moment)]
    crashes = Crashes(app, points)
    async with running_worker(app):
        run = await job.submit()
        seen = [number async for number in run.watch("n", int)]
        await run.result(20)
    assert not crashes.left
    assert seen == sorted(set(seen))
    assert seen[-1] == 5


@app.task
async def branching(ctx: Context) -> None:
    async def branch(name: str) -> None:
        for number in range(3):
            await ctx.set("last", f"{name}{number}")
            await ctx.sleep("1h")

    await ctx.gather(branch("a"), branch("b"))


async def test_each_branch_counts_its_own_sets() -> None:
    async with World(app) as world:
        run = await branching.submit()
        await run.result()
        [fact] = await world.engine.list_facts(run.id)
    assert fact.number == 6


@app.task(retry=RETRY)
async def in_a_step(ctx: Context) -> int:
    async def work() -> int:
        await ctx.set("attempt", ctx.attempt)
        if ctx.attempt < 2:
            raise ValueError("again")
        return ctx.attempt

    return await ctx.step(work)


async def test_a_step_that_runs_again_sets_again() -> None:
    async with World(app) as world:
        run = await in_a_step.submit()
        assert await run.result() == 2
        assert await run.get("attempt", int) == 2
        assert [fact.number for fact in await world.engine.list_facts(run.id)] == [3]


@app.task
async def waiting(ctx: Context) -> None:
    await ctx.receive("go")
    await ctx.set("went", True)


async def test_a_fact_is_read_of_a_run_that_waits_has_ended_or_has_no_worker() -> None:
    async with World(app, workers=0) as world:
        run = await counting.submit()
        assert await run.get("n", int) is None
        world.start_worker()
        assert await run.get("n", int, wait="5s") == 1
        await run.result()
        assert await run.get("n", int) == 3


async def test_a_fact_that_is_not_set_says_what_the_run_waits_for() -> None:
    async with World(app):
        run = await waiting.submit()
        with pytest.raises(TimeoutError, match="has set no 'went' within 5 s; it waits for a message to go"):
            await run.get("went", bool, wait="5s")
        getting = asyncio.create_task(run.get("went", bool, wait="1h"))
        await run.signal("go")
        assert await getting is True
        with pytest.raises(TimeoutError, match="has set no 'other', and has ended"):
            await run.get("other", bool, wait="1h")


async def test_a_fact_of_no_run_is_not_found() -> None:
    async with World(app) as world:
        run = app.find(world.engine.new_execution_id())
        for call in (run.get("n"), anext(run.watch("n"))):
            with pytest.raises(NotFound):
                await call


@app.task
async def too_much(ctx: Context) -> list[Any]:
    said = []
    for name, value in (("big", "x" * 70_000), ("", 1), ("odd", object())):
        try:
            await ctx.set(name, value)
        except (FactTooLarge, InvalidInput) as refused:
            said.append(str(refused))
    return said


async def test_a_bad_fact_names_the_fix_and_changes_nothing() -> None:
    async with World(app) as world:
        run = await too_much.submit()
        large, nameless, odd = await run.result()
        assert await world.engine.list_facts(run.id) == []
    assert "70002 bytes, the limit is 65536" in large
    assert "set a reference to it" in large
    assert "name" in nameless
    assert "not JSON" in odd


@app.task
def plain(ctx: Context) -> None:
    ctx.sync.set("a", [1])
    ctx.sync.sleep("1h")
    ctx.sync.set("a", [1, 2])


async def test_a_plain_function_sets_facts() -> None:
    async with World(app):
        run = await plain.submit()
        assert await run.get("a", list[int], wait="10s") == [1]
        await run.result()
        assert await run.get("a", list[int]) == [1, 2]


async def test_a_plain_call_keeps_its_facts() -> None:
    @app.task(name="shows")
    async def shows(ctx: Context) -> Any:
        await ctx.set("a", 1)
        return getattr(ctx, "facts", None)

    assert await shows() == {"a": 1}
