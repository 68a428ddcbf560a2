"""Held runs: crashes around a rename, versions that take turns, releases that race, and places that are accepted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Context, Fabric, Run
from flowfabric.model.obstacles import Held
from flowfabric.sdk.worker.held_runs import release_held_runs
from flowfabric.testing import World
from flowfabric.testing.world import Moment

IS_FOR_EVERY_STORE = True

app = Fabric("memory://", version="1")
effects: list[str] = []


async def charge(order: str) -> str:
    effects.append("charge")
    return "paid"


async def charge_card(order: str) -> str:
    effects.append("charge_card")
    return "paid by card"


async def check(order: str) -> str:
    effects.append("check")
    return "checked"


async def check_all(order: str) -> str:
    effects.append("check_all")
    return "all checked"


@app.task(name="double")
async def double(n: int) -> int:
    effects.append(f"double {n}")
    return 2 * n


@pytest.fixture(autouse=True)
def _no_effects() -> None:
    effects.clear()


class Code:
    """What the function does now; a deploy changes it."""

    pay: Any = staticmethod(charge)
    check: Any = staticmethod(check)


def paying(app: Fabric, code: Code) -> Any:
    @app.task(name="pay")
    async def pay(ctx: Context, order: str) -> list[str]:
        done: list[str] = [await ctx.step(code.pay, order)]
        await ctx.sleep("1h")
        done.append(await ctx.step(code.check, order))
        await ctx.sleep("1h")
        return done

    return pay


async def is_held(run: Run[Any]) -> bool:
    return isinstance((await run.explain()).obstacle, Held)


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "seen", "held"),
    [
        ("before_effect", ["charge_card"], False),
        ("after_effect", ["charge", "charge_card"], False),
        ("after_commit", ["charge"], True),
    ],
)
async def test_a_renamed_step_is_held_if_its_result_is_remembered(moment: Moment, seen: list[str], held: bool) -> None:
    code = Code()
    pay = paying(app, code)
    async with World(app) as world:
        world.crash_at("step:charge", moment)
        run = await pay.submit("o")
        await world.settle()
        code.pay = charge_card
        await world.advance("30m")
        assert await is_held(run) == held
        assert effects == seen
        world.assert_invariants()


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_crash_while_a_run_is_held_repeats_no_effect_and_holds_it_again(moment: Moment) -> None:
    code = Code()
    pay = paying(app, code)
    async with World(app) as world:
        run = await pay.submit("o")
        await world.advance("1m")
        code.pay = charge_card
        world.crash_at("hold:charge_card", moment)
        await world.advance("2h")
        assert await is_held(run)
        assert effects == ["charge"]

        code.pay = charge
        assert await run.release()
        assert await run.result("1d") == ["paid", "checked"]
        assert effects == ["charge", "check"]
        world.assert_invariants()


async def test_an_accepted_place_stays_accepted_after_a_crash() -> None:
    code = Code()
    pay = paying(app, code)
    async with World(app) as world:
        run = await pay.submit("o")
        await world.advance("1m")
        code.pay = charge_card
        await world.advance("2h")
        world.crash_at("step:charge_card", "before_effect")
        assert await run.release(accept=True)
        assert await run.result("1d") == ["paid by card", "checked"]
        assert effects == ["charge", "charge_card", "check"]


# -- versions and releases ---------------------------------------------------------------------------------------------


async def test_two_versions_take_turns_on_one_run_and_no_effect_is_repeated() -> None:
    older, newer = Fabric("memory://", version="1"), Fabric("memory://", version="2")
    renamed = Code()
    renamed.pay = charge_card
    pay = paying(older, Code())
    paying(newer, renamed)
    async with World(older) as world:
        run = await pay.submit("o")
        await world.advance("1m")
        await world.deploy(newer)
        await world.advance("70m")
        assert await is_held(run)
        await world.deploy(newer)  # a restart
        await world.advance("10m")
        assert await is_held(run)
        await world.deploy(older)
        await world.advance("1m")
        assert not await is_held(run), "this version has not held it"
        await world.deploy(newer)
        await world.advance("2h")
        assert await is_held(run)
        await world.deploy(older)
        await world.advance("1m")
        assert await run.result("1d") == ["paid", "checked"]
        assert effects == ["charge", "check"]
        world.assert_invariants()


async def test_the_fix_is_deployed_while_the_release_is_under_way() -> None:
    code = Code()
    pay = paying(app, code)
    async with World(app) as world:
        run = await pay.submit("o")
        await world.advance("1m")
        code.pay = charge_card
        await world.advance("2h")
        engine = await app.engine()
        # Version 2 releases the run, and a worker of version 1 gets it. Whatever it does then, version 2 finds it.
        assert await engine.release_held(run.id, version="2")
        await asyncio.gather(*(engine.release_held(run.id, version="2") for _ in range(5)))
        await world.settle()
        assert await is_held(run)
        app.version, code.pay = "2", charge
        try:
            assert await release_held_runs(app, engine) == 1
            assert await run.result("1d") == ["paid", "checked"]
        finally:
            app.version = "1"
        assert effects == ["charge", "check"]
        world.assert_invariants()


async def test_each_place_is_accepted_on_its_own_and_once() -> None:
    code = Code()

    @app.task(name="places")
    async def places(ctx: Context) -> list[str]:
        done: list[str] = [await ctx.step(code.pay, "o"), await ctx.step(code.check, "o")]
        await ctx.sleep("1h")
        return done

    async with World(app) as world:
        run = await places.submit()
        await world.advance("1m")
        code.pay, code.check = charge_card, check_all
        await world.advance("2h")
        for place in ("charge_card", "check_all"):
            held = (await run.explain()).obstacle
            assert isinstance(held, Held)
            assert f"step {place!r} would run for the first time" in held.why, "the text is that of this place"
            assert (held.task, held.version) == ("places", "1")
            assert await run.release(accept=True)
            await world.settle()
        assert await run.result("1d") == ["paid by card", "all checked"]
        assert effects == ["charge", "check", "charge_card", "check_all"]
        assert not await run.release(accept=True)


async def test_held_runs_are_counted_by_task_until_they_continue() -> None:
    code = Code()
    pay = paying(app, code)
    async with World(app) as world:
        runs = [await pay.submit("a"), await pay.submit("b")]
        await world.advance("1m")
        code.pay = charge_card
        await world.advance("2h")
        engine = await app.engine()
        assert await engine.count_held() == {"pay": 2}
        await world.engine.gauges.refresh_gauges(max_age_s=0)
        assert world.engine.metrics.gauges["ff_held_runs", (("task", "pay"),)] == 2
        code.pay = charge
        await runs[0].release()
        await runs[1].cancel()
        await world.settle()
        assert await engine.count_held() == {}
        await world.engine.gauges.refresh_gauges(max_age_s=0)
        assert ("ff_held_runs", (("task", "pay"),)) not in world.engine.metrics.gauges


# -- no false alarm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before_effect", "after_effect"])
async def test_children_and_approvals_inside_a_step_that_runs_again_hold_nothing(moment: Moment) -> None:
    runs: list[str] = []

    @app.task(name="inside")
    async def inside(ctx: Context) -> list[Any]:
        async def ask() -> list[Any]:
            runs.append("ask")
            child = await ctx.spawn(double, len(runs))  # another input each time
            approval = await ctx.approval("ok", bool)
            other = await ctx.step(check, "o")
            return [await child.result(), len(approval.links), other]

        first = await ctx.step(ask)
        await ctx.sleep("1h")
        return [*first, await ctx.step(charge, "o")]

    async with World(app) as world:
        world.crash_at("step:check", moment)
        run = await inside.submit()
        assert await run.result("1d") == [2, 1, "checked", "paid"]
        assert runs == ["ask", "ask"]
        assert effects.count("double 1") == 1
        assert "double 2" not in effects, "the child of the first try stands"
        world.assert_invariants()


async def test_a_step_inside_an_accepted_step_is_accepted_with_it() -> None:
    code = Code()

    async def nested_check(order: str) -> str:
        return "nested"

    @app.task(name="accepted-inside")
    async def accepted_inside(ctx: Context) -> str:
        async def outer(order: str) -> str:
            child = await ctx.spawn(double, 4)
            return f"{await ctx.step(nested_check, order)} {await child.result()}"

        paid: str = await ctx.step(code.pay or outer, "o")
        await ctx.sleep("1h")
        return paid

    async with World(app) as world:
        run = await accepted_inside.submit()
        await world.advance("1m")
        code.pay = None
        await world.advance("2h")
        assert await is_held(run)
        assert await run.release(accept=True)
        assert await run.result("1d") == "nested 8"
        assert effects == ["charge", "double 4"]


async def test_a_rollback_keeps_the_answers_of_the_newer_code() -> None:
    is_deployed = True

    @app.task(name="rolled-back")
    async def rolled_back(ctx: Context) -> list[str]:
        seen = []
        if is_deployed and await ctx.patched("fraud-check"):
            seen.append(await ctx.step(check, "o"))
        seen.append(await ctx.step(charge, "o"))
        await ctx.sleep("1h")
        await ctx.sleep("1h")
        if is_deployed and await ctx.patched("fraud-check"):
            seen.append("new")
        return seen

    async with World(app) as world:
        run = await rolled_back.submit()
        await world.advance("1m")
        is_deployed = False
        await world.advance("70m")
        assert await run.state() == "suspended"
        assert not await is_held(run)
        is_deployed = True
        assert await run.result("1d") == ["checked", "paid", "new"]
        assert effects == ["check", "charge"]


async def test_a_plain_handler_asks_for_patches_too() -> None:
    asked: list[bool] = []

    @app.task(name="plain-patched")
    def plain_patched(ctx: Context) -> str:
        asked.append(ctx.sync.patched("p"))
        return ctx.sync.step(charge, "o")

    async with World(app):
        assert await (await plain_patched.submit()).result() == "paid"
    assert plain_patched() == "paid", "a plain call is new"
    assert asked == [True, True]
