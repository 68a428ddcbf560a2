"""Ends reach those who wait for them within the process that wrote them, and by the sweeps when that process died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from flowfabric import CreateExecution
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.flows import GraphEdge
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers import Claimed
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency, Dispatch, EdgeGroup
from flowfabric.rules.successors import FEW
from flowfabric.settings import Settings
from flowfabric.stores.base import Scan, Store, Want
from flowfabric.testing.faults import FlakyStore, Loss

LANE = "default"


class Crew:
    """A flow, a worker that does what it is told, and two processes: one that lives and one that dies at will."""

    def __init__(self, store: Store) -> None:
        self.store = FlakyStore(store)
        self.engine = Engine(self.store, minter=SeededMinter(1))
        self.mortal = Engine(self.store, minter=SeededMinter(2), settings=Settings(dispatch=False))
        self.flow = FlowId(str(UUID(int=7)))
        self.names: dict[str, str] = {}

    async def graph(self, nodes: list[str], edges: list[tuple[str, str]], **given: Any) -> None:
        self.names = {name: mint_for_flow(self.flow, self.engine.partitions, self.engine.minter) for name in nodes}
        asks = [
            CreateExecution(
                execution_id=execution, partition=0, namespace="default", lane_id=LANE, execution_kind="task"
            )
            for execution in self.names.values()
        ]
        policies = {self.names[name]: policy for name, policy in given.pop("policies", {}).items()}
        pairs = [GraphEdge(self.names[one], self.names[other], **given) for one, other in edges]
        await self.engine.create_flow_graph(self.flow, asks, pairs, policies=policies)

    async def claim(self, count: int = 1000, by: Engine | None = None) -> list[Claimed]:
        return await (by or self.engine).claim_many(
            LANE, count, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=60_000
        )

    async def work(self, by: Engine | None = None, *, failing: str = "") -> list[str]:
        """Claim and end whatever can be claimed now; who that was."""
        claimed = await self.claim(by=by)
        known = {execution: name for name, execution in self.names.items()}
        done = []
        for one in claimed:
            name = known[one.execution_id]
            done.append(name)
            if name in failing:
                await (by or self.engine).fail(one.handle, reason="broken")
            else:
                await (by or self.engine).complete(one.handle, result=name.encode())
        return sorted(done)

    async def states(self, *names: str) -> str:
        wanted = names or tuple(self.names)
        return " ".join([str(await self.engine.read_execution_state(self.names[name])) for name in wanted])

    async def group(self, name: str) -> EdgeGroup:
        found = (await self.engine.load((Want(EdgeGroup, (self.flow, self.names[name])),))).rows[0]
        group: EdgeGroup = found[0]
        return group

    async def owed(self) -> int:
        """How much is settled and not folded, or not even settled."""
        unfolded = await self.store.scan(Scan(Dependency, limit=100_000))
        dispatches = await self.store.scan(Scan(Dispatch, limit=100))
        return sum(one.unfolded_at is not None for one in unfolded) + len(dispatches)

    async def sweep(self, *names: str) -> None:
        for name in names:
            while (await self.engine.sweep_once(name)).processed:
                pass


@pytest.fixture
async def crew(store: Store, clock: ManualClock) -> AsyncIterator[Crew]:
    crew = Crew(store)
    yield crew
    await crew.engine.dispatcher.close()


async def test_a_chain_runs_through_without_any_sweep(crew: Crew) -> None:
    await crew.graph([*"abcd"], [("a", "b"), ("b", "c"), ("c", "d")])

    order = [await crew.work() for _ in range(4)]

    assert order == [["a"], ["b"], ["c"], ["d"]]
    assert await crew.owed() == 0


@pytest.fixture
def asked(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The trips of the store from now on: which, and with how much."""
    trips: list[tuple[str, int]] = []

    def counted(verb: str) -> Any:
        ask = getattr(crew.store, verb)

        async def told(given: Any, *more: Any) -> Any:
            trips.append((verb, len(given)))
            return await ask(given, *more)

        return told

    monkeypatch.setattr(crew.store, "peek", lambda _: None)
    for verb in ("load", "commit"):
        monkeypatch.setattr(crew.store, verb, counted(verb))
    return trips


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
async def test_a_step_of_a_chain_is_one_commit_and_no_look(
    crew: Crew, asked: list[tuple[str, int]], together: bool
) -> None:
    await crew.graph([*"abcd"], [("a", "b"), ("c", "d")])
    held = await crew.claim()
    asked.clear()

    if together:
        await crew.engine.complete_many([(one.handle, b"r") for one in held])
    else:
        await asyncio.gather(*(crew.engine.complete(one.handle, result=b"r") for one in held))
    await crew.engine.dispatched()

    assert asked == [("commit", 2)]
    assert await crew.states(*"abcd") == "completed waiting completed waiting"


