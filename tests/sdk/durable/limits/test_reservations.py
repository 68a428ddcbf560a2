"""Spends and reservations of durable functions: counted once, also if the run sleeps, fails or changes its worker."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import Budget, Context, Fabric, Retry
from flowfabric.model.limits.budget import UsageKey
from flowfabric.model.states import PublicState
from flowfabric.sdk.worker.worker import Worker
from flowfabric.testing.invariants import scan_all
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

app = Fabric("sqlite:////nowhere/at/all.db")
purse = Budget("purse", limits={"tokens": 10})
calls: list[str] = []
RETRY = Retry(max=4, base="1s", jitter=False)


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


async def figures(app: Fabric) -> tuple[int, int]:
    """What is spent and reserved."""
    status = await (await app.engine()).get_budget_status(purse.id(app.namespace))
    return status.usage.get("tokens", 0), status.reserved.get("tokens", 0)


@app.task
async def spend_elsewhere(ctx: Context, tokens: int) -> None:
    await ctx.spend(purse, tokens=tokens)


async def note() -> None:
    calls.append("note")


@app.task(retry=RETRY)
async def sleeping(ctx: Context) -> None:
    async with ctx.reserve(purse, tokens=8) as room:
        await room.spend(tokens=3)
        await ctx.sleep("2d")
        await room.spend(tokens=2)


async def test_a_run_that_sleeps_two_days_in_a_reservation_spends_once() -> None:
    async with World(app) as world:
        run = await sleeping.submit()
        await world.advance("30m")
        assert await run.state() is PublicState.SUSPENDED
        assert await figures(app) == (3, 5)
        await world.advance("1h")
        assert await figures(app) == (3, 0), "the reservation has expired"
        await world.advance("2d")
        assert await run.state() is PublicState.COMPLETED
        assert await figures(app) == (5, 0)
        assert len(await run.attempts()) == 1
        await world.assert_invariants()


async def test_workers_that_stop_ten_times_in_a_reservation_spend_it_once(app: Fabric) -> None:
    entered = asyncio.Event()

    @app.task
    async def long(ctx: Context) -> int:
        async with ctx.reserve(purse, tokens=8) as room:
            await room.spend(tokens=3)
            calls.append("entered")
            entered.set()
            if len(calls) <= 10:
                await asyncio.sleep(60)
            await room.spend(tokens=2)
        return len(calls)

    run = await long.submit()
    for _ in range(10):
        worker = Worker(app, grace="0s")
        working = asyncio.create_task(worker.work())
        async with asyncio.timeout(20):
            await entered.wait()
        entered.clear()
        worker.stop()
        await working
        assert await figures(app) == (3, 5), "the next attempt takes the reservation up"
    async with running_worker(app):
        assert await run.result(20) == 11
    assert await figures(app) == (5, 0)


@app.task(retry=RETRY)
async def paying(ctx: Context) -> None:
    await ctx.spend(purse, tokens=1)
    async with ctx.reserve(purse, tokens=5) as room:
        await room.spend(tokens=3)


@app.task(retry=Retry(max=1, base="25h", cap="25h", jitter=False))
async def paying_late(ctx: Context) -> int:
    await ctx.spend(purse, tokens=1)
    async with ctx.reserve(purse, tokens=5) as room:
        await room.spend(tokens=3)
    return ctx.attempt


@pytest.mark.parametrize("point", ["spend:purse", "spent:purse"])
async def test_a_spend_whose_record_was_lost_is_not_counted_again_after_25_hours(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(context: Context, reached: str, moment: str) -> None:
        if (reached, moment, context.attempt) == (point, "after_effect", 0):
            raise ConnectionError("counted, and not recorded")

    async with World(app) as world:
        monkeypatch.setattr(app, "on_fault_point", fail)
        assert await (await paying_late.submit()).result() == 1
        assert await figures(app) == (4, 0)
        await world.assert_invariants()


@pytest.mark.parametrize("moment", ["before_effect", "after_effect", "after_commit"])
async def test_a_crash_at_a_spend_from_a_reservation_counts_it_once(app: Fabric, moment: str) -> None:
    @app.task(retry=Retry(max=3, base="10ms", jitter=False))
    async def pay(ctx: Context) -> str:
        async with ctx.reserve(purse, tokens=10) as room:
            await room.spend(tokens=4)
            await ctx.step(note)
            await room.spend(tokens=3)
        return "paid"

    crashes = Crashes(app, [("spent:purse", moment), ("step:note", "after_commit")])
    async with running_worker(app):
        assert await (await pay.submit()).result(20) == "paid"
    assert not crashes.left
    assert await figures(app) == (7, 0)
    assert calls == ["note"]


async def test_a_holder_that_lost_its_lease_neither_spends_nor_refunds() -> None:
    async with World(app, workers=2) as world:
        world.crash_at("spent:purse", "lease_expired")
        run = await paying.submit()
        await run.result()
        await world.advance("1m")
        assert await figures(app) == (4, 0)
        await world.assert_invariants()


@app.task(retry=RETRY)
async def talking(ctx: Context, is_reserved: bool) -> int:
    async with ctx.reserve(purse, tokens=2) as room:

        async def talk() -> int:
            calls.append("talk")
            await (room.spend(tokens=2) if is_reserved else ctx.spend(purse, tokens=2))
            if len(calls) < 5:
                raise ConnectionError("cut off")
            return len(calls)

        return await ctx.options(name="talk").step(talk)


@pytest.mark.parametrize("is_reserved", [True, False])
async def test_five_failed_runs_of_a_step_spend_what_five_calls_spent(is_reserved: bool) -> None:
    async with World(app) as world:
        run = await talking.submit(is_reserved)
        if is_reserved:
            assert await run.result() == 5
            assert await figures(app) == (10, 0)
        else:  # the fifth does not fit: what was reserved is not used
            await world.advance("1m")
            assert await figures(app) == (8, 0)
            assert len(calls) == 5
        await world.assert_invariants()


@app.task(retry=RETRY)
async def retrying(ctx: Context) -> int:
    async with ctx.reserve(purse, tokens=10) as room:
        await room.spend(tokens=6)
        if ctx.attempt < 3:
            raise ConnectionError("cut off")
        await room.spend(tokens=4)
    return ctx.attempt


async def test_a_retry_reserves_what_was_not_spent() -> None:
    async with World(app) as world:
        assert await (await retrying.submit()).result() == 3
        assert await figures(app) == (10, 0)
        await world.assert_invariants()


@app.task
async def short(ctx: Context, is_failing: bool) -> str:
    try:
        async with ctx.reserve(purse, tokens=10) as room:
            await room.spend(tokens=2)
            if is_failing:
                raise KeyError("inside")
    except KeyError:
        calls.append("caught")
    await ctx.sleep("10m")
    return "done"


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_replay_does_not_reserve_again_what_was_given_back(is_failing: bool) -> None:
    async with World(app) as world:
        run = await short.submit(is_failing)
        await world.advance("1m")
        assert await figures(app) == (2, 0)
        await (await spend_elsewhere.submit(8)).result()
        assert await run.result() == "done"
        assert await figures(app) == (10, 0)


@app.task
async def forgetful(ctx: Context) -> None:
    async with ctx.reserve(purse, tokens=5) as room:
        room.spend(tokens=1)  # type: ignore[unused-awaitable]
        room.spend(tokens=2)  # type: ignore[unused-awaitable]
    await ctx.sleep("10m")


async def test_a_spend_without_await_is_counted_at_the_end_of_the_block_and_warns() -> None:
    async with World(app) as world:
        run = await forgetful.submit()
        with pytest.warns(DeprecationWarning, match=r"write `await room.spend\(…\)`"):
            await world.advance("1m")
        assert await figures(app) == (3, 0)
        await run.result()
        assert await figures(app) == (3, 0)


async def test_a_plain_handler_spends_from_a_reservation_once(app: Fabric) -> None:
    @app.task(retry=Retry(max=3, base="10ms", jitter=False))
    def pay(ctx: Context) -> int:
        with ctx.sync.reserve(purse, tokens=10) as room:
            room.spend(tokens=6)
            if ctx.attempt == 0:
                raise ConnectionError("cut off")
            room.spend(tokens=4)
        return ctx.attempt

    async with running_worker(app):
        assert await (await pay.submit()).result(20) == 1
    assert await figures(app) == (10, 0)


async def test_a_cancelled_run_gives_its_reservation_back() -> None:
    @app.task(name="waiting")
    async def waiting(ctx: Context) -> None:
        async with ctx.reserve(purse, tokens=5):
            await asyncio.sleep(3600)

    async with World(app) as world:
        run = await waiting.submit()
        await world.advance("1m")
        assert await figures(app) == (0, 5)
        await run.cancel("not needed")
        await world.advance("1m")
        assert await figures(app) == (0, 0)


async def test_the_budget_forgets_the_keys_of_a_run_a_day_after_its_end() -> None:
    async with World(app) as world:
        await (await paying.submit()).result()
        keys = await scan_all(world.store, UsageKey)
        assert len([key for key in keys if not key.digest.startswith("change:")]) == 2
        assert max(key.expires_at for key in keys) <= world.now_ms() + 24 * 60 * 60 * 1000
