"""The record of a failure: its request or reply is lost, or the lease ends between it and the next step."""

from __future__ import annotations

from collections import Counter

import pytest

from flowfabric import Context, Fabric
from flowfabric.model.gate import StepState, step_row_name
from flowfabric.testing import Loss, World

IS_FOR_EVERY_STORE = True

app = Fabric("sqlite:////nowhere/at/all.db")
calls: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


class Declined(Exception):
    pass


async def book(what: str) -> str:
    calls[f"book {what}"] += 1
    raise Declined(what)


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_failure_whose_record_loses_a_message_is_recorded_once(loss: Loss) -> None:
    async def undo(what: str) -> str:
        calls[f"undo {what}"] += 1
        return f"no {what}"

    @app.task(name="losing")
    async def losing(ctx: Context) -> str:
        try:
            return await ctx.step(book, "hotel")
        except Declined:
            if not calls["undo flight"]:
                world.store.lose("commit", loss)  # the next change is the record of the failure
            return await ctx.step(undo, "flight")

    async with World(app) as world:
        run = await losing.submit()
        assert await run.result() == "no flight"
        steps = await world.engine.read_steps(run.id)
        assert world.store.losses == [("commit", loss)]
        await world.assert_invariants()
    assert calls == {"book hotel": 1, "undo flight": 1}
    assert [memo.name for memo in steps] == [step_row_name("book", StepState.FAILED), "undo"]


async def test_a_holder_that_loses_its_lease_after_the_record_of_a_failure_leaves_it_to_the_next() -> None:
    @app.task(name="expiring")
    async def expiring(ctx: Context) -> str:
        async def undo() -> str:
            calls["undo"] += 1
            if calls["undo"] > 1:
                return "undone"
            await world._let_lease_expire(ctx)
            calls["late"] += 1
            return "late"

        try:
            return await ctx.step(book, "hotel")
        except Declined as why:
            return f"{await ctx.step(undo)} after {why}"

    async with World(app) as world:
        run = await expiring.submit()
        assert await run.result() == "undone after hotel"
        await world.advance("1h")
        steps = await world.engine.read_steps(run.id)
        await world.assert_invariants()
    # The former holder finished its effect, and recorded nothing.
    assert calls == {"book hotel": 1, "undo": 2, "late": 1}
    assert [(memo.name, memo.result) for memo in steps if memo.name == "undo"] == [("undo", b'"undone"')]
