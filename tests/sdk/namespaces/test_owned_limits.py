"""Budgets and limits of an app with its own namespace: declared, spent and waited for there."""

from __future__ import annotations

import pytest

from flowfabric import Budget, Context, Fabric, Limit, errors
from flowfabric.model import obstacles
from flowfabric.testing.world import World

app = Fabric("sqlite:////nowhere/at/all.db", namespace="shop")
calls = Budget("calls", limits={"calls": 3})
patient = Budget("patient", limits={"tokens": 100}, reset="1d", on_hard="suspend")


@app.task(budgets=[calls], limits=[Limit(concurrency=1)])
async def ring(ctx: Context, times: int) -> int:
    await ctx.spend(calls, calls=times)
    return times


@app.task
async def keep(ctx: Context, used: int) -> dict[str, int]:
    async with ctx.reserve(calls, calls=2) as kept:
        during = await ctx.engine.get_budget_status(calls.id("shop"), namespace="shop")
        await kept.spend(calls=used)
    return during.reserved


@app.task(budgets=[patient])
async def think(ctx: Context, tokens: int) -> str:
    await ctx.spend(patient, tokens=tokens)
    return f"thought {tokens}"


async def used(world: World, budget: Budget) -> dict[str, int]:
    return (await world.engine.get_budget_status(budget.id("shop"), namespace="shop")).usage


async def test_an_app_spends_in_its_own_namespace() -> None:
    async with World(app) as world:
        assert await (await ring.submit(1)).result() == 1
        assert await (await keep.submit(2)).result() == {"calls": 2}

        assert await used(world, calls) == {"calls": 3}
        with pytest.raises(errors.NotFound):
            await world.engine.get_budget_status(calls.id("shop"), namespace="default")
        run = await ring.submit(1)
        await world.settle()
        assert isinstance((await run.explain()).obstacle, obstacles.BudgetExhausted)
        await world.assert_invariants()


async def test_a_run_that_sleeps_for_its_budget_resumes_when_there_is_capacity() -> None:
    async with World(app) as world:
        assert await (await think.submit(90)).result() == "thought 90"
        run = await think.submit(20)
        await world.settle()
        assert isinstance((await run.explain()).obstacle, obstacles.BudgetExhausted)

        await world.advance("1d")

        assert await run.result() == "thought 20"
        assert await used(world, patient) == {"tokens": 20}
        await world.assert_invariants()