async def test_a_step_that_hands_its_result_on_looks_at_the_input_only(
    crew: Crew, asked: list[tuple[str, int]]
) -> None:
    await crew.graph([*"ab"], [("a", "b")], data_passing_ref="r")
    [held] = await crew.claim()
    asked.clear()

    await crew.engine.complete(held.handle, result=b"r")
    await crew.engine.dispatched()

    assert asked == [("load", 1), ("commit", 1)]
    assert await crew.states("a", "b") == "completed waiting"
    [after] = await crew.claim()
    assert after.payload is not None
    assert after.payload.input_payload == b"r"


async def test_a_diamond_joins_and_a_failure_skips_to_any_depth(crew: Crew) -> None:
    tail = [f"t{number:03}" for number in range(120)]
    nodes = ["a", "b", "c", "d", *tail]
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("c", tail[0])]
    edges += list(pairwise(tail))
    await crew.graph(nodes, edges)

    assert await crew.work() == ["a"]
    await crew.engine.dispatched()
    assert await crew.work(failing="c") == ["b", "c"]
    await crew.engine.dispatched()

    assert set((await crew.states("d", *tail)).split()) == {"skipped"}
    assert await crew.owed() == 0


@pytest.mark.parametrize("width", [FEW + 1, 1100])
async def test_many_children_are_released_in_bounded_steps(crew: Crew, width: int) -> None:
    children = [f"c{number:04}" for number in range(width)]
    await crew.graph(["a", *children], [("a", child) for child in children])

    await crew.work()
    await crew.engine.dispatched()

    assert len(await crew.claim(5000)) == width
    assert await crew.owed() == 0


async def test_some_children_are_released_in_the_commit_that_ends_their_parent(crew: Crew) -> None:
    children = [f"c{number:03}" for number in range(FEW)]
    await crew.graph(["a", *children], [("a", child) for child in children])

    assert await crew.work() == ["a"]

    assert len(await crew.claim(5000)) == FEW
    assert await crew.owed() == 0


async def test_one_child_of_some_that_moved_does_not_hold_the_others_back(crew: Crew) -> None:
    await crew.graph([*"abcd"], [("a", "b"), ("a", "c"), ("a", "d")])
    await crew.engine.cancel_execution(crew.names["c"], source="operator_override", reason="not needed")

    assert await crew.work() == ["a"]
    await crew.engine.dispatched()

    assert await crew.states(*"abcd") == "completed waiting cancelled waiting"
    assert (await crew.group("c")).succeeded == 1
    assert await crew.owed() == 0


async def test_many_parents_fire_their_join_once(crew: Crew) -> None:
    parents = [f"p{number:04}" for number in range(1000)]
    await crew.graph([*parents, "j"], [(parent, "j") for parent in parents])
    held = await crew.claim()

    await asyncio.gather(*(crew.engine.complete(one.handle) for one in held))
    await crew.engine.dispatched()

    group = await crew.group("j")
    assert (group.n, group.succeeded, group.group_state) == (1000, 1000, "satisfied")
    [joined] = await crew.claim()
    assert joined.execution_id == crew.names["j"]
    assert await crew.owed() == 0


