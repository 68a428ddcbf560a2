"""Deploys while runs are under way: what no longer fits is held before its effect, and continues with a fix."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import Context, Fabric
from flowfabric.engine.types import patch_tag
from flowfabric.sdk.worker.held_runs import release_held_runs
from flowfabric.testing import World

IS_FOR_EVERY_STORE = True

app = Fabric("memory://", version="1")
effects: list[str] = []


async def charge(order: str) -> str:
    effects.append(f"charge {order}")
    return "paid"


async def charge_card(order: str) -> str:
    effects.append(f"charge {order} again")
    return "paid twice"


async def check_fraud(order: str) -> str:
    effects.append(f"check {order}")
    return "fine"


async def double(n: int) -> int:
    effects.append(f"double {n}")
    return 2 * n


doubled = app.task(name="doubled")(double)


@pytest.fixture(autouse=True)
def _no_effects() -> None:
    effects.clear()


class Code:
    """What the function does now; a deploy changes it."""

    step: Any = staticmethod(charge)


async def order_of(ctx: Context, code: Code, order: str) -> str:
    paid: str = await ctx.step(code.step, order)
    await ctx.sleep("1h")
    return paid


async def test_a_renamed_step_is_held_before_its_effect_and_continues_with_its_old_name() -> None:
    code = Code()

    @app.task(name="renamed")
    async def renamed(ctx: Context, order: str) -> str:
        return await order_of(ctx, code, order)

    async with World(app) as world:
        run = await renamed.submit("o1")
        await world.advance("1m")
        code.step = charge_card
        await world.advance("2h")
        assert await run.state() == "suspended"
        assert effects == ["charge o1"]

        code.step = charge
        assert await run.release()
        assert await run.result("1d") == "paid"
        assert effects == ["charge o1"]
        world.assert_invariants()


async def test_a_held_run_takes_the_new_way_when_it_is_accepted_and_only_then() -> None:
    code = Code()

    @app.task(name="accepted")
    async def accepted(ctx: Context, order: str) -> str:
        return await order_of(ctx, code, order)

    async with World(app) as world:
        run = await accepted.submit("o1")
        await world.advance("1m")
        code.step = charge_card
        await world.advance("2h")
        assert await run.release(), "without a fix it is held again"
        await world.advance("1m")
        assert await run.state() == "suspended"

        assert await run.release(accept=True)
        assert await run.result("1d") == "paid twice"
        assert effects == ["charge o1", "charge o1 again"]
        assert not await run.release()
        world.assert_invariants()


async def test_a_release_for_a_version_that_has_held_the_run_does_nothing() -> None:
    code = Code()

    @app.task(name="versions")
    async def versions(ctx: Context, order: str) -> str:
        return await order_of(ctx, code, order)

    async with World(app) as world:
        run = await versions.submit("o1")
        await world.advance("1m")
        code.step = charge_card
        await world.advance("2h")
        engine = await app.engine()
        assert await engine.list_held(["versions"]) == [run.id]
        assert not await engine.release_held(run.id, version="1")
        assert await engine.release_held(run.id, version="2")
        await world.advance("1m")
        assert await engine.list_held(["versions"]) == [run.id], "this worker has version 1"
        await run.cancel()
        assert await engine.list_held(["versions"]) == []


async def test_a_worker_with_a_new_version_releases_held_runs_once() -> None:
    code = Code()

    @app.task(name="redeployed")
    async def redeployed(ctx: Context, order: str) -> str:
        return await order_of(ctx, code, order)

    async with World(app) as world:
        run = await redeployed.submit("o1")
        await world.advance("1m")
        code.step = charge_card
        await world.advance("2h")
        engine = await app.engine()
        assert await release_held_runs(app, engine) == 0, "a restart releases nothing"
        app.version, code.step = "2", charge
        try:
            assert await release_held_runs(app, engine) == 1
            assert await run.result("1d") == "paid"
            assert await release_held_runs(app, engine) == 0
        finally:
            app.version = "1"


async def test_a_cancelled_parent_takes_its_children_along_but_for_a_detached_one() -> None:
    spawned: list[str] = []

    @app.task(name="sleeper")
    async def sleeper(ctx: Context) -> str:
        await ctx.sleep("2h")
        return "rested"

    @app.task(name="parent")
    async def parent(ctx: Context) -> None:
        own, detached = await ctx.spawn(sleeper), await ctx.spawn(sleeper.options(detached=True).s())
        spawned[:] = [own.id, detached.id]
        await own.result()

    async with World(app) as world:
        run = await parent.submit()
        await world.advance("1m")
        await run.cancel()
        await world.advance("3h")
        assert await sleeper.run(spawned[0]).state() == "cancelled"
        assert await sleeper.run(spawned[1]).result() == "rested"


async def test_a_branch_is_held_and_its_siblings_continue() -> None:
    code = Code()

    @app.task(name="siblings")
    async def siblings(ctx: Context) -> list[str]:
        async def member(name: str) -> str:
            paid: str = await ctx.step(code.step if name == "a" else charge, name)
            await ctx.sleep("1h")
            return paid + await ctx.step(check_fraud, name)

        return await ctx.gather(member("a"), member("b"))

    async with World(app) as world:
        run = await siblings.submit()
        await world.advance("1m")
        code.step = charge_card
        await world.advance("2h")
        assert effects == ["charge a", "charge b", "check b"]
        code.step = charge
        await run.release()
        assert await run.result("1d") == ["paidfine", "paidfine"]
        assert effects == ["charge a", "charge b", "check b", "check a"]


async def test_a_patch_is_false_for_runs_that_had_passed_and_true_for_others() -> None:
    is_deployed = False

    @app.task(name="patches")
    async def patches(ctx: Context, order: str) -> list[str]:
        seen = []
        if is_deployed and await ctx.patched("fraud-check"):
            seen.append(await ctx.step(check_fraud, order))
        seen.append(await ctx.step(charge, order))
        await ctx.sleep("1h")
        return seen

    async with World(app) as world:
        before = await patches.submit("old")
        await world.advance("1m")
        is_deployed = True
        after = await patches.submit("new")
        assert await before.result() == ["paid"]
        assert await after.result() == ["fine", "paid"]
        assert (await before.describe()).tags[patch_tag("fraud-check")] == "fraud-check"
        assert patch_tag("fraud-check") not in (await after.describe()).tags
        assert effects == ["charge old", "check new", "charge new"]


async def test_a_crash_between_the_answer_to_a_patch_and_its_step_keeps_the_answer() -> None:
    @app.task(name="crashing")
    async def crashing(ctx: Context) -> list[str]:
        way = ["new"] if await ctx.patched("p") else ["old"]
        way.append(await ctx.step(check_fraud, "o"))
        await ctx.sleep("1h")
        return way

    async with World(app) as world:
        world.crash_at("step:check_fraud", "before_effect")
        run = await crashing.submit()
        assert await run.result("1d") == ["new", "fine"]


async def test_a_child_added_in_front_of_others_is_held_and_the_others_are_not_made_again() -> None:
    inputs = [1, 2]

    @app.task(name="front")
    async def front(ctx: Context) -> list[int]:
        values = await ctx.gather([doubled.s(n) for n in inputs])
        await ctx.sleep("1h")
        return values

    async with World(app) as world:
        run = await front.submit()
        await world.advance("1m")
        inputs.insert(0, 7)
        await world.advance("2h")
        assert await run.state() == "suspended"
        assert sorted(effects) == ["double 1", "double 2"]
        inputs.pop(0)
        await run.release()
        assert await run.result("1d") == [2, 4]
        assert sorted(effects) == ["double 1", "double 2"]


async def test_children_that_swapped_their_places_are_found_by_their_input() -> None:
    inputs = [1, 2]

    @app.task(name="swapped")
    async def swapped(ctx: Context) -> list[int]:
        runs = [await ctx.spawn(doubled, n) for n in inputs]
        await ctx.sleep("1h")
        return [await run.result() for run in runs]

    async with World(app) as world:
        run = await swapped.submit()
        await world.advance("1m")
        inputs.reverse()
        assert await run.result("1d") == [4, 2]
        assert sorted(effects) == ["double 1", "double 2"]


async def test_a_step_that_waits_is_not_taken_for_a_new_one() -> None:
    @app.task(name="nested")
    async def nested(ctx: Context) -> str:
        async def patient() -> str:
            await ctx.step(charge, "o")
            await ctx.sleep("1h")
            return "rested"

        return await ctx.step(patient)

    async with World(app) as world:
        run = await nested.submit()
        assert await run.result("1d") == "rested"
        assert effects == ["charge o"]
        world.assert_invariants()


def test_a_version_is_the_given_one_or_a_digest_of_the_source() -> None:
    assert app.version_of(doubled) == "1"
    other = Fabric("memory://")
    task = other.task(name="t")(double)
    assert other.version_of(task).startswith("sha-")
    assert other.version_of(task) == other.version_of(task)
