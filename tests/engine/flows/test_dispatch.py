"""Outcomes reach dependent executions within the process that wrote them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from flowfabric import errors
from flowfabric.engine.flows import bulk_cancel
from flowfabric.engine.runtime.commit_queue import CommitResult
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency
from flowfabric.model.states import AttemptRecordState
from flowfabric.rules.execution.cancel import QUORUM_SATISFIED
from flowfabric.rules.flow.successors import MAX_NAMED_SUCCESSORS
from flowfabric.stores.queries import Read
from tests.engine.flow_harness import FIRST_OF_ALL, LANE, FlowHarness


async def test_a_chain_runs_through_without_any_sweep(harness: FlowHarness) -> None:
    await harness.graph([*"abcd"], [("a", "b"), ("b", "c"), ("c", "d")])

    order = [await harness.work() for _ in range(4)]

    assert order == [["a"], ["b"], ["c"], ["d"]]
    assert await harness.unprocessed() == 0


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
async def test_a_step_of_a_chain_is_one_commit_and_no_load(
    harness: FlowHarness, store_calls: list[tuple[str, int]], together: bool
) -> None:
    await harness.graph([*"abcd"], [("a", "b"), ("c", "d")])
    held = await harness.claim()
    store_calls.clear()

    if together:
        await harness.engine.complete_many([(one.handle, b"r") for one in held])
    else:
        await asyncio.gather(*(harness.engine.complete(one.handle, result=b"r") for one in held))
    await harness.engine.dispatcher.wait_idle()

    assert store_calls == [("commit", 2)]
    assert await harness.states(*"abcd") == "completed waiting completed waiting"


async def test_a_step_that_passes_its_result_on_loads_only_the_input(
    harness: FlowHarness, store_calls: list[tuple[str, int]]
) -> None:
    await harness.graph([*"ab"], [("a", "b")], data_passing_ref="r")
    [held] = await harness.claim()
    store_calls.clear()

    await harness.engine.complete(held.handle, result=b"r")
    await harness.engine.dispatcher.wait_idle()

    assert store_calls == [("load", 1), ("commit", 1)]
    assert await harness.states("a", "b") == "completed waiting"
    [after] = await harness.claim()
    assert after.payload is not None
    assert after.payload.input_payload == b"r"


async def test_a_step_without_a_result_to_pass_on_is_one_commit(
    harness: FlowHarness, store_calls: list[tuple[str, int]]
) -> None:
    one_of = {"kind": "any_of", "on_satisfied": "let_run"}
    await harness.graph([*"ab"], [("a", "b")], data_passing_ref="r", policies={"b": one_of})
    [held] = await harness.claim()
    store_calls.clear()

    await harness.engine.complete(held.handle)
    await harness.engine.dispatcher.wait_idle()

    assert store_calls == [("load", 3), ("commit", 1)]
    assert await harness.states("a", "b") == "completed waiting"


@pytest.mark.parametrize("k", [1, 2])
async def test_the_input_of_a_finished_child_stays_when_its_only_upstream_succeeds(
    harness: FlowHarness, k: int
) -> None:
    one_of = {"kind": "quorum", "k": k, "on_satisfied": "let_run"}
    await harness.graph([*"ab"], [("a", "b")], data_passing_ref="r", policies={"b": one_of})
    [held] = await harness.claim()
    await harness.engine.cancel_execution(harness.names["b"])

    await harness.engine.complete(held.handle, result=b"r")
    await harness.engine.dispatcher.wait_idle()

    assert (await harness.engine.read_execution_context(harness.names["b"])).input_payload == b""
    assert (await harness.group("b")).succeeded == 1


async def test_a_diamond_joins_and_a_failure_skips_to_any_depth(harness: FlowHarness) -> None:
    tail = [f"t{number:03}" for number in range(120)]
    nodes = ["a", "b", "c", "d", *tail]
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("c", tail[0])]
    edges += list(pairwise(tail))
    await harness.graph(nodes, edges)

    assert await harness.work() == ["a"]
    await harness.engine.dispatcher.wait_idle()
    assert await harness.work(failing="c") == ["b", "c"]
    await harness.engine.dispatcher.wait_idle()

    assert set((await harness.states("d", *tail)).split()) == {"skipped"}
    assert await harness.unprocessed() == 0


@pytest.mark.parametrize("width", [MAX_NAMED_SUCCESSORS + 1, 1100])
async def test_many_children_are_released_in_bounded_steps(harness: FlowHarness, width: int) -> None:
    children = [f"c{number:04}" for number in range(width)]
    await harness.graph(["a", *children], [("a", child) for child in children])

    await harness.work()
    await harness.engine.dispatcher.wait_idle()

    assert len(await harness.claim(5000)) == width
    assert await harness.unprocessed() == 0


async def test_some_children_are_released_in_the_commit_that_ends_their_parent(harness: FlowHarness) -> None:
    children = [f"c{number:03}" for number in range(MAX_NAMED_SUCCESSORS)]
    await harness.graph(["a", *children], [("a", child) for child in children])

    assert await harness.work() == ["a"]

    assert len(await harness.claim(5000)) == MAX_NAMED_SUCCESSORS
    assert await harness.unprocessed() == 0


async def test_a_child_that_changed_does_not_delay_its_siblings(harness: FlowHarness) -> None:
    await harness.graph([*"abcd"], [("a", "b"), ("a", "c"), ("a", "d")])
    await harness.engine.cancel_execution(harness.names["c"], source="operator_override", reason="not needed")

    assert await harness.work() == ["a"]
    await harness.engine.dispatcher.wait_idle()

    assert await harness.states(*"abcd") == "completed waiting cancelled waiting"
    assert (await harness.group("c")).succeeded == 1
    assert await harness.unprocessed() == 0


async def test_many_parents_fire_their_join_once(harness: FlowHarness) -> None:
    parents = [f"p{number:04}" for number in range(1000)]
    await harness.graph([*parents, "j"], [(parent, "j") for parent in parents])
    held = await harness.claim()

    await asyncio.gather(*(harness.engine.complete(one.handle) for one in held))
    await harness.engine.dispatcher.wait_idle()

    group = await harness.group("j")
    assert (group.n, group.succeeded, group.group_state) == (1000, 1000, "satisfied")
    [joined] = await harness.claim()
    assert joined.execution_id == harness.names["j"]
    assert await harness.unprocessed() == 0


async def test_siblings_are_cancelled_without_any_sweep(harness: FlowHarness) -> None:
    parents = [f"p{number}" for number in range(20)]
    policy = {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"}
    await harness.graph([*parents, "j"], [(parent, "j") for parent in parents], policies={"j": policy})
    held = await harness.claim(10)

    for one in held[:2]:
        await harness.engine.complete(one.handle)
    await harness.engine.dispatcher.wait_idle()

    states = (await harness.states(*parents)).split()
    assert (states.count("completed"), states.count("cancelled")) == (2, 18)
    group = await harness.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (2, 18, False)


@pytest.fixture
def force_bulk_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel few siblings by the path that serves many."""
    monkeypatch.setattr(bulk_cancel, "MIN_UNLOADED_CANCELS", 1)


