"""A worker of the previous release beside one of this release, on one store: what it leaves, and what it does.

The previous release records steps without numbers, names the operations of own tasks by their arrival, and knows no
failures: it looks a step up by its name alone.
"""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import Context, Fabric, Retry
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change, Insert, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo, StepState
from flowfabric.model.instant import NOW
from flowfabric.sdk.serialization.failures import encode_failure
from flowfabric.stores.queries import Read
from flowfabric.testing.world import World

IS_FOR_EVERY_STORE = True

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


async def zip_up(text: str) -> str:
    effects.append(f"zip {text}")
    return f"zipped {text}"


@app.task(retry=Retry(max=3, base="1s"))
async def two_tasks(ctx: Context) -> list[str]:
    async def pay(card: str) -> str:
        return await ctx.step(charge, card)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pay(card)) for card in ("ana", "bo")]
    return [task.result() for task in tasks]


async def claim_by_hand(world: World) -> Claimed:
    """Claim the only run, as a worker of the previous release."""
    claimed = await world.engine.claim("default", worker_id="older", worker_instance_id="older:1")
    assert claimed is not None
    return claimed


async def release(engine: Engine, claimed: Claimed) -> None:
    await engine.delay_for(claimed.handle, 0)
    await engine.promote_delayed(claimed.execution_id)


async def test_a_run_that_an_older_worker_began_repeats_nothing() -> None:
    async with World(app, workers=0) as world:
        run = await two_tasks.submit()
        claimed = await claim_by_hand(world)
        for number, card in enumerate(("ana", "bo")):
            await world.engine.record_step(claimed.handle, "charge", number, f'"old receipt of {card}"'.encode())
        await release(world.engine, claimed)
        world.start_worker()
        assert await run.result("1d") == ["old receipt of ana", "old receipt of bo"]
        assert effects == []
        await world.assert_invariants()


async def test_a_run_that_an_older_worker_began_is_matched_by_arrival_to_its_end() -> None:
    async with World(app, workers=0) as world:
        run = await two_tasks.submit()
        claimed = await claim_by_hand(world)
        await world.engine.record_step(claimed.handle, "charge", 0, b'"old receipt"')
        await release(world.engine, claimed)
        world.start_worker()
        assert await run.result("1d") == ["old receipt", "receipt of bo"]
        assert effects == ["charge bo"]
        names = {(memo.name, memo.occurrence) for memo in await world.engine.read_steps(run.id)}
        assert names == {("charge", 0), ("charge", 1)}


async def record_as_older_release(world: World, execution_id: str, name: str, result: bytes) -> None:
    """Insert a result as the previous release does on a store: without a look at failures."""
    [[row]] = (await world.store.load([Read(Execution, (execution_id,))])).rows
    memo = StepMemo(execution_id, name, 0, row.attempt_index or 0, NOW, result)
    [verdict] = await world.store.commit([Change(guards=(seen(row),), writes=(Insert(memo),))])
    assert isinstance(verdict, int)


@pytest.mark.parametrize("name", ["charge", "zip"])
async def test_a_recorded_failure_is_kept_although_an_older_worker_added_a_result(name: str) -> None:
    """The names sort before and after `failed:`, so the order of the rows does not decide."""

    @app.task(name="older_beside")
    async def older_beside(ctx: Context) -> str:
        try:
            return await ctx.options(name=name).step(zip_up, "a")
        except Declined as why:
            return f"failed: {why}"

    async with World(app, workers=0) as world:
        run = await older_beside.submit()
        claimed = await claim_by_hand(world)
        failure = encode_failure(Declined("no money"))
        await world.engine.record_step(claimed.handle, name, 0, failure, state=StepState.FAILED, number=1)
        await world.advance("1s")
        await record_as_older_release(world, run.id, name, b'"of the older one"')
        await release(world.engine, claimed)
        world.start_worker()
        assert await run.result("1d") == "failed: no money"
        assert effects == []
