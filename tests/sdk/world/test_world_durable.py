"""The test world for durable functions: failing steps, deploys, timelines, crashes around what is remembered."""

from __future__ import annotations

import pytest

from flowfabric import Context, Fabric, Retry, RunFailed
from flowfabric.model.gate import StepState
from flowfabric.testing.invariants import InvariantBroken
from flowfabric.testing.world import World

app = Fabric("sqlite:////nowhere/at/all.db")
effects: list[str] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    effects.clear()


class Declined(Exception):
    pass


async def charge(card: str) -> str:
    effects.append(f"charge {card}")
    return f"receipt of {card}"


def ship(card: str) -> str:
    effects.append(f"ship {card}")
    return f"parcel of {card}"


@app.task(retry=Retry(max=5, base="1s"))
async def buy(ctx: Context, card: str, other: str) -> str:
    try:
        receipt = await ctx.step(charge, card)
    except Declined as why:
        await ctx.sleep("1h")
        receipt = await ctx.step(charge, other)
        receipt = f"{receipt}, after {why}"
    await ctx.step(ship, card)
    return receipt


async def test_a_step_fails_as_often_as_it_is_set_to() -> None:
    async with World(app) as world:
        world.fail("step:charge", Declined("no money"))
        run = await buy.submit("bad", "good")
        assert await run.result() == "receipt of good, after no money"
        assert effects == ["charge good", "ship bad"]
        await world.assert_invariants()


async def test_a_plain_function_of_a_step_fails_and_is_tried_again() -> None:
    async with World(app) as world:
        world.fail("step:ship", OSError("no van"), times=2)
        run = await buy.submit("ana", "bo")
        assert await run.result() == "receipt of ana"
        assert effects == ["charge ana", "ship ana"]
        assert [attempt.failure_category for attempt in await run.attempts()] == ["OSError", "OSError", None]


async def test_a_step_that_is_not_tried_so_often_is_an_error() -> None:
    async def fail_too_often() -> None:
        async with World(app) as world:
            world.fail("step:refund", Declined("no"))
            await (await buy.submit("ana", "bo")).result()

    with pytest.raises(AssertionError, match="step:refund was tried less often than it was set to fail"):
        await fail_too_often()


@pytest.mark.parametrize("point", ["charge", "spend:x", "failed:charge"])
async def test_only_steps_can_be_set_to_fail(point: str) -> None:
    async with World(app) as world:
        with pytest.raises(ValueError, match="step:<name>"):
            world.fail(point, Declined("no"))


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_crash_around_the_record_of_a_failure_repeats_no_remembered_step(moment: str) -> None:
    async with World(app) as world:
        world.fail("step:charge", Declined("no money"))
        if moment == "before_effect":  # then the first charge is not remembered, and tried again
            world.fail("step:charge", Declined("still no money"))
        world.crash_at("failed:charge", moment)  # type: ignore[arg-type]
        run = await buy.submit("bad", "good")
        why = "still no money" if moment == "before_effect" else "no money"
        assert await run.result() == f"receipt of good, after {why}"
        assert effects == ["charge good", "ship bad"]
        await world.assert_invariants()


async def test_the_timeline_lists_operations_in_order() -> None:
    async with World(app) as world:
        world.fail("step:charge", Declined("no money"))
        run = await buy.submit("bad", "good")
        await world.advance("1m")
        assert [(entry.kind, entry.state) for entry in await world.timeline(run)] == [
            ("step", "failed"),
            ("sleep", "open"),
        ]
        await run.result()
        timeline = await world.timeline(run)
        assert [str(entry) for entry in timeline] == [
            f"step charge: failed ({__name__}.Declined: no money)",
            "sleep sleep#0: done",
            'step charge #1: done ("receipt of good")',
            'step ship: done ("parcel of bad")',
        ]
        numbers = [entry.number for entry in timeline if entry.number is not None]
        assert len(numbers) == len(timeline)
        assert numbers == sorted(set(numbers))


async def test_a_run_continues_in_the_deployed_app() -> None:
    newer = Fabric("sqlite:////nowhere/else.db")

    @newer.task(name="buy_slowly")
    async def buy_newer(ctx: Context, card: str, other: str) -> str:
        receipt = await ctx.step(charge, card)
        await ctx.sleep("1h")
        return f"{receipt}, by the newer one"

    @app.task(name="buy_slowly")
    async def buy_slowly(ctx: Context, card: str, other: str) -> str:
        receipt = await ctx.step(charge, card)
        await ctx.sleep("1h")
        return f"{receipt}, by the older one"

    async with World(app) as world:
        run = await buy_slowly.submit("ana", "bo")
        await world.advance("1m")
        await world.deploy(newer)
        assert await run.result() == "receipt of ana, by the newer one"
        assert effects == ["charge ana"]
        await world.deploy(app)
        assert await (await buy_slowly.submit("cy", "bo")).result() == "receipt of cy, by the older one"
        await world.assert_invariants()


async def test_an_effect_after_a_remembered_failure_breaks_an_invariant() -> None:
    async with World(app) as world:

        @app.task(name="repeats")
        async def repeats(ctx: Context) -> str:
            await ctx.engine.record_step(ctx.handle, "charge", 1, b"{}", state=StepState.FAILED)
            await ctx.step(charge, "a")
            ctx.durable.ledger.ends.clear()
            return await ctx.step(charge, "b")

        run = await app.tasks["repeats"].options(retry=Retry(max=0)).submit()
        with pytest.raises(RunFailed, match="recorded by another attempt"):
            await run.result()
        with pytest.raises(InvariantBroken, match="step 'charge' \\(number 1\\) ran after its failure stood"):
            world.assert_invariants()
