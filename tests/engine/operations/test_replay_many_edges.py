"""The replay of an upstream with many edges: an outcome counted during the replay is never the former one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from flowfabric.model.flow import CompletionDispatch, Dependency
from flowfabric.stores.queries import Scan
from flowfabric.testing.flaky_store import Loss, SyncPoint
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.engine.flow_harness import FlowHarness

CHILDREN = [f"c{number}" for number in range(5)]


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat five edges as many and two as one step."""
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 2)
    monkeypatch.setattr("flowfabric.engine.flows.completion_dispatcher.MAX_EDGES_PER_STEP", 2)
    monkeypatch.setattr("flowfabric.engine.operations.executions.MAX_EDGES_PER_STEP", 2)


async def create_joins(harness: FlowHarness, **given: str) -> None:
    """Create children that each wait for a and b."""
    edges = [(upstream, child) for child in CHILDREN for upstream in "ab"]
    await harness.graph([*"ab", *CHILDREN], edges, **given)


async def run_to_gates(work: asyncio.Task[object], gates: list[SyncPoint]) -> bool:
    """Run the work up to the last of these gates; return False if it finishes before."""
    for place, gate in enumerate(gates):
        reached = asyncio.create_task(gate.reached())
        await asyncio.wait({work, reached}, return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            return False
        if place < len(gates) - 1:
            gate.release()
    return True


async def recorded_outcomes(harness: FlowHarness) -> list[str]:
    """Return the outcomes of a that are recorded or counted on its edges."""
    rows: list[Dependency] = await harness.store.inner.scan(Scan(Dependency, limit=100))
    return [str(one.outcome) for one in rows if one.upstream_execution_id == harness.names["a"] and one.outcome]


async def replay_before_each_call(
    harness: FlowHarness,
    verb: str,
    end: Callable[[int], Awaitable[object]],
    count: Callable[[], Coroutine[Any, Any, object]],
) -> None:
    """Before each call in turn with which the end of a is counted, replay a: what is not counted yet never is."""
    stops = 0
    for turn in range(1, 12):
        await end(turn)
        gates = [harness.store.stop_before(verb) for _ in range(turn)]
        work = asyncio.create_task(count())
        is_stopped = await run_to_gates(work, gates)
        harness.store._before.clear()
        if not is_stopped:
            await work
            break
        stops += 1
        before = await counted_outcomes(harness)
        await harness.mortal.replay_execution(harness.names["a"])
        assert await counted_outcomes(harness) == before, "the replay counts nothing"
        gates[-1].release()
        await work
        assert await counted_outcomes(harness) == before, f"{verb} {turn}: an end was counted that is none any more"
        if before:
            break
    assert stops
    await check_flow_invariants(harness.engine)


async def counted_outcomes(harness: FlowHarness) -> int:
    """Return how many outcomes of a are counted."""
    rows: list[Dependency] = await harness.store.inner.scan(Scan(Dependency, limit=100))
    return sum(one.last_resolved_at is not None for one in rows if one.upstream_execution_id == harness.names["a"])


@pytest.mark.parametrize("verb", ["load", "commit", "scan"])
@pytest.mark.parametrize("swept", [False, True])
async def test_no_outcome_of_a_former_life_is_counted_once_the_upstream_is_replayed(
    harness: FlowHarness, verb: str, swept: bool
) -> None:
    await create_joins(harness, data_passing_ref="r")

    async def complete(turn: int) -> None:
        held = {one.execution_id: one for one in await harness.claim()}[harness.names["a"]]
        await (harness.mortal if swept else harness.engine).complete(held.handle, result=b"%d" % turn)

    sweep = partial(harness.sweep, "completion_dispatch")
    await replay_before_each_call(harness, verb, complete, sweep if swept else harness.engine.dispatcher.wait_idle)


@pytest.mark.parametrize("verb", ["load", "commit"])
async def test_an_unrecorded_outcome_is_not_counted_after_a_replay(harness: FlowHarness, verb: str) -> None:
    await create_joins(harness)

    async def cancel(_: int) -> None:
        await harness.mortal.cancel_execution(harness.names["a"], source="flow_cascade")

    await replay_before_each_call(harness, verb, cancel, partial(harness.sweep, "dependency_reconciler"))


async def test_a_replay_removes_recorded_outcomes_in_bounded_steps(
    harness: FlowHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_joins(harness)
    held = {one.execution_id: one for one in await harness.claim()}[harness.names["a"]]
    await harness.mortal.complete(held.handle)
    delivering = harness.store.stop_before("commit")
    after_first = harness.store.stop_before("commit")
    work = asyncio.create_task(harness.mortal.dispatcher.fan_out(harness.names["a"]))
    await delivering.reached()
    delivering.release()
    await after_first.reached()
    assert len(await recorded_outcomes(harness)) == 2
    sizes: list[int] = []
    commit = harness.store.commit

    async def counted(changes, hint=frozenset()):  # type: ignore[no-untyped-def]
        sizes.extend(len(change.writes) for change in changes)
        return await commit(changes, hint)

    monkeypatch.setattr(harness.store, "commit", counted)
    await harness.engine.replay_execution(harness.names["a"])  # while `mortal` is about to count the first two
    after_first.release()
    await work

    assert await recorded_outcomes(harness) == []
    assert await harness.store.inner.scan(Scan(CompletionDispatch)) == []
    assert max(sizes) <= 3 + 3, "a step, or the replay itself"


@pytest.mark.parametrize("loss", [*Loss])
@pytest.mark.parametrize("after", range(4))
async def test_a_replay_is_complete_whatever_is_lost(harness: FlowHarness, loss: Loss, after: int) -> None:
    await create_joins(harness)
    held = {one.execution_id: one for one in await harness.claim()}
    await harness.mortal.complete(held[harness.names["a"]].handle)
    harness.store.lose("commit", loss, after=after)

    await harness.mortal.replay_execution(harness.names["a"])
    harness.store.heal()

    assert await harness.states("a") == "waiting"
    assert await recorded_outcomes(harness) == []
    await harness.engine.complete(held[harness.names["b"]].handle)
    await harness.work()
    await harness.engine.dispatcher.wait_idle()
    assert set((await harness.states(*CHILDREN)).split()) == {"waiting"}


async def test_a_process_that_dies_before_the_replay_leaves_the_outcome_to_the_reconciler(harness: FlowHarness) -> None:
    await create_joins(harness)
    held = {one.execution_id: one for one in await harness.claim()}
    await harness.mortal.complete(held[harness.names["a"]].handle)
    await harness.mortal.complete(held[harness.names["b"]].handle)
    await harness.mortal._retract_many_outcomes(harness.names["a"])
    assert await recorded_outcomes(harness) == []

    for _ in range(3):
        await harness.sweep("dependency_reconciler")

    assert set((await harness.states(*CHILDREN)).split()) == {"waiting"}


async def test_an_edge_applied_while_a_replay_is_prepared_is_reset_too(harness: FlowHarness) -> None:
    await create_joins(harness)
    held = {one.execution_id: one for one in await harness.claim()}[harness.names["a"]]
    await harness.mortal.complete(held.handle)
    [first, *_] = gates = [harness.store.stop_before("commit") for _ in range(4)]
    work = asyncio.create_task(harness.mortal.replay_execution(harness.names["a"]))
    await run_to_gates(work, gates)  # at the replay itself
    edge = harness.engine.minter.uuid()
    await harness.engine.stage_dependency_edge(harness.flow, edge, harness.names["a"], harness.names["b"])
    await harness.engine.apply_dependency_to_child(harness.flow, edge, harness.names["b"], harness.names["a"])
    gates[-1].release()
    await work

    assert first is not gates[-1]
    assert await recorded_outcomes(harness) == []
    assert await harness.states("a") == "waiting"
