"""Operations that a function leaves, and races: what was left swallows nothing, and a replay has one winner."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from flowfabric import Context, Fabric, InvalidInput, Won
from flowfabric.model.states import PublicState
from flowfabric.testing import World
from tests.sdk.conftest import running_worker, wait_until_suspended
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

calls: Counter[str] = Counter()
world_app = Fabric("sqlite:////nowhere/at/all.db")


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


def leaving(app: Fabric) -> Any:
    @app.task
    async def leaves(ctx: Context) -> list[Any]:
        stop = asyncio.ensure_future(ctx.receive("stop", str))
        mail = asyncio.ensure_future(ctx.receive("mail", str))
        done, _ = await asyncio.wait({stop, mail}, return_when=asyncio.FIRST_COMPLETED)
        mail.cancel()
        await asyncio.gather(mail, return_exceptions=True)
        found = sorted("stop" if one is stop else "mail" for one in done)
        return [found, await ctx.receive("mail", str), await ctx.receive("mail", str)]

    return leaves


@pytest.mark.parametrize(
    "point", [None, ("left:receive:mail#0", "before_effect"), ("left:receive:mail#0", "after_commit")]
)
async def test_a_receive_that_was_left_swallows_nothing(app: Fabric, point: tuple[str, str] | None) -> None:
    leaves = leaving(app)
    prefix = "task:receive#1/"
    crashes = Crashes(app, [] if point is None else [(point[0].replace("left:", f"left:{prefix}"), point[1])])
    async with running_worker(app):
        run = await leaves.submit()
        await wait_until_suspended(run)
        await run.signal("stop", "now")
        await wait_until_suspended(run)
        await run.signal("mail", "one")
        await run.signal("mail", "two")
        assert await run.result(20) == [["stop"], "one", "two"]
    assert not crashes.left


async def test_a_wait_that_a_failure_left_waits_until_it_is_left_again(app: Fabric) -> None:
    async def fail() -> None:
        calls["fail"] += 1
        await asyncio.sleep(0.02)
        raise LookupError("no")

    @app.task
    async def failing(ctx: Context) -> list[Any]:
        try:
            await ctx.gather(ctx.receive("mail", str), ctx.step(fail))
        except LookupError:
            return [await ctx.receive("mail", str), await ctx.receive("mail", str)]
        return []

    async with running_worker(app):
        run = await failing.submit()
        for letter in ("one", "two"):
            await wait_until_suspended(run)
            await run.signal("mail", letter)
        assert await run.result(20) == ["one", "two"]
    assert calls["fail"] == 1


async def test_a_step_that_was_left_does_not_run_again(app: Fabric) -> None:
    async def slow() -> None:
        calls["slow"] += 1
        await asyncio.sleep(30)

    @app.task
    async def impatient(ctx: Context) -> str:
        try:
            await asyncio.wait_for(ctx.step(slow), 0.05)
        except TimeoutError:
            return await ctx.receive("go", str)
        return "never"

    async with running_worker(app):
        run = await impatient.submit()
        await wait_until_suspended(run)
        await run.signal("go", "on")
        assert await run.result(20) == "on"
    assert calls["slow"] == 1


async def test_an_approval_that_is_no_longer_awaited_stays_open(app: Fabric) -> None:
    @app.task
    async def asking(ctx: Context) -> bool:
        approval = await ctx.approval("ship", bool)
        await ctx.race(answer=_first(approval), skip=ctx.receive("skip", str))
        return (await approval)[0].value

    async def _first(approval: Any) -> None:
        await approval

    async with World(app) as world:
        run = await asking.submit()
        await world.settle()
        await run.signal("skip", "it")
        await world.advance("1h")
        assert await run.state() is PublicState.SUSPENDED
        await (await world.approval(run, "ship")).approve_as("ana")
        assert await run.result() is True


def racing(app: Fabric) -> Any:
    @app.task
    async def race(ctx: Context) -> list[Any]:
        won = await ctx.race(paid=ctx.receive("paid", str), late=ctx.receive("late", str))
        assert isinstance(won, Won)
        return [won.name, won.value, await ctx.receive("paid", str)]

    return race


@pytest.mark.parametrize("first", ["paid", "late"])
async def test_a_race_has_one_winner_and_leaves_the_other(app: Fabric, first: str) -> None:
    race = racing(app)
    async with running_worker(app):
        run = await race.submit()
        await wait_until_suspended(run)
        await run.signal(first, "1st")
        await wait_until_suspended(run)
        await run.signal("paid", "2nd")
        assert await run.result(20) == [first, "1st", "2nd"]


async def test_a_race_with_two_messages_that_are_there_gives_one_back(app: Fabric) -> None:
    race = racing(app)
    run = await race.submit()
    await run.signal("late", "b")
    await run.signal("paid", "a")
    async with running_worker(app):
        await wait_until_suspended(run)
        await run.signal("paid", "c")
        assert await run.result(20) == ["paid", "a", "c"]


async def test_both_members_of_a_race_are_ready_after_a_crash_and_one_wins(app: Fabric) -> None:
    rounds: list[str] = []

    @app.task
    async def race(ctx: Context) -> list[Any]:
        won = await ctx.race(paid=ctx.receive("paid", str), late=ctx.receive("late", str))
        rounds.append(won.name)
        return [won.name, await ctx.options(name="reported").step(lambda: won.name), await ctx.receive("other", str)]

    crashes = Crashes(app, [("step:reported", "before_effect"), ("step:reported", "after_effect")])
    run = await race.submit()
    await run.signal("late", "b")
    await run.signal("paid", "a")
    async with running_worker(app):
        await wait_until_suspended(run)
        await run.signal("other", "c")
        assert await run.result(20) == [rounds[0], rounds[0], "c"]
    assert not crashes.left
    assert len(rounds) >= 4
    assert len(set(rounds)) == 1


async def test_a_race_of_threads_leaves_the_loser(app: Fabric) -> None:
    @app.task
    def race(ctx: Context) -> list[Any]:
        won = ctx.sync.race(paid=lambda: ctx.sync.receive("paid", str), late=lambda: ctx.sync.receive("late", str))
        return [won.name, won.value, ctx.sync.receive("paid", str)]

    async with running_worker(app):
        run = await race.submit()
        await wait_until_suspended(run)
        await run.signal("late", "b")
        await wait_until_suspended(run)
        await run.signal("paid", "a")
        assert await run.result(20) == ["late", "b", "a"]


@pytest.mark.parametrize("moment", ["after the race", "before the replay"])
@pytest.mark.parametrize("way", ["race", "asyncio"])
async def test_a_wait_to_which_a_replay_does_not_come_before_it_is_left_swallows_nothing(
    app: Fabric, way: str, moment: str
) -> None:
    """The first attempt waits in both branches. In the replay one of them is cancelled before it comes to its wait."""
    pauses = [0.01]

    async def slowly(ctx: Context) -> str:
        await asyncio.sleep(pauses.pop() if pauses else 30)
        return await ctx.receive("paid", str)

    @app.task
    async def impatient(ctx: Context) -> list[Any]:
        if way == "race":
            won = (await ctx.race(paid=slowly(ctx), late=ctx.receive("late", str))).value
        else:
            paid, late = asyncio.ensure_future(slowly(ctx)), asyncio.ensure_future(ctx.receive("late", str))
            await asyncio.wait({paid, late}, return_when=asyncio.FIRST_COMPLETED)
            paid.cancel()
            await asyncio.gather(paid, return_exceptions=True)
            won = late.result()
        return [won, await ctx.receive("paid", str)]

    async with running_worker(app):
        run = await impatient.submit()
        await wait_until_suspended(run)
    await run.signal("late", "b")
    if moment == "before the replay":
        await run.signal("paid", "a")
    async with running_worker(app):
        if moment == "after the race":
            await wait_until_suspended(run)
            await run.signal("paid", "a")
        assert await run.result(20) == ["b", "a"]


async def test_the_message_of_a_loser_that_was_ready_too_is_not_lost(app: Fabric) -> None:
    @app.task
    async def race(ctx: Context) -> list[Any]:
        won = await ctx.race(paid=ctx.receive("paid", str), late=ctx.receive("late", str))
        return [won.name, won.value, await ctx.receive("late", str)]

    async with running_worker(app):
        run = await race.submit()
        await wait_until_suspended(run)
    await run.signal("late", "b")
    await run.signal("paid", "a")
    async with running_worker(app):
        assert await run.result(20) == ["paid", "a", "b"]


@pytest.mark.parametrize("way", ["gather", "task group", "asyncio"])
async def test_a_branch_that_was_cancelled_between_two_operations_comes_to_no_other_one_in_a_replay(
    app: Fabric, way: str
) -> None:
    """The first attempt cancels a branch in a pause of its own. The pause is shorter in the replay."""
    pauses = [30.0]

    async def book() -> None:
        calls["book"] += 1

    async def fail() -> None:
        raise LookupError("no")

    async def slowly(ctx: Context) -> None:
        await asyncio.sleep(pauses.pop() if pauses else 0)
        await ctx.step(book)

    async def cancel_slowly(ctx: Context) -> None:
        slow, go = asyncio.create_task(slowly(ctx)), asyncio.create_task(ctx.receive("go", str))
        await asyncio.wait({slow, go}, return_when=asyncio.FIRST_COMPLETED)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        raise LookupError("no")

    @app.task
    async def trip(ctx: Context) -> str:
        try:
            match way:
                case "gather":
                    await ctx.gather(slowly(ctx), ctx.step(fail))
                case "task group":
                    async with asyncio.TaskGroup() as group:
                        group.create_task(slowly(ctx))
                        group.create_task(ctx.step(fail))
                case _:
                    await cancel_slowly(ctx)
        except* LookupError:
            await ctx.step(str, "rolled back")
        return await ctx.receive("end", str)

    run = await trip.submit()
    await run.signal("go", "on")
    async with running_worker(app):
        await wait_until_suspended(run)
        await run.signal("end", "rolled back")
        assert await run.result(20) == "rolled back"
    assert calls["book"] == 0


async def test_a_race_whose_winner_failed_has_no_other_winner_in_a_replay(app: Fabric) -> None:
    """The loser pauses in the first attempt, and is ready at once in the replay."""
    pauses = [30.0]

    async def decline() -> None:
        await asyncio.sleep(0.05)
        raise LookupError("declined")

    async def slowly(ctx: Context) -> str:
        letter = await ctx.receive("mail", str)
        await asyncio.sleep(pauses.pop() if pauses else 0)
        return letter

    @app.task
    async def race(ctx: Context) -> list[str]:
        try:
            won = await ctx.race(letter=slowly(ctx), card=ctx.step(decline))
        except LookupError as why:
            return [str(why), await ctx.receive("mail", str), await ctx.receive("mail", str)]
        return [won.name]

    run = await race.submit()
    await run.signal("mail", "one")
    async with running_worker(app):
        await wait_until_suspended(run)
        await run.signal("mail", "two")
        assert await run.result(20) == ["declined", "one", "two"]


async def test_a_failure_that_the_winner_of_a_race_caught_is_recorded_with_the_race(app: Fabric) -> None:
    async def decline() -> str:
        calls["decline"] += 1
        await asyncio.sleep(0.02)
        if calls["decline"] == 1:
            raise LookupError("declined")
        return "paid"

    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step(decline)
        except LookupError as why:
            return str(why)

    @app.task
    async def race(ctx: Context) -> str:
        return (await ctx.race(card=pay(ctx), late=ctx.receive("never", str))).value

    crashes = Crashes(app, [("left:race#0.late/receive:never#0", "after_commit")])
    async with running_worker(app):
        assert await (await race.submit()).result(20) == "declined"
    assert not crashes.left
    assert calls["decline"] == 1


async def test_a_race_takes_calls_or_named_members() -> None:
    own_app = Fabric("memory://")

    @own_app.task
    async def mixed(ctx: Context) -> None:
        anything: Any = ctx
        with pytest.raises(InvalidInput, match="one kind"):
            await anything.race(mixed.s(), late=ctx.sleep("1h"))

    async with World(own_app):
        await (await mixed.submit()).result()
