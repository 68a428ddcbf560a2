"""Executions unblocked by completions go to claims of the same process, in queue order and without loss.

Stores that execute in order do not commit and claim in one call; the visible behaviour is the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.claiming.poller import LanePoller
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Claimed, Completed
from flowfabric.model.change import Change
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult
from flowfabric.stores.port import Store
from tests.engine.claiming.test_claim_after_completion import (
    LANE,
    CountingStore,
    create_chain,
    engine_without_polling,
    ids_of,
)
from tests.engine.lossy_store import Loss, LossyStore

OTHER = "other"


@pytest.fixture
async def engine(store: Store) -> Engine:
    return engine_without_polling(store, seed=7)


def poller_for(engine: Engine, *lanes: str) -> LanePoller:
    return engine.pulling(lanes or [LANE], worker_id="w", worker_instance_id="w-1")


async def complete_and_claim(
    engine: Engine, pull: LanePoller, held: Sequence[Claimed], limit: int = 1
) -> list[Claimed]:
    """Complete the held executions and claim concurrently, as a worker does whose slots are full."""
    completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in held]))
    claimed = await asyncio.wait_for(pull.claim(limit, max_wait_ms=60_000), 20)
    assert all(isinstance(answer, Completed) for answer in await completing)
    return claimed


def is_idle(engine: Engine) -> bool:
    return not engine.runtime.commit_queue.notified_changes and not engine.runtime.commit_queue._pending_claims


async def test_a_chain_runs_to_its_last_step(engine: Engine) -> None:
    names = await create_chain(engine, 5)
    pull = poller_for(engine)
    held = await pull.claim(1)
    for name in names[1:]:
        held = await complete_and_claim(engine, pull, held)
        assert (ids_of(held), held[0].lease_epoch, held[0].attempt_index) == ({name}, 1, 0)

    assert isinstance(await engine.complete(held[0].handle), Completed)
    assert is_idle(engine)
    pull.close()


async def test_a_step_starts_with_the_result_of_its_upstream(engine: Engine) -> None:
    names = await create_chain(engine, 3, ref="result")
    pull = poller_for(engine)
    held = await pull.claim(2)  # It has a free slot, so it has seen the end of its lane.
    for before, name in pairwise(names):
        waiting = asyncio.create_task(pull.claim(2, max_wait_ms=60_000))
        await asyncio.sleep(0)  # It now waits for the execution that this completion unblocks.
        await engine.complete(held[0].handle, result=before.encode(), encoding="text")

        held = await asyncio.wait_for(waiting, 20)
        assert ids_of(held) == {name}
        assert held[0].payload is not None
        assert (held[0].payload.input_payload, held[0].payload.payload_encoding) == (before.encode(), "text")
    pull.close()


async def test_the_execution_with_the_better_position_is_claimed_first(engine: Engine, store: Store) -> None:
    names = await create_chain(engine, 3)
    pull = poller_for(engine)
    held = await pull.claim(1)
    held = await complete_and_claim(engine, pull, held)
    other = engine_without_polling(store, seed=8)  # A process from which this one received no wakeup.
    urgent = other.new_execution_id()
    await other.create_execution(execution_id=urgent, lane_id=LANE, priority=1000)

    held = await complete_and_claim(engine, pull, held)
    assert ids_of(held) == {urgent}
    held = await complete_and_claim(engine, pull, held)
    assert ids_of(held) == {names[2]}
    pull.close()


@pytest.mark.parametrize("lanes", [(LANE, OTHER), (OTHER, LANE)])
async def test_the_other_lanes_of_a_worker_get_their_turn(engine: Engine, lanes: tuple[str, str]) -> None:
    names = await create_chain(engine, 8)
    pull = poller_for(engine, *lanes)
    held = await pull.claim(1)
    for _ in range(2):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=OTHER)

    order: list[str] = []
    for _ in range(4):
        held = await complete_and_claim(engine, pull, held)
        order += ["chain" if one.execution_id in names else "other" for one in held]

    assert "other" in order[:3]
    assert "chain" in order
    pull.close()


class OneChangeStore(CountingStore):
    """A store that commits one change at a time."""

    batch_limit = 1


async def test_executions_unblocked_beyond_one_batch_wake_the_waiting_claims(store: Store) -> None:
    engine = engine_without_polling(OneChangeStore(store), seed=7)
    chains = [await create_chain(engine, 2) for _ in range(2)]
    pull = poller_for(engine)
    held = await pull.claim(3)
    waiting = [
        asyncio.create_task(pull.claim(1, max_wait_ms=60_000)),
        asyncio.create_task(engine.claim_many(LANE, 1, worker_id="v", worker_instance_id="v-1", max_wait_ms=60_000)),
    ]
    await asyncio.sleep(0.2)  # Both claims have found nothing.

    await engine.complete_many([(one.handle, b"{}") for one in held])

    got = [one for claimed in await asyncio.wait_for(asyncio.gather(*waiting), 20) for one in claimed]
    assert ids_of(got) == {second for _, second in chains}
    assert is_idle(engine)
    pull.close()


async def test_a_worker_of_other_namespaces_receives_nothing_from_a_commit_and_claim(engine: Engine) -> None:
    names = await create_chain(engine, 2)
    pull = poller_for(engine)
    held = await pull.claim(1)
    stranger = engine.pulling([LANE], worker_id="s", worker_instance_id="s-1", namespaces=["elsewhere"])
    assert await stranger.claim(1) == []
    waiting = asyncio.create_task(stranger.claim(1, max_wait_ms=60_000))
    await asyncio.sleep(0)  # It has seen the end of its lane and now waits.

    await engine.complete(held[0].handle)

    [claimed] = await asyncio.wait_for(pull.claim(1, max_wait_ms=60_000), 20)
    assert claimed.execution_id == names[1]
    assert not waiting.done()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    pull.close()
    stranger.close()


async def test_tenants_alternate_while_the_chain_of_one_continues(store: Store) -> None:
    counting = CountingStore(store)
    engine = engine_without_polling(counting, seed=7)
    chained = await create_chain(engine, 6, policy='{"fairness_key": "a"}')
    pull = poller_for(engine)
    held = await pull.claim(1)
    for _ in range(3):
        await engine.create_execution(
            execution_id=engine.new_execution_id(), lane_id=LANE, policy={"fairness_key": "b"}
        )

    order = ""
    for _ in range(8):
        held = await complete_and_claim(engine, pull, held)
        order += "a" if held[0].execution_id in chained else "b"

    assert sorted(order) == sorted("aaaaabbb")
    assert "aa" not in order.rstrip("a"), order  # In the other order, its next step might not exist yet.
    assert counting.commit_and_claims == 0
    pull.close()


@pytest.mark.parametrize("limited", ["the chain", "others"])
async def test_limits_are_checked_while_a_chain_continues(store: Store, limited: str) -> None:
    counting = CountingStore(store)
    engine = engine_without_polling(counting, seed=7)
    quota = engine.minter.uuid()
    await engine.create_quota_policy(quota, window_seconds=60, max_requests_per_window=2, max_concurrent=0)
    policy = {"quota_policy_ids": [quota]}
    names = await create_chain(engine, 4, policy=json.dumps(policy) if limited == "the chain" else None)
    others = [engine.new_execution_id() for _ in range(3)] if limited == "others" else []
    for name in others:
        await engine.create_execution(execution_id=name, lane_id=LANE, policy=policy, priority=10)
    pull = poller_for(engine)

    order, held = list[str](), await pull.claim(1)
    while held:
        order += ids_of(held)
        completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in held]))
        held = await asyncio.wait_for(pull.claim(1, max_wait_ms=1000), 20)
        await completing

    assert order == (names[:2] if limited == "the chain" else [*sorted(others)[:2], *names])
    if limited == "the chain":
        assert counting.commit_and_claims == 0
    pull.close()


async def test_an_expired_lease_in_the_lane_is_reclaimed_while_a_chain_continues(
    engine: Engine, store: Store, clock: ManualClock
) -> None:
    lost = engine.new_execution_id()
    await engine.create_execution(execution_id=lost, lane_id=LANE, priority=10)
    dead = engine_without_polling(store, seed=8)
    assert await dead.claim(LANE, worker_id="dead", worker_instance_id="dead-1", lease_ttl_ms=1000) is not None
    await create_chain(engine, 8)
    pull = poller_for(engine)
    held = await pull.claim(1)
    held = await complete_and_claim(engine, pull, held)

    clock.now += 2000
    seen: set[str] = set()
    for _ in range(3):
        held = await complete_and_claim(engine, pull, held)
        seen |= ids_of(held)

    assert lost in seen
    pull.close()


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.DOUBT, Loss.ANSWER])
@pytest.mark.parametrize("limit", [1, 4], ids=["full slots", "free slots"])
async def test_each_step_is_claimed_once_whatever_reply_is_lost(store: Store, loss: Loss, limit: int) -> None:
    lossy = LossyStore(store)
    engine = engine_without_polling(lossy, seed=7)
    names = await create_chain(engine, 4)
    pull = poller_for(engine)
    held = await pull.claim(limit)
    for place, name in enumerate(names[1:]):
        if place == 1:
            lossy.next_loss = loss
        held = await complete_and_claim(engine, pull, held, limit)
        assert (ids_of(held), held[0].lease_epoch, held[0].attempt_index) == ({name}, 1, 0)

    assert lossy.losses == 1
    assert isinstance(await engine.complete(held[0].handle), Completed)
    assert is_idle(engine)
    pull.close()


async def test_a_claim_that_arrives_after_its_caller_left_is_released(store: Store) -> None:
    lossy = LossyStore(store)
    engine = engine_without_polling(lossy, seed=7)
    first, second = await create_chain(engine, 2)
    pull = poller_for(engine)
    held = await pull.claim(1)
    lossy.next_loss = Loss.LATE
    completing = asyncio.create_task(engine.complete_many([(held[0].handle, b"{}")]))
    claiming = asyncio.create_task(pull.claim(1, max_wait_ms=60_000))

    assert all(isinstance(answer, Completed) for answer in await completing)
    [claimed] = await asyncio.wait_for(claiming, 20)

    assert (held[0].execution_id, claimed.execution_id) == (first, second)
    assert (claimed.lease_epoch, claimed.attempt_index) in ((1, 0), (2, 0)), "its lease was not waited for"
    assert isinstance(await engine.complete(claimed.handle), Completed)
    assert is_idle(engine)
    pull.close()


class RefusingStore(LossyStore):
    """A store whose commit-and-claim claims nothing."""

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        return CommitAndClaimResult(await self.commit(changes, topics), [])


async def test_executions_that_a_commit_cannot_claim_are_claimed_separately(store: Store) -> None:
    engine = engine_without_polling(RefusingStore(store), seed=7)
    chains = [await create_chain(engine, 3) for _ in range(2)]
    pull = poller_for(engine)
    held = await pull.claim(2)
    for place in (1, 2):
        held = await complete_and_claim(engine, pull, held, 2)
        assert ids_of(held) == {names[place] for names in chains}
    assert is_idle(engine)
    pull.close()


async def test_a_cancelled_claim_requests_nothing_more(engine: Engine) -> None:
    names = await create_chain(engine, 3)
    pull = poller_for(engine)
    held = await pull.claim(2)
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=60_000))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert is_idle(engine)

    await engine.complete(held[0].handle)
    [claimed] = await asyncio.wait_for(pull.claim(1, max_wait_ms=60_000), 20)
    assert claimed.execution_id == names[1]
    pull.close()


async def test_a_stopping_worker_keeps_what_it_has_claimed(engine: Engine) -> None:
    names = await create_chain(engine, 2)
    pull = poller_for(engine)
    held = await pull.claim(2)
    goes_on = True
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=60_000, go_on=lambda: goes_on))
    completing = asyncio.create_task(engine.complete_many([(held[0].handle, b"{}")]))
    for _ in range(4):
        await asyncio.sleep(0)
    goes_on = False
    engine.wake_claims([LANE])

    claimed = await asyncio.wait_for(waiting, 20)
    await completing
    left = await pull.claim(1)
    assert ids_of(claimed) | ids_of(left) == {names[1]}
    assert is_idle(engine)
    pull.close()
