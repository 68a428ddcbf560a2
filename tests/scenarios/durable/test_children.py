"""Children: their ends reach the function that waits for them, whoever dies in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateOutcome
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.park import GatesReady
from flowfabric.stores.queries import Scan
from tests.scenarios.functions import WAITS, Function, closed
from tests.scenarios.play import RESUMABLE, Play
from tests.scenarios.waits import Waits

DAY_MS = 86_400_000


async def test_the_end_of_children_resumes_their_parent(function: Function, play: Play) -> None:
    first, second = await function.child(), await function.child()
    await function.children("both", first.execution_id, second.execution_id)
    await function.park("both")

    await function.engine.complete(first.handle)
    await function.engine.child_completions.drain()
    assert await play.vector(function.e) == WAITS
    await function.engine.complete(second.handle)
    await function.engine.child_completions.drain()

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.memo("both")).ended_as is GateOutcome.SATISFIED


async def test_the_end_of_a_child_closes_no_other_gate(function: Function, play: Play) -> None:
    child = await function.child()
    await function.children("one", child.execution_id)
    await function.children("late", child.execution_id, expires_in_ms=10)
    await function.approval("approve")
    await function.receive("r", "steer")
    await function.timer("nap", 60_000)
    play.clock.advance_ms(10)

    await function.engine.complete(child.handle)
    await function.engine.child_completions.drain()

    waits = await function.engine.read_waits(function.e)
    assert {name: memo.ended_as for name, memo in waits.memos.items()} == {"one": GateOutcome.SATISFIED}
    assert sorted(waits.open) == ["approve", "late", "nap", "r"]
    assert (await function.park("late")) == GatesReady(("late",))
    assert (await function.memo("late")).ended_as is GateOutcome.TIMED_OUT


@pytest.mark.parametrize("waits_already", [False, True])
async def test_a_child_that_ends_while_the_wait_for_it_is_on_its_way_counts(
    function: Function, monkeypatch: pytest.MonkeyPatch, waits_already: bool
) -> None:
    child = await function.child()
    if waits_already:
        await function.timer("nap", 60_000)
    engine = function.engine
    add = engine.runtime.commit_queue.add

    def after_the_end(change: Change) -> asyncio.Future[int | None]:
        """Write what was decided before the child ended after its end has been taken in."""
        monkeypatch.setattr(engine.runtime.commit_queue, "add", add)

        async def write() -> int | None:
            await engine.complete(child.handle)
            await engine.child_completions.drain()
            return await add(change)

        return asyncio.ensure_future(write())

    monkeypatch.setattr(engine.runtime.commit_queue, "add", after_the_end)

    assert closed(await function.children("one", child.execution_id)).ended_as is GateOutcome.SATISFIED


async def test_the_end_of_a_child_whose_parent_is_gone_is_told_to_nobody(function: Function, play: Play) -> None:
    child = await function.child()
    stays = Function(play, function.waits, (held := await play.claimed()).execution_id, held)
    other = await stays.child()
    await function.engine.complete(function.held.handle)
    play.clock.advance_ms(25 * DAY_MS // 24)
    await play.engine.sweep_once("retention_trimmer")
    assert await play.engine.describe_execution(function.e) is None

    for one in (child, other):
        await play.engine.cancel_execution(one.execution_id)
    await play.engine.child_completions.drain()

    ends = (await play.everything())["ff_child_end"]
    assert [(end.parent_id, end.child_id, end.due_at) for end in ends] == [(stays.e, other.execution_id, None)]


async def test_a_child_that_ended_before_the_wait_counts(function: Function) -> None:
    child = await function.child()
    await function.engine.complete(child.handle)
    await function.engine.child_completions.drain()

    assert closed(await function.children("one", child.execution_id)).ended_as is GateOutcome.SATISFIED
    assert closed(await function.children("again", child.execution_id)).ended_as is GateOutcome.SATISFIED


@pytest.mark.parametrize(
    ("need", "any_outcome", "ends", "ended_as"),
    [
        (2, False, ["success", "failed", "success"], GateOutcome.SATISFIED),
        (2, False, ["failed", "failed"], GateOutcome.IMPOSSIBLE),
        (3, True, ["failed", "success", "cancelled"], GateOutcome.SATISFIED),
        (1, False, ["success"], GateOutcome.SATISFIED),
        (3, False, ["failed"], GateOutcome.IMPOSSIBLE),
    ],
)
async def test_a_quorum_of_children(
    function: Function, play: Play, need: int, any_outcome: bool, ends: list[str], ended_as: GateOutcome
) -> None:
    children = [await function.child() for _ in range(3)]
    names = [child.execution_id for child in children]
    await function.children("quorum", *names, need=need, any_outcome=any_outcome)
    await function.park("quorum")

    for number, (child, end) in enumerate(zip(children, ends, strict=False)):
        assert await play.vector(function.e) == WAITS, f"before end {number}"
        match end:
            case "success":
                await function.engine.complete(child.handle)
            case "failed":
                await function.engine.fail(child.handle, reason="no", category="permanent")
            case _:
                await function.engine.cancel_execution(child.execution_id)
        await function.engine.child_completions.drain()

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.memo("quorum")).ended_as is ended_as


async def test_an_end_that_nobody_carried_over_is_found_by_the_sweep(function: Function, play: Play) -> None:
    child = await function.child()
    await function.children("one", child.execution_id)
    await function.park("one")
    function.engine.runtime.write_listeners.clear()  # as if the process had died right after the commit

    await function.engine.complete(child.handle)
    assert await play.vector(function.e) == WAITS
    assert (await function.engine.sweep_once("child_ends")).processed == 1

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.engine.sweep_once("child_ends")).processed == 0


async def test_a_child_lives_where_its_parent_does(play: Play) -> None:
    with pytest.raises(errors.InvalidInput, match="parent_id"):
        await play.create(parent_id=ExecutionId("{fp:1}:11111111-1111-4111-8111-111111111111"))


async def test_many_children_are_taken_in_together(store: Any, clock: Any) -> None:
    from flowfabric.engine.engine import Engine

    play = Play(Engine(store), clock)
    held = await play.claimed()
    function = Function(play, Waits(play), held.execution_id, held)
    children = [await function.child() for _ in range(60)]
    await function.children("all", *(child.execution_id for child in children))
    await function.park("all")

    await asyncio.gather(*(function.engine.complete(child.handle) for child in children))
    await function.engine.child_completions.drain()

    assert await play.vector(function.e) == RESUMABLE


async def test_a_child_is_kept_until_its_parent_has_succeeded(function: Function, play: Play) -> None:
    child = await function.child()
    await function.children("one", child.execution_id)
    await function.park("one")
    await function.engine.complete(child.handle, result=b"7")
    await function.engine.child_completions.drain()

    for _ in range(3):
        play.clock.advance_ms(DAY_MS)
        assert (await function.engine.sweep_once("retention_trimmer")).processed == 0
        assert await function.engine.trim_retention(partition_of(ExecutionId(function.e)), "default") == 0
    assert await function.engine.read_results((child.execution_id,)) == {child.execution_id: b"7"}
    assert (await function.engine.read_execution_state(child.execution_id)) is PublicState.COMPLETED

    await function.go_on()
    await function.engine.complete(function.held.handle)
    play.clock.advance_ms(DAY_MS)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 2
    assert await function.engine.runtime.scan(Scan(Execution)) == []


async def test_a_child_of_a_parent_without_success_is_kept_for_its_replay(function: Function, play: Play) -> None:
    child = await function.child()
    await function.engine.complete(child.handle)
    play.clock.advance_ms(DAY_MS // 2)
    await function.engine.cancel_execution(function.e)
    play.clock.advance_ms(DAY_MS // 2)

    assert (await function.engine.sweep_once("retention_trimmer")).processed == 0
    play.clock.advance_ms(DAY_MS // 2)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1, "the parent"
    play.clock.advance_ms(1000)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1


async def test_a_child_that_outlives_its_parent_goes_when_its_own_time_is_over(function: Function, play: Play) -> None:
    child = await function.child()
    await function.engine.complete(function.held.handle)
    play.clock.advance_ms(DAY_MS)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1
    await function.engine.cancel_execution(child.execution_id)
    play.clock.advance_ms(DAY_MS - 1)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 0
    play.clock.advance_ms(1)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1
