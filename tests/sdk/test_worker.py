"""Workers: slots, renewal beside a blocked loop, lost leases, draining."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from flowfabric import Context, Fabric, Run
from flowfabric.model.states import PublicState
from tests.sdk.conftest import until, working


async def test_no_more_runs_at_once_than_there_are_slots(app: Fabric) -> None:
    now, most = 0, 0

    @app.task
    async def busy() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    runs = [await busy.submit() for _ in range(20)]
    async with working(app, slots=3):
        await asyncio.gather(*(run.result(30) for run in runs))

    assert most == 3


async def test_a_blocked_loop_does_not_lose_its_work(app: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    if app.url == "memory://":
        return  # a store in the loop's own memory cannot be renewed while the loop stands still

    @app.task
    async def rude(ctx: Context) -> int:
        time.sleep(1.5)  # noqa: ASYNC251 - three times the lease
        return ctx.attempt

    async with working(app, lease_ttl="500ms"):
        run = await rude.submit()
        assert await run.result(20) == 0

    assert "time.sleep(1.5)" in caplog.text, "the blocker is reported with its stack"


async def test_a_handler_whose_lease_was_taken_away_is_cancelled(app: Fabric) -> None:
    cancelled = asyncio.Event()

    @app.task
    async def long(ctx: Context) -> int:
        if ctx.attempt:
            return ctx.attempt
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 0

    async with working(app, lease_ttl="300ms"):
        run = await long.submit()
        engine = await app.engine()
        await until(lambda: _is(run, PublicState.ACTIVE))
        await engine.revoke_lease(run.id, reason="bad node")
        await asyncio.wait_for(cancelled.wait(), 10)
        assert await run.result(20) == 1


async def test_draining_finishes_what_runs_and_hands_back_the_rest_without_costing_an_attempt(app: Fabric) -> None:
    running: list[str] = []

    @app.task
    async def quick(ctx: Context) -> str:
        running.append("quick")
        await asyncio.sleep(0.05)
        return "done"

    @app.task
    async def endless(ctx: Context) -> str:
        running.append("endless")
        if running.count("endless") == 1:
            await asyncio.sleep(3600)
        return f"attempt {ctx.attempt}"

    async def both_run() -> bool:
        return len(running) == 2

    first, second = await quick.submit(), await endless.submit()
    async with working(app, grace="300ms"):
        await until(both_run)
    assert await first.result(5) == "done"
    assert await second.state() in (PublicState.DELAYED, PublicState.WAITING)

    async with working(app):
        assert await second.result(20) == "attempt 0"
    assert len(await second.attempts()) == 1


async def test_work_of_an_unknown_kind_is_left_for_others(app: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    async def known() -> None: ...

    engine = await app.engine()
    stranger = engine.new_execution_id()
    await engine.create_execution(execution_id=stranger, execution_kind="not.here")

    async def delayed() -> bool:
        return await engine.read_execution_state(stranger) is PublicState.DELAYED

    async with working(app):
        await until(delayed)
    assert "no task 'not.here' here" in caplog.text
    assert await engine.read_total_attempt_count(stranger) == 1


async def _is(run: Run[Any], state: PublicState) -> bool:
    return await run.state() is state
