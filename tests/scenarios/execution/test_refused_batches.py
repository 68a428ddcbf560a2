"""Claims over many executions that budgets, quotas or capabilities block."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.limits.quota import QuotaRequest
from flowfabric.stores.queries import Scan
from tests.scenarios.env import WAITING, Env
from tests.scenarios.limits.test_budgets import B2, B, budget, report
from tests.scenarios.limits.test_quotas import Q, check, policy
from tests.scenarios.limits.test_slots import claim_admitted_one
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, CLAIM_METHODS, QUOTA_BLOCKED, claim_via
from tests.scenarios.scheduling.test_grants import requires
from tests.scenarios.scheduling.test_workers import ROUTE_BLOCKED, register

MANY = 25


async def exhausted_budget(env: Env) -> tuple[dict[str, Any], str]:
    await budget(env, tokens=1)
    await report(env, tokens=1)
    return {"budget_ids": [B]}, BUDGET_BLOCKED


async def full_quota(env: Env) -> tuple[dict[str, Any], str]:
    await policy(env, cap=1)
    await check(env, await env.create(lane="elsewhere"), concurrency_cap=1)
    return {"quota_policy_id": Q}, QUOTA_BLOCKED


async def used_up_rate(env: Env) -> tuple[dict[str, Any], str]:
    await policy(env, rate=1)
    await check(env, await env.create(lane="elsewhere"), rate_limit=1)
    return {"quota_policy_id": Q}, QUOTA_BLOCKED


@pytest.mark.parametrize("limit", [exhausted_budget, full_quota, used_up_rate])
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_executions_over_the_same_limit_are_blocked_in_few_round_trips(env: Env, limit: Any, method: str) -> None:
    terms, blocked = await limit(env)
    stopped = [await env.create(policy=terms, priority=5) for _ in range(MANY)]
    free = await env.create(priority=1)
    env.store.calls.clear()

    assert await claim_via(env, method) == free

    assert {await env.vector(e) for e in stopped} == {blocked}
    assert env.store.calls["commit"] + env.store.calls["scan"] < MANY
    assert len(await env.engine.runtime.scan(Scan(QuotaRequest))) <= 1, "a refusal writes no request"


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_executions_behind_the_claimed_one_are_not_evaluated(env: Env, method: str) -> None:
    terms, blocked = await full_quota(env)
    first = await env.create(policy=terms, priority=5)
    free = await env.create(priority=3)
    last = await env.create(policy=terms, priority=1)

    assert await claim_via(env, method) == free

    assert await env.vector(first) == blocked
    assert await env.vector(last) == WAITING


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_blocked_executions_of_many_fairness_keys_do_not_hide_claimable_ones(env: Env, method: str) -> None:
    terms, blocked = await exhausted_budget(env)
    keys = [f"tenant-{number}" for number in range(10)] * 3
    stopped = [await env.create(policy=terms | {"fairness_key": key}, priority=5) for key in keys]
    free = await env.create(policy={"fairness_key": "tenant-0"}, priority=1)

    assert await claim_via(env, method) == free

    assert {await env.vector(e) for e in stopped} == {blocked}


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_an_execution_with_a_quota_slot_is_not_blocked_with_those_without(env: Env, method: str) -> None:
    await policy(env, cap=1)
    again = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 5}}}
    holder = await env.create(policy={"quota_policy_id": Q} | again, priority=3)
    claim = await claim_admitted_one(env)
    stopped = [await env.create(policy={"quota_policy_id": Q}, priority=5) for _ in range(3)]
    younger = [await env.create(policy={"quota_policy_id": Q}, priority=1) for _ in range(3)]
    await env.engine.fail(claim.handle, reason="try again")
    await env.promote(holder)

    assert await claim_via(env, method) == holder

    assert {await env.vector(e) for e in stopped} == {QUOTA_BLOCKED}
    assert {await env.vector(e) for e in younger} == {WAITING}


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_the_first_admissible_execution_is_claimed_behind_many_blocked_ones(env: Env, method: str) -> None:
    terms, _ = await exhausted_budget(env)
    await budget(env, B2, tokens=1)
    for _ in range(MANY):
        await env.create(policy=terms, priority=9)
    best = await env.create(policy={"budget_ids": [B2]}, priority=5)
    await env.create(priority=1)

    assert await claim_via(env, method) == best


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_the_first_takeover_is_claimed_behind_many_at_their_reclaim_cap(env: Env, method: str) -> None:
    for _ in range(MANY):
        await env.create_and_claim(ttl=1000, priority=9, policy={"max_reclaim_count": 0})
    best = await env.create_and_claim(ttl=1000, priority=5)
    await env.create(priority=1)
    env.clock.advance_ms(1000)

    assert await claim_via(env, method) == best.execution_id


async def test_the_scheduler_inspects_only_the_head_of_a_queue_for_another_capability(env: Env) -> None:
    await register(env, "i1", capabilities=["gpu"])
    for _ in range(MANY):
        await env.create(policy=requires("gpu"), priority=9)
    assert await claim_via(env, "scheduler") is None
    env.store.calls.clear()
    assert await claim_via(env, "scheduler") is None
    scans = env.store.calls["scan"]
    for _ in range(MANY):
        await env.create(policy=requires("gpu"), priority=9)
    env.store.calls.clear()

    assert await claim_via(env, "scheduler") is None

    assert env.store.calls["scan"] == scans


async def test_unroutable_executions_are_blocked_first_one_then_in_batches(env: Env) -> None:
    unroutable = [await env.create(policy=requires("gpu")) for _ in range(MANY)]

    assert await claim_via(env, "scheduler") is None
    assert await env.vector(unroutable[0]) == ROUTE_BLOCKED
    for _ in range(MANY // 10):
        assert await claim_via(env, "scheduler") is None

    assert {await env.vector(e) for e in unroutable} == {ROUTE_BLOCKED}


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_failed_block_does_not_stop_other_claims(
    env: Env, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms, _ = await exhausted_budget(env)
    stuck = await env.create(policy=terms, priority=9)
    free = await env.create()
    decide = env.engine.runtime.decide_execution

    async def failing(execution_id: str, *args: Any) -> Any:
        if execution_id == stuck:
            raise errors.StoreUnavailable("away")
        return await decide(execution_id, *args)

    monkeypatch.setattr(env.engine.runtime, "decide_execution", failing)

    assert await claim_via(env, method) == free

    assert await env.vector(stuck) == WAITING
