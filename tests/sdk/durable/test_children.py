"""Children whose results a handler awaits: the wait frees the slot and returns their outcomes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Context, Fabric, Retry, RunFailed
from flowfabric.model.change import Change, Delete
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.states import PublicState
from flowfabric.sdk.call import Call
from flowfabric.testing.world import World

IS_FOR_EVERY_STORE = True

app = Fabric("sqlite:////nowhere/at/all.db")


@app.task
async def slow(ctx: Context, length: str) -> str:
    await ctx.sleep(length)
    return f"after {length}"


@app.task
async def broken() -> None:
    raise ValueError("no good")


@app.task
async def counted(n: int) -> int:
    return n


async def test_waiting_days_for_a_child_occupies_no_slot_and_one_attempt() -> None:
    @app.task
    async def parent(ctx: Context) -> str:
        return await (await ctx.spawn(slow, "3d")).result()

    async with World(app, slots=1) as world:
        run = await parent.submit()
        await world.advance("1d")
        assert await run.state() is PublicState.SUSPENDED
        assert await run.result() == "after 3d"
        assert len(await run.attempts()) == 1
        world.assert_invariants()


async def test_a_killed_parent_finds_its_child_again() -> None:
    @app.task
    async def parent(ctx: Context) -> str:
        return await (await ctx.spawn(slow, "3d")).result()

    async with World(app, workers=0) as world:
        worker = world.start_worker()
        run = await parent.submit()
        await world.advance("1d")
        await world.kill(worker)
        world.start_worker()
        assert await run.result() == "after 3d"
        found = await world.engine.search_executions(limit=10)
        assert len(found.executions) == 2, "the parent, and one child"


async def test_a_wait_for_a_child_times_out_and_can_be_repeated() -> None:
    @app.task
    async def parent(ctx: Context) -> list[str]:
        child = await ctx.spawn(slow, "3h")
        try:
            await child.result(timeout="1h")
        except TimeoutError as late:
            return [str(late), await child.result(timeout="1d")]
        return []

    async with World(app):
        late, value = await (await parent.submit()).result()

    assert "has not ended after 3600 s; it continues to run" in late
    assert value == "after 3h"


async def test_a_failed_child_fails_the_wait_with_its_reason() -> None:
    @app.task(retry=Retry(max=0))
    async def parent(ctx: Context) -> None:
        await (await ctx.spawn(broken)).result()

    async with World(app):
        with pytest.raises(RunFailed, match="no good"):
            await (await parent.submit()).result()


@pytest.mark.parametrize("way", ["result", "gather"])
async def test_a_child_that_failed_has_failed_for_good_for_a_parent_that_moved_past_it(way: str) -> None:
    failures = [LookupError("no room")]

    @app.task(name="replayed-child", retry=Retry(max=0))
    async def child() -> str:
        if failures:
            raise failures.pop()
        return "room 7"

    @app.task
    async def parent(ctx: Context) -> str:
        run = await ctx.spawn(child) if way == "result" else None
        try:
            found = await run.result() if run is not None else (await ctx.gather([child.s()]))[0]
        except RunFailed as failed:
            found = f"{failed.type} {failed.text} {failed.category} {type(failed.__cause__).__name__}"
        return found + await ctx.receive("go", str)

    async with World(app) as world:
        run = await parent.submit()
        await world.settle()
        [one] = (await world.engine.list_children(run.id)).executions
        await child.run(one.execution_id).replay()
        assert await child.run(one.execution_id).result() == "room 7"
        await run.signal("go", "!")
        assert await run.result() == "LookupError no room LookupError LookupError!"


async def test_a_wait_inside_a_step_blocks_in_place() -> None:
    begun: list[str] = []

    @app.task
    async def parent(ctx: Context) -> list[int]:
        begun.append(ctx.run_id)
        one, two, three = [await ctx.spawn(counted, n) for n in range(3)]

        async def third() -> int:
            before = len(begun)
            value = await three.result()
            assert len(begun) == before, "the run was not parked meanwhile"
            return value

        return [*await asyncio.gather(one.result(), two.result()), await ctx.step(third)]

    async with World(app):
        assert await (await parent.submit()).result() == [0, 1, 2]


async def test_an_awaited_child_has_no_key_and_another_child_may_find_an_earlier_run() -> None:
    @app.task(retry=Retry(max=0))
    async def gathers(ctx: Context) -> list[int]:
        return await ctx.gather([counted.options(key="one").s(1)])

    @app.task
    async def spawns(ctx: Context, n: int) -> list[Any]:
        run = await ctx.spawn(counted.options(key="one").s(n))
        return [run.created, await run.result()]

    async with World(app):
        with pytest.raises(RunFailed, match="key: 'one' may be that of a run with another parent"):
            await (await gathers.submit()).result()
        assert await (await spawns.submit(1)).result() == [True, 1]
        assert await (await spawns.submit(2)).result() == [False, 1]


async def test_two_votes_of_one_person_count_once() -> None:
    @app.task
    async def asks(ctx: Context) -> list[str]:
        return [vote.by for vote in await (await ctx.approval("ok", bool, need=2))]

    async with World(app) as world:
        run = await asks.submit()
        gate = await world.approval(run, "ok")
        await gate.approve_as("ana")
        await gate.approve_as("ana")
        await world.settle()
        assert await run.state() is PublicState.SUSPENDED
        await (await world.approval(run, "ok")).approve_as("bo")
        assert await run.result() == ["ana", "bo"]
        with pytest.raises(AssertionError, match="cleo has no link"):
            await gate.approve_as("cleo")


async def test_children_are_gathered_from_any_collection_of_calls() -> None:
    nobody: list[Call[int]] = []

    @app.task
    async def parent(ctx: Context) -> list[list[int]]:
        return [
            await ctx.gather([counted.s(0), counted.s(1)]),
            await ctx.gather(counted.s(n) for n in range(2, 4)),
            await ctx.gather(counted.s(4), counted.s(5)),
            await ctx.gather(*nobody),
        ]

    @app.task
    def plain(ctx: Context) -> list[list[int | None]]:
        return [
            ctx.sync.gather([counted.s(0), counted.s(1)]),
            ctx.sync.gather(counted.s(n) for n in range(2, 4)),
            [*ctx.sync.gather(counted.s(4), counted.s(5))],
            [*ctx.sync.gather(*nobody)],
        ]

    wanted = [[0, 1], [2, 3], [4, 5], []]
    async with World(app):
        assert await (await parent.submit()).result() == wanted
        assert await (await plain.submit()).result() == wanted
    assert await parent() == wanted


async def test_a_task_used_as_a_step_gets_the_context_of_its_run() -> None:
    @app.task
    async def inner(ctx: Context, n: int) -> list[Any]:
        return [ctx.run_id, n]

    @app.task
    def plain(ctx: Context, n: int) -> list[Any]:
        return [ctx.run_id, n]

    @app.task
    async def outer(ctx: Context) -> list[Any]:
        return [await ctx.step(inner, 1), await ctx.step(plain, n=2), ctx.run_id]

    @app.task
    def outer_plain(ctx: Context) -> list[Any]:
        return [ctx.sync.step(inner, 1), ctx.sync.step(plain, n=2), ctx.run_id]

    async with World(app):
        for task in (outer, outer_plain):
            run = await task.submit()
            assert await run.result() == [[run.id, 1], [run.id, 2], run.id]
    one, two, run_id = await outer()
    assert (one, two) == ([run_id, 1], [run_id, 2])


async def test_children_that_finished_long_ago_are_not_created_again() -> None:
    done: list[int] = []
    child = app.task(name="remembered-child")(_noting(done))

    @app.task
    async def patient(ctx: Context) -> list[int]:
        several = await ctx.gather([child.s(n) for n in range(2)])
        fastest = await ctx.race(child.s(2))
        spawned = await ctx.spawn(child, 3)
        single = await spawned.result()
        for _ in range(5):
            await ctx.sleep("20h")  # Finished executions are kept for a day.
        return [*several, fastest, single, await spawned.result()]

    async with World(app) as world:
        run = await patient.submit()
        assert await run.result() == [0, 1, 2, 3, 3]
        assert sorted(done) == [0, 1, 2, 3]
        world.assert_invariants()


async def test_a_replayed_parent_reads_the_results_of_children_that_were_purged() -> None:
    done: list[int] = []
    child, spawned = app.task(name="purged-child")(_noting(done)), set[str]()

    @app.task
    async def patient(ctx: Context) -> list[int]:
        several = await ctx.gather([child.s(n) for n in range(2)])
        alone = await ctx.spawn(child, 2)
        spawned.add(alone.id)
        several.append(await alone.result())
        await ctx.sleep("1h")
        return [*several, await alone.result()]

    async with World(app) as world:
        run = await patient.submit()
        await world.advance("1m")
        children = (await world.engine.list_children(run.id)).executions
        assert len(children) == 3
        runtime = world.engine.runtime
        for one in children:
            deletes = tuple(Delete(kind, (one.execution_id,)) for kind in (Result, Payload, Execution))
            assert await runtime.commit_queue.add(Change((), deletes, id=runtime.minter.change_id())) is not None
        assert await run.result() == [0, 1, 2, 2]
        assert sorted(done) == [0, 1, 2]
        assert len(spawned) == 1
        assert (await world.engine.list_children(run.id)).executions == []


def _noting(done: list[int]) -> Any:
    async def child(n: int) -> int:
        done.append(n)
        return n

    return child


# -- deploys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while it waits for them", "when they have ended"])
async def test_a_gather_whose_children_a_deploy_changed_waits_for_the_new_ones(
    caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    lengths = ["1h", "2h"]

    async def many(ctx: Context) -> list[str]:
        several = await ctx.gather([slow.s(length) for length in lengths])
        await ctx.sleep("4h")
        return several

    warned = app.task(name="warned", on_mismatch="warn")(many)
    refused = app.task(name="refused", on_mismatch="error")(many)

    async with World(app) as world:
        runs = [await warned.submit(), await refused.submit()]
        await world.advance("90m" if moment == "while it waits for them" else "3h")
        lengths.append("5h")
        assert await runs[0].result() == ["after 1h", "after 2h", "after 5h"]
        assert "children#0 is recorded with other children" in caplog.text
        with pytest.raises(RunFailed, match="NonDeterministic"):
            await runs[1].result()
        world.assert_invariants()


async def test_a_gather_inserted_before_another_does_not_use_its_children() -> None:
    before = False

    @app.task(on_mismatch="warn")
    async def inserted(ctx: Context) -> list[Any]:
        first = await ctx.gather([slow.s("1h")]) if before else []
        several = await ctx.gather([counted.s(n) for n in range(3)])
        await ctx.sleep("4h")
        return [*first, *several]

    async with World(app) as world:
        run = await inserted.submit()
        await world.advance("1h")
        before = True
        assert await run.result() == ["after 1h", 0, 1, 2]
        world.assert_invariants()


async def test_a_gather_from_which_a_deploy_removed_the_failed_child_continues() -> None:
    calls: list[Call[Any]] = [counted.s(1), broken.s()]

    @app.task(retry=Retry(max=3, base="1h"))
    async def fewer(ctx: Context) -> list[Any]:
        return await ctx.gather(calls)

    async with World(app) as world:
        run = await fewer.submit()
        await world.advance("1m")
        del calls[1]
        assert await run.result() == [1]
