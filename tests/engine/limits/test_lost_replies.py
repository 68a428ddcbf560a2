"""Budgets, quotas and workers: each operation takes effect exactly once although a request or a reply is lost."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from tests.engine.exactly_once import assert_exactly_once
from tests.engine.lossy_store import Loss
from tests.engine.runtime.test_lost_replies import LEASE_MS, WORKER, Act, Case, Scene

B = "0b000000-0000-4000-8000-000000000001"
Q = "0c000000-0000-4000-8000-000000000001"
R = "0d000000-0000-4000-8000-000000000001"
LIMITS: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [100], "soft_limits": [80]}
QUOTA: dict[str, Any] = {"window_seconds": 60, "max_requests_per_window": 5, "max_concurrent": 2}
NUMBERS: dict[str, Any] = {"window_seconds": 60, "rate_limit": 5, "concurrency_cap": 2}
INSTANCE = {"namespace": "default", "worker_instance_id": "i1"}
MADE: dict[str, Any] = {**INSTANCE, "worker_id": "w", "lanes": ["default"], "liveness_ttl_ms": 1000}


async def create_budget(scene: Scene) -> Act:
    return lambda: scene.engine.create_budget(B, **LIMITS)


async def change_limits(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS)
    return lambda: scene.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[7], soft_limits=[0])


async def report_without_a_key(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS)
    return lambda: scene.engine.report_usage_admin(B, dimensions=["tokens"], deltas=[90])


async def report_too_much(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS)
    return lambda: scene.engine.report_usage_admin(B, dimensions=["tokens"], deltas=[101], dedup_key="k")


async def spend_with_a_key(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS)
    e = await scene.waiting()
    return lambda: scene.engine.record_spend(B, e, {"tokens": 3}, idempotency_key="k")


async def release_spending(scene: Scene) -> Act:
    e = await scene.waiting()
    await scene.engine.record_spend(B, e, {"tokens": 3})
    return lambda: scene.engine.release_budget(B, e)


async def reserve(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS)
    e = await scene.waiting()
    return lambda: scene.engine.reserve_budget(B, e, {"tokens": 3}, ttl_ms=1000, reservation_id=R)


async def settle(scene: Scene) -> Act:
    e = await scene.waiting()
    await scene.engine.reserve_budget(B, e, {"tokens": 3}, ttl_ms=1000, reservation_id=R)
    return lambda: scene.engine.settle_budget(B, e, R, {"tokens": 2})


async def refund(scene: Scene) -> Act:
    e = await scene.waiting()
    await scene.engine.reserve_budget(B, e, {"tokens": 3}, ttl_ms=1000, reservation_id=R)
    return lambda: scene.engine.refund_budget(B, R)


async def reset(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS, reset_interval_ms=1000)
    await scene.engine.report_usage_admin(B, dimensions=["tokens"], deltas=[90])
    return lambda: scene.engine.reset_budget(B)


async def create_policy(scene: Scene) -> Act:
    return lambda: scene.engine.create_quota_policy(Q, **QUOTA)


async def admit(scene: Scene) -> Act:
    e = await scene.waiting()
    return lambda: scene.engine.check_admission(Q, e, **NUMBERS)


async def release_admission(scene: Scene) -> Act:
    e = await scene.waiting()
    await scene.engine.check_admission(Q, e, **NUMBERS)
    return lambda: scene.engine.release_admission(Q, e)


async def claim_what_is_limited(scene: Scene) -> Act:
    await scene.engine.create_quota_policy(Q, **QUOTA)
    await scene.waiting(policy={"quota_policy_ids": [Q], "budget_ids": [B]})
    return lambda: scene.engine.claim_admitted("default", **WORKER, lease_ttl_ms=LEASE_MS)


async def block_by_a_budget(scene: Scene) -> Act:
    await scene.engine.create_budget(B, **LIMITS)
    await scene.engine.report_usage_admin(B, dimensions=["tokens"], deltas=[100])
    await scene.waiting(policy={"budget_ids": [B]})
    return lambda: scene.engine.claim_admitted("default", **WORKER, lease_ttl_ms=LEASE_MS)


async def register(scene: Scene) -> Act:
    return lambda: scene.engine.register_worker(**MADE)


async def heartbeat(scene: Scene) -> Act:
    await scene.engine.register_worker(**MADE)
    scene.clock.advance_ms(10)
    return lambda: scene.engine.heartbeat_worker(**INSTANCE)


async def mark_dead(scene: Scene) -> Act:
    await scene.engine.register_worker(**MADE)
    return lambda: scene.engine.mark_worker_dead(**INSTANCE, reason="oom")


async def purge(scene: Scene) -> Act:
    e = await scene.ended()
    scene.clock.advance_ms(24 * 3_600_000)
    return lambda: scene.engine.purge_execution(e)


CASES: tuple[Case, ...] = (
    *(create_budget, change_limits, report_without_a_key, report_too_much, spend_with_a_key, release_spending),
    *(reserve, settle, refund, reset, create_policy, admit, release_admission, claim_what_is_limited),
    *(block_by_a_budget, register, heartbeat, mark_dead, purge),
)


@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name.lower())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_limits_operation_that_was_lost_once_takes_effect_once(
    clock: ManualClock, case: Case, loss: Loss
) -> None:
    await assert_exactly_once(MemoryStore(clock), clock, case, loss)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_every_store_recovers_a_lost_reply_of_a_limits_operation(
    store: Store, clock: ManualClock, case: Case
) -> None:
    await assert_exactly_once(store, clock, case, Loss.ANSWER)
