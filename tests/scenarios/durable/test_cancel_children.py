"""A parent cancels its own children, under its lease."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations import leases
from flowfabric.model.answers.execution import ChildrenCancelled, Claimed, Revoked
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.scenarios.env import Env, terminal
from tests.scenarios.lossy_engine import lossy_engine

SPARE = "{fp:86}:550e8400-e29b-41d4-a716-44665544%04d"


async def create_children(env: Env, parent: Claimed, count: int) -> list[str]:
    return [
        await env.create(execution_id=SPARE % number, parent_id=parent.execution_id, lane="work")
        for number in range(count)
    ]


async def test_cancel_children_cancels_unfinished_children_and_keeps_finished_ones(env: Env) -> None:
    parent = await env.create_and_claim()
    waiting, running, done, cancelled = await create_children(env, parent, 4)
    for child in (running, done):
        await env.grant(child, lane="work")
    claim = await env.claim(running)
    await env.engine.complete((await env.claim(done)).handle)
    await env.engine.cancel_execution(cancelled)

    answer = await env.engine.cancel_children(
        parent.handle, [waiting, running, done, cancelled, waiting], reason="enough"
    )

    assert answer == ChildrenCancelled((waiting, running, cancelled), (done,))
    assert await env.vector(waiting) == terminal("cancelled", "pending_first_attempt")
    assert await env.vector(running) == terminal("cancelled")
    assert await env.vector(done) == terminal("success")
    core = await env.core(running)
    assert (core["cancelled_by"], core["cancellation_reason"]) == ("parent", "enough")
    assert [(event.variant, event.revoked_by) for event in await env.lease_feed(running)][1:] == [
        ("Revoked", "operator")
    ]
    with pytest.raises(errors.ExecutionNotActive):
        await env.engine.complete(claim.handle)
    async with env.unchanged():
        again = await env.engine.cancel_children(parent.handle, [waiting, running, done])
    assert again == ChildrenCancelled((waiting, running), (done,))


async def test_cancel_children_refuses_executions_that_are_not_children(env: Env) -> None:
    parent = await env.create_and_claim()
    [child] = await create_children(env, parent, 1)
    other = await env.create_and_claim()
    for stranger in (other.execution_id, parent.execution_id, await env.create(), SPARE % 99):
        async with env.refused(errors.NotFound, execution_id=stranger):
            await env.engine.cancel_children(parent.handle, [child, stranger])
        async with env.refused(errors.NotFound, execution_id=child):
            await env.engine.cancel_children(other.handle, [child])


async def test_cancel_children_requires_the_lease_of_the_parent(env: Env) -> None:
    stale = await env.create_and_claim(ttl=100)
    [child] = await create_children(env, stale, 1)
    await env.expire_lease(stale)
    async with env.refused(errors.LeaseExpired):
        await env.engine.cancel_children(stale.handle, [child])

    successor = await env.grant_and_reclaim(stale.execution_id)
    async with env.refused(errors.StaleLease):
        await env.engine.cancel_children(stale.handle, [child])
    await env.engine.complete(successor.handle)
    async with env.refused(errors.ExecutionNotActive):
        await env.engine.cancel_children(successor.handle, [child])


async def test_a_purged_parent_cancels_nothing(env: Env) -> None:
    parent = await env.create_and_claim()
    [child] = await create_children(env, parent, 1)
    await env.engine.complete(parent.handle)
    env.clock.advance_ms(24 * 60 * 60 * 1000)
    assert await env.engine.purge_execution(parent.execution_id)

    async with env.refused(errors.NotFound):
        await env.engine.cancel_children(parent.handle, [child])


async def test_a_parent_that_loses_its_lease_concurrently_cancels_nothing(env: Env, store: Store) -> None:
    parent = await env.create_and_claim()
    [child] = await create_children(env, parent, 1)
    cancelled, revoked = await env.race(
        env.engine.cancel_children(parent.handle, [child]),
        lambda: Engine(store).revoke_lease(parent.execution_id),
    )

    assert (type(cancelled), type(revoked)) == (errors.LeaseRevoked, Revoked)
    assert await env.engine.read_execution_state(child) == "waiting"


async def test_many_children_are_cancelled_in_batches(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_CHILDREN_PER_CHANGE", 3)
    parent = await env.create_and_claim()
    children = await create_children(env, parent, 7)

    answer = await env.engine.cancel_children(parent.handle, children)
    assert answer.cancelled == tuple(children)
    assert await env.engine.cancel_children(parent.handle, []) == ChildrenCancelled((), ())


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.REPLY])
async def test_cancel_children_with_a_lost_message_cancels_once(env: Env, store: Store, loss: Loss) -> None:
    parent = await env.create_and_claim()
    children = await create_children(env, parent, 2)
    answer = await lossy_engine(store, loss).cancel_children(parent.handle, children)

    assert answer.cancelled == tuple(children)
    assert await env.outcomes(*children) == ["cancelled", "cancelled"]


@pytest.mark.parametrize("names", ["x", ["x"], [7], 3, None])
async def test_invalid_child_ids_are_refused(env: Env, names: Any) -> None:
    parent = await env.create_and_claim()
    async with env.unchanged():
        with pytest.raises(errors.InvalidInput):
            await env.engine.cancel_children(parent.handle, names)
