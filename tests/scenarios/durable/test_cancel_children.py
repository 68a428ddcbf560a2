"""What an execution spawned, it may end: while it holds its lease, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations import leases
from flowfabric.model.answers.execution import ChildrenCancelled, Claimed
from flowfabric.stores.port import Store
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.play import Play, terminal

SPARE = "{fp:86}:550e8400-e29b-41d4-a716-44665544%04d"


async def spawned(play: Play, parent: Claimed, count: int) -> list[str]:
    return [
        await play.create(execution_id=SPARE % number, parent_id=parent.execution_id, lane="work")
        for number in range(count)
    ]


async def test_children_end_whatever_they_do_and_ended_ones_stay(play: Play) -> None:
    parent = await play.claimed()
    waits, runs, done, gone = await spawned(play, parent, 4)
    for child in (runs, done):
        await play.grant(child, lane="work")
    held = await play.claim(runs)
    await play.engine.complete((await play.claim(done)).handle)
    await play.engine.cancel_execution(gone)

    answer = await play.engine.cancel_children(parent.handle, [waits, runs, done, gone, waits], reason="enough")

    assert answer == ChildrenCancelled((waits, runs, gone), (done,))
    assert await play.vector(waits) == terminal("cancelled", "pending_first_attempt")
    assert await play.vector(runs) == terminal("cancelled")
    assert await play.vector(done) == terminal("success")
    core = await play.core(runs)
    assert (core["cancelled_by"], core["cancellation_reason"]) == ("parent", "enough")
    assert [(news.variant, news.revoked_by) for news in await play.lease_feed(runs)][1:] == [("Revoked", "operator")]
    with pytest.raises(errors.ExecutionNotActive):
        await play.engine.complete(held.handle)
    async with play.untouched():
        again = await play.engine.cancel_children(parent.handle, [waits, runs, done])
    assert again == ChildrenCancelled((waits, runs), (done,))


async def test_strangers_are_not_ended_nor_told_of(play: Play) -> None:
    parent = await play.claimed()
    [child] = await spawned(play, parent, 1)
    other = await play.claimed()
    for stranger in (other.execution_id, parent.execution_id, await play.create(), SPARE % 99):
        async with play.refused(errors.NotFound, execution_id=stranger):
            await play.engine.cancel_children(parent.handle, [child, stranger])
        async with play.refused(errors.NotFound, execution_id=child):
            await play.engine.cancel_children(other.handle, [child])


async def test_only_the_holder_of_the_lease_may(play: Play) -> None:
    zombie = await play.claimed(ttl=100)
    [child] = await spawned(play, zombie, 1)
    await play.expired(zombie)
    async with play.refused(errors.LeaseExpired):
        await play.engine.cancel_children(zombie.handle, [child])

    heir = await play.reclaimed(zombie.execution_id)
    async with play.refused(errors.StaleLease):
        await play.engine.cancel_children(zombie.handle, [child])
    await play.engine.complete(heir.handle)
    async with play.refused(errors.ExecutionNotActive):
        await play.engine.cancel_children(heir.handle, [child])


async def test_a_parent_that_is_gone_ends_nothing(play: Play) -> None:
    parent = await play.claimed()
    [child] = await spawned(play, parent, 1)
    await play.engine.complete(parent.handle)
    play.clock.advance_ms(24 * 60 * 60 * 1000)
    assert await play.engine.purge_execution(parent.execution_id)

    async with play.refused(errors.NotFound):
        await play.engine.cancel_children(parent.handle, [child])


async def test_a_parent_that_loses_its_lease_meanwhile_ends_nothing(play: Play, store: Store) -> None:
    parent = await play.claimed()
    [child] = await spawned(play, parent, 1)
    gate = play.slowed("commit")
    cancelling = asyncio.create_task(play.engine.cancel_children(parent.handle, [child]))
    await gate.reached()
    await Engine(store).revoke_lease(parent.execution_id)
    gate.release()

    with pytest.raises(errors.LeaseRevoked):
        await cancelling
    assert await play.engine.read_execution_state(child) == "waiting"


async def test_many_children_end_in_portions(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_CHILDREN_PER_CHANGE", 3)
    parent = await play.claimed()
    children = await spawned(play, parent, 7)

    answer = await play.engine.cancel_children(parent.handle, children)
    assert answer.cancelled == tuple(children)
    assert await play.engine.cancel_children(parent.handle, []) == ChildrenCancelled((), ())


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.REPLY])
async def test_a_cancel_whose_answer_is_lost_is_one_cancel(play: Play, store: Store, loss: Loss) -> None:
    parent = await play.claimed()
    children = await spawned(play, parent, 2)
    flaky = FlakyStore(store)
    flaky.lose("commit", loss)
    answer = await Engine(flaky).cancel_children(parent.handle, children)

    assert answer.cancelled == tuple(children)
    assert await play.outcomes(*children) == ["cancelled", "cancelled"]


@pytest.mark.parametrize("names", ["x", ["x"], [7], 3, None])
async def test_names_that_are_none_are_refused(play: Play, names: Any) -> None:
    parent = await play.claimed()
    async with play.untouched():
        with pytest.raises(errors.InvalidInput):
            await play.engine.cancel_children(parent.handle, names)
