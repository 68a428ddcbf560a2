"""The branches of a durable function: concurrent, nested, failing, and tasks that the function creates itself."""

from __future__ import annotations

import asyncio
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
        await ctx.sleep("1d")  # The failed branch does not prevent the run from parking.
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


async def test_after_a_caught_failure_the_function_continues_and_parks_again(caplog: pytest.LogCaptureFixture) -> None:
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


# -- tasks of the function's own making --------------------------------------------------------------------------------


@app.task
async def with_asyncio(ctx: Context) -> list[Any]:
    return list(await asyncio.gather(ctx.sleep("7d"), ctx.step(charge, "one"), ctx.receive("steer", str)))


@app.task
async def with_a_task_group(ctx: Context) -> str:
    async def twice() -> None:
        await ctx.step(charge, "one")
        await ctx.step(charge, "two")

    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.sleep("7d"))
        group.create_task(twice())
    return await ctx.step(charge, "three")


@app.task
async def working_meanwhile(ctx: Context) -> str:
    asleep = asyncio.create_task(ctx.sleep("7d"))
    await asyncio.sleep(0)
    await ctx.step(charge, "one")
    await asleep
    return await ctx.step(charge, "two")


@app.task
async def the_first_of_two(ctx: Context) -> str:
    sleeping = asyncio.create_task(ctx.sleep("7d"))
    receiving = asyncio.create_task(ctx.receive("steer", str))
    done, _ = await asyncio.wait({sleeping, receiving}, return_when=asyncio.FIRST_COMPLETED)
    return receiving.result() if receiving in done else "nothing came"


@app.task
async def in_a_step(ctx: Context) -> list[Any]:
    async def patient() -> str:
        await ctx.sleep("1d")
        return "slept"

    return list(await asyncio.gather(ctx.step(patient), ctx.step(charge, "one")))


@app.task
async def branches_beside_a_task(ctx: Context) -> list[Any]:
    return list(await asyncio.gather(ctx.gather(ctx.sleep("1d"), ctx.sleep("2d")), ctx.step(charge, "one")))


@app.task
async def failing_asyncio(ctx: Context) -> str:
    try:
        await asyncio.gather(ctx.sleep("7d"), ctx.step(refuse))
    except ValueError:
        return "caught"
    return "never"


@pytest.mark.parametrize("crash", [None, "before_effect", "after_effect", "after_commit"])
async def test_asyncio_gather_interrupts_no_step_and_parks(crash: Any) -> None:
    async with World(app) as world:
        if crash:
            world.crash_at("step:charge", crash)
        run = await with_asyncio.submit()
        await world.advance("1m")
        assert await run.state() is PublicState.SUSPENDED
        assert effects == ["begin one", "end one"] * (2 if crash == "after_effect" else 1)
        await run.signal("steer", "on")
        await world.advance("1d")
        assert await run.result() == [None, "one", "on"]
        assert effects == ["begin one", "end one"] * (2 if crash == "after_effect" else 1)
        world.assert_invariants()


async def test_the_steps_of_a_task_group_continue_while_another_of_its_tasks_sleeps() -> None:
    async with World(app) as world:
        run = await with_a_task_group.submit()
        await world.advance("1m")
        assert await run.state() is PublicState.SUSPENDED
        assert effects == ["begin one", "end one", "begin two", "end two"]
        assert await run.result() == "three"
        assert effects[4:] == ["begin three", "end three"]
        world.assert_invariants()


async def test_a_sleeping_task_does_not_interrupt_the_functions_own_step() -> None:
    async with World(app) as world:
        assert await (await working_meanwhile.submit()).result() == "two"
        assert effects == ["begin one", "end one", "begin two", "end two"]
        world.assert_invariants()


async def test_asyncio_wait_returns_with_the_first_of_two_waits() -> None:
    async with World(app) as world:
        run = await the_first_of_two.submit()
        await world.advance("1d")
        await run.signal("steer", "on")
        await world.advance("1m")
        assert await run.state() is PublicState.COMPLETED
        assert await run.result() == "on"
        assert await (await the_first_of_two.submit()).result() == "nothing came"
        world.assert_invariants()


async def test_a_step_that_waits_lets_the_run_park_once_the_others_are_done() -> None:
    async with World(app) as world:
        run = await in_a_step.submit()
        await world.advance("1h")
        assert await run.state() is PublicState.SUSPENDED
        assert await run.result() == ["slept", "one"]
        assert effects == ["begin one", "end one"]
        world.assert_invariants()


async def test_branches_that_all_wait_do_not_interrupt_the_step_of_a_concurrent_task() -> None:
    async with World(app) as world:
        run = await branches_beside_a_task.submit()
        await world.advance("1h")
        assert await run.state() is PublicState.SUSPENDED
        assert await run.result() == [[None, None], "one"]
        assert effects == ["begin one", "end one"]
        world.assert_invariants()


async def test_a_failure_in_asyncio_gather_is_raised_at_once() -> None:
    async with World(app) as world:
        run = await failing_asyncio.submit()
        await world.advance("1m")
        assert await run.state() is PublicState.COMPLETED
        assert await run.result() == "caught"
        world.assert_invariants()
