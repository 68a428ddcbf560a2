"""Exception groups, as a task group raises them: what is reported, and the outcome of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Context, Fabric, Fatal, Retry, RetryAfter, RunFailed
from flowfabric.testing.world import World

app = Fabric("sqlite:////nowhere/at/all.db")

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def in_a_group(*failures: BaseException) -> Any:
    """Return a handler whose tasks fail together on its first call."""

    async def fails(failure: BaseException) -> None:
        await asyncio.sleep(0.01)
        raise failure

    async def handler() -> int:
        calls.append("handler")
        if len(calls) == 1:
            async with asyncio.TaskGroup() as group:
                for failure in failures:
                    group.create_task(fails(failure))
        return len(calls)

    return handler


async def test_a_waiter_receives_every_failure_of_a_group_with_its_traceback() -> None:
    task = app.task(name="group")(in_a_group(ValueError("no good"), KeyError("colour")))

    async with World(app):
        with pytest.raises(RunFailed) as failed:
            await (await task.submit()).result()

    first = str(failed.value).splitlines()[0]
    assert "ValueError: no good" in first
    assert "KeyError: 'colour'" in first
    assert str(failed.value).count("raise failure") == 2


async def test_a_fatal_failure_is_fatal_in_a_group() -> None:
    task = app.task(name="group", retry=Retry(max=3))(in_a_group(ValueError("perhaps"), Fatal("no such card")))

    async with World(app):
        with pytest.raises(RunFailed, match="no such card"):
            await (await task.submit()).result()

    assert len(calls) == 1


async def test_a_retry_policy_for_some_failures_recognises_them_in_a_group() -> None:
    task = app.task(name="group", retry=Retry(max=3, only=("ConnectionError",)))(in_a_group(ConnectionError("away")))

    async with World(app):
        assert await (await task.submit()).result() == 2


async def test_several_retry_after_errors_use_the_longest_delay() -> None:
    task = app.task(name="group", retry=Retry(max=0))(in_a_group(RetryAfter("5s"), RetryAfter("60s")))

    async with World(app) as world:
        began = world.now_ms()
        run = await task.submit()
        assert await run.result() == 2
        assert world.now_ms() - began >= 60_000
        assert len(await run.attempts()) == 1


async def test_a_process_that_dies_within_a_task_group_is_dead() -> None:
    async def pay() -> str:
        calls.append("pay")
        return "paid"

    @app.task(retry=Retry(max=0))
    async def checkout(ctx: Context) -> str:
        async with asyncio.TaskGroup() as group:
            paying = group.create_task(ctx.step(pay))
        return paying.result()

    async with World(app) as world:
        world.crash_at("step:pay", "after_effect")
        assert await (await checkout.submit()).result() == "paid"

    assert calls == ["pay", "pay"]
