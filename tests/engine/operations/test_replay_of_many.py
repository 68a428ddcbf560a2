"""The replay of an upstream with many edges: an end that is counted at that moment is never its former one."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.model.flow import CompletionDispatch, Dependency
from flowfabric.stores.queries import Scan
from flowfabric.testing.faults import Loss, SyncPoint
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.engine.crew import Crew

CHILDREN = [f"c{number}" for number in range(5)]


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five edges are many, and a step takes two."""
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 2)
    monkeypatch.setattr("flowfabric.engine.flows.completion_dispatcher.MAX_EDGES_PER_STEP", 2)
    monkeypatch.setattr("flowfabric.engine.operations.executions.MAX_EDGES_PER_STEP", 2)


async def joins(crew: Crew, **given: str) -> None:
    """Each child waits for a and for b."""
    edges = [(upstream, child) for child in CHILDREN for upstream in "ab"]
    await crew.graph([*"ab", *CHILDREN], edges, **given)


async def stopped(work: asyncio.Task[object], gates: list[SyncPoint]) -> bool:
    """Let the work go on up to the last of these gates; False if it ends before."""
    for place, gate in enumerate(gates):
        reached = asyncio.create_task(gate.reached())
        await asyncio.wait({work, reached}, return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            return False
        if place < len(gates) - 1:
            gate.release()
    return True


async def notes(crew: Crew) -> list[str]:
    """The ends of a that are noted or counted on its edges."""
    rows: list[Dependency] = await crew.store.inner.scan(Scan(Dependency, limit=100))
    return [str(one.outcome) for one in rows if one.upstream_execution_id == crew.names["a"] and one.outcome]


@pytest.mark.parametrize("verb", ["load", "commit", "scan"])
@pytest.mark.parametrize("swept", [False, True])
async def test_no_end_of_a_former_life_is_counted_once_the_upstream_lives_again(
    crew: Crew, verb: str, swept: bool
) -> None:
    stops = 0
    await joins(crew, data_passing_ref="r")
    for turn in range(1, 12):
        claimed = {one.execution_id: one for one in await crew.claim()}
        held = claimed[crew.names["a"]]
        await (crew.mortal if swept else crew.engine).complete(held.handle, result=b"%d" % turn)
        gates = [crew.store.stop_before(verb) for _ in range(turn)]
        work = asyncio.create_task(crew.sweep("completion_dispatch") if swept else crew.engine.dispatcher.wait_idle())
        is_stopped = await stopped(work, gates)
        crew.store._before.clear()
        if not is_stopped:
            await work
            break
        stops += 1
        before = await notes_counted(crew)
        await crew.mortal.replay_execution(crew.names["a"])
        assert await notes_counted(crew) == before, "the replay counts nothing"
        gates[-1].release()
        await work
        assert await notes_counted(crew) == before, f"{verb} {turn}: an end was counted that is none any more"
        if before:
            break
    assert stops
    await check_flow_invariants(crew.engine)


async def notes_counted(crew: Crew) -> int:
    """How many ends of a are counted."""
    rows: list[Dependency] = await crew.store.inner.scan(Scan(Dependency, limit=100))
    return sum(one.last_resolved_at is not None for one in rows if one.upstream_execution_id == crew.names["a"])


@pytest.mark.parametrize("verb", ["load", "commit"])
async def test_an_end_that_left_no_note_is_not_counted_after_a_replay(crew: Crew, verb: str) -> None:
    await joins(crew)
    stops = 0
    for turn in range(1, 10):
        await crew.mortal.cancel_execution(crew.names["a"], source="flow_cascade")
        gates = [crew.store.stop_before(verb) for _ in range(turn)]
        work = asyncio.create_task(crew.sweep("dependency_reconciler"))
        is_stopped = await stopped(work, gates)
        crew.store._before.clear()
        if not is_stopped:
            await work
            break
        stops += 1
        before = await notes_counted(crew)
        await crew.mortal.replay_execution(crew.names["a"])
        gates[-1].release()
        await work
        assert await notes_counted(crew) == before
        if before:
            break
    assert stops
    await check_flow_invariants(crew.engine)


async def test_a_replay_takes_back_what_was_noted_in_bounded_steps(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    await joins(crew)
    held = {one.execution_id: one for one in await crew.claim()}[crew.names["a"]]
    await crew.mortal.complete(held.handle)
    delivering = crew.store.stop_before("commit")
    after_first = crew.store.stop_before("commit")
    work = asyncio.create_task(crew.mortal.dispatcher.fan_out(crew.names["a"]))
    await delivering.reached()
    delivering.release()
    await after_first.reached()
    assert len(await notes(crew)) == 2
    sizes: list[int] = []
    commit = crew.store.commit

    async def counted(changes, hint=frozenset()):  # type: ignore[no-untyped-def]
        sizes.extend(len(change.writes) for change in changes)
        return await commit(changes, hint)

    monkeypatch.setattr(crew.store, "commit", counted)
    await crew.engine.replay_execution(crew.names["a"])  # while the mortal one is about to count the first two
    after_first.release()
    await work

    assert await notes(crew) == []
    assert await crew.store.inner.scan(Scan(CompletionDispatch)) == []
    assert max(sizes) <= 3 + 3, "a step, or the replay itself"


@pytest.mark.parametrize("loss", [*Loss])
@pytest.mark.parametrize("after", range(4))
async def test_a_replay_is_whole_whatever_is_lost_on_the_way(crew: Crew, loss: Loss, after: int) -> None:
    await joins(crew)
    held = {one.execution_id: one for one in await crew.claim()}
    await crew.mortal.complete(held[crew.names["a"]].handle)
    crew.store.lose("commit", loss, after=after)

    await crew.mortal.replay_execution(crew.names["a"])
    crew.store.heal()

    assert await crew.states("a") == "waiting"
    assert await notes(crew) == []
    await crew.engine.complete(held[crew.names["b"]].handle)
    await crew.work()
    await crew.engine.dispatcher.wait_idle()
    assert set((await crew.states(*CHILDREN)).split()) == {"waiting"}


async def test_a_process_that_dies_before_the_replay_leaves_the_end_to_the_reconciler(crew: Crew) -> None:
    await joins(crew)
    held = {one.execution_id: one for one in await crew.claim()}
    await crew.mortal.complete(held[crew.names["a"]].handle)
    await crew.mortal.complete(held[crew.names["b"]].handle)
    await crew.mortal._prepared_for_replay(crew.names["a"])
    assert await notes(crew) == []

    for _ in range(3):
        await crew.sweep("dependency_reconciler")

    assert set((await crew.states(*CHILDREN)).split()) == {"waiting"}


async def test_an_edge_applied_while_a_replay_is_prepared_is_taken_back_as_well(crew: Crew) -> None:
    await joins(crew)
    held = {one.execution_id: one for one in await crew.claim()}[crew.names["a"]]
    await crew.mortal.complete(held.handle)
    [first, *_] = gates = [crew.store.stop_before("commit") for _ in range(4)]
    work = asyncio.create_task(crew.mortal.replay_execution(crew.names["a"]))
    await stopped(work, gates)  # at the replay itself
    edge = crew.engine.minter.uuid()
    await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names["a"], crew.names["b"])
    await crew.engine.apply_dependency_to_child(crew.flow, edge, crew.names["b"], crew.names["a"])
    gates[-1].release()
    await work

    assert first is not gates[-1]
    assert await notes(crew) == []
    assert await crew.states("a") == "waiting"
