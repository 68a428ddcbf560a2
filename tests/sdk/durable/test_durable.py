"""Durable functions: steps run once, waits free the slot, and a crash loses and doubles nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from flowfabric import Context, Fabric, Retry, RunFailed
from flowfabric.errors import InvalidInput
from flowfabric.sdk.joins import AnyOf, Quorum
from flowfabric.testing.world import World

app = Fabric("sqlite:////nowhere/at/all.db")
effects: list[str] = []
links: list[list[str]] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    effects.clear()
    links.clear()


@dataclass
class Answer:
    ok: bool


async def charge(amount: int) -> str:
    effects.append(f"charge {amount}")
    return f"receipt for {amount}"


@app.task(retry=Retry(max=3, base="1s", jitter=False))
async def pay(ctx: Context, amounts: list[int]) -> list[str]:
    receipts = [await ctx.step(charge, amount) for amount in amounts]
    if ctx.attempt < 2:
        raise ValueError("after the steps")
    return receipts


@app.task
async def nap(ctx: Context) -> int:
    before = await ctx.now()
    await ctx.sleep("3d")
    return ctx.engine.estimate.now() - before


@app.task
async def deploy(ctx: Context, need: int) -> str:
    gate = await ctx.approval("approve", Answer, need=need, expires="3d")
    await ctx.step(mail, gate.links)
    votes = await gate
    if votes.expired or not all(vote.value.ok for vote in votes):
        return "rejected"
    await ctx.step(charge, 1)
    return "applied by " + ",".join(sorted(vote.by for vote in votes))


async def mail(sent: list[str]) -> None:
    links.append(sent)


@app.task
async def steered(ctx: Context, count: int) -> list[int]:
    return [await ctx.receive("steer", int) or 0 for _ in range(count)]


@app.task
async def patient(ctx: Context) -> str:
    got = await ctx.receive("steer", str, timeout="5m")
    return "silence" if got is None else got


@app.task
async def double(ctx: Context, n: int) -> int:
    if n < 0:
        raise ValueError(f"{n} is negative")
    await ctx.sleep(f"{n + 2}s")
    return n * 2


@app.task
async def fan(ctx: Context, numbers: list[int]) -> list[int]:
    return await ctx.gather([double.s(n) for n in numbers])


@app.task
async def quorum(ctx: Context) -> int:
    results = await ctx.gather([double.s(n) for n in (1, 2, 500)], join=Quorum(2, cancel_rest=True))
    return sum(result for result in results if result is not None)


@app.task
async def racing(ctx: Context) -> int:
    return await ctx.race(double.s(50), double.s(3), double.s(90))


@app.task
async def beside(ctx: Context) -> str:
    async def paying() -> str:
        await asyncio.sleep(0.5)
        return await ctx.step(charge, 7)

    receipt, _ = await ctx.gather(paying(), ctx.sleep("7d"))
    return str(receipt)


@app.task
async def two_branches(ctx: Context) -> list[str]:
    async def branch(number: int) -> str:
        await ctx.sleep(f"{10 - number}s")
        return await ctx.step(charge, number)

    return await ctx.gather(branch(1), branch(2))


async def test_a_finished_step_does_not_run_again() -> None:
    async with World(app):
        assert await (await pay.submit([3, 3, 5])).result() == ["receipt for 3", "receipt for 3", "receipt for 5"]
    assert effects == ["charge 3", "charge 3", "charge 5"]


async def test_a_sleep_of_days_occupies_no_slot_and_no_time() -> None:
    async with World(app, slots=1) as world:
        runs = [await nap.submit() for _ in range(5)]
        slept = await asyncio.gather(*(run.result() for run in runs))
        await world.assert_invariants()
    assert all(3 * 86_400_000 <= length < 3 * 86_400_000 + 5000 for length in slept)


async def test_two_people_approve() -> None:
    async with World(app) as world:
        run = await deploy.submit(2)
        gate = await world.approval(run, "approve")
        await gate.answer_as("ana", Answer(True))
        await gate.answer_as("bo", Answer(True))
        assert await run.result() == "applied by ana,bo"
        await world.assert_invariants()
    assert effects == ["charge 1"]
    assert len(links) == 1


async def test_an_approval_without_an_answer_is_denied() -> None:
    async with World(app) as world:
        run = await deploy.submit(1)
        await world.advance("3d")
        assert await run.result() == "rejected"


async def test_links_that_were_mailed_stay_valid_after_a_crash() -> None:
    async with World(app) as world:
        world.crash_at("step:mail", "after_effect")
        run = await deploy.submit(2)
        await world.advance("1m")
        assert len(links) == 2, "the mail went out again, since its memo was lost"
        assert links[0] == links[1], "with the same links"
        await run.vote(links[0][0], Answer(True), by="ana")
        await run.vote(links[0][1], Answer(True), by="bo")
        assert await run.result() == "applied by ana,bo"


async def test_unread_votes_survive_a_crash() -> None:
    async with World(app) as world:
        run = await deploy.submit(2)
        gate = await world.approval(run, "approve")
        world.crash_at("step:charge", "before_effect")
        await gate.answer_as("ana", Answer(True))
        await gate.answer_as("bo", Answer(True))
        assert await run.result() == "applied by ana,bo"
        assert len(await run.attempts()) == 2
    assert effects == ["charge 1"]


async def test_one_link_cannot_vote_twice() -> None:
    async with World(app) as world:
        run = await deploy.submit(2)
        await world.approval(run, "approve")
        counted = [await run.vote(links[0][0], Answer(True), by="ana") for _ in range(3)]
        assert counted == [True, False, False]
        assert await run.signal("approve", Answer(False), token=links[0][0]) is False
        await world.advance("73h")
        assert await run.result() == "rejected"


async def test_a_vote_of_the_wrong_type_is_refused_and_the_run_continues() -> None:
    async with World(app) as world:
        run = await deploy.submit(2)
        await world.approval(run, "approve")
        for value in (True, None, "yes", {}, {"ok": "yes"}, [Answer(True)]):
            with pytest.raises(InvalidInput, match="is needed|is missing"):
                await run.vote(links[0][0], value, by="ana")
        assert await run.vote(links[0][0], Answer(True), by="ana") is True
        assert await run.vote(links[0][1], Answer(True), by="bo") is True
        assert await run.result() == "applied by ana,bo"


async def test_links_are_valid_whatever_the_name_of_the_key() -> None:
    async with World(app) as world:
        await world.engine.rotate_waitpoint_hmac_secret_all("a&b=c+d %41 #é?/", "77" * 32, 0)
        run = await deploy.submit(2)
        gate = await world.approval(run, "approve")
        await gate.answer_as("ana", Answer(True))
        assert await run.vote(links[0][1], Answer(True), by="bo") is True
        assert await run.result() == "applied by ana,bo"


async def test_a_run_that_is_replayed_asks_again() -> None:
    async with World(app) as world:
        run = await deploy.submit(2)
        for _ in range(2):
            gate = await world.approval(run, "approve")
            await gate.answer_as("ana", Answer(True))
            await gate.answer_as("bo", Answer(True))
            assert await run.result() == "applied by ana,bo"
            await run.replay()
        await world.approval(run, "approve")
        assert len(links) == 3
        assert await run.vote(links[0][0], Answer(True)) is True


async def test_messages_are_kept_before_between_and_after_receiving() -> None:
    async with World(app, workers=0) as world:
        run = await steered.submit(3)
        await run.signal("steer", 1)
        world.start_worker()
        await world.advance("1m")
        await run.signal("steer", 2)
        await world.advance("1m")
        assert await run.signal("steer", 3, key="third") is True
        assert await run.signal("steer", 3, key="third") is False
        assert await run.result() == [1, 2, 3]


async def test_receiving_times_out() -> None:
    async with World(app):
        assert await (await patient.submit()).result() == "silence"


async def test_children_run_and_their_results_are_returned_in_order() -> None:
    async with World(app) as world:
        assert await (await fan.submit([3, 1, 2])).result() == [6, 2, 4]
        await world.assert_invariants()


async def test_a_child_that_fails_fails_the_gather() -> None:
    async with World(app):
        with pytest.raises(RunFailed, match="is negative"):
            await (await fan.submit([3, -1])).result()


async def test_a_quorum_of_children_is_enough_and_the_rest_is_cancelled() -> None:
    async with World(app) as world:
        run = await quorum.submit()
        assert await run.result() == 2 + 4
        await world.advance("1m")
        states = [one.public_state.value for one in (await world.engine.search_executions()).executions]
        assert sorted(states) == ["cancelled", "completed", "completed", "completed"]


async def test_the_fastest_child_wins_a_race() -> None:
    async with World(app):
        assert await (await racing.submit()).result() == 6


async def test_the_step_beside_a_long_sleep_is_recorded_before_the_run_parks() -> None:
    async with World(app):
        assert await (await beside.submit()).result() == "receipt for 7"
    assert effects == ["charge 7"]


async def test_branches_that_run_in_another_order_keep_their_own_results() -> None:
    async with World(app):
        assert await (await two_branches.submit()).result() == ["receipt for 1", "receipt for 2"]
    assert sorted(effects) == ["charge 1", "charge 2"]


def test_joins_are_plain_values() -> None:
    assert AnyOf() == AnyOf(cancel_rest=False)