@pytest.mark.usefixtures("force_bulk_cancel")
async def test_untouched_siblings_are_cancelled_without_a_load(
    harness: FlowHarness, store_calls: list[tuple[str, int]]
) -> None:
    await harness.graph([*"abcdj"], [(parent, "j") for parent in "abcd"], policies={"j": FIRST_OF_ALL})
    [held] = await harness.claim(1)
    store_calls.clear()

    await harness.engine.complete(held.handle)
    await harness.engine.dispatcher.wait_idle()

    end, settled, inbound, ended, fold = ("commit", 1), ("load", 3), ("load", 1), ("load", 1), ("commit", 1)
    assert store_calls[:6] == [end, settled, inbound, ended, fold, ("commit", 3)]
    counted, drained = [("load", 5), ("commit", 1)], [("load", 2), ("commit", 1)]
    assert store_calls[6:] == [*counted, *drained]
    states = (await harness.states(*"abcd")).split()
    assert (states.count("completed"), states.count("cancelled")) == (1, 3)
    group = await harness.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (1, 3, False)
    edges = (await harness.engine.runtime.load((Read(Dependency, (harness.names["j"],)),))).rows[0]
    assert sorted(edge.outcome for edge in edges) == ["cancelled", "cancelled", "cancelled", "success"]


@pytest.mark.usefixtures("force_bulk_cancel")
async def test_siblings_that_changed_since_creation_are_cancelled_too(harness: FlowHarness) -> None:
    edges = [(parent, child) for parent in "abcdefg" for child in "jk"][:-1]
    await harness.graph([*"abcdefgjk"], edges, policies={"j": FIRST_OF_ALL, "k": {"kind": "all_of"}})
    [held] = await harness.claim(1)
    parents = {harness.names[name] for name in "abcdefg"} - {held.execution_id}
    touched = sorted(parents)
    await harness.engine.issue_grant_and_claim(touched[0], lane_id=LANE, lease_duration_ms=60_000)
    await harness.engine.cancel_execution(touched[1], reason="by hand")
    await harness.engine.change_priority(touched[2], 9)
    await harness.engine.set_execution_tag(touched[3], "app.note", "kept")

    await harness.engine.complete(held.handle)
    await harness.engine.dispatcher.wait_idle()

    assert sorted((await harness.states(*"abcdefg")).split()) == ["cancelled"] * 6 + ["completed"]
    reasons = [(await load_execution(harness, name)).cancellation_reason for name in "abcdefg"]
    assert (reasons.count(QUORUM_SATISFIED), reasons.count("by hand")) == (5, 1)
    assert await harness.states("k") == "skipped"
    group = await harness.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (1, 6, False)
    assert await harness.unprocessed() == 0


@pytest.mark.usefixtures("force_bulk_cancel")
async def test_a_sibling_that_is_claimed_just_before_its_cancel_is_loaded(
    harness: FlowHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.graph([*"abcj"], [(parent, "j") for parent in "abc"], policies={"j": FIRST_OF_ALL})
    [held] = await harness.claim(1)
    send, claimed = harness.engine.runtime.commit_queue.send_batch, list[Claimed]()

    def claim_before_commit(changes: Sequence[Change]) -> asyncio.Task[list[CommitResult]]:
        async def sent() -> list[CommitResult]:
            if not claimed:
                claimed.extend(await harness.claim(by=harness.mortal))
            return await send(changes)

        return asyncio.create_task(sent())

    monkeypatch.setattr(harness.engine.runtime.commit_queue, "send_batch", claim_before_commit)
    await harness.engine.complete(held.handle)
    await harness.engine.dispatcher.wait_idle()

    assert sorted((await harness.states(*"abc")).split()) == ["cancelled", "cancelled", "completed"]
    late = next(one for one in claimed if one.execution_id != harness.names["j"])
    with pytest.raises(errors.ExecutionNotActive):
        await harness.mortal.complete(late.handle)
    ended = await harness.engine.attempt_history(late.execution_id)
    assert [one.attempt_state for one in ended] == [AttemptRecordState.ENDED_CANCELLED]
    assert (await harness.group("j")).failed == 2


async def load_execution(harness: FlowHarness, name: str) -> Execution:
    row: Execution = (await harness.engine.runtime.load((Read(Execution, (harness.names[name],)),))).rows[0][0]
    return row
