"""Continue as new: the run stays, its past is gone, and nothing that was sent is lost on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from flowfabric import Budget, Context, Fabric, InvalidInput, Retry, RunFailed
from flowfabric.sdk.durable import lives
from tests.sdk.conftest import running_worker, wait_until_suspended
from tests.sdk.durable.crashes import Crashes

calls: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


async def note(name: str) -> str:
    calls[name] += 1
    return name


def counting(app: Fabric) -> Any:
    @app.task
    async def count(ctx: Context, total: int = 0) -> list[Any]:
        """Adds numbers, two of them a life."""
        received = 0
        while number := await ctx.receive("add", int):
            await ctx.step(note, f"{ctx.life}:{number}")
            total, received = total + number, received + 1
            if received == 2:
                await ctx.continue_as_new(total)
        return [total, ctx.life]

    return count


async def test_a_run_continues_under_its_id_with_its_unread_messages(app: Fabric) -> None:
    count = counting(app)
    async with running_worker(app):
        run = await count.options(tags={"shop.id": "7"}).submit()
        for number in (1, 2, 3, 4, 5, 0):
            await run.signal("add", number)
        assert await run.result(20) == [15, 2]
    assert calls == Counter({"0:1": 1, "0:2": 1, "1:3": 1, "1:4": 1, "2:5": 1})
    snapshot = await run.describe()
    assert (snapshot.tags, snapshot.life) == ({"shop.id": "7"}, 2)
    engine = await app.engine()
    assert [memo.name for memo in await engine.read_steps(run.id)] == ["note"]


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_signal_between_the_last_read_and_the_next_life_is_kept(app: Fabric, moment: str) -> None:
    count = counting(app)

    async def send(ctx: Context, point: str, at: str) -> None:
        if (point, at) == (lives.CONTINUE, moment) and not ctx.life:
            await app.find(ctx.run_id).signal("add", 40)
            await app.find(ctx.run_id).signal("add", 0)

    app.on_fault_point = send
    async with running_worker(app):
        run = await count.submit()
        for number in (1, 2):
            await run.signal("add", number)
        assert await run.result(20) == [43, 1]


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_process_that_dies_beside_the_next_life_repeats_nothing(app: Fabric, moment: str) -> None:
    count = counting(app)
    crashes = Crashes(app, [(lives.CONTINUE, moment)])
    async with running_worker(app):
        run = await count.submit()
        for number in (1, 2, 0):
            await run.signal("add", number)
        assert await run.result(20) == [3, 1]
    assert not crashes.left
    assert calls == Counter({"0:1": 1, "0:2": 1})


async def test_a_message_that_another_branch_received_but_did_not_see_is_kept(app: Fabric) -> None:
    @app.task
    async def split(ctx: Context, again: bool = False) -> str:
        if again:
            return await ctx.receive("mail", str)

        async def go_on() -> None:
            await ctx.receive("go", bool)
            await app.find(ctx.run_id).signal("mail", "kept")  # closes the gate of the other branch
            await ctx.continue_as_new(True)

        await ctx.gather(ctx.receive("mail", str), go_on())
        return "never"

    async with running_worker(app):
        run = await split.submit()
        await wait_until_suspended(run)
        await run.signal("go", True)
        assert await run.result(20) == "kept"


async def test_names_of_the_next_life_are_new_and_those_of_the_first_as_they_were(app: Fabric) -> None:
    seen: list[tuple[Any, ...]] = []

    @app.task
    async def child(ctx: Context, life: int) -> int:
        return life

    @app.task
    async def named(ctx: Context, life: int = 0) -> list[int]:
        spawned = await ctx.spawn(child, life)
        result = await spawned.result()
        seen.append((ctx.key("charge"), ctx.uuid(), ctx.random.random(), spawned.id, result))
        if life < 1:
            await ctx.continue_as_new(life + 1)
        return [ctx.life, result]

    async with running_worker(app):
        run = await named.submit()
        assert await run.result(20) == [1, 1]
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    for key, number, chance, child_id, result in seen:
        (first if result == 0 else second)[key] = (number, chance, child_id)
    assert len(first) == len(second) == 1
    assert not set(first) & set(second)
    assert all(one != other for one, other in zip(*first.values(), *second.values(), strict=True))


async def test_a_new_life_has_all_its_retries_and_no_failures(app: Fabric) -> None:
    async def fail() -> None:
        raise LookupError("no")

    @app.task(retry=Retry(max=1, base="1ms", jitter=False))
    async def flaky(ctx: Context, life: int = 0) -> int:
        calls[f"life {life}"] += 1
        try:
            await ctx.step(fail)
        except LookupError:
            await ctx.step(note, "caught")
        if calls[f"life {life}"] < 2:
            raise ValueError("again")
        if life < 2:
            await ctx.continue_as_new(life + 1)
        return life

    async with running_worker(app):
        run = await flaky.submit()
        assert await run.result(20) == 2
    assert [calls[f"life {life}"] for life in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("count", [7, 8, 9])
async def test_a_long_past_is_forgotten_in_bounded_changes(
    app: Fabric, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.durable.lives.MAX_FORGOTTEN", 4)

    @app.task
    async def long(ctx: Context, life: int = 0) -> list[int]:
        if not life:
            for number in range(count):
                await ctx.step(note, f"old {number}")
            await ctx.continue_as_new(1)
        await ctx.step(note, "new")
        return [ctx.life]

    async with running_worker(app):
        run = await long.submit()
        assert await run.result(30) == [1]
    assert [memo.result for memo in await (await app.engine()).read_steps(run.id)] == [b'"new"']


async def test_should_continue_says_the_same_in_a_replay(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "CONTINUE_OVER", 6)

    @app.task
    async def poll(ctx: Context, rounds: int = 0) -> list[int]:
        while not ctx.should_continue:
            rounds += 1
            await ctx.step(note, f"round {rounds}")
            await ctx.sleep("1100ms" if rounds == 2 else 0)
            if rounds == 9:
                return [rounds, ctx.life]
        await ctx.continue_as_new(rounds)
        raise AssertionError

    async with running_worker(app):
        run = await poll.submit()
        assert await run.result(20) == [9, 1]
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("args", [("no number",), (1, 2, 3)])
async def test_wrong_arguments_begin_no_life(app: Fabric, args: tuple[Any, ...]) -> None:
    @app.task
    async def wrong(ctx: Context, life: int = 0) -> str:
        with pytest.raises(InvalidInput):
            await ctx.continue_as_new(*args)
        return f"refused in life {ctx.life}"

    async with running_worker(app):
        assert await (await wrong.submit()).result(20) == "refused in life 0"


async def test_a_step_cannot_continue_as_new(app: Fabric) -> None:
    @app.task
    async def inside(ctx: Context) -> None:
        async def step() -> None:
            await ctx.continue_as_new()

        await ctx.step(step)

    async with running_worker(app):
        with pytest.raises(RunFailed, match="only the function itself"):
            await (await inside.submit()).result(20)


async def test_a_plain_function_continues_as_new(app: Fabric) -> None:
    @app.task
    def plain(ctx: Context, life: int = 0) -> int:
        ctx.sync.step(note, f"plain {life}")
        if life < 2:
            ctx.sync.continue_as_new(plain.s(life + 1))
        return life

    async with running_worker(app):
        assert await (await plain.submit()).result(20) == 2
    assert calls == Counter({f"plain {life}": 1 for life in range(3)})


async def test_a_branch_continues_for_all(app: Fabric) -> None:
    @app.task
    async def branching(ctx: Context, life: int = 0) -> int:
        async def on() -> None:
            await ctx.step(note, "on")
            await ctx.continue_as_new(life + 1)

        if life < 2:
            await ctx.gather(on(), asyncio.sleep(30))
        return life

    async with running_worker(app):
        assert await (await branching.submit()).result(20) == 2


async def test_a_long_life_is_warned_of_once(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lives, "WARN_AT", 3)

    @app.task
    async def long(ctx: Context) -> list[bool]:
        return [await ctx.step(note, str(number)) == "" or ctx.should_continue for number in range(5)]

    async with running_worker(app):
        assert await (await long.submit()).result(20) == [False] * 5
    assert sum("which every attempt loads" in record.message for record in caplog.records) == 1


async def test_a_reservation_is_left_before_the_next_life(app: Fabric) -> None:
    budget = Budget("llm", limits={"tokens": 100})

    @app.task(budgets=[budget])
    async def spending(ctx: Context, life: int = 0) -> int:
        async with ctx.reserve(budget, tokens=10) as room:
            await room.spend(tokens=3)
            if life < 2:
                with pytest.raises(InvalidInput, match="leave that first"):
                    await ctx.continue_as_new(life + 1)
        if life < 2:
            await ctx.continue_as_new(life + 1)
        return life

    async with running_worker(app):
        run = await spending.submit()
        assert await run.result(20) == 2
    assert sum(one.amount for one in await (await app.engine()).read_spending(run.id)) == 9


async def test_a_past_that_lies_ahead_holds_the_run(app: Fabric) -> None:
    """A function that continues as new before it came to what it remembers would repeat effects."""

    @app.task(on_mismatch="error")
    async def hasty(ctx: Context) -> None:
        if calls["hasty"]:
            await ctx.continue_as_new()
        calls["hasty"] += 1
        await ctx.step(note, "paid")
        await ctx.sleep("1100ms")

    async with running_worker(app):
        with pytest.raises(RunFailed, match="NonDeterministic"):
            await (await hasty.submit()).result(20)
