"""A process dies, or a message is lost or late, between an outcome and its dependents: each resolves exactly once."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.operations.flows import WaitTimeout
from flowfabric.ids import FlowId
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.answers.flow import FlowCancelled, PartiallyCancelled
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog
from flowfabric.rules.flow.successors import MAX_NAMED_SUCCESSORS
from flowfabric.stores.queries import Read
from flowfabric.testing.flaky_store import Loss
from flowfabric.testing.invariants import scan_all
from tests.engine.flow_harness import FlowHarness


async def test_a_crash_between_completion_and_dispatch_loses_nothing(harness: FlowHarness) -> None:
    await harness.graph([*"abcd"], [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])

    await harness.work(by=harness.mortal)  # The process dies right after the commit.
    assert await harness.states("b", "c") == "waiting_children waiting_children"
    assert await harness.unprocessed() == 2

    await harness.sweep("completion_dispatch")
    assert await harness.work(by=harness.mortal) == ["b", "c"]
    await harness.sweep("completion_dispatch")
    assert await harness.work() == ["d"]


async def test_a_crash_between_a_skip_and_its_cascade_loses_nothing(harness: FlowHarness) -> None:
    await harness.graph([*"abcde"], [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")])
    await harness.work(by=harness.mortal, failing="a")

    await harness.mortal.sweep_once("dependency_reconciler")

    assert await harness.states(*"bcde") == "skipped skipped skipped skipped"


@pytest.mark.parametrize("died_after", [0, 1, 2])
async def test_a_crash_between_the_steps_of_a_large_dispatch_loses_nothing(
    harness: FlowHarness, died_after: int
) -> None:
    children = [f"c{number:04}" for number in range(1100)]
    await harness.graph(["a", *children], [("a", child) for child in children])
    await harness.work(by=harness.mortal)
    if died_after:
        for _ in range(died_after - 1):
            harness.store.stop_before("commit").release()
        gate = harness.store.stop_before("commit")
        dying = asyncio.create_task(harness.mortal.dispatcher.fan_out(harness.names["a"]))
        await gate.reached()
        dying.cancel()
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await dying

    await harness.sweep("completion_dispatch")

    assert len(await harness.claim(5000)) == 1100
    assert await harness.unprocessed() == 0


async def test_a_late_dispatcher_finds_nothing_to_do(harness: FlowHarness) -> None:
    children = [f"c{number:03}" for number in range(MAX_NAMED_SUCCESSORS + 1)]
    await harness.graph(["a", *children], [("a", child) for child in children])
    await harness.work(by=harness.mortal)
    late = harness.store.stop_before("commit")
    zombie = asyncio.create_task(harness.mortal.dispatcher.fan_out(harness.names["a"]))
    await late.reached()

    await harness.engine.dispatcher.fan_out(harness.names["a"])
    held = await harness.claim(5000)
    late.release()

    assert (await zombie).resolved == 0
    assert len(held) == MAX_NAMED_SUCCESSORS + 1
    assert (await harness.group(children[0])).succeeded == 1


@pytest.mark.parametrize("loss", [*Loss])
async def test_a_lost_reply_to_any_commit_of_a_join_neither_strands_nor_doubles_it(
    harness: FlowHarness, loss: Loss
) -> None:
    for nth in range(6):
        harness.flow = FlowId(str(UUID(int=100 + nth)))
        await harness.graph([*"abj", "k"], [("a", "j"), ("b", "j"), ("j", "k")])
        held = await harness.claim()
        harness.store.lose("commit", loss, after=nth)
        for one in held:
            await harness.engine.complete(one.handle)
        await harness.engine.dispatcher.wait_idle()
        await harness.sweep("completion_dispatch", "dependency_reconciler")
        harness.store.heal()

        assert await harness.states(*"abjk") == "completed completed waiting waiting_children"
        assert (await harness.group("j")).succeeded == 2
        assert await harness.work() == ["j"]
        await harness.engine.dispatcher.wait_idle()
        assert await harness.work() == ["k"]


async def test_an_edge_applied_while_its_upstream_finishes_is_resolved(harness: FlowHarness) -> None:
    await harness.graph([*"ab"], [])
    claimed = {one.execution_id: one for one in await harness.claim()}
    held, other, child = claimed[harness.names["a"]], claimed[harness.names["b"]], harness.names["b"]
    edge = harness.engine.minter.uuid()
    await harness.engine.stage_dependency_edge(harness.flow, edge, harness.names["a"], child)
    ending = harness.store.stop_before("commit")  # decided on a row without edges
    finish = asyncio.create_task(harness.engine.complete(held.handle))
    await ending.reached()
    await harness.mortal.apply_dependency_to_child(harness.flow, edge, child, harness.names["a"])
    ending.release()
    await finish
    await harness.engine.dispatcher.wait_idle()

    assert (await harness.group("b")).group_state == "satisfied"
    await harness.engine.complete(other.handle)


async def claim_child_of_ended_parent(harness: FlowHarness) -> Claimed:
    """Claim b, make it wait for a, and complete a in a process that dies before it resolves the join."""
    await harness.graph([*"ab"], [])
    claimed = {one.execution_id: one for one in await harness.claim()}
    parent, child = claimed[harness.names["a"]], claimed[harness.names["b"]]
    edge = harness.engine.minter.uuid()
    await harness.engine.stage_dependency_edge(harness.flow, edge, harness.names["a"], harness.names["b"])
    await harness.engine.apply_dependency_to_child(harness.flow, edge, harness.names["b"], harness.names["a"])
    await harness.mortal.complete(parent.handle)
    return child


async def test_a_child_that_parks_while_its_join_fires_is_not_left_parked(harness: FlowHarness) -> None:
    child = await claim_child_of_ended_parent(harness)
    folding = harness.store.stop_before("commit")  # decided while the child was active
    fold = asyncio.create_task(harness.engine.cascade_completion(harness.names["a"]))
    await folding.reached()
    await harness.mortal.wait_children(child.handle)
    assert await harness.states("b") == "waiting_children"
    folding.release()
    await fold
    assert await harness.states("b") == "waiting"


async def test_a_join_that_fires_while_its_child_is_about_to_park_resumes_the_child(harness: FlowHarness) -> None:
    child = await claim_child_of_ended_parent(harness)
    parking = harness.store.stop_before("commit")  # decided while the group was pending
    park = asyncio.create_task(harness.engine.wait_children(child.handle))
    await parking.reached()
    await harness.mortal.cascade_completion(harness.names["a"])
    parking.release()
    await park
    assert await harness.states("b") == "waiting"


async def test_a_skip_that_races_with_the_cancel_of_its_flow_leaves_the_member_to_the_cancel(
    harness: FlowHarness,
) -> None:
    await harness.graph([*"ab"], [("a", "b")])
    await harness.work(by=harness.mortal, failing="a")

    skipping = harness.store.stop_before("commit")
    skip = asyncio.create_task(harness.engine.cascade_completion(harness.names["a"]))
    await skipping.reached()
    await harness.mortal.cancel_flow_header(harness.flow, reason="r")
    skipping.release()
    await skip
    assert await harness.states("b") == "waiting_children"
    await harness.mortal.bulk_canceller.cancel_members(harness.flow, [harness.names["b"]], "r")
    assert await harness.states("b") == "cancelled"


async def test_members_that_are_claimed_just_before_their_cancel_are_cancelled_too(
    harness: FlowHarness,
) -> None:
    await harness.graph([*"ab"], [])
    await harness.engine.cancel_flow_header(harness.flow, reason="r")
    writing = harness.store.stop_before("commit")
    cancel = asyncio.create_task(
        harness.mortal.bulk_canceller.cancel_members(harness.flow, [*harness.names.values()], "r")
    )
    await writing.reached()
    assert len(await harness.claim()) == 2
    writing.release()

    assert await cancel == []
    assert await harness.states(*"ab") == "cancelled cancelled"


async def test_a_cancel_that_exceeds_the_grace_at_shutdown_is_aborted_and_left_to_the_reconciler(
    harness: FlowHarness, clock: ManualClock
) -> None:
    await harness.graph([*"ab"], [])
    await harness.engine.cancel_flow_header(harness.flow, reason="r")
    writing = harness.store.stop_before("commit")
    harness.mortal.bulk_canceller.finish_in_background(
        harness.mortal.bulk_canceller.cancel_members(harness.flow, [*harness.names.values()], "r")
    )
    await writing.reached()

    async with asyncio.timeout(10):
        assert await harness.mortal.bulk_canceller.close(grace_s=0.01) == 1

    clock.advance_ms(30_000)
    await harness.sweep("cancel_reconciler")
    assert await harness.states(*"ab") == "cancelled cancelled"


async def test_a_dispatch_that_exceeds_the_grace_at_shutdown_is_aborted_and_left_to_the_sweeps(
    harness: FlowHarness,
) -> None:
    await harness.graph([*"abc"], [("a", "c"), ("b", "c")])
    held = await harness.claim()
    folding = harness.store.stop_before("load")
    await harness.engine.complete(held[0].handle)
    await folding.reached()

    async with asyncio.timeout(10):
        assert await harness.engine.dispatcher.close(grace_s=0.01) == 1
    await harness.engine.complete(held[1].handle)
    assert (await harness.unprocessed(), await harness.states("c")) == (2, "waiting_children")

    await harness.mortal.sweep_once("completion_dispatch")
    assert await harness.states("c") == "waiting"


@pytest.mark.parametrize("answer_is_lost", [False, True])
async def test_members_that_cannot_be_loaded_are_reported_and_left_to_the_reconciler(
    harness: FlowHarness, clock: ManualClock, answer_is_lost: bool
) -> None:
    await harness.graph([*"ab"], [])
    await harness.engine.cancel_flow_header(harness.flow, reason="r")
    if answer_is_lost:
        harness.store.lose("commit", Loss.REPLY)
    harness.store.lose("load", Loss.REQUEST, after=int(answer_is_lost))

    failed = await harness.mortal.bulk_canceller.cancel_members(harness.flow, [*harness.names.values()], "r")

    assert len(harness.store.losses) == 1 + answer_is_lost
    assert failed == [*harness.names.values()]
    clock.advance_ms(30_000)
    await harness.sweep("cancel_reconciler")
    assert await harness.states(*"ab") == "cancelled cancelled"
    assert await scan_all(harness.store.inner, CancelBacklog) == []


@pytest.mark.parametrize("loss", Loss)
async def test_a_lost_reply_to_the_cancel_of_members_is_recovered(harness: FlowHarness, loss: Loss) -> None:
    await harness.graph([*"abc"], [("a", "c")])
    harness.store.lose("commit", loss, after=1)  # The reply for the header arrives.

    answer = await harness.engine.cancel_flow(harness.flow, wait=WaitTimeout(20_000))
    await harness.engine.dispatcher.wait_idle()

    assert harness.store.losses
    if loss is Loss.REPLY:
        assert isinstance(answer, FlowCancelled)
        assert await harness.states(*"abc") == "cancelled cancelled cancelled"
        assert await harness.unprocessed() == 0
    else:
        assert isinstance(answer, PartiallyCancelled)
        assert sorted(answer.failed_member_execution_ids) == sorted(harness.names.values())
        assert await harness.states(*"abc") == "waiting waiting waiting_children"


async def test_a_child_is_replayed_while_its_upstream_finishes_again(harness: FlowHarness) -> None:
    await harness.graph([*"ab"], [("a", "b")])
    await harness.work(failing="a")
    await harness.engine.dispatcher.wait_idle()
    assert await harness.states("b") == "skipped"
    await harness.engine.replay_execution(harness.names["a"])
    [held] = await harness.claim()

    replaying = harness.store.stop_before("commit")  # decided while the upstream was running
    replay = asyncio.create_task(harness.mortal.replay_execution(harness.names["b"]))
    await replaying.reached()
    await harness.engine.complete(held.handle)  # Its first outcome is still recorded, so this one is not.
    replaying.release()
    await replay
    await harness.sweep("completion_dispatch")

    assert await harness.states("a", "b") == "completed waiting"


@pytest.mark.parametrize(("swept", "looks"), [(False, 1), (False, 2), (True, 1), (True, 2), (True, 3)])
async def test_an_outcome_is_not_counted_without_the_result_that_a_replay_removes(
    harness: FlowHarness, swept: bool, looks: int
) -> None:
    await harness.graph([*"abc"], [("a", "c"), ("b", "c")], data_passing_ref="r")
    held = {one.execution_id: one for one in await harness.claim()}
    await harness.engine.complete(held[harness.names["b"]].handle, result=b"from b")
    await harness.engine.dispatcher.wait_idle()

    await (harness.mortal if swept else harness.engine).complete(held[harness.names["a"]].handle, result=b"from a")
    gates = [harness.store.stop_before("load") for _ in range(looks)]
    counting = asyncio.create_task(
        harness.sweep("completion_dispatch") if swept else harness.engine.dispatcher.wait_idle()
    )
    for gate in gates[:-1]:
        await gate.reached()
        gate.release()
    await gates[-1].reached()
    await harness.mortal.replay_execution(harness.names["a"])
    gates[-1].release()
    await counting
    assert await harness.states("a", "c") == "waiting waiting_children"

    [again] = await harness.claim()
    await harness.engine.complete(again.handle, result=b"from a, again")
    await harness.engine.dispatcher.wait_idle()
    assert await harness.states("c") == "waiting"
    assert (await harness.engine.read_execution_context(harness.names["c"])).input_payload == b"from a, again"


async def test_a_purged_upstream_has_reported_its_outcome_before(harness: FlowHarness, clock: ManualClock) -> None:
    children = [f"c{number}" for number in range(MAX_NAMED_SUCCESSORS + 1)]
    await harness.graph(["a", "b", *children], [("a", "b"), *(("b", child) for child in children)])
    await harness.work(by=harness.mortal)
    await harness.sweep("completion_dispatch")
    await harness.work(by=harness.mortal)
    clock.advance_ms(24 * 60 * 60 * 1000)
    assert await harness.mortal.purge_execution(harness.names["a"])
    assert await harness.mortal.purge_execution(harness.names["b"])

    await harness.sweep("completion_dispatch")

    assert set((await harness.states(*children)).split()) == {"waiting"}


async def test_a_purged_child_leaves_its_join_behind(harness: FlowHarness, clock: ManualClock) -> None:
    await harness.graph([*"ab"], [("a", "b")])
    await harness.engine.cancel_execution(harness.names["b"])
    clock.advance_ms(24 * 60 * 60 * 1000)
    assert await harness.engine.purge_execution(harness.names["b"])

    await harness.work()
    await harness.engine.dispatcher.wait_idle()
    await harness.sweep("dependency_reconciler")

    found = (await harness.engine.runtime.load((Read(Execution, (harness.names["b"],)),))).rows[0]
    assert found == []
    assert (await harness.group("b")).group_state == "pending"


async def test_an_edge_that_was_staged_only_is_not_confused_with_the_applied_one(harness: FlowHarness) -> None:
    children = [f"c{number}" for number in range(MAX_NAMED_SUCCESSORS + 2)]
    await harness.graph(["a", "x", *children], [("a", child) for child in children[1:]] + [("x", children[0])])
    edge = harness.engine.minter.uuid()
    await harness.engine.stage_dependency_edge(harness.flow, edge, harness.names["a"], harness.names[children[0]])
    claimed = {one.execution_id: one for one in await harness.claim()}

    await harness.engine.complete(claimed[harness.names["a"]].handle)
    await harness.engine.dispatcher.wait_idle()

    assert await harness.states(*children) == " ".join(["waiting_children"] + ["waiting"] * (MAX_NAMED_SUCCESSORS + 1))
