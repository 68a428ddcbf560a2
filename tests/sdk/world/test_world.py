"""The test world: hours pass at once, and every run with one seed is the same."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from flowfabric import Context, Fabric, Retry
from flowfabric.testing.world import World

app = Fabric("sqlite:////nowhere/at/all.db")


@app.task(retry=Retry(max=3, base="1h", cap="9h", jitter=False))
async def stubborn(ctx: Context) -> int:
    if ctx.attempt < 3:
        raise ValueError("not yet")
    return ctx.attempt


@app.task
async def long(ctx: Context) -> int:
    await asyncio.sleep(600)
    return ctx.attempt


@app.task
def threaded(n: int) -> int:
    time.sleep(0.02)
    return n * 2


async def test_hours_of_backoff_pass_at_once() -> None:
    async with World(app) as world:
        start = world.now_ms()
        run = await stubborn.submit()
        assert await run.result() == 3
        assert world.now_ms() - start == (1 + 2 + 4) * 3_600_000
        await world.assert_invariants()


@app.task
async def sleepy(ctx: Context) -> None:
    await ctx.sleep("300d")


async def test_most_of_a_year_passes_in_a_world() -> None:
    async with World(app) as world:
        start = world.now_ms()
        await (await sleepy.submit()).result()
        assert world.now_ms() - start >= 300 * 86_400_000


async def test_a_timeout_with_a_part_of_a_millisecond_ends() -> None:
    async with World(app):
        run = await sleepy.submit()
        with pytest.raises(TimeoutError):
            await run.result(timeout=0.0104)


async def test_virtual_time_stops_while_a_thread_works() -> None:
    async with World(app) as world:
        start = world.now_ms()
        assert await (await threaded.submit(21)).result() == 42
        assert world.now_ms() - start < 1000


turns_taken: list[int] = []


@app.task
async def taking_turns(turns: int | None) -> None:
    while turns is None or len(turns_taken) < turns:
        await asyncio.sleep(0)
        turns_taken.append(len(turns_taken) + 1)


async def test_settle_waits_until_nothing_can_happen_before_the_next_timer() -> None:
    turns_taken.clear()
    async with World(app) as world:
        await taking_turns.submit(500)
        await world.settle()
        assert len(turns_taken) == 500


async def test_settle_ends_although_a_handler_is_never_idle() -> None:
    turns_taken.clear()
    async with World(app) as world:
        await taking_turns.submit(None)
        await world.settle()
        assert turns_taken


async def test_the_work_of_a_killed_worker_is_taken_over_when_its_lease_expires() -> None:
    async with World(app, workers=0) as world:
        doomed = world.start_worker()
        run = await long.submit()
        await world.advance("1m")
        world.start_worker()
        killed_at = world.now_ms()
        await world.kill(doomed)
        assert await run.result() == 1
        [first, second] = await run.attempts()
        assert first.failure_reason == "lease_expired"
        assert second.started_at - killed_at <= 16_000
        await world.assert_invariants()


effects: list[int] = []


@app.task
async def swallowing(ctx: Context) -> None:
    if ctx.attempt == 0:
        with suppress(asyncio.CancelledError):  # as `asyncio.wait_for` does before Python 3.12, if it is just over
            await asyncio.sleep(600)
    await ctx.step(effects.append, ctx.attempt)
    await ctx.sleep("1h")


async def test_a_handler_of_a_killed_worker_that_swallows_its_cancellation_does_nothing_more() -> None:
    effects.clear()
    async with World(app, workers=0) as world:
        doomed = world.start_worker()
        run = await swallowing.submit()
        await world.advance("1m")
        await world.kill(doomed)
        world.start_worker()
        await run.result()
        assert effects == [1]
        await world.assert_invariants()


async def test_two_worlds_with_one_seed_are_identical() -> None:
    async def life() -> list[str]:
        async with World(app, seed=7):
            runs = [await stubborn.submit() for _ in range(3)]
            await asyncio.gather(*(run.result() for run in runs))
            return [attempt.attempt_id for run in runs for attempt in await run.attempts()]

    assert await life() == await life()


async def test_the_app_is_restored_afterwards() -> None:
    async with World(app):
        pass
    assert app.url == "sqlite:////nowhere/at/all.db"
    assert not app._provider._engines
