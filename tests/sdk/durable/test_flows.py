"""Flows: nodes among the arguments are edges that carry results; joins decide when a node may run."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import AnyOf, Context, Fabric, Quorum, RunFailed, errors
from flowfabric.model.states import PublicState
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker

app = Fabric("sqlite:////nowhere/at/all.db")
ran: list[str] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    ran.clear()


@app.task
async def extract(day: str) -> list[int]:
    ran.append("extract")
    return [len(day), 2, 3]


@app.task
async def scrub(rows: list[int], least: int = 0) -> list[int]:
    ran.append("scrub")
    if least < 0:
        raise ValueError("scrubbing failed")
    return [row for row in rows if row >= least]


@app.task
def rank(rows: list[int]) -> int:
    ran.append("rank")
    return max(rows)


@app.task
async def publish(clean: list[int], score: int) -> str:
    ran.append("publish")
    return f"{clean} {score}"


@app.task
async def alert() -> str:
    ran.append("alert")
    return "alerted"


@app.task
async def total(parts: list[int | None]) -> int:
    return sum(part or 0 for part in parts)


@app.task
async def slow(ctx: Context, n: int) -> int:
    await ctx.sleep(f"{n}s")
    return n


async def test_an_argument_that_is_a_node_is_an_edge_and_carries_its_result() -> None:
    flow = app.flow("nightly")
    rows = flow.add(extract, "monday")
    clean = flow.add(scrub, rows, least=3)
    score = flow.add(rank, rows)
    flow.add(publish, clean, score)
    flow.add(alert, join=AnyOf(clean.failed, score.failed))
    async with World(app) as world:
        run = await flow.submit()
        assert await run.result() == {"publish": "[6, 3] 6"}
        assert await run[score].result() == 6
        assert (await run.states())["alert"] is PublicState.SKIPPED
        await world.assert_invariants()
        await check_flow_invariants(world.engine)
    assert ran[0] == "extract"
    assert ran[-1] == "publish"


async def test_a_failure_that_a_node_waits_for_is_handled() -> None:
    flow = app.flow("nightly")
    rows = flow.add(extract, "monday")
    clean = flow.add(scrub, rows, least=-1)
    flow.add(publish, clean, flow.add(rank, rows))
    flow.add(alert, join=AnyOf(clean.failed))
    async with World(app):
        run = await flow.submit()
        assert await run.result() == {"alert": "alerted"}
        with pytest.raises(RunFailed, match="scrubbing failed"):
            await run[clean].result()
        assert (await run.states())["publish"] is PublicState.SKIPPED


async def test_an_unhandled_failure_is_raised() -> None:
    flow = app.flow("nightly")
    flow.add(scrub, flow.add(extract, "monday"), least=-1)
    async with World(app):
        with pytest.raises(RunFailed, match="scrubbing failed"):
            await (await flow.submit()).result()


async def test_a_quorum_of_nodes_is_enough_and_the_rest_is_cancelled() -> None:
    flow = app.flow("race")
    parts = [flow.add(slow, n) for n in (2, 3, 500)]
    flow.add(total, parts, join=Quorum(2, cancel_rest=True))
    async with World(app) as world:
        run = await flow.submit()
        await world.advance("1m")
        assert await run[parts[2]].state() is PublicState.CANCELLED
        assert (await run.states())["total"] is PublicState.COMPLETED
        assert await run.result() == {"total": 5}


@pytest.mark.parametrize("handled", [True, False])
async def test_a_failure_of_a_branch_that_a_satisfied_join_did_not_need_is_handled(handled: bool) -> None:
    flow = app.flow("branches")
    broken = flow.add(rank, flow.add(scrub, [1], least=-1))
    flow.add(total, [broken, flow.add(slow, 2)] if handled else [flow.add(slow, 2)], join=AnyOf())
    async with World(app) as world:
        run = await flow.submit()
        await world.advance("1m")
        assert (await run.states())["rank"] is PublicState.SKIPPED
        if handled:
            assert await run.result() == {"total": 2}
        else:
            with pytest.raises(RunFailed, match="scrubbing failed"):
                await run.result()


async def test_a_key_makes_submitting_a_flow_idempotent() -> None:
    flow = app.flow("nightly")
    flow.add(rank, flow.add(extract, "monday"))
    async with World(app):
        first, again = await flow.submit(key="2026-11-16"), await flow.submit(key="2026-11-16")
        other = await flow.submit(key="2026-11-17")
        assert first.id == again.id != other.id
        assert await again.result() == {"rank": 6}
        assert await other.result() == {"rank": 6}
    assert len(ran) == 4


async def test_cancelling_a_flow_cancels_everything_unfinished() -> None:
    flow = app.flow("nightly")
    one = flow.add(slow, 3600)
    two = flow.add(total, [one])
    async with World(app) as world:
        run = await flow.submit()
        await world.advance("1s")
        await run.cancel("changed my mind")
        await world.advance("1m")
        assert set((await run.states()).values()) == {PublicState.CANCELLED}
        assert (await run[two].describe()).execution_id in str(run[two])


def test_the_graph_is_described_and_drawn() -> None:
    flow = app.flow("nightly")
    rows = flow.add(extract, "monday")
    first, second = flow.add(scrub, rows), flow.add(scrub, rows)
    flow.add(alert, after=[first, second.done])
    graph = flow.graph()
    assert list(graph.nodes) == ["extract", "scrub", "scrub-2", "alert"]
    assert graph.edges == [
        ("extract", "scrub", "success_only"),
        ("extract", "scrub-2", "success_only"),
        ("scrub", "alert", "success_only"),
        ("scrub-2", "alert", "any_outcome"),
    ]
    assert graph.mermaid().splitlines()[-1] == "    n2 -. done .-> n3"


def test_invalid_input_is_refused_when_a_node_is_added() -> None:
    flow, other = app.flow("one"), app.flow("other")
    with pytest.raises(errors.InvalidInput, match="day"):
        flow.add(extract, 7)
    with pytest.raises(errors.InvalidInput, match="score"):
        flow.add(publish, flow.add(extract, "a"))
    with pytest.raises(errors.InvalidInput, match="of another flow"):
        flow.add(rank, other.add(extract, "a"))
    with pytest.raises(errors.InvalidInput, match="3 cannot come from 2"):
        flow.add(total, [flow.add(slow, 1), flow.add(slow, 2)], join=Quorum(3))
    assert "publish" not in flow.nodes


async def test_an_empty_flow_is_refused() -> None:
    async with World(app):
        with pytest.raises(errors.InvalidInput, match="no nodes"):
            await app.flow("empty").submit()


async def test_flows_run_on_every_store_and_without_await(app: Fabric) -> None:
    @app.task
    async def give(n: int) -> int:
        return n

    @app.task
    def add(numbers: list[int], more: int) -> int:
        return sum(numbers) + more

    flow = app.flow("sum")
    last = flow.add(add, [flow.add(give, n) for n in range(5)], flow.add(give, 100))
    async with running_worker(app, slots=8):
        run = await flow.submit()
        assert await run.result(20) == {"add": 110}
        assert await asyncio.to_thread(lambda: flow.sync.submit()[last].result(timeout=20)) == 110


async def test_a_node_that_waits_for_days_keeps_its_input_and_finds_the_results_of_others() -> None:
    @app.task
    async def patient(ctx: Context, rows: list[int]) -> int:
        await ctx.sleep("30h")  # Results are kept for a day unless they are needed.
        return len(rows)

    flow = app.flow("long")
    rows = flow.add(extract, "monday")
    flow.add(publish, flow.add(scrub, rows), flow.add(patient, rows))

    async with World(app) as world:
        run = await flow.submit()
        await world.advance("4d")
        assert "extract" not in await run.states(), "what nobody needs any more is gone"
        assert "publish" not in await run.states()
        run = await flow.submit()
        assert await run.result() == {"publish": "[6, 2, 3] 3"}
        await world.advance("20h")
        assert await run.result() == {"publish": "[6, 2, 3] 3"}, "although the first ones are gone by now"
        assert ran.count("extract") == 2
    del app.tasks[patient.name]


async def test_a_node_without_some_results_runs_days_after_their_upstreams_finished() -> None:
    @app.task
    async def patient(ctx: Context, parts: list[int | None]) -> int:
        await ctx.sleep("30h")  # Afterwards its input is read again.
        return sum(part or 0 for part in parts)

    flow = app.flow("some")
    ranked = flow.add(rank, flow.add(scrub, [1], least=-1))  # skipped, since its upstream fails at once
    late = flow.add(slow, 48 * 3600)
    flow.add(patient, [ranked, flow.add(slow, 7 * 24 * 3600), late], join=AnyOf(cancel_rest=True))

    async with World(app) as world:
        run = await flow.submit()
        await world.advance("79h")
        assert await run["patient"].result() == 48 * 3600
    del app.tasks[patient.name]
