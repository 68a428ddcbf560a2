"""Blocking code in a test world: threads take turns, so that equal seeds give equal runs; `settle` waits for them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest

from flowfabric import Context, Fabric, Retry, Run
from flowfabric.settings import Settings, Sweeps
from flowfabric.testing import virtual_time
from flowfabric.testing.world import RARE_INTERVAL_MS, World

app = Fabric("memory://")
ORDER: list[str] = []


def effect(name: str, length_s: float) -> str:
    ORDER.append(f"{name} begins")
    time.sleep(length_s)
    ORDER.append(f"{name} ends")
    return name


def flaky(name: str) -> str:
    ORDER.append(f"{name} tries")
    if ORDER.count(f"{name} tries") < 2:
        raise ValueError(name)
    return name


@app.task(retry=Retry(max=3, base="1m", jitter=True))
async def mixed(ctx: Context, number: int) -> list[str]:
    """Run steps of unequal length concurrently: the first takes longest."""
    lengths = [0.004, 0.0, 0.001, 0.002]
    names = [f"{number}.{place}" for place in range(4)]
    done = await asyncio.gather(
        *(ctx.options(key=name).step(effect, name, length) for name, length in zip(names, lengths, strict=True))
    )
    return [*done, await ctx.step(flaky, f"{number}.flaky")]


@app.task
def plain(ctx: Context, number: int) -> str:
    first = ctx.sync.step(effect, f"plain {number}.1", 0.001)
    ctx.sync.sleep("1h")
    return first + ctx.sync.step(effect, f"plain {number}.2", 0.0)


async def life(seed: int) -> list[Any]:
    """Return everything observable of a run with this seed: blocking calls in order, and every event."""
    ORDER.clear()
    async with World(app, seed=seed, workers=2) as world:
        runs: list[Run[Any]] = [await mixed.submit(number) for number in range(4)]
        runs += [await plain.submit(number) for number in range(3)]
        results = [await run.result() for run in runs]
        histories = [[msgspec.to_builtins(event) for event in await world.engine.lease_history(run.id)] for run in runs]
        attempts = [[msgspec.to_builtins(one) for one in await run.attempts()] for run in runs]
        await world.assert_invariants()
        return [results, histories, attempts, [*ORDER], world.now_ms()]


async def test_twenty_four_worlds_of_one_seed_have_the_same_order_of_blocking_steps() -> None:
    lives = [await life(11) for _ in range(24)]

    for other in lives[1:]:
        for ours, theirs in zip(lives[0], other, strict=True):
            assert ours == theirs
    assert await life(12) != lives[0]


async def test_settle_waits_for_blocking_steps() -> None:
    done = []

    def slow(number: int) -> int:
        time.sleep(0.02)
        done.append(number)
        return number

    @app.task
    async def several(ctx: Context) -> int:
        return sum(await asyncio.gather(*(ctx.options(key=str(number)).step(slow, number) for number in range(5))))

    async with World(app) as world:
        run = await several.submit()
        await world.settle()

        assert done == [0, 1, 2, 3, 4]
        assert await run.state() == "completed"


async def test_settle_runs_blocking_handlers_up_to_their_wait() -> None:
    async with World(app) as world:
        run = await plain.submit(1)
        await world.settle()
        assert await run.state() == "suspended"


async def test_blocking_code_that_waits_for_other_blocking_code_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STUCK_S", 0.05)
    released = threading.Event()

    def listens() -> bool:
        return released.wait(20)

    def release() -> bool:
        released.set()
        return True

    @app.task
    async def both(ctx: Context) -> list[bool]:
        return [*await asyncio.gather(ctx.step(listens), ctx.step(release))]

    async with World(app) as world:
        run = await both.submit()
        await world.settle()
        assert await run.result() == [True, True]


async def test_settle_reports_blocking_code_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STUCK_S", 0.02)
    monkeypatch.setattr(virtual_time, "IDLE_TIMEOUT_S", 0.1)
    may_end = threading.Event()

    @app.task
    def waits() -> bool:
        return may_end.wait(20)

    async with World(app) as world:
        run = await waits.submit()
        with pytest.raises(TimeoutError, match="plain code in a thread has been running for 0.1 s of real time"):
            await world.settle()
        may_end.set()
        assert await run.result() is True


async def test_a_busy_loop_does_not_starve_blocking_code() -> None:
    async with World(app):
        run = await plain.submit(1)
        while await run.state() != "suspended":  # noqa: ASYNC110 - the loop is kept busy on purpose
            await asyncio.sleep(0)


async def test_blocking_code_that_was_cancelled_before_its_turn_never_runs() -> None:
    ran: list[int] = []
    async with World(app):
        first = asyncio.ensure_future(asyncio.to_thread(ran.append, 1))
        second = asyncio.ensure_future(asyncio.to_thread(ran.append, 2))
        await asyncio.sleep(0)
        second.cancel()
        await first
        await asyncio.sleep(1)
    assert ran == [1]


async def test_a_world_has_the_settings_of_its_app() -> None:
    sweeps = Sweeps(lease_expiry_ms=0, batch=7, jitter=0.5)
    own = Fabric("memory://", settings=Settings(retention_ms=5_000, ageing_ms={"slow": 10}, sweeps=sweeps))
    async with World(own, workers=0) as world:
        found = world.engine.settings
        assert (found.retention_ms, found.ageing_ms) == (5_000, {"slow": 10})
        assert (found.sweeps.lease_expiry_ms, found.sweeps.batch, found.sweeps.jitter) == (0, 7, 0.5)
        assert (found.poll_ms, found.sweeps.delayed_promoter_ms) == (RARE_INTERVAL_MS, RARE_INTERVAL_MS), (
            "where it says nothing"
        )


async def test_finished_runs_are_kept_in_a_world_as_long_as_the_app_says() -> None:
    own = Fabric("memory://", settings=Settings(retention_ms=60_000))

    @own.task
    async def short() -> int:
        return 1

    async with World(own) as world:
        run = await short.submit()
        assert await run.result() == 1
        await world.advance("59s")
        assert await world.engine.describe_execution(run.id) is not None
        await world.advance("2s")
        assert await world.engine.describe_execution(run.id) is None


async def test_a_server_call_that_pauses_before_it_tries_again_comes_to_an_end() -> None:
    clock = virtual_time.VirtualTime(asyncio.get_running_loop())
    clock.start()
    try:
        before = clock.now()
        with clock.stopped():
            await asyncio.sleep(0.01)
        assert clock.now() - before < 1, "the clock runs no faster than real time"
    finally:
        clock.stop()
