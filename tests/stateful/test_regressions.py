"""Regressions that the state machines found, each in the fewest steps."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Created, Duplicate, ReclaimGrant
from flowfabric.model.states import PublicState
from flowfabric.stores.port import Store
from tests.executions import claim_one
from tests.stateful.players import Player

A: dict[str, Any] = {"worker_id": "wa", "worker_instance_id": "wa-1"}
B: dict[str, Any] = {"worker_id": "wb", "worker_instance_id": "wb-1"}


@pytest.fixture
async def engines(store: Store, clock: ManualClock) -> list[Engine]:
    """Two engines that estimate the time from their last reply."""
    return Player(store, clock).engines


async def create(engine: Engine, **asked: Any) -> str:
    execution_id = engine.new_execution_id(asked.get("lane_id", "default"))
    assert isinstance(await engine.create_execution(execution_id=execution_id, **asked), Created)
    return execution_id


async def claimed_id(engine: Engine, **asked: Any) -> str | None:
    held = await engine.claim("default", **{**B, **asked})
    return None if held is None else held.execution_id


async def test_a_lane_is_listed_from_its_first_create_on_even_a_delayed_one(
    engines: list[Engine], clock: ManualClock
) -> None:
    await create(engines[0], lane_id="later", delay_until=clock.now + 1000)

    assert (await engines[1].list_lanes()).lanes == ["later"]


async def test_a_key_is_checked_even_by_a_create_that_will_not_be_remembered(engines: list[Engine]) -> None:
    first = await create(engines[0], idempotency_key="k")

    again = await engines[1].create_execution(
        execution_id=engines[1].new_execution_id(), idempotency_key="k", policy={"dedup_window_ms": 0}
    )
    assert again == Duplicate(first)


async def test_a_reclaimable_execution_is_claimed_in_its_turn_when_its_grant_has_expired(
    engines: list[Engine], clock: ManualClock
) -> None:
    engine = engines[0]
    await engine.seed_waitpoint_hmac_secret("k1", "0123456789abcdef" * 4)
    old = await create(engine)
    clock.advance_ms(1)
    middle = await create(engine)
    clock.advance_ms(1)
    young = await create(engine)
    assert await claimed_id(engine, **A) == old
    await engine.revoke_lease(old)
    granted = await engine.issue_reclaim_grant(old, lane_id="default", **A, grant_ttl_ms=500)
    assert isinstance(granted, ReclaimGrant)
    assert await claimed_id(engine) == middle  # The grant is respected.

    clock.advance_ms(500)
    assert await claimed_id(engine) == old
    assert await claimed_id(engine) == young


async def test_a_claim_continues_past_executions_at_their_reclaim_cap(
    engines: list[Engine], clock: ManualClock
) -> None:
    engine = engines[0]
    doomed = [await create(engine, policy={"max_reclaim_count": 0}) for _ in range(3)]
    good = await create(engine)
    assert len(await engine.claim_many("default", 4, **A, lease_ttl_ms=100)) == 4
    clock.advance_ms(100)

    assert await claimed_id(engine) == good
    for execution_id in doomed:
        assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def test_a_busy_claimer_learns_of_a_new_queue_of_another_process_within_a_second(
    engines: list[Engine], clock: ManualClock
) -> None:
    one, other = engines
    for _ in range(3):
        await create(one)
    assert await claimed_id(one, capabilities=("gpu",)) is not None
    urgent = await create(other, priority=9, policy={"routing_requirements": {"required_capabilities": ["gpu"]}})

    clock.advance_ms(1000)
    one.estimate.update(clock.now)
    assert await claimed_id(one, capabilities=("gpu",)) == urgent


async def test_work_that_outlasts_its_first_lease_continues_as_long_as_it_is_renewed(
    engines: list[Engine], clock: ManualClock
) -> None:
    engine, other = engines
    execution_id = await create(engine)
    held = await claim_one(engine, **A, lease_ttl_ms=1000)
    for number in range(5):
        clock.advance_ms(900)
        await (engine if number % 2 else other).renew(held.handle)
        engine.estimate.update(clock.now + 500)  # It may be wrong about the time, and about who renewed.
        await engine.progress(held.handle, pct=20 * number)
        assert await claimed_id(other) is None

    await engine.complete(held.handle, result=b"done")
    assert await engine.read_execution_state(execution_id) is PublicState.COMPLETED
    assert (held.lease_epoch, await engine.read_total_attempt_count(execution_id)) == (1, 1)


async def test_many_granted_rows_do_not_hide_the_rows_behind_them(engines: list[Engine]) -> None:
    engine = engines[0]
    await engine.seed_waitpoint_hmac_secret("k1", "0123456789abcdef" * 4)
    crowd = [await create(engine) for _ in range(40)]
    grants = [await engine.claim_for_worker("default", **A) for _ in range(40)]

    assert sorted(grant.execution_id for grant in grants if grant is not None) == sorted(crowd)
    assert await engine.claim_for_worker("default", **A) is None
