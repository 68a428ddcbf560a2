"""Child completions reach the waiting parent despite crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.durable.child_completions import ChildCompletions
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion, GateOutcome
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.park import GatesReady
from flowfabric.stores.queries import Scan
from tests.scenarios.durable_function import WAITS, DurableFunction, closed
from tests.scenarios.env import RESUMABLE, Env
from tests.scenarios.waits import Waits

DAY_MS = 86_400_000


async def test_the_completion_of_all_children_resumes_the_parent(function: DurableFunction, env: Env) -> None:
    first, second = await function.create_child(), await function.create_child()
    await function.children("both", first.execution_id, second.execution_id)
    await function.park("both")

    await function.complete_child(first)
    assert await env.vector(function.e) == WAITS
    await function.complete_child(second)

    assert await env.vector(function.e) == RESUMABLE
    assert (await function.memo("both")).ended_as is GateOutcome.SATISFIED


async def test_the_sweep_delivers_the_completions_of_a_parent_together(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery each would cost round trips in proportion to the square of their number."""
    deliveries: list[str] = []
    deliver = ChildCompletions.deliver

    async def count(self: ChildCompletions, parent_id: str) -> int:
        deliveries.append(parent_id)
        return await deliver(self, parent_id)

    monkeypatch.setattr(ChildCompletions, "deliver", count)
    children = [await function.create_child() for _ in range(6)]
    await function.children("all", *(child.execution_id for child in children))
    await function.park("all")
    env.engine.runtime.write_listeners.pop(ChildCompletion)
    for child in children:
        await function.engine.complete(child.handle)

    await env.engine.sweep_once("child_ends")

    assert await env.vector(function.e) == RESUMABLE
    assert len(deliveries) <= 2, "the first one, and one for those that asked meanwhile"


