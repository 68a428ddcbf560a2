"""What a cancelled member of a race or `ctx.gather` may do in its cleanup: steps run, and waits are cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from flowfabric import Context, Fabric
from flowfabric.testing import World

app = Fabric()
calls: Counter[str] = Counter()


class Declined(Exception):
    """The failure that cancels the other member of a gather."""


async def undo() -> None:
    calls["undo"] += 1


async def decline() -> None:
    raise Declined


async def accept() -> None:
    calls["accept"] += 1


@app.task
async def child(ctx: Context) -> None:
    await ctx.sleep("1d")


async def _cancel(ctx: Context, how: str, member: Coroutine[Any, Any, None]) -> None:
    """Cancel a member: the other one of the race wins, or the other one of the gather fails."""
    if how == "race":
        won = await ctx.race(slow=member, quick=ctx.step(accept))
        assert won.name == "quick"
    else:
        with pytest.raises(Declined):
            await ctx.gather(member, ctx.step(decline))


@app.task
async def undoing(ctx: Context, how: str) -> None:
    async def member() -> None:
        try:
            await ctx.sleep("1d")
        finally:
            await ctx.step(undo)

    await _cancel(ctx, how, member())
    await ctx.sleep("1m")  # a replay follows


WAITS: dict[str, Callable[[Context], Coroutine[Any, Any, Any]]] = {
    "sleep": lambda ctx: ctx.sleep("1h"),
    "receive": lambda ctx: ctx.receive("mail", str),
    "child": lambda ctx: ctx.gather([child.s()]),
}


@app.task
async def waiting(ctx: Context, how: str, wait: str) -> None:
    async def member() -> None:
        try:
            await ctx.sleep("1d")
        except asyncio.CancelledError:
            try:
                await WAITS[wait](ctx)
            except asyncio.CancelledError:
                calls["cancelled"] += 1
            else:
                calls["waited"] += 1

    await _cancel(ctx, how, member())


@pytest.mark.parametrize("how", ["race", "gather"])
@pytest.mark.parametrize(
    ("moment", "undone"), [(None, 1), ("before_effect", 1), ("after_effect", 2), ("after_commit", 1)]
)
async def test_a_step_in_the_cleanup_of_a_cancelled_member_runs(how: str, moment: Any, undone: int) -> None:
    calls.clear()
    async with World(app) as world:
        if moment is not None:
            world.crash_at("step:undo", moment)
        await (await undoing.submit(how)).result()
        await world.assert_invariants()
    assert calls["undo"] == undone


@pytest.mark.parametrize("how", ["race", "gather"])
@pytest.mark.parametrize("wait", WAITS)
async def test_a_wait_in_the_cleanup_of_a_cancelled_member_is_cancelled(how: str, wait: str) -> None:
    calls.clear()
    async with World(app) as world:
        began = world.now_ms()
        await (await waiting.submit(how, wait)).result("1m")
        assert world.now_ms() - began < 1000
    assert (calls["cancelled"], calls["waited"]) == (1, 0)
