"""The spread of a lane: where ids are minted, where keys are found, and what a change of the spread leaves alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import (
    ExecutionId,
    LaneId,
    PartitionCounts,
    SeededMinter,
    key_partition,
    lane_partitions,
    partition_of,
)
from flowfabric.keyed_create import create_with_fresh_id
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.scheduling.lane import LaneSpread
from flowfabric.rules.scheduling.lane_spread import GRACE_MS, SETTLE_MS
from tests.executions import create_request
from tests.scenarios.checked_store import dump
from tests.scenarios.env import DEFAULT_PARTITION, Env

LANE = "default"
COUNTS = PartitionCounts()


def partitions(spread: int) -> set[int]:
    return set(lane_partitions(LaneId(LANE), spread, COUNTS))


def moving_key(before: int, after: int) -> str:
    """Return a key that these two spreads put on different partitions."""
    for number in range(1000):
        key = f"key-{number}"
        if len({key_partition(LaneId(LANE), spread, COUNTS, key) for spread in (before, after)}) == 2:
            return key
    raise AssertionError("every key stays where it is")


def at(execution_id: str) -> int:
    """Return the partition of an execution."""
    return partition_of(ExecutionId(execution_id))


async def spread_now(env: Env, spread: int) -> None:
    """Change the spread and wait until it is in effect and earlier creates are visible."""
    await env.engine.set_lane_spread(LANE, spread)
    env.clock.advance_ms(GRACE_MS + SETTLE_MS)
    await env.engine.refresh_lanes()


async def create(engine: Engine, key: str) -> Created | Duplicate:
    """Create a run with a key under an id that is minted for it."""
    e = engine.new_execution_id(LANE, key)
    return await engine.create_execution(execution_id=e, idempotency_key=key)


@asynccontextmanager
async def passing_time(env: Env) -> AsyncIterator[None]:
    """Advance the clock in the background."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.002)
            env.clock.advance_ms(100)

    task = asyncio.ensure_future(tick())
    try:
        yield
    finally:
        task.cancel()


async def test_a_lane_of_spread_1_has_the_partition_of_its_name_with_or_without_a_key(env: Env) -> None:
    minted = [env.engine.new_execution_id(LANE, key) for key in (None, "", "k", "k2")]

    assert {at(e) for e in minted} == {DEFAULT_PARTITION}
    assert await env.engine.read_lane(LANE) == LaneSpread(LANE, 1)
    assert (await dump(env.store.store))["ff_lane"] == []


async def test_ids_of_a_spread_lane_cover_all_its_partitions(env: Env) -> None:
    await spread_now(env, 5)

    minted = [at(env.engine.new_execution_id(LANE)) for _ in range(300)]
    keyed = [at(env.engine.new_execution_id(LANE, f"k{n}")) for n in range(300)]

    assert set(minted) == set(keyed) == partitions(5)
    assert min(minted.count(one) for one in partitions(5)) > 30
    assert DEFAULT_PARTITION in partitions(5)
    assert {at(env.engine.new_execution_id("other")) for _ in range(50)} != set(minted)


async def test_a_change_of_the_spread_takes_effect_after_the_grace_period(env: Env) -> None:
    answer = await env.engine.set_lane_spread(LANE, 3)

    assert answer == LaneSpread(LANE, 1, 3, env.now + GRACE_MS)
    env.clock.advance_ms(GRACE_MS - 1)
    assert await env.engine.read_lane(LANE) == LaneSpread(LANE, 1, 3, env.now + 1)
    assert {at(env.engine.new_execution_id(LANE)) for _ in range(50)} == {DEFAULT_PARTITION}
    env.clock.advance_ms(1)
    assert await env.engine.read_lane(LANE) == LaneSpread(LANE, 3)
    assert {at(env.engine.new_execution_id(LANE)) for _ in range(100)} == partitions(3)


async def test_the_same_spread_again_changes_nothing(env: Env) -> None:
    first = await env.engine.set_lane_spread(LANE, 3)
    stored = (await dump(env.store.store))["ff_lane"]
    env.clock.advance_ms(5)

    assert await env.engine.set_lane_spread(LANE, 3) == first
    assert (await dump(env.store.store))["ff_lane"] == stored
    assert await env.engine.set_lane_spread("another", 1) == LaneSpread("another", 1)
    assert len((await dump(env.store.store))["ff_lane"]) == 1