async def test_siblings_are_cancelled_without_any_sweep(crew: Crew) -> None:
    parents = [f"p{number}" for number in range(20)]
    policy = {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"}
    await crew.graph([*parents, "j"], [(parent, "j") for parent in parents], policies={"j": policy})
    held = await crew.claim(10)

    for one in held[:2]:
        await crew.engine.complete(one.handle)
    await crew.engine.dispatched()

    states = (await crew.states(*parents)).split()
    assert (states.count("completed"), states.count("cancelled")) == (2, 18)
    group = await crew.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (2, 18, False)


# -- deaths in between ----------------------------------------------------------------------------------------------


async def test_a_crash_between_completion_and_dispatch_loses_nothing(crew: Crew) -> None:
    await crew.graph([*"abcd"], [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])

    await crew.work(by=crew.mortal)  # it dies right after the commit
    assert await crew.states("b", "c") == "waiting_children waiting_children"
    assert await crew.owed() == 2

    await crew.sweep("completion_dispatch")
    assert await crew.work(by=crew.mortal) == ["b", "c"]
    await crew.sweep("completion_dispatch")
    assert await crew.work() == ["d"]


async def test_a_crash_between_a_skip_and_what_follows_loses_nothing(crew: Crew) -> None:
    await crew.graph([*"abcde"], [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")])
    await crew.work(by=crew.mortal, failing="a")

    await crew.mortal.sweep_once("dependency_reconciler")

    assert await crew.states(*"bcde") == "skipped skipped skipped skipped"


@pytest.mark.parametrize("died_after", [0, 1, 2])
async def test_a_crash_between_the_steps_of_a_large_dispatch_loses_nothing(crew: Crew, died_after: int) -> None:
    children = [f"c{number:04}" for number in range(1100)]
    await crew.graph(["a", *children], [("a", child) for child in children])
    await crew.work(by=crew.mortal)
    if died_after:
        for _ in range(died_after - 1):
            crew.store.stop_before("commit").open()
        gate = crew.store.stop_before("commit")
        dying = asyncio.create_task(crew.mortal.dispatcher.deliver(crew.names["a"]))
        await gate.reached()
        dying.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await dying

    await crew.sweep("completion_dispatch")

    assert len(await crew.claim(5000)) == 1100
    assert await crew.owed() == 0


async def test_a_dispatcher_that_comes_late_finds_nothing_to_do(crew: Crew) -> None:
    children = [f"c{number:03}" for number in range(FEW + 1)]
    await crew.graph(["a", *children], [("a", child) for child in children])
    await crew.work(by=crew.mortal)
    late = crew.store.stop_before("commit")
    zombie = asyncio.create_task(crew.mortal.dispatcher.deliver(crew.names["a"]))
    await late.reached()

    await crew.engine.dispatcher.deliver(crew.names["a"])
    held = await crew.claim(5000)
    late.open()

    assert (await zombie).settled == 0
    assert len(held) == FEW + 1
    assert (await crew.group(children[0])).succeeded == 1


@pytest.mark.parametrize("loss", [*Loss])
async def test_a_lost_answer_at_any_commit_of_a_join_does_not_strand_or_double(crew: Crew, loss: Loss) -> None:
    for nth in range(6):
        crew.flow = FlowId(str(UUID(int=100 + nth)))
        await crew.graph([*"abj", "k"], [("a", "j"), ("b", "j"), ("j", "k")])
        held = await crew.claim()
        crew.store.lose("commit", loss, after=nth)
        for one in held:
            await crew.engine.complete(one.handle)
        await crew.engine.dispatched()
        await crew.sweep("completion_dispatch", "dependency_reconciler")
        crew.store.heal()

        assert await crew.states(*"abjk") == "completed completed waiting waiting_children"
        assert (await crew.group("j")).succeeded == 2
        assert await crew.work() == ["j"]
        await crew.engine.dispatched()
        assert await crew.work() == ["k"]


async def test_an_edge_applied_while_its_upstream_ends_is_never_missed(crew: Crew) -> None:
    await crew.graph([*"ab"], [])
    claimed = {one.execution_id: one for one in await crew.claim()}
    held, other, child = claimed[crew.names["a"]], claimed[crew.names["b"]], crew.names["b"]
    edge = crew.engine.minter.uuid()
    await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names["a"], child)
    ending = crew.store.stop_before("commit")  # decided on a sheet without edges
    finish = asyncio.create_task(crew.engine.complete(held.handle))
    await ending.reached()
    await crew.mortal.apply_dependency_to_child(crew.flow, edge, child, crew.names["a"])
    ending.open()
    await finish
    await crew.engine.dispatched()

    assert (await crew.group("b")).group_state == "satisfied"
    await crew.engine.complete(other.handle)


async def test_a_child_that_parks_while_its_join_fires_is_not_left_parked(crew: Crew) -> None:
    await crew.graph([*"ab"], [])
    claimed = {one.execution_id: one for one in await crew.claim()}
    parent, child = claimed[crew.names["a"]], claimed[crew.names["b"]]
    edge = crew.engine.minter.uuid()
    await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names["a"], crew.names["b"])
    await crew.engine.apply_dependency_to_child(crew.flow, edge, crew.names["b"], crew.names["a"])
    await crew.mortal.complete(parent.handle)

    folding = crew.store.stop_before("commit")  # decided while the child was active
    fold = asyncio.create_task(crew.engine.cascade_completion(crew.names["a"]))
    await folding.reached()
    await crew.mortal.wait_children(child.handle)
    assert await crew.states("b") == "waiting_children"
    folding.open()
    await fold
    assert await crew.states("b") == "waiting"


async def test_a_join_that_fires_while_its_child_is_about_to_park_lets_it_go_on(crew: Crew) -> None:
    await crew.graph([*"ab"], [])
    claimed = {one.execution_id: one for one in await crew.claim()}
    parent, child = claimed[crew.names["a"]], claimed[crew.names["b"]]
    edge = crew.engine.minter.uuid()
    await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names["a"], crew.names["b"])
    await crew.engine.apply_dependency_to_child(crew.flow, edge, crew.names["b"], crew.names["a"])
    await crew.mortal.complete(parent.handle)

    parking = crew.store.stop_before("commit")  # decided while the group was pending
    park = asyncio.create_task(crew.engine.wait_children(child.handle))
    await parking.reached()
    await crew.mortal.cascade_completion(crew.names["a"])
    parking.open()
    await park
    assert await crew.states("b") == "waiting"


