"""Branches on every event loop: other loops, task factories of the application, eager tasks."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
import uvloop

from flowfabric import Context, Fabric, RunFailed
from flowfabric.sdk.durable import branches
from flowfabric.testing import World
from tests.sdk.conftest import running_worker, wait_until_suspended
from tests.sdk.durable.branches.steps import check, effects, pay

IS_FOR_EVERY_STORE = True

world_app = Fabric("sqlite:////nowhere/at/all.db")


@world_app.task
async def pair(ctx: Context) -> list[Any]:
    async def member(name: str) -> str:
        await ctx.step(check, 20 if name == "a" else 1)
        paid = await ctx.step(pay, name)
        await ctx.sleep("1h")
        return paid

    return list(await asyncio.gather(member("a"), member("b"), ctx.gather(ctx.step(pay, "c"), ctx.sleep("1h"))))


@world_app.task
async def wage(whom: str) -> str:
    return await pay(whom)


@world_app.task
async def wages_of_children(ctx: Context) -> list[str]:
    runs = [await ctx.spawn(wage, name) for name in ("ana", "bo")]
    await ctx.sleep("1h")
    return [await run.result() for run in runs]


PAID = ["a is paid", "b is paid", ["c is paid", None]]


async def test_an_earlier_task_factory_still_makes_the_tasks() -> None:
    made: list[str] = []

    def foreign(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(getattr(coroutine, "__qualname__", ""))
        return asyncio.Task(coroutine, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(foreign)
    async with World(world_app):
        assert await (await pair.submit()).result() == PAID
    assert sorted(effects) == ["a", "b", "c"]
    assert "pair.<locals>.member" in made


if "eager_task_factory" in vars(asyncio):  # since Python 3.12

    async def test_eager_tasks_keep_their_own_steps() -> None:
        factory: Any = vars(asyncio)["eager_task_factory"]
        asyncio.get_running_loop().set_task_factory(factory)
        async with World(world_app):
            assert await (await pair.submit()).result() == PAID
        assert sorted(effects) == ["a", "b", "c"]

    async def test_a_function_parks_again_although_eager_tasks_end_at_once() -> None:
        factory: Any = vars(asyncio)["eager_task_factory"]
        asyncio.get_running_loop().set_task_factory(factory)
        async with World(world_app):
            assert await (await wages_of_children.submit()).result() == ["ana is paid", "bo is paid"]


async def test_all_branches_of_a_gather_exist_before_the_first_of_them_starts() -> None:
    """A factory that starts tasks at once would otherwise park the run on the first member."""

    def eager(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        tree = next((owner.branches for owner in [branches.current_owner.get(None)] if owner is not None), None)
        if tree is not None:
            seen.append(len(tree.living))
        return task

    seen: list[int] = []
    asyncio.get_running_loop().set_task_factory(eager)
    async with World(world_app):
        assert await (await pair.submit()).result() == PAID
    assert max(seen) >= 6, "the handler, three tasks, and both members before the first of them starts"


@pytest.mark.parametrize("policy", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_tasks_are_branches_on_every_loop(policy: Any) -> None:
    async def main() -> list[str]:
        async with Fabric("memory://") as app:

            @app.task
            async def letters(ctx: Context) -> list[str]:
                async def member(name: str, ms: int) -> str:
                    await asyncio.sleep(ms / 1000)
                    await ctx.step(pay, name)
                    return name + await ctx.receive(f"mail-{name}", str)

                return list(await asyncio.gather(member("a", 20), member("b", 1)))

            async with running_worker(app):
                run = await letters.submit()
                for name in ("b", "a"):
                    await wait_until_suspended(run)
                    await run.signal(f"mail-{name}", name)
                return await run.result(20)

    with asyncio.Runner(loop_factory=policy) as runner:
        assert runner.run(main()) == ["aa", "bb"]
    assert sorted(effects) == ["a", "b"]


async def test_waits_in_own_tasks_are_refused_on_a_loop_without_our_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "set_task_factory", refuse)
    async with World(world_app):
        with pytest.raises(RunFailed, match="use ctx.gather here"):
            await (await pair.submit()).result()
    monkeypatch.undo()


async def test_a_context_that_two_tasks_share_does_not_mix_their_branches(app: Fabric) -> None:
    @app.task
    async def shared(ctx: Context) -> list[str]:
        async def member(name: str, ms: int) -> str:
            await asyncio.sleep(ms / 1000)
            paid = await ctx.step(pay, name)
            await ctx.receive("go")
            return paid

        variables = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(member(name, ms), context=variables) for name, ms in (("a", 30), ("b", 1))]
        return list(await asyncio.gather(*tasks))

    async with running_worker(app):
        run = await shared.submit()
        for _ in range(2):
            await wait_until_suspended(run)
            await run.signal("go")
            await asyncio.sleep(0.05)
        assert await run.result(20) == ["a is paid", "b is paid"]
