"""Ends reach those who wait for them within the process that wrote them."""

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
from tests.engine.crew import FIRST_OF_ALL, LANE, Crew


async def test_a_chain_runs_through_without_any_sweep(crew: Crew) -> None:
    await crew.graph([*"abcd"], [("a", "b"), ("b", "c"), ("c", "d")])

    order = [await crew.work() for _ in range(4)]

    assert order == [["a"], ["b"], ["c"], ["d"]]
    assert await crew.owed() == 0


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
    await crew.engine.dispatcher.wait_idle()

    assert asked == [("commit", 2)]
    assert await crew.states(*"abcd") == "completed waiting completed waiting"


async def test_a_step_that_hands_its_result_on_looks_at_the_input_only(
    crew: Crew, asked: list[tuple[str, int]]
) -> None:
    await crew.graph([*"ab"], [("a", "b")], data_passing_ref="r")
    [held] = await crew.claim()
    asked.clear()

    await crew.engine.complete(held.handle, result=b"r")
    await crew.engine.dispatcher.wait_idle()

    assert asked == [("load", 1), ("commit", 1)]
    assert await crew.states("a", "b") == "completed waiting"
    [after] = await crew.claim()
    assert after.payload is not None
    assert after.payload.input_payload == b"r"


async def test_a_step_that_has_no_result_to_hand_on_is_one_commit_too(crew: Crew, asked: list[tuple[str, int]]) -> None:
    one_of = {"kind": "any_of", "on_satisfied": "let_run"}
    await crew.graph([*"ab"], [("a", "b")], data_passing_ref="r", policies={"b": one_of})
    [held] = await crew.claim()
    asked.clear()

    await crew.engine.complete(held.handle)
    await crew.engine.dispatcher.wait_idle()

    assert asked == [("load", 3), ("commit", 1)]
    assert await crew.states("a", "b") == "completed waiting"


@pytest.mark.parametrize("k", [1, 2])
async def test_the_input_of_a_child_that_has_ended_stays_when_its_only_upstream_succeeds(crew: Crew, k: int) -> None:
    one_of = {"kind": "quorum", "k": k, "on_satisfied": "let_run"}
    await crew.graph([*"ab"], [("a", "b")], data_passing_ref="r", policies={"b": one_of})
    [held] = await crew.claim()
    await crew.engine.cancel_execution(crew.names["b"])

    await crew.engine.complete(held.handle, result=b"r")
    await crew.engine.dispatcher.wait_idle()

    assert (await crew.engine.read_execution_context(crew.names["b"])).input_payload == b""
    assert (await crew.group("b")).succeeded == 1


async def test_a_diamond_joins_and_a_failure_skips_to_any_depth(crew: Crew) -> None:
    tail = [f"t{number:03}" for number in range(120)]
    nodes = ["a", "b", "c", "d", *tail]
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("c", tail[0])]
    edges += list(pairwise(tail))
    await crew.graph(nodes, edges)

    assert await crew.work() == ["a"]
    await crew.engine.dispatcher.wait_idle()
    assert await crew.work(failing="c") == ["b", "c"]
    await crew.engine.dispatcher.wait_idle()

    assert set((await crew.states("d", *tail)).split()) == {"skipped"}
    assert await crew.owed() == 0


@pytest.mark.parametrize("width", [MAX_NAMED_SUCCESSORS + 1, 1100])
async def test_many_children_are_released_in_bounded_steps(crew: Crew, width: int) -> None:
    children = [f"c{number:04}" for number in range(width)]
    await crew.graph(["a", *children], [("a", child) for child in children])

    await crew.work()
    await crew.engine.dispatcher.wait_idle()

    assert len(await crew.claim(5000)) == width
    assert await crew.owed() == 0


async def test_some_children_are_released_in_the_commit_that_ends_their_parent(crew: Crew) -> None:
    children = [f"c{number:03}" for number in range(MAX_NAMED_SUCCESSORS)]
    await crew.graph(["a", *children], [("a", child) for child in children])

    assert await crew.work() == ["a"]

    assert len(await crew.claim(5000)) == MAX_NAMED_SUCCESSORS
    assert await crew.owed() == 0


async def test_one_child_of_some_that_moved_does_not_hold_the_others_back(crew: Crew) -> None:
    await crew.graph([*"abcd"], [("a", "b"), ("a", "c"), ("a", "d")])
    await crew.engine.cancel_execution(crew.names["c"], source="operator_override", reason="not needed")

    assert await crew.work() == ["a"]
    await crew.engine.dispatcher.wait_idle()

    assert await crew.states(*"abcd") == "completed waiting cancelled waiting"
    assert (await crew.group("c")).succeeded == 1
    assert await crew.owed() == 0


