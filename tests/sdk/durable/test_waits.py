"""Waits of a durable function under faults: killed workers, takeovers, an unavailable store, a deploy."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest

from flowfabric import Context, Fabric, NonDeterministic, Quorum, Retry, RunFailed
from flowfabric.model.states import PublicState
from flowfabric.testing import World

app = Fabric("sqlite:////nowhere/at/all.db")
effects: list[str] = []
links: list[list[str]] = []
version = 1


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    effects.clear()
    links.clear()
    monkeypatch.setattr("tests.sdk.durable.test_waits.version", 1)


@dataclass
class Answer:
    ok: bool


async def charge(what: str) -> str:
    effects.append(what)
    return f"paid {what}"


async def mail(sent: list[str]) -> None:
    links.append(sent)


@app.task
async def deploy(ctx: Context) -> str:
    gate = await ctx.approval("approve", Answer, need=2, expires="3d")
    await ctx.step(mail, gate.links)
    votes = await gate
    return await ctx.step(charge, ",".join(vote.by for vote in votes))


@app.task
async def pay(ctx: Context) -> str:
    return await ctx.step(charge, "once")


@app.task
async def answer(n: int) -> int:
    await asyncio.sleep(n)
    return n


@app.task
async def two_quorums(ctx: Context) -> tuple[list[int | None], list[int | None]]:
    first = await ctx.gather([answer.s(n) for n in (1, 2, 900)], join=Quorum(2, cancel_rest=True))
    second = await ctx.gather([answer.s(n) for n in (3, 800, 4)], join=Quorum(2, cancel_rest=True))
    return first, second


@app.task
async def quorums_at_once(ctx: Context) -> list[list[int | None]]:
    return await ctx.gather(
        ctx.gather([answer.s(n) for n in (1, 2, 900)], join=Quorum(2, cancel_rest=True)),
        ctx.gather([answer.s(n) for n in (3, 800, 4)], join=Quorum(2, cancel_rest=True)),
    )


@app.task
async def beside(ctx: Context) -> str:
    async def paying() -> str:
        await asyncio.sleep(0.5)
        return await ctx.step(charge, "beside")

    receipt, _, steer = await ctx.gather(paying(), ctx.sleep("7d"), ctx.receive("steer", str))
    return f"{receipt} {steer}"


@app.task(on_mismatch="warn")
async def changing(ctx: Context) -> list[str]:
    return await _changing(ctx)


@app.task(on_mismatch="error", retry=Retry(max=5, base="1s"))
async def strictly(ctx: Context) -> list[str]:
    return await _changing(ctx)


async def _changing(ctx: Context) -> list[str]:
    match version:
        case 1:
            done = [
                await ctx.options(name="first").step(charge, "a"),
                await ctx.options(name="second").step(charge, "b"),
            ]
        case 2:  # renamed
            done = [
                await ctx.options(name="first").step(charge, "a"),
                await ctx.options(name="other").step(charge, "b"),
            ]
        case 3:  # moved
            done = [
                await ctx.options(name="zeroth").step(charge, "z"),
                await ctx.options(name="first").step(charge, "a"),
            ]
        case 4:  # another input
            done = [
                await ctx.options(name="first").step(charge, "A"),
                await ctx.options(name="second").step(charge, "b"),
            ]
        case _:  # one more at the end
            done = [
                await ctx.options(name="first").step(charge, "a"),
                await ctx.options(name="second").step(charge, "b"),
            ]
            await ctx.receive("go")
            done.append(await ctx.options(name="third").step(charge, "c"))
            return done
    await ctx.receive("go")
    return done


async def test_votes_that_arrive_while_no_worker_runs_are_read_by_the_next() -> None:
    async with World(app, workers=0) as world:
        doomed = world.start_worker()
        run = await deploy.submit()
        await world.approval(run, "approve")
        await world.advance("1m")
        await world.kill(doomed)
        for number, person in enumerate(("ana", "bo")):
            await run.vote(links[0][number], Answer(True), by=person)
        await world.advance("1h")
        assert await run.state() is PublicState.WAITING
        unlucky = world.start_worker()
        world.crash_at("step:charge", "before_effect")
        await world.advance("1s")
        await world.kill(unlucky)
        world.start_worker()
        assert await run.result() == "paid ana,bo"
        world.assert_invariants()
    assert len(links) == 1


async def test_a_process_that_dies_after_recording_the_links_mails_them_once() -> None:
    async with World(app) as world:
        world.crash_at("step:mail", "after_commit")
        run = await deploy.submit()
        await world.advance("1m")
        for number, person in enumerate(("ana", "bo")):
            await run.vote(links[0][number], Answer(True), by=person)
        assert await run.result() == "paid ana,bo"
    assert len(links) == 1


async def test_two_quorums_in_one_function_do_not_mix_their_children() -> None:
    async with World(app) as world:
        assert await (await two_quorums.submit()).result() == ([1, 2, None], [3, None, 4])
        assert await (await quorums_at_once.submit()).result() == [[1, 2, None], [3, None, 4]]
        await world.advance("1m")
        states = [one.public_state for one in (await world.engine.search_executions(limit=100)).executions]
        assert states.count(PublicState.CANCELLED) == 4
        world.assert_invariants()


async def test_the_step_beside_long_waits_survives_the_death_of_its_process() -> None:
    async with World(app) as world:
        world.crash_at("step:charge", "after_commit")
        run = await beside.submit()
        await world.advance("1d")
        assert effects == ["beside"]
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("steer", "on")
        assert await run.result() == "paid beside on"
    assert effects == ["beside"]


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "paid", "attempts"),
    [("before_effect", 1, 2), ("after_effect", 2, 2), ("after_commit", 1, 2), ("lease_expired", 2, 2)],
)
async def test_the_run_completes_whatever_fault_hits_a_step(moment: str, paid: int, attempts: int) -> None:
    async with World(app) as world:
        world.crash_at("step:charge", moment)  # type: ignore[arg-type]
        run = await pay.submit()
        assert await run.result() == "paid once"
        assert len(await run.attempts()) == attempts
        world.assert_invariants()
    assert effects == ["once"] * paid


async def test_a_handler_whose_run_was_taken_over_cannot_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "flowfabric.worker")
    async with World(app) as world:
        world.crash_at("step:charge", "lease_expired")
        run = await pay.submit()
        await run.result()
        await world.advance("1m")
        [first, second] = await run.attempts()
        assert first.failure_reason == "lease_expired"
        memos = await world.engine.read_steps(run.id)
        assert [memo.attempt_index for memo in memos] == [second.attempt_index]
    assert "is over: execution_not_active" in caplog.text


@pytest.mark.parametrize("lasts", ["3s", "40s"])
async def test_an_unavailable_store_loses_nothing(lasts: str) -> None:
    async with World(app) as world:
        world.crash_at("step:charge", "store_down", lasts=lasts)
        run = await pay.submit()
        await world.advance("1h")
        assert await run.result() == "paid once"
        world.assert_invariants()
    assert 1 <= len(effects) <= 2


async def test_a_question_can_be_answered_with_its_own_type_after_its_process_died_while_asking() -> None:
    async def asking(ctx: Context) -> str:
        async def deciding() -> bool:
            [vote] = await (await ctx.approval("approve", Answer))
            return vote.value.ok

        ok, paid = await ctx.gather(deciding(), ctx.step(charge, "at once"))
        return f"{ok} {paid}"

    made = app.task(asking)
    async with World(app) as world:
        for _ in range(3):
            world.crash_at("step:charge", "before_effect")
        run = await made.submit()
        await (await world.approval(run, "approve")).approve_as("ana")
        assert await run.result() == "True paid at once"
    del app.tasks[made.name]


async def test_an_injected_fault_that_was_never_reached_is_reported() -> None:
    world = World(app)
    await world.__aenter__()
    world.crash_at("step:never", "before_effect")
    await (await pay.submit()).result()
    with pytest.raises(AssertionError, match="step:never before_effect was never reached"):
        await world.__aexit__(None, None, None)


def test_an_unknown_fault_point_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of before_effect"):
        World(app).crash_at("step:x", "someday")  # type: ignore[arg-type]


async def test_stubs_replace_steps_and_tasks_and_count_calls() -> None:
    async with World(app) as world:
        stub = world.stub(charge, returns="paid nothing")
        assert await (await pay.submit()).result() == "paid nothing"
        assert stub.calls == [(("once",), {})]
        world.stub(charge, lambda what: f"only said {what}")
        assert await (await pay.submit()).result() == "only said once"
        world.stub(charge, raises=OSError("no bank"))
        with pytest.raises(RunFailed, match="no bank"):
            await (await pay.submit()).result()
        children = world.stub(answer, lambda n: 0)
        assert await (await two_quorums.submit()).result() is not None
        assert len(children.calls) >= 4
    assert effects == []
    async with World(app):
        assert await (await pay.submit()).result() == "paid once", "afterwards the stubs are gone"


# -- deploys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "words", "result"),
    [
        (
            2,
            "'other' (number 0) runs for the first time although 'receive:go', 'second' ran before",
            ["paid a", "paid b"],
        ),
        (
            3,
            "'zeroth' (number 0) runs for the first time although 'first', 'receive:go', 'second' ran before",
            ["paid z", "paid a"],
        ),
        (4, "'first' (number 0) is recorded with another input", ["paid a", "paid b"]),
    ],
)
async def test_a_function_that_a_deploy_changed_is_detected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, new: int, words: str, result: list[str]
) -> None:
    async with World(app) as world:
        warned, refused = await changing.submit(), await strictly.submit()
        await world.advance("1m")
        monkeypatch.setattr("tests.sdk.durable.test_waits.version", new)
        for run in (warned, refused):
            await run.signal("go")
        assert await warned.result() == result
        assert words in caplog.text
        with pytest.raises(RunFailed, match=NonDeterministic.__name__) as failed:
            await refused.result()
        assert words in str(failed.value)
        assert len(await refused.attempts()) == 1, "no retry can mend it"


async def test_a_step_that_was_added_at_the_end_is_no_mismatch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with World(app) as world:
        run = await strictly.submit()
        await world.advance("1m")
        monkeypatch.setattr("tests.sdk.durable.test_waits.version", 5)
        await run.signal("go")
        assert await run.result() == ["paid a", "paid b", "paid c"]
    assert "first time" not in caplog.text
