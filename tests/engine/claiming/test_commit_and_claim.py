"""What ends set free goes to the claims of the same process: nobody is passed over, and nothing gets lost on the way.

Stores that keep the order hand nothing over; what anybody sees is the same there.
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
from flowfabric.stores.port import Store, Unstorable
from tests.engine.claiming.test_behind_own_work import LANE, Counting, chain, ids_of, working
from tests.engine.losing import LosingStore, Loss

OTHER = "other"


@pytest.fixture
async def engine(store: Store) -> Engine:
    return working(store, seed=7)


def pulling(engine: Engine, *lanes: str) -> LanePoller:
    return engine.pulling(lanes or [LANE], worker_id="w", worker_instance_id="w-1")


async def gone_on(engine: Engine, pull: LanePoller, held: Sequence[Claimed], room: int = 1) -> list[Claimed]:
    """End what is held, and claim at the same time, as a worker does whose slots are full."""
    telling = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in held]))
    claimed = await asyncio.wait_for(pull.claim(room, max_wait_ms=60_000), 20)
    assert all(isinstance(answer, Completed) for answer in await telling)
    return claimed


def at_rest(engine: Engine) -> bool:
    return not engine.runtime.commit_queue.notified_changes and not engine.runtime.commit_queue._pending_claims


async def test_a_chain_goes_on_to_its_end(engine: Engine) -> None:
    names = await chain(engine, 5)
    pull = pulling(engine)
    held = await pull.claim(1)
    for name in names[1:]:
        held = await gone_on(engine, pull, held)
        assert (ids_of(held), held[0].lease_epoch, held[0].attempt_index) == ({name}, 1, 0)

    assert isinstance(await engine.complete(held[0].handle), Completed)
    assert at_rest(engine)
    pull.close()


async def test_a_step_begins_with_the_result_that_it_waited_for(engine: Engine) -> None:
    names = await chain(engine, 3, ref="result")
    pull = pulling(engine)
    held = await pull.claim(2)  # with room for more, so that it has seen the end of its lane
    for before, name in pairwise(names):
        waiting = asyncio.create_task(pull.claim(2, max_wait_ms=60_000))
        await asyncio.sleep(0)  # and now waits for what this one sets free
        await engine.complete(held[0].handle, result=before.encode(), encoding="text")

        held = await asyncio.wait_for(waiting, 20)
        assert ids_of(held) == {name}
        assert held[0].payload is not None
        assert (held[0].payload.input_payload, held[0].payload.payload_encoding) == (before.encode(), "text")
    pull.close()


async def test_whoever_has_a_better_rank_goes_first(engine: Engine, store: Store) -> None:
    names = await chain(engine, 3)
    pull = pulling(engine)
    held = await pull.claim(1)
    held = await gone_on(engine, pull, held)
    other = working(store, seed=8)  # a process of which this one has heard nothing
    urgent = other.new_execution_id()
    await other.create_execution(execution_id=urgent, lane_id=LANE, priority=1000)

    held = await gone_on(engine, pull, held)
    assert ids_of(held) == {urgent}
    held = await gone_on(engine, pull, held)
    assert ids_of(held) == {names[2]}
    pull.close()


@pytest.mark.parametrize("lanes", [(LANE, OTHER), (OTHER, LANE)])
async def test_the_other_lanes_of_a_worker_have_their_turn(engine: Engine, lanes: tuple[str, str]) -> None:
    names = await chain(engine, 8)
    pull = pulling(engine, *lanes)
    held = await pull.claim(1)
    for _ in range(2):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=OTHER)

    order: list[str] = []
    for _ in range(4):
        held = await gone_on(engine, pull, held)
        order += ["chain" if one.execution_id in names else "other" for one in held]

    assert "other" in order[:3]
    assert "chain" in order
    pull.close()


class Narrow(Counting):
    """A store that takes one change at a time."""

    batch_limit = 1


async def test_what_ends_set_free_beyond_one_batch_is_told_to_whoever_waits(store: Store) -> None:
    engine = working(Narrow(store), seed=7)
    chains = [await chain(engine, 2) for _ in range(2)]
    pull = pulling(engine)
    held = await pull.claim(3)
    waiting = [
        asyncio.create_task(pull.claim(1, max_wait_ms=60_000)),
        asyncio.create_task(engine.claim_many(LANE, 1, worker_id="v", worker_instance_id="v-1", max_wait_ms=60_000)),
    ]
    await asyncio.sleep(0.2)  # both have looked in vain

    await engine.complete_many([(one.handle, b"{}") for one in held])

    got = [one for claimed in await asyncio.wait_for(asyncio.gather(*waiting), 20) for one in claimed]
    assert ids_of(got) == {second for _, second in chains}
    assert at_rest(engine)
    pull.close()


async def test_a_worker_of_other_namespaces_is_handed_nothing(engine: Engine) -> None:
    names = await chain(engine, 2)
    pull = pulling(engine)
    held = await pull.claim(1)
    stranger = engine.pulling([LANE], worker_id="s", worker_instance_id="s-1", namespaces=["elsewhere"])
    assert await stranger.claim(1) == []
    waiting = asyncio.create_task(stranger.claim(1, max_wait_ms=60_000))
    await asyncio.sleep(0)  # it has seen the end of its lane, so now it waits

    await engine.complete(held[0].handle)

    [claimed] = await asyncio.wait_for(pull.claim(1, max_wait_ms=60_000), 20)
    assert claimed.execution_id == names[1]
    assert not waiting.done()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    pull.close()
    stranger.close()


async def test_tenants_take_turns_though_the_chain_of_one_goes_on(store: Store) -> None:
    counting = Counting(store)
    engine = working(counting, seed=7)
    chained = await chain(engine, 6, policy='{"fairness_key": "a"}')
    pull = pulling(engine)
    held = await pull.claim(1)
    for _ in range(3):
        await engine.create_execution(
            execution_id=engine.new_execution_id(), lane_id=LANE, policy={"fairness_key": "b"}
        )

    order = ""
    for _ in range(8):
        held = await gone_on(engine, pull, held)
        order += "a" if held[0].execution_id in chained else "b"

    assert sorted(order) == sorted("aaaaabbb")
    assert "aa" not in order.rstrip("a"), order  # the other way round, its next step may not have been there yet
    assert counting.wishes == 0
    pull.close()


@pytest.mark.parametrize("limited", ["the chain", "others"])
async def test_where_limits_have_a_say_they_are_asked_though_a_chain_goes_on(store: Store, limited: str) -> None:
    counting = Counting(store)
    engine = working(counting, seed=7)
    quota = engine.minter.uuid()
    await engine.create_quota_policy(quota, window_seconds=60, max_requests_per_window=2, max_concurrent=0)
    policy = {"quota_policy_ids": [quota]}
    names = await chain(engine, 4, policy=json.dumps(policy) if limited == "the chain" else None)
    others = [engine.new_execution_id() for _ in range(3)] if limited == "others" else []
    for name in others:
        await engine.create_execution(execution_id=name, lane_id=LANE, policy=policy, priority=10)
    pull = pulling(engine)

    order, held = list[str](), await pull.claim(1)
    while held:
        order += ids_of(held)
        telling = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in held]))
        held = await asyncio.wait_for(pull.claim(1, max_wait_ms=1000), 20)
        await telling

    assert order == (names[:2] if limited == "the chain" else [*sorted(others)[:2], *names])
    if limited == "the chain":
        assert counting.wishes == 0
    pull.close()


async def test_what_was_lost_in_the_lane_is_taken_over_though_a_chain_goes_on(
    engine: Engine, store: Store, clock: ManualClock
) -> None:
    lost = engine.new_execution_id()
    await engine.create_execution(execution_id=lost, lane_id=LANE, priority=10)
    dead = working(store, seed=8)
    assert await dead.claim(LANE, worker_id="dead", worker_instance_id="dead-1", lease_ttl_ms=1000) is not None
    await chain(engine, 8)
    pull = pulling(engine)
    held = await pull.claim(1)
    held = await gone_on(engine, pull, held)

    clock.now += 2000
    seen: set[str] = set()
    for _ in range(3):
        held = await gone_on(engine, pull, held)
        seen |= ids_of(held)

    assert lost in seen
    pull.close()


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.DOUBT, Loss.ANSWER])
@pytest.mark.parametrize("room", [1, 4], ids=["full slots", "free slots"])
async def test_whatever_gets_lost_each_step_is_held_once(store: Store, loss: Loss, room: int) -> None:
    losing = LosingStore(store)
    engine = working(losing, seed=7)
    names = await chain(engine, 4)
    pull = pulling(engine)
    held = await pull.claim(room)
    for place, name in enumerate(names[1:]):
        if place == 1:
            losing.next_loss = loss
        held = await gone_on(engine, pull, held, room)
        assert (ids_of(held), held[0].lease_epoch, held[0].attempt_index) == ({name}, 1, 0)

    assert losing.losses == 1
    assert isinstance(await engine.complete(held[0].handle), Completed)
    assert at_rest(engine)
    pull.close()


async def test_what_arrives_when_nobody_expects_it_any_more_is_given_back(store: Store) -> None:
    losing = LosingStore(store)
    engine = working(losing, seed=7)
    first, second = await chain(engine, 2)
    pull = pulling(engine)
    held = await pull.claim(1)
    losing.next_loss = Loss.LATE
    telling = asyncio.create_task(engine.complete_many([(held[0].handle, b"{}")]))
    claiming = asyncio.create_task(pull.claim(1, max_wait_ms=60_000))

    assert all(isinstance(answer, Completed) for answer in await telling)
    [claimed] = await asyncio.wait_for(claiming, 20)

    assert (held[0].execution_id, claimed.execution_id) == (first, second)
    assert (claimed.lease_epoch, claimed.attempt_index) in ((1, 0), (2, 0)), "its lease was not waited for"
    assert isinstance(await engine.complete(claimed.handle), Completed)
    assert at_rest(engine)
    pull.close()


class Choosy(LosingStore):
    """A store that cannot keep what it is to hand over."""

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        raise Unstorable("a broken page")


async def test_what_cannot_be_handed_over_is_claimed_as_ever(store: Store) -> None:
    engine = working(Choosy(store), seed=7)
    chains = [await chain(engine, 3) for _ in range(2)]
    pull = pulling(engine)
    held = await pull.claim(2)
    for place in (1, 2):
        held = await gone_on(engine, pull, held, 2)
        assert ids_of(held) == {names[place] for names in chains}
    assert at_rest(engine)
    pull.close()


async def test_a_claim_that_is_cancelled_wishes_for_nothing_more(engine: Engine) -> None:
    names = await chain(engine, 3)
    pull = pulling(engine)
    held = await pull.claim(2)
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=60_000))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert at_rest(engine)

    await engine.complete(held[0].handle)
    [claimed] = await asyncio.wait_for(pull.claim(1, max_wait_ms=60_000), 20)
    assert claimed.execution_id == names[1]
    pull.close()


async def test_a_worker_that_is_told_to_stop_keeps_what_it_was_given(engine: Engine) -> None:
    names = await chain(engine, 2)
    pull = pulling(engine)
    held = await pull.claim(2)
    goes_on = True
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=60_000, go_on=lambda: goes_on))
    telling = asyncio.create_task(engine.complete_many([(held[0].handle, b"{}")]))
    for _ in range(4):
        await asyncio.sleep(0)
    goes_on = False
    engine.wake_claims([LANE])

    claimed = await asyncio.wait_for(waiting, 20)
    await telling
    left = await pull.claim(1)
    assert ids_of(claimed) | ids_of(left) == {names[1]}
    assert at_rest(engine)
    pull.close()