async def test_many_parents_fire_their_join_once(crew: Crew) -> None:
    parents = [f"p{number:04}" for number in range(1000)]
    await crew.graph([*parents, "j"], [(parent, "j") for parent in parents])
    held = await crew.claim()

    await asyncio.gather(*(crew.engine.complete(one.handle) for one in held))
    await crew.engine.dispatcher.wait_idle()

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
    await crew.engine.dispatcher.wait_idle()

    states = (await crew.states(*parents)).split()
    assert (states.count("completed"), states.count("cancelled")) == (2, 18)
    group = await crew.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (2, 18, False)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few siblings are cancelled as many are."""
    monkeypatch.setattr(bulk_cancel, "MIN_UNSEEN_CANCELS", 1)


@pytest.mark.usefixtures("unseen")
async def test_siblings_that_nobody_has_touched_are_cancelled_without_a_look(
    crew: Crew, asked: list[tuple[str, int]]
) -> None:
    await crew.graph([*"abcdj"], [(parent, "j") for parent in "abcd"], policies={"j": FIRST_OF_ALL})
    [held] = await crew.claim(1)
    asked.clear()

    await crew.engine.complete(held.handle)
    await crew.engine.dispatcher.wait_idle()

    end, settled, inbound, ended, fold = ("commit", 1), ("load", 3), ("load", 1), ("load", 1), ("commit", 1)
    assert asked[:6] == [end, settled, inbound, ended, fold, ("commit", 3)]
    counted, drained = [("load", 5), ("commit", 1)], [("load", 2), ("commit", 1)]
    assert asked[6:] == [*counted, *drained]
    states = (await crew.states(*"abcd")).split()
    assert (states.count("completed"), states.count("cancelled")) == (1, 3)
    group = await crew.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (1, 3, False)
    edges = (await crew.engine.runtime.load((Read(Dependency, (crew.names["j"],)),))).rows[0]
    assert sorted(edge.outcome for edge in edges) == ["cancelled", "cancelled", "cancelled", "success"]


@pytest.mark.usefixtures("unseen")
async def test_siblings_that_are_not_as_they_were_created_are_cancelled_all_the_same(crew: Crew) -> None:
    edges = [(parent, child) for parent in "abcdefg" for child in "jk"][:-1]
    await crew.graph([*"abcdefgjk"], edges, policies={"j": FIRST_OF_ALL, "k": {"kind": "all_of"}})
    [held] = await crew.claim(1)
    parents = {crew.names[name] for name in "abcdefg"} - {held.execution_id}
    touched = sorted(parents)
    await crew.engine.issue_grant_and_claim(touched[0], lane_id=LANE, lease_duration_ms=60_000)
    await crew.engine.cancel_execution(touched[1], reason="by hand")
    await crew.engine.change_priority(touched[2], 9)
    await crew.engine.set_execution_tag(touched[3], "app.note", "kept")

    await crew.engine.complete(held.handle)
    await crew.engine.dispatcher.wait_idle()

    assert sorted((await crew.states(*"abcdefg")).split()) == ["cancelled"] * 6 + ["completed"]
    reasons = [(await one_execution(crew, name)).cancellation_reason for name in "abcdefg"]
    assert (reasons.count(QUORUM_SATISFIED), reasons.count("by hand")) == (5, 1)
    assert await crew.states("k") == "skipped"
    group = await crew.group("j")
    assert (group.succeeded, group.failed, group.cancel_siblings_pending_flag) == (1, 6, False)
    assert await crew.owed() == 0


@pytest.mark.usefixtures("unseen")
async def test_a_sibling_that_is_claimed_when_it_is_about_to_be_cancelled_is_looked_at(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    await crew.graph([*"abcj"], [(parent, "j") for parent in "abc"], policies={"j": FIRST_OF_ALL})
    [held] = await crew.claim(1)
    send, claimed = crew.engine.runtime.commit_queue.send_batch, list[Claimed]()

    def after_a_claim(changes: Sequence[Change]) -> asyncio.Task[list[CommitResult]]:
        async def sent() -> list[CommitResult]:
            if not claimed:
                claimed.extend(await crew.claim(by=crew.mortal))
            return await send(changes)

        return asyncio.create_task(sent())

    monkeypatch.setattr(crew.engine.runtime.commit_queue, "send_batch", after_a_claim)
    await crew.engine.complete(held.handle)
    await crew.engine.dispatcher.wait_idle()

    assert sorted((await crew.states(*"abc")).split()) == ["cancelled", "cancelled", "completed"]
    late = next(one for one in claimed if one.execution_id != crew.names["j"])
    with pytest.raises(errors.ExecutionNotActive):
        await crew.mortal.complete(late.handle)
    ended = await crew.engine.attempt_history(late.execution_id)
    assert [one.attempt_state for one in ended] == [AttemptRecordState.ENDED_CANCELLED]
    assert (await crew.group("j")).failed == 2


async def one_execution(crew: Crew, name: str) -> Execution:
    row: Execution = (await crew.engine.runtime.load((Read(Execution, (crew.names[name],)),))).rows[0][0]
    return row
