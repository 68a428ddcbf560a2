"""Children are created and recorded in one change, under the lease of their parent."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.durable import children
from flowfabric.engine.engine import Engine
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.scenarios.durable_function import DurableFunction
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine


def ask(function: DurableFunction, number: int = 0, **options: Any) -> CreateExecution:
    partition = partition_of(ExecutionId(function.e))
    fields: dict[str, Any] = {
        "execution_id": f"{{fp:{partition}}}:550e8400-e29b-41d4-a716-44665544{number:04}",
        "partition": partition,
        "namespace": "default",
        "lane_id": "default",
        "execution_kind": "child",
        "parent_id": function.e,
    }
    return CreateExecution(**(fields | options))


def memo(number: int = 0, digest: str = "d") -> MemoArgs:
    return MemoArgs(name="child:mail", occurrence=number, digest=digest, number=number)


async def test_children_are_created_with_their_memos(function: DurableFunction, env: Env) -> None:
    asks = [ask(function, number) for number in range(3)]
    created = await function.engine.spawn(function.claim.handle, asks, [memo(number) for number in range(3)])

    assert [type(answer) for answer in created] == [Created] * 3
    memos = await function.engine.read_steps(function.e)
    assert [(one.name, one.occurrence, one.digest) for one in memos] == [("child:mail", n, "d") for n in range(3)]
    assert [one.result.decode() for one in memos] == [f'"{one.execution_id}"' for one in asks]
    assert [await env.engine.read_execution_state(one.execution_id) for one in asks] == ["waiting"] * 3


async def test_a_child_that_is_recorded_is_not_created_again_although_it_was_purged(
    function: DurableFunction, env: Env, store: Store
) -> None:
    [first] = await function.engine.spawn(function.claim.handle, [ask(function)], [memo()])
    await function.delete(first.execution_id)
    await function.reclaim()

    other = ask(function, 7)
    assert await function.engine.spawn(function.claim.handle, [other], [memo()]) == [Duplicate(first.execution_id)]
    assert await env.engine.describe_execution(other.execution_id) is None


async def test_a_child_that_exists_without_a_memo_is_recorded(function: DurableFunction, env: Env) -> None:
    known = ask(function)
    await env.engine.create(known)

    answer = await function.engine.spawn(function.claim.handle, [known], [memo()])

    assert answer == [Duplicate(known.execution_id)]
    assert [one.result for one in await function.engine.read_steps(function.e)] == [f'"{known.execution_id}"'.encode()]


async def test_a_key_that_is_taken_records_the_run_that_has_it(function: DurableFunction) -> None:
    [first] = await function.engine.spawn(function.claim.handle, [ask(function, idempotency_key="k")], [memo()])
    second = await function.engine.spawn(function.claim.handle, [ask(function, 1, idempotency_key="k")], [memo(1)])

    assert second == [Duplicate(first.execution_id)]
    assert len({one.result for one in await function.engine.read_steps(function.e)}) == 1


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_spawn_with_a_lost_message_creates_each_child_once(
    function: DurableFunction, env: Env, store: Store, loss: Loss
) -> None:
    asks, memos = [ask(function, number) for number in range(3)], [memo(number) for number in range(3)]
    answers = await lossy_engine(store, loss).spawn(function.claim.handle, asks, memos)

    assert [answer.execution_id for answer in answers] == [one.execution_id for one in asks]
    again = await function.engine.spawn(function.claim.handle, asks, memos)
    assert again == [Duplicate(one.execution_id) for one in asks]
    assert len((await env.dump())["ff_exec_core"]) == 4


async def test_no_child_is_created_after_its_parent_was_cancelled(
    function: DurableFunction, env: Env, store: Store
) -> None:
    child = ask(function)
    spawned, _ = await env.race(
        function.engine.spawn(function.claim.handle, [child], [memo()]),
        lambda: Engine(store).cancel_execution(function.e),
    )

    assert isinstance(spawned, errors.ExecutionNotActive)
    assert await env.engine.describe_execution(child.execution_id) is None


async def test_a_worker_that_lost_its_lease_creates_no_child(function: DurableFunction, env: Env) -> None:
    zombie = function.claim.handle
    await function.reclaim()
    async with env.refused(errors.StaleLease):
        await function.engine.spawn(zombie, [ask(function)], [memo()])


async def test_many_children_are_created_in_batches(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "MAX_CHILDREN_PER_SPAWN", 3)
    asks, memos = [ask(function, number) for number in range(7)], [memo(number) for number in range(7)]

    answers = await function.engine.spawn(function.claim.handle, asks, memos)
    assert [answer.execution_id for answer in answers] == [one.execution_id for one in asks]
    assert await function.engine.spawn(function.claim.handle, [], []) == []


async def test_invalid_spawns_are_refused_and_create_nothing(function: DurableFunction, env: Env) -> None:
    stranger = await env.create()
    good, handle = ask(function), function.claim.handle
    for asks, memos in (
        ([good], []),
        ([good, ask(function, 1)], [memo(), memo()]),
        ([good, good], [memo(), memo(1)]),
        ([ask(function, parent_id=None)], [memo()]),
        ([ask(function, parent_id=stranger)], [memo()]),
        ([ask(function, policy="{")], [memo()]),
        ([good, ask(function, 1, policy="{")], [memo(), memo(1)]),
        ([good], [MemoArgs(name="left:x")]),
        (None, None),
    ):
        async with env.unchanged():
            with pytest.raises(errors.FabricError):
                await function.engine.spawn(handle, asks, memos)  # type: ignore[arg-type]
