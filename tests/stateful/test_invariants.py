"""The invariant checks detect violations: a valid sequence passes, and each kind of damage is named."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change, Delete, Patch
from flowfabric.model.event import Event
from flowfabric.model.execution import Attempt, Execution, QueueKey
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.testing.invariants import InvariantBroken, InvariantChecker, check_invariants
from tests.executions import claim_one

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}


async def claimed(engine: Engine, **asked: Any) -> Claimed:
    await engine.create_execution(execution_id=engine.new_execution_id(), **asked)
    return await claim_one(engine, worker_id="wa", worker_instance_id="wa-1")


async def damage(engine: Engine, execution_id: str, **fields: Any) -> None:
    """Write what no rule would write."""
    change = Change((), (Patch(Execution, (execution_id,), fields),), id=7)
    assert await engine.store.commit([change]) != [None]


async def test_trimmed_events_of_the_feed_are_not_reported_as_missing(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    old = await claimed(engine, policy=RETRY)
    await engine.fail(old.handle, reason="flaky")
    clock.advance_ms(engine.settings.feed_retention_ms + 1)
    await engine.sweep_once("feed_trimmer")
    await check_invariants(engine)
    await engine.cancel_execution(old.execution_id)
    clock.advance_ms(1)
    young = await claimed(engine)
    await check_invariants(engine)

    await damage(engine, old.execution_id, public_state=PublicState.ACTIVE)
    await damage(engine, young.execution_id, lease_epoch=5)
    with pytest.raises(InvariantBroken) as broken:
        await check_invariants(engine)
    assert f"{old.execution_id}: I10" in str(broken.value)
    assert f"{young.execution_id}: I7" in str(broken.value)


async def test_a_long_sequence_violates_no_invariant(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    watch = InvariantChecker(engine)
    first = await claimed(engine, policy=RETRY)
    await watch.check()
    await engine.fail(first.handle, reason="flaky")
    await watch.check()
    await engine.sweep_once("delayed_promoter")
    await engine.issue_grant_and_claim(first.execution_id, lane_id="default", lease_duration_ms=100)
    clock.advance_ms(100)
    await watch.check()
    second = await claim_one(engine, worker_id="wb", worker_instance_id="wb-1")
    await watch.check()
    await engine.delay(second.handle, delay_until=clock.now)
    await watch.check()
    await engine.cancel_execution(first.execution_id)
    await watch.check()
    await engine.replay_execution(first.execution_id)
    await watch.check()
    await check_invariants(engine)


async def test_limited_work_is_queued_and_reclaimed_in_its_own_queue(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    held = await claimed(engine, policy={"budget_ids": ["0b000000-0000-4000-8000-000000000001"]})
    await engine.delay(held.handle, delay_until=clock.now)
    await engine.sweep_once("delayed_promoter")
    await check_invariants(engine)
    await engine.issue_grant_and_claim(held.execution_id, lane_id="default", lease_duration_ms=100)
    clock.advance_ms(100)
    await engine.sweep_once("lease_expiry")
    await check_invariants(engine)

    await damage(engine, held.execution_id, line=None)

    with pytest.raises(InvariantBroken, match=r"I11 is in indexes \['lease'\], expected \['lease', 'takeover'\]"):
        await check_invariants(engine)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"lifecycle_phase": LifecyclePhase.TERMINAL}, "I1 terminal with"),
        ({"terminal_outcome": TerminalOutcome.SUCCESS}, "I2 active with outcome success"),
        ({"lifecycle_phase": LifecyclePhase.RUNNABLE}, "I3 leased while runnable"),
        ({"eligibility_state": EligibilityState.ELIGIBLE_NOW}, "I4 active and eligible_now"),
        ({"attempt_state": AttemptState.ATTEMPT_INTERRUPTED}, "I5 leased with attempt_interrupted"),
        ({"lease_id": None}, "I5 leased without a whole lease"),
        ({"ownership_state": OwnershipState.LEASE_REVOKED}, "I6 active, not leased, with running_attempt"),
        ({"lease_epoch": 3}, "I7 leases acquired under epochs"),
        ({"total_attempt_count": 2}, "I8 attempts [0] of 2"),
        ({"granted_until": 5}, "I9 a grant until None in a slot until 5"),
        ({"public_state": PublicState.WAITING}, "I10 public state waiting is not derived"),
        ({"line": QueueKey("default")}, "I11 is in indexes ['lease', 'line'], expected ['lease']"),
        ({"line": QueueKey("elsewhere", guarded=True)}, "which is not its own"),
        ({"delay_until": 9}, "I11 is in indexes ['delayed', 'lease'], expected ['lease']"),
        ({"rank": 5}, "rank 5 does not follow from priority and age"),
        ({"completed_at": 5}, "completed at 5 while active"),
        ({"started_at": None}, "started at None with epoch 1"),
        ({"lease_expired_at": 5}, "lease expired at 5 while leased"),
        ({"lease_revoked_at": 5}, "lease revoked at 5 while leased"),
        ({"last_mutation_at": 5}, "times are out of order"),
        ({"blocking_reason": BlockingReason.NONE, "replay_count": 1}, "0 completion events for 1 ended lives"),
    ],
)
async def test_damage_to_a_row_is_named(fields: dict[str, Any], sentence: str) -> None:
    engine = Engine(MemoryStore(ManualClock()))
    held = await claimed(engine)
    await check_invariants(engine)
    await damage(engine, held.execution_id, **fields)

    with pytest.raises(InvariantBroken) as broken:
        await check_invariants(engine)
    assert sentence in str(broken.value)


async def test_a_missing_attempt_record_is_named() -> None:
    engine = Engine(MemoryStore(ManualClock()))
    held = await claimed(engine)
    await engine.fail(held.handle, reason="boom")
    await engine.store.commit([Change((), (Delete(Attempt, (held.execution_id,)),), id=7)])

    with pytest.raises(InvariantBroken, match="I8 attempts \\[\\] of 1"):
        await check_invariants(engine)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"outcome": "success"}, "2 completion events for 1 ended lives"),
        ({"lease": "acquired", "lease_epoch": 1}, "I7 leases acquired under epochs \\[1, 1\\]"),
        ({"lease": "released", "lease_epoch": 1}, "leases ended under epochs \\[1, 1\\]"),
        ({"operator": "replayed"}, "the replay count differs from the replay events"),
    ],
)
async def test_a_surplus_event_is_named(fields: dict[str, Any], sentence: str) -> None:
    engine = Engine(MemoryStore(ManualClock()))
    held = await claimed(engine)
    await engine.fail(held.handle, reason="boom")
    await engine.store.commit([Change((), (), (Event(held.execution_id, "default", **fields),), id=7)])

    with pytest.raises(InvariantBroken, match=sentence):
        await check_invariants(engine)


async def test_a_decreasing_count_is_named() -> None:
    engine = Engine(MemoryStore(ManualClock()))
    held = await claimed(engine, policy=RETRY)
    await engine.fail(held.handle, reason="flaky")
    watch = InvariantChecker(engine)
    await watch.check()
    await damage(engine, held.execution_id, retry_count=0)

    with pytest.raises(InvariantBroken, match="I7 retry_count went back from 1 to 0"):
        await watch.check()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rank": 5}, "rank 5 in life 1 follows from no instant since its creation"),
        ({"rank": 2**50}, "in life 1 follows from no instant since its creation"),
        ({"rank": 1_700_000_000_000}, "its place in the queue moved from 1700000000050 to 1700000000000"),
        ({"rank": 1_700_000_000_060}, "its place in the queue moved from 1700000000050 to 1700000000060"),
        ({"life": None}, "life went back from 1 to 0"),
        ({"retry_count": 0}, "I7 retry_count went back from 1 to 0"),
    ],
)
async def test_a_later_life_keeps_its_place_and_counts_its_own_retries(fields: dict[str, Any], sentence: str) -> None:
    clock = ManualClock(1_700_000_000_000)
    engine = Engine(MemoryStore(clock))
    watch = InvariantChecker(engine)
    held: Claimed | None = await claimed(engine, policy=RETRY)
    for _ in range(2):
        assert held is not None
        await engine.fail(held.handle, reason="flaky")
        await watch.check()
        await engine.sweep_once("delayed_promoter")
        held = await claim_one(engine, worker_id="wa", worker_instance_id="wa-1")
        if held.life == 0:
            clock.advance_ms(50)
            await engine.continue_as_new(held.handle, b"2")
            await watch.check()
            clock.advance_ms(50)
            held = await engine.claim("default", worker_id="wa", worker_instance_id="wa-1")
    assert held is not None
    await watch.check()
    await damage(engine, held.execution_id, **fields)

    with pytest.raises(InvariantBroken) as broken:
        await watch.check()
    assert sentence in str(broken.value)