async def test_another_change_is_refused_until_the_one_before_is_in_effect(env: Env) -> None:
    first = await env.engine.set_lane_spread(LANE, 3)
    env.clock.advance_ms(GRACE_MS - 1)

    with pytest.raises(errors.SpreadChangePending) as refused:
        await env.engine.set_lane_spread(LANE, 1)

    assert (refused.value.lane_id, refused.value.effective_at) == (LANE, first.effective_at)
    env.clock.advance_ms(1)
    assert (await env.engine.set_lane_spread(LANE, 1)).next_spread == 1


@pytest.mark.parametrize("spread", [0, -1, 257, True, 2.0, "2", None, 2**70])
async def test_a_spread_beyond_the_partitions_is_refused_and_changes_nothing(env: Env, spread: Any) -> None:
    with pytest.raises(errors.InvalidInput):
        await env.engine.set_lane_spread(LANE, spread)

    assert (await dump(env.store.store))["ff_lane"] == []
    assert (await env.engine.set_lane_spread(LANE, 256)).next_spread == 256


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (3, 7)])
async def test_a_key_from_before_a_change_of_the_spread_is_still_known(env: Env, before: int, after: int) -> None:
    if before > 1:
        await spread_now(env, before)
    key = moving_key(before, after)
    first = await create(env.engine, key)
    assert isinstance(first, Created)

    await spread_now(env, after)

    assert at(env.engine.new_execution_id(LANE, key)) != at(first.execution_id)
    assert await create(env.engine, key) == Duplicate(first.execution_id)
    bulk = create_request(env.engine.new_execution_id(LANE, key), LANE, idempotency_key=key)
    assert await env.engine.create_executions([bulk]) == [Duplicate(first.execution_id)]
    assert len((await dump(env.store.store))["ff_exec_core"]) == 1


async def test_a_key_is_known_through_several_changes_of_the_spread(env: Env) -> None:
    first = {key: await create(env.engine, key) for key in map(str, range(8))}

    for spread in (4, 9, 2, 4, 1):
        await spread_now(env, spread)
        for key, created in first.items():
            assert await create(env.engine, key) == Duplicate(created.execution_id)
        later = await create(env.engine, f"of {spread} at {env.now}")
        assert isinstance(later, Created)
        first[f"of {spread} at {env.now}"] = later


@pytest.mark.parametrize("order", ["the stale one first", "the fresh one first"])
async def test_a_key_from_two_processes_that_know_different_spreads_is_one_run(env: Env, order: str) -> None:
    key = moving_key(1, 8)
    stale = Engine(env.store.store, minter=SeededMinter(9))
    await stale.refresh_lanes()
    await env.engine.set_lane_spread(LANE, 8)
    if order == "the stale one first":
        first = await create(stale, key)
        assert at(first.execution_id) == DEFAULT_PARTITION
        env.clock.advance_ms(GRACE_MS + SETTLE_MS)
        second = await create(env.engine, key)
    else:
        env.clock.advance_ms(GRACE_MS + SETTLE_MS)
        first = await create(env.engine, key)
        assert at(stale.new_execution_id(LANE, key)) == DEFAULT_PARTITION
        second = await create(stale, key)

    assert isinstance(first, Created)
    assert second == Duplicate(first.execution_id)
    assert len((await dump(env.store.store))["ff_exec_core"]) == 1


async def test_an_id_from_before_the_change_is_refused_for_a_new_key_and_minted_again(env: Env) -> None:
    key = moving_key(1, 8)
    stale = Engine(env.store.store, minter=SeededMinter(9))
    await stale.refresh_lanes()
    await spread_now(env, 8)

    with pytest.raises(errors.KeyElsewhere):
        await create(stale, key)

    assert (await dump(env.store.store))["ff_exec_core"] == []
    made = await create_with_fresh_id(
        stale, LANE, key, lambda e: stale.create_execution(execution_id=e, idempotency_key=key)
    )
    assert isinstance(made, Created)
    assert at(made.execution_id) == key_partition(LaneId(LANE), 8, COUNTS, key)


