"""Whatever dies, gets lost or comes late between an end and those who wait for it: nobody is stranded or told twice."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.operations.flows import WaitTimeout
from flowfabric.ids import FlowId
from flowfabric.model.answers.flow import FlowCancelled, PartiallyCancelled
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog
from flowfabric.rules.flow.successors import MAX_NAMED_SUCCESSORS
from flowfabric.stores.queries import Read
from flowfabric.testing.faults import Loss
from flowfabric.testing.invariants import scan_all
from tests.engine.crew import Crew


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
            crew.store.stop_before("commit").release()
        gate = crew.store.stop_before("commit")
        dying = asyncio.create_task(crew.mortal.dispatcher.fan_out(crew.names["a"]))
        await gate.reached()
        dying.cancel()
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await dying

    await crew.sweep("completion_dispatch")

    assert len(await crew.claim(5000)) == 1100
    assert await crew.owed() == 0


async def test_a_dispatcher_that_comes_late_finds_nothing_to_do(crew: Crew) -> None:
    children = [f"c{number:03}" for number in range(MAX_NAMED_SUCCESSORS + 1)]
    await crew.graph(["a", *children], [("a", child) for child in children])
    await crew.work(by=crew.mortal)
    late = crew.store.stop_before("commit")
    zombie = asyncio.create_task(crew.mortal.dispatcher.fan_out(crew.names["a"]))
    await late.reached()

    await crew.engine.dispatcher.fan_out(crew.names["a"])
    held = await crew.claim(5000)
    late.release()

    assert (await zombie).resolved == 0
    assert len(held) == MAX_NAMED_SUCCESSORS + 1
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
        await crew.engine.dispatcher.wait_idle()
        await crew.sweep("completion_dispatch", "dependency_reconciler")
        crew.store.heal()

        assert await crew.states(*"abjk") == "completed completed waiting waiting_children"
        assert (await crew.group("j")).succeeded == 2
        assert await crew.work() == ["j"]
        await crew.engine.dispatcher.wait_idle()
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
    ending.release()
    await finish
    await crew.engine.dispatcher.wait_idle()

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
    folding.release()
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
    parking.release()
    await park
    assert await crew.states("b") == "waiting"


async def test_a_skip_that_meets_the_cancel_of_its_flow_leaves_the_member_to_it(crew: Crew) -> None:
    await crew.graph([*"ab"], [("a", "b")])
    await crew.work(by=crew.mortal, failing="a")

    skipping = crew.store.stop_before("commit")
    skip = asyncio.create_task(crew.engine.cascade_completion(crew.names["a"]))
    await skipping.reached()
    await crew.mortal.cancel_flow_header(crew.flow, reason="r")
    skipping.release()
    await skip
    assert await crew.states("b") == "waiting_children"
    await crew.mortal.bulk_canceller.cancel_members(crew.flow, [crew.names["b"]], "r")
    assert await crew.states("b") == "cancelled"


async def test_members_that_are_claimed_when_they_are_about_to_be_cancelled_are_cancelled_all_the_same(
    crew: Crew,
) -> None:
    await crew.graph([*"ab"], [])
    await crew.engine.cancel_flow_header(crew.flow, reason="r")
    writing = crew.store.stop_before("commit")
    cancel = asyncio.create_task(crew.mortal.bulk_canceller.cancel_members(crew.flow, [*crew.names.values()], "r"))
    await writing.reached()
    assert len(await crew.claim()) == 2
    writing.release()

    assert await cancel == []
    assert await crew.states(*"ab") == "cancelled cancelled"


async def test_a_cancel_that_takes_too_long_when_its_process_ends_is_cut_off_and_left_to_the_reconciler(
    crew: Crew, clock: ManualClock
) -> None:
    await crew.graph([*"ab"], [])
    await crew.engine.cancel_flow_header(crew.flow, reason="r")
    writing = crew.store.stop_before("commit")
    crew.mortal.bulk_canceller.finish_in_background(
        crew.mortal.bulk_canceller.cancel_members(crew.flow, [*crew.names.values()], "r")
    )
    await writing.reached()

    async with asyncio.timeout(10):
        assert await crew.mortal.bulk_canceller.close(grace_s=0.01) == 1

    clock.advance_ms(30_000)
    await crew.sweep("cancel_reconciler")
    assert await crew.states(*"ab") == "cancelled cancelled"


async def test_a_dispatch_that_takes_too_long_when_its_process_ends_is_cut_off_and_left_to_the_sweeps(
    crew: Crew,
) -> None:
    await crew.graph([*"abc"], [("a", "c"), ("b", "c")])
    held = await crew.claim()
    folding = crew.store.stop_before("load")
    await crew.engine.complete(held[0].handle)
    await folding.reached()

    async with asyncio.timeout(10):
        assert await crew.engine.dispatcher.close(grace_s=0.01) == 1
    await crew.engine.complete(held[1].handle)
    assert (await crew.owed(), await crew.states("c")) == (2, "waiting_children")

    await crew.mortal.sweep_once("completion_dispatch")
    assert await crew.states("c") == "waiting"


@pytest.mark.parametrize("answer_is_lost", [False, True])
async def test_members_that_cannot_be_looked_at_are_told_of_and_left_to_the_reconciler(
    crew: Crew, clock: ManualClock, answer_is_lost: bool
) -> None:
    await crew.graph([*"ab"], [])
    await crew.engine.cancel_flow_header(crew.flow, reason="r")
    if answer_is_lost:
        crew.store.lose("commit", Loss.REPLY)
    crew.store.lose("load", Loss.REQUEST, after=int(answer_is_lost))

    failed = await crew.mortal.bulk_canceller.cancel_members(crew.flow, [*crew.names.values()], "r")

    assert len(crew.store.losses) == 1 + answer_is_lost
    assert failed == [*crew.names.values()]
    clock.advance_ms(30_000)
    await crew.sweep("cancel_reconciler")
    assert await crew.states(*"ab") == "cancelled cancelled"
    assert await scan_all(crew.store.inner, CancelBacklog) == []


@pytest.mark.parametrize("loss", Loss)
async def test_a_lost_answer_to_the_cancel_of_members_is_found_again(crew: Crew, loss: Loss) -> None:
    await crew.graph([*"abc"], [("a", "c")])
    crew.store.lose("commit", loss, after=1)  # that of the header arrives

    answer = await crew.engine.cancel_flow(crew.flow, wait=WaitTimeout(20_000))
    await crew.engine.dispatcher.wait_idle()

    assert crew.store.losses
    if loss is Loss.REPLY:
        assert isinstance(answer, FlowCancelled)
        assert await crew.states(*"abc") == "cancelled cancelled cancelled"
        assert await crew.owed() == 0
    else:
        assert isinstance(answer, PartiallyCancelled)
        assert sorted(answer.failed_member_execution_ids) == sorted(crew.names.values())
        assert await crew.states(*"abc") == "waiting waiting waiting_children"


async def test_a_child_is_replayed_while_its_upstream_ends_again(crew: Crew) -> None:
    await crew.graph([*"ab"], [("a", "b")])
    await crew.work(failing="a")
    await crew.engine.dispatcher.wait_idle()
    assert await crew.states("b") == "skipped"
    await crew.engine.replay_execution(crew.names["a"])
    [held] = await crew.claim()

    replaying = crew.store.stop_before("commit")  # decided while the upstream was running
    replay = asyncio.create_task(crew.mortal.replay_execution(crew.names["b"]))
    await replaying.reached()
    await crew.engine.complete(held.handle)  # its first end is still noted, so this one is not
    replaying.release()
    await replay
    await crew.sweep("completion_dispatch")

    assert await crew.states("a", "b") == "completed waiting"


@pytest.mark.parametrize(("swept", "looks"), [(False, 1), (False, 2), (True, 1), (True, 2), (True, 3)])
async def test_an_end_is_not_counted_without_the_result_that_a_replay_takes_away(
    crew: Crew, swept: bool, looks: int
) -> None:
    await crew.graph([*"abc"], [("a", "c"), ("b", "c")], data_passing_ref="r")
    held = {one.execution_id: one for one in await crew.claim()}
    await crew.engine.complete(held[crew.names["b"]].handle, result=b"from b")
    await crew.engine.dispatcher.wait_idle()

    await (crew.mortal if swept else crew.engine).complete(held[crew.names["a"]].handle, result=b"from a")
    gates = [crew.store.stop_before("load") for _ in range(looks)]
    counting = asyncio.create_task(crew.sweep("completion_dispatch") if swept else crew.engine.dispatcher.wait_idle())
    for gate in gates[:-1]:
        await gate.reached()
        gate.release()
    await gates[-1].reached()
    await crew.mortal.replay_execution(crew.names["a"])
    gates[-1].release()
    await counting
    assert await crew.states("a", "c") == "waiting waiting_children"

    [again] = await crew.claim()
    await crew.engine.complete(again.handle, result=b"from a, again")
    await crew.engine.dispatcher.wait_idle()
    assert await crew.states("c") == "waiting"
    assert (await crew.engine.read_execution_context(crew.names["c"])).input_payload == b"from a, again"


async def test_a_purged_upstream_has_told_its_end_before_it_went(crew: Crew, clock: ManualClock) -> None:
    children = [f"c{number}" for number in range(MAX_NAMED_SUCCESSORS + 1)]
    await crew.graph(["a", "b", *children], [("a", "b"), *(("b", child) for child in children)])
    await crew.work(by=crew.mortal)
    await crew.sweep("completion_dispatch")
    await crew.work(by=crew.mortal)
    clock.advance_ms(24 * 60 * 60 * 1000)
    assert await crew.mortal.purge_execution(crew.names["a"])
    assert await crew.mortal.purge_execution(crew.names["b"])

    await crew.sweep("completion_dispatch")

    assert set((await crew.states(*children)).split()) == {"waiting"}


async def test_a_purged_child_leaves_its_join_behind(crew: Crew, clock: ManualClock) -> None:
    await crew.graph([*"ab"], [("a", "b")])
    await crew.engine.cancel_execution(crew.names["b"])
    clock.advance_ms(24 * 60 * 60 * 1000)
    assert await crew.engine.purge_execution(crew.names["b"])

    await crew.work()
    await crew.engine.dispatcher.wait_idle()
    await crew.sweep("dependency_reconciler")

    found = (await crew.engine.runtime.load((Read(Execution, (crew.names["b"],)),))).rows[0]
    assert found == []
    assert (await crew.group("b")).group_state == "pending"


async def test_an_edge_that_was_staged_and_not_applied_is_not_taken_for_the_one_that_was(crew: Crew) -> None:
    children = [f"c{number}" for number in range(MAX_NAMED_SUCCESSORS + 2)]
    await crew.graph(["a", "x", *children], [("a", child) for child in children[1:]] + [("x", children[0])])
    edge = crew.engine.minter.uuid()
    await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names["a"], crew.names[children[0]])
    claimed = {one.execution_id: one for one in await crew.claim()}

    await crew.engine.complete(claimed[crew.names["a"]].handle)
    await crew.engine.dispatcher.wait_idle()

    assert await crew.states(*children) == " ".join(["waiting_children"] + ["waiting"] * (MAX_NAMED_SUCCESSORS + 1))
