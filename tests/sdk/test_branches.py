"""The branches of a durable function: beside each other, one in another, failing, and those that it makes by itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from typing import Any

import pytest

from flowfabric import Context, Fabric, Retry, RunFailed
from flowfabric.model.states import PublicState
from flowfabric.testing import World

app = Fabric("sqlite:////nowhere/at/all.db")
effects: list[str] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    effects.clear()


async def charge(what: str) -> str:
    effects.append(f"begin {what}")
    await asyncio.sleep(0.1)
    effects.append(f"end {what}")
    return what


async def refuse() -> None:
    effects.append("refuse")
    await asyncio.sleep(0.1)
    raise ValueError("no money")


@app.task
async def fails_beside_a_sleep(ctx: Context) -> None:
    await ctx.gather(ctx.step(refuse), ctx.sleep("7d"))


@app.task
async def catches_beside_a_sleep(ctx: Context) -> str:
    try:
        await ctx.gather(ctx.sleep("7d"), ctx.step(refuse))
    except ValueError:
        await ctx.sleep("1d")  # what the failure left behind does not keep the run from parking
        return await ctx.step(charge, "after all")
    return "never"


@app.task
async def catches_in_an_inner_gather(ctx: Context) -> list[Any]:
    async def inner() -> str:
        try:
            await ctx.gather(ctx.sleep("7d"), ctx.gather(ctx.step(refuse), ctx.receive("never", int)))
        except ValueError:
            return "caught"
        return "never"

    return await ctx.gather(inner(), ctx.receive("steer", str))


@app.task
def catches_in_threads(ctx: Context) -> str:
    try:
        ctx.sync.gather(lambda: ctx.sync.sleep("7d"), lambda: ctx.sync.step(refuse))
    except ValueError:
        ctx.sync.sleep("1d")
        return "caught"
    return "never"


async def test_a_branch_that_fails_beside_a_long_wait_fails_the_run_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with World(app) as world:
        began = world.now_ms()
        with pytest.raises(RunFailed, match="no money"):
            await (await fails_beside_a_sleep.submit()).result()
        assert world.now_ms() - began < 1000
        assert effects == ["refuse"]
        assert "went on" not in caplog.text
        world.assert_invariants()


async def test_a_failed_branch_is_retried_by_the_policy_and_not_when_its_neighbour_wakes() -> None:
    retried = app.task(name="retried", retry=Retry(max=2, base="1m", jitter=False))(fails_beside_a_sleep.handler)
    try:
        async with World(app) as world:
            began = world.now_ms()
            with pytest.raises(RunFailed, match="no money"):
                await (await retried.submit()).result()
            assert effects == ["refuse"] * 3
            assert world.now_ms() - began < 10 * 60_000
    finally:
        del app.tasks["retried"]


async def test_a_caught_failure_lets_the_function_go_on_and_park_again(caplog: pytest.LogCaptureFixture) -> None:
    async with World(app) as world:
        run = await catches_beside_a_sleep.submit()
        await world.advance("1h")
        assert await run.state() is PublicState.SUSPENDED
        assert await run.result() == "after all"
        assert world.now_ms() < 1_700_000_000_000 + 2 * 86_400_000, "it did not wait for the sleep it gave up"
        assert "went on" not in caplog.text
        world.assert_invariants()


async def test_a_failure_in_an_inner_gather_is_caught_while_other_branches_wait() -> None:
    async with World(app) as world:
        run = await catches_in_an_inner_gather.submit()
        await world.advance("1h")
        assert effects == ["refuse"]
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("steer", "on")
        assert await run.result() == ["caught", "on"]
        world.assert_invariants()


async def test_a_branch_in_a_thread_that_fails_is_caught_at_once() -> None:
    async with World(app) as world:
        assert await (await catches_in_threads.submit()).result() == "caught"
        assert world.now_ms() < 1_700_000_000_000 + 2 * 86_400_000
        world.assert_invariants()