async def test_a_create_that_reaches_the_store_after_the_change_is_not_written_where_the_key_was(env: Env) -> None:
    key = moving_key(1, 8)
    late = Engine(env.store, minter=SeededMinter(9))
    await late.refresh_lanes()
    sync = env.pause_next("commit")
    task = asyncio.ensure_future(create(late, key))
    async with asyncio.timeout(20):
        await sync.reached()
        other = Engine(env.store.store, minter=SeededMinter(5))
        await other.set_lane_spread(LANE, 8)
        env.clock.advance_ms(GRACE_MS + SETTLE_MS)
        first = await create(other, key)
        sync.release()
        assert isinstance(first, Created)
        assert await task == Duplicate(first.execution_id)


async def test_a_key_waits_until_the_last_creates_under_the_earlier_spread_are_visible(env: Env) -> None:
    key = moving_key(1, 8)
    await env.engine.set_lane_spread(LANE, 8)
    env.clock.advance_ms(GRACE_MS + SETTLE_MS - 1)
    await env.engine.refresh_lanes()

    task = asyncio.ensure_future(create(env.engine, key))
    done, _ = await asyncio.wait([task], timeout=0.3)

    assert not done
    env.clock.advance_ms(1)
    assert isinstance(await asyncio.wait_for(task, 20), Created)


async def test_a_child_with_a_key_stays_on_the_partition_of_its_parent(env: Env) -> None:
    parent = await env.create()
    await spread_now(env, 8)
    child = f"{{fp:{DEFAULT_PARTITION}}}:{env.engine.minter.uuid()}"
    key = moving_key(1, 8)

    answer = await env.engine.create_execution(execution_id=child, idempotency_key=key, parent_id=parent)

    assert isinstance(answer, Created)


async def test_claims_drain_a_spread_lane_in_order_within_each_partition(env: Env) -> None:
    await spread_now(env, 4)
    created: dict[int, list[str]] = defaultdict(list)
    for _ in range(24):
        e = await env.create()
        created[at(e)].append(e)
        env.clock.advance_ms(1)
    assert len(created) == 4

    claimed: dict[int, list[str]] = defaultdict(list)
    while (claim := await env.claim_next()) is not None:
        claimed[at(claim.execution_id)].append(claim.execution_id)

    assert claimed == created


async def test_a_large_claim_serves_every_partition_of_a_spread_lane(env: Env) -> None:
    await spread_now(env, 4)
    for _ in range(40):
        await env.create()
        env.clock.advance_ms(1)

    claims = await env.engine.claim_many(LANE, 20, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=30_000)

    assert len(claims) == 20
    assert {at(claim.execution_id) for claim in claims} == partitions(4)


async def test_a_spread_that_changes_under_submits_and_claims_loses_and_doubles_nothing(env: Env) -> None:
    one, other, worker = (Engine(env.store.store, minter=SeededMinter(seed)) for seed in (8, 9, 10))
    keys = [f"job-{number}" for number in range(120)]
    claimed: list[str] = []

    async def submit(engine: Engine) -> list[str]:
        submitted = []
        for key in keys:
            made = await create_with_fresh_id(
                engine,
                LANE,
                key,
                lambda e, key=key: engine.create_execution(execution_id=e, idempotency_key=key),  # type: ignore[misc]
            )
            submitted.append(made.execution_id)
            await asyncio.sleep(0.004)
        return submitted

    async def change() -> None:
        for spread in (6, 2):
            while True:
                try:
                    await worker.set_lane_spread(LANE, spread)
                    break
                except errors.SpreadChangePending:
                    await asyncio.sleep(0.01)

    async def claim_all(submits: asyncio.Future[Any]) -> None:
        while True:
            ended = submits.done()
            claims = await worker.claim_many(LANE, 5, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=10**7)
            claimed.extend(claim.execution_id for claim in claims)
            await asyncio.gather(*(worker.complete(claim.handle) for claim in claims))
            if not claims and ended:
                return
            await asyncio.sleep(0.005)

    async with asyncio.timeout(60), passing_time(env):
        submits = asyncio.gather(submit(one), submit(other), change())
        await claim_all(submits)
        mine, others, _ = await submits

    assert mine == others
    assert len(set(mine)) == len(keys)
    assert sorted(claimed) == sorted(mine)
    assert len({at(e) for e in mine}) > 1
