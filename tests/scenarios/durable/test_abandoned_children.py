"""A parent that is cancelled or expires takes its children along, and theirs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from flowfabric.engine.durable import child_cancels
from flowfabric.model.gate import ChildCancel, GateOutcome
from flowfabric.rules.durable.child_results import results_of
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.scenarios.durable_function import DurableFunction
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine

DETACHED = {"detached": True}


async def record(function: DurableFunction) -> None:
    """Make the execution a durable function: it has recorded something."""
    await function.engine.record_step(function.claim.handle, "pay", 0, b"1")


async def cancel(env: Env, e: str) -> None:
    await env.engine.cancel_execution(e, reason="enough")
    await env.engine.child_cancels.drain()


async def expire(env: Env, e: str) -> None:
    await env.engine.expire_execution(e)
    await env.engine.child_cancels.drain()


@pytest.mark.parametrize("end", [cancel, expire])
async def test_children_are_cancelled_with_their_parent_but_for_detached_and_finished_ones(
    function: DurableFunction, env: Env, end: Callable[[Env, str], Awaitable[None]]
) -> None:
    await record(function)
    running, done = await function.create_child(), await function.create_child()
    waiting = await env.create(parent_id=function.e)
    detached = await env.create(parent_id=function.e, policy=DETACHED)
    stranger = await env.create()
    await function.complete_child(done)

    await end(env, function.e)

    assert await env.outcomes(running.execution_id, waiting) == ["cancelled", "cancelled"]
    assert await env.outcomes(done.execution_id) == ["success"]
    assert [await env.engine.read_execution_state(one) for one in (detached, stranger)] == ["waiting", "waiting"]
    assert (await env.core(waiting))["cancelled_by"] == "parent"
    assert (await env.dump())["ff_child_cancel"] == []


async def test_a_parent_that_fails_leaves_its_children(function: DurableFunction, env: Env) -> None:
    await record(function)
    child = await env.create(parent_id=function.e)
    await env.engine.fail(function.claim.handle, reason="no", category="permanent")
    await env.engine.child_cancels.drain()

    assert await env.engine.read_execution_state(child) == "waiting"
    assert (await env.dump())["ff_child_cancel"] == []


async def test_grandchildren_of_a_parent_whose_canceller_died_are_cancelled_by_the_sweep(
    function: DurableFunction, env: Env
) -> None:
    await record(function)
    child = await function.create_child()
    await env.engine.record_step(child.handle, "pay", 0, b"1")
    grandchild = await env.create(parent_id=child.execution_id)
    env.engine.runtime.write_listeners.pop(ChildCancel)
    await env.engine.cancel_execution(function.e)
    assert await env.engine.read_execution_state(grandchild) == "waiting"

    for _ in range(2):  # the children, then theirs
        await env.engine.sweep_once("child_cancels")

    assert await env.outcomes(child.execution_id, grandchild) == ["cancelled", "cancelled"]
    assert (await env.dump())["ff_child_cancel"] == []


async def test_more_children_than_one_change_cancels_are_all_cancelled(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_cancels, "MAX_CHILDREN_PER_CHANGE", 2)
    await record(function)
    children = [await env.create(parent_id=function.e) for _ in range(5)]

    await cancel(env, function.e)

    assert await env.outcomes(*children) == ["cancelled"] * 5
    assert (await env.dump())["ff_child_cancel"] == []


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_cancel_with_a_lost_message_takes_the_children_along(
    function: DurableFunction, env: Env, store: Store, loss: Loss
) -> None:
    await record(function)
    child = await env.create(parent_id=function.e)
    engine = lossy_engine(store, loss, times=2)
    await engine.cancel_execution(function.e)
    await engine.child_cancels.drain()
    await env.engine.sweep_once("child_cancels")

    assert await env.outcomes(child) == ["cancelled"]


async def test_a_parent_that_is_replayed_keeps_the_children_that_are_still_running(
    function: DurableFunction, env: Env
) -> None:
    await record(function)
    child = await env.create(parent_id=function.e)
    env.engine.runtime.write_listeners.pop(ChildCancel)
    await env.engine.cancel_execution(function.e)
    await env.engine.replay_execution(function.e)

    await env.engine.sweep_once("child_cancels")

    assert await env.engine.read_execution_state(child) == "waiting"
    assert (await env.dump())["ff_child_cancel"] == []


async def test_results_of_children_travel_into_the_memo_of_the_gate(function: DurableFunction, env: Env) -> None:
    first, second, large = [await function.create_child() for _ in range(3)]
    ids = [child.execution_id for child in (first, second, large)]
    await function.children("all", *ids)
    await function.park("all")
    await function.complete_child(first, b"1")
    await function.complete_child(large, b"x" * 16_385)
    await function.complete_child(second, b"2")

    memo = await function.memo("all")

    assert memo.ended_as is GateOutcome.SATISFIED
    assert {child: result.payload for child, result in results_of(memo).items()} == {ids[0]: b"1", ids[1]: b"2"}


async def test_the_result_of_a_child_that_was_purged_is_found_by_a_later_gate(
    function: DurableFunction, env: Env
) -> None:
    child = await function.create_child()
    await function.complete_child(child, b"kept")
    await function.delete(child.execution_id)
    await function.reclaim()

    await function.children("one", child.execution_id)

    [result] = results_of(await function.memo("one")).values()
    assert (result.child_id, result.payload) == (child.execution_id, b"kept")
