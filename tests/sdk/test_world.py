"""The test world: hours pass at once, and every run with one seed is the same."""

from __future__ import annotations

import asyncio
import time

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


async def test_time_stands_still_while_a_thread_works() -> None:
    async with World(app) as world:
        start = world.now_ms()
        assert await (await threaded.submit(21)).result() == 42
        assert world.now_ms() - start < 1000


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