async def test_the_completion_of_a_child_closes_no_other_gate(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.children("one", child.execution_id)
    await function.children("late", child.execution_id, expires_in_ms=10)
    await function.approval("approve")
    await function.receive("r", "steer")
    await function.timer("nap", 60_000)
    env.clock.advance_ms(10)

    await function.complete_child(child)

    waits = await function.engine.read_waits(function.e)
    assert {name: memo.ended_as for name, memo in waits.memos.items()} == {"one": GateOutcome.SATISFIED}
    assert sorted(waits.open) == ["approve", "late", "nap", "r"]
    assert (await function.park("late")) == GatesReady(("late",))
    assert (await function.memo("late")).ended_as is GateOutcome.TIMED_OUT


@pytest.mark.parametrize("waits_already", [False, True])
async def test_a_child_that_completes_while_its_gate_is_opened_counts(
    function: DurableFunction, monkeypatch: pytest.MonkeyPatch, waits_already: bool
) -> None:
    child = await function.create_child()
    if waits_already:
        await function.timer("nap", 60_000)
    function.complete_before_the_next_commit(child, monkeypatch)

    assert closed(await function.children("one", child.execution_id)).ended_as is GateOutcome.SATISFIED


async def test_the_completion_of_a_child_of_a_purged_parent_is_discarded(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    other_parent = DurableFunction(env, function.waits, (claim := await env.create_and_claim()).execution_id, claim)
    other = await other_parent.create_child()
    await function.engine.complete(function.claim.handle)
    await env.sweep("retention_trimmer", after_ms=25 * DAY_MS // 24)
    assert await env.engine.describe_execution(function.e) is None

    for one in (child, other):
        await env.engine.cancel_execution(one.execution_id)
    await env.engine.child_completions.drain()

    ends = (await env.dump())["ff_child_end"]
    assert [(end.parent_id, end.child_id, end.due_at) for end in ends] == [(other_parent.e, other.execution_id, None)]


async def test_a_child_that_completed_before_the_gate_counts(function: DurableFunction) -> None:
    child = await function.create_child()
    await function.complete_child(child)

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
async def test_a_children_gate_closes_at_its_quorum_or_when_it_is_impossible(
    function: DurableFunction, env: Env, need: int, any_outcome: bool, ends: list[str], ended_as: GateOutcome
) -> None:
    children = [await function.create_child() for _ in range(3)]
    names = [child.execution_id for child in children]
    await function.children("quorum", *names, need=need, any_outcome=any_outcome)
    await function.park("quorum")

    for number, (child, end) in enumerate(zip(children, ends, strict=False)):
        assert await env.vector(function.e) == WAITS, f"before end {number}"
        match end:
            case "success":
                await function.engine.complete(child.handle)
            case "failed":
                await function.engine.fail(child.handle, reason="no", category="permanent")
            case _:
                await function.engine.cancel_execution(child.execution_id)
        await function.engine.child_completions.drain()

    assert await env.vector(function.e) == RESUMABLE
    assert (await function.memo("quorum")).ended_as is ended_as


async def test_the_sweep_delivers_a_child_completion_that_was_not_delivered(
    function: DurableFunction, env: Env
) -> None:
    child = await function.create_child()
    await function.children("one", child.execution_id)
    await function.park("one")
    function.engine.runtime.write_listeners.clear()  # as if the process had died right after the commit

    await function.engine.complete(child.handle)
    assert await env.vector(function.e) == WAITS
    assert (await function.engine.sweep_once("child_ends")).processed == 1

    assert await env.vector(function.e) == RESUMABLE
    assert (await function.engine.sweep_once("child_ends")).processed == 0


async def test_a_child_must_be_on_the_partition_of_its_parent(env: Env) -> None:
    with pytest.raises(errors.InvalidInput, match="parent_id"):
        await env.create(parent_id=ExecutionId("{fp:1}:11111111-1111-4111-8111-111111111111"))


async def test_many_concurrent_child_completions_resume_the_parent(store: Any, clock: Any) -> None:
    from flowfabric.engine.engine import Engine

    env = Env(Engine(store), clock)
    claim = await env.create_and_claim()
    function = DurableFunction(env, Waits(env), claim.execution_id, claim)
    children = [await function.create_child() for _ in range(60)]
    await function.children("all", *(child.execution_id for child in children))
    await function.park("all")

    await asyncio.gather(*(function.engine.complete(child.handle) for child in children))
    await function.engine.child_completions.drain()

    assert await env.vector(function.e) == RESUMABLE


async def test_a_child_is_not_purged_before_its_parent_completes(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.children("one", child.execution_id)
    await function.park("one")
    await function.complete_child(child, result=b"7")

    for _ in range(3):
        env.clock.advance_ms(DAY_MS)
        assert (await function.engine.sweep_once("retention_trimmer")).processed == 0
        assert await function.engine.trim_retention(partition_of(ExecutionId(function.e)), "default") == 0
    assert await function.engine.read_results((child.execution_id,)) == {child.execution_id: b"7"}
    assert (await function.engine.read_execution_state(child.execution_id)) is PublicState.COMPLETED

    await function.resume()
    await function.engine.complete(function.claim.handle)
    env.clock.advance_ms(DAY_MS)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 2
    assert await function.engine.runtime.scan(Scan(Execution)) == []


async def test_a_child_of_an_unsuccessful_parent_is_kept_for_its_replay(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.engine.complete(child.handle)
    env.clock.advance_ms(DAY_MS // 2)
    await function.engine.cancel_execution(function.e)
    env.clock.advance_ms(DAY_MS // 2)

    assert (await function.engine.sweep_once("retention_trimmer")).processed == 0
    env.clock.advance_ms(DAY_MS // 2)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1, "the parent"
    env.clock.advance_ms(1000)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1


async def test_a_child_that_outlives_its_parent_is_purged_after_its_own_retention(
    function: DurableFunction, env: Env
) -> None:
    child = await function.create_child()
    await function.engine.complete(function.claim.handle)
    env.clock.advance_ms(DAY_MS)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1
    await function.engine.cancel_execution(child.execution_id)
    env.clock.advance_ms(DAY_MS - 1)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 0
    env.clock.advance_ms(1)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 1