async def test_a_skip_that_meets_the_cancel_of_its_flow_leaves_the_member_to_it(crew: Crew) -> None:
    await crew.graph([*"ab"], [("a", "b")])
    await crew.work(by=crew.mortal, failing="a")

    skipping = crew.store.stop_before("commit")
    skip = asyncio.create_task(crew.engine.cascade_completion(crew.names["a"]))
    await skipping.reached()
    await crew.mortal.cancel_flow_header(crew.flow, reason="r")
    skipping.open()
    await skip
    assert await crew.states("b") == "waiting_children"
    await crew.mortal.cancelling.cancel_members(crew.flow, [crew.names["b"]], "r")
    assert await crew.states("b") == "cancelled"


async def test_a_child_is_replayed_while_its_upstream_ends_again(crew: Crew) -> None:
    await crew.graph([*"ab"], [("a", "b")])
    await crew.work(failing="a")
    await crew.engine.dispatched()
    assert await crew.states("b") == "skipped"
    await crew.engine.replay_execution(crew.names["a"])
    [held] = await crew.claim()

    replaying = crew.store.stop_before("commit")  # decided while the upstream was running
    replay = asyncio.create_task(crew.mortal.replay_execution(crew.names["b"]))
    await replaying.reached()
    await crew.engine.complete(held.handle)  # its first end is still noted, so this one is not
    replaying.open()
    await replay
    await crew.sweep("completion_dispatch")

    assert await crew.states("a", "b") == "completed waiting"


async def test_a_purged_upstream_has_told_its_end_before_it_went(crew: Crew, clock: ManualClock) -> None:
    children = [f"c{number}" for number in range(FEW + 1)]
    await crew.graph(["a", "b", *children], [("a", "b"), *(("b", child) for child in children)])
    await crew.work(by=crew.mortal)
    await crew.sweep("completion_dispatch")
    await crew.work(by=crew.mortal)
    clock.pass_ms(24 * 60 * 60 * 1000)
    assert await crew.mortal.purge_execution(crew.names["a"])
    assert await crew.mortal.purge_execution(crew.names["b"])

    await crew.sweep("completion_dispatch")

    assert set((await crew.states(*children)).split()) == {"waiting"}


async def test_a_purged_child_leaves_its_join_behind(crew: Crew, clock: ManualClock) -> None:
    await crew.graph([*"ab"], [("a", "b")])
    await crew.engine.cancel_execution(crew.names["b"])
    clock.pass_ms(24 * 60 * 60 * 1000)
    assert await crew.engine.purge_execution(crew.names["b"])

    await crew.work()
    await crew.engine.dispatched()
    await crew.sweep("dependency_reconciler")

    found = (await crew.engine.load((Want(Execution, (crew.names["b"],)),))).rows[0]
    assert found == []
    assert (await crew.group("b")).group_state == "pending"


async def test_an_edge_that_was_staged_and_not_applied_is_not_taken_for_the_one_that_was(crew: Crew) -> None:
    children = [f"c{number}" for number in range(FEW + 2)]
    await crew.graph(["a", "x", *children], [("a", child) for child in children[1:]] + [("x", children[0])])
    edge = crew.engine.minter.uuid()
    await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names["a"], crew.names[children[0]])
    claimed = {one.execution_id: one for one in await crew.claim()}

    await crew.engine.complete(claimed[crew.names["a"]].handle)
    await crew.engine.dispatched()

    assert await crew.states(*children) == " ".join(["waiting_children"] + ["waiting"] * (FEW + 1))
