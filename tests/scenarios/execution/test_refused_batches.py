"""What a claim does with much work that budgets, quotas or capabilities keep from running."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.quota import QuotaRequest
from flowfabric.stores.queries import Scan
from tests.scenarios.limits.test_budgets import B2, B, budget, report
from tests.scenarios.limits.test_quotas import Q, check, policy
from tests.scenarios.limits.test_slots import take
from tests.scenarios.play import WAITING, Play
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, QUOTA_BLOCKED, ROADS, ask
from tests.scenarios.scheduling.test_grants import requires
from tests.scenarios.scheduling.test_workers import ROUTE_BLOCKED, register

MANY = 25


async def exhausted_budget(play: Play) -> tuple[dict[str, Any], str]:
    await budget(play, tokens=1)
    await report(play, tokens=1)
    return {"budget_ids": [B]}, BUDGET_BLOCKED


async def full_quota(play: Play) -> tuple[dict[str, Any], str]:
    await policy(play, cap=1)
    await check(play, await play.create(lane="elsewhere"), concurrency_cap=1)
    return {"quota_policy_id": Q}, QUOTA_BLOCKED


async def used_up_rate(play: Play) -> tuple[dict[str, Any], str]:
    await policy(play, rate=1)
    await check(play, await play.create(lane="elsewhere"), rate_limit=1)
    return {"quota_policy_id": Q}, QUOTA_BLOCKED


@pytest.mark.parametrize("limit", [exhausted_budget, full_quota, used_up_rate])
@pytest.mark.parametrize("road", ROADS)
async def test_what_the_same_limit_stops_is_blocked_in_few_trips(play: Play, limit: Any, road: str) -> None:
    terms, blocked = await limit(play)
    stopped = [await play.create(policy=terms, priority=5) for _ in range(MANY)]
    free = await play.create(priority=1)
    play.store.calls.clear()

    assert await ask(play, road) == free

    assert {await play.vector(e) for e in stopped} == {blocked}
    assert play.store.calls["commit"] + play.store.calls["scan"] < MANY
    assert len(await play.engine.runtime.scan(Scan(QuotaRequest))) <= 1, "a refusal leaves no trace"


@pytest.mark.parametrize("road", ROADS)
async def test_what_comes_behind_the_one_that_is_given_out_is_not_looked_at(play: Play, road: str) -> None:
    terms, blocked = await full_quota(play)
    first = await play.create(policy=terms, priority=5)
    free = await play.create(priority=3)
    last = await play.create(policy=terms, priority=1)

    assert await ask(play, road) == free

    assert await play.vector(first) == blocked
    assert await play.vector(last) == WAITING


@pytest.mark.parametrize("road", ROADS)
async def test_work_of_many_keys_that_one_limit_stops_hides_nobody(play: Play, road: str) -> None:
    terms, blocked = await exhausted_budget(play)
    keys = [f"tenant-{number}" for number in range(10)] * 3
    stopped = [await play.create(policy=terms | {"fairness_key": key}, priority=5) for key in keys]
    free = await play.create(policy={"fairness_key": "tenant-0"}, priority=1)

    assert await ask(play, road) == free

    assert {await play.vector(e) for e in stopped} == {blocked}


@pytest.mark.parametrize("road", ROADS)
async def test_one_who_has_a_slot_is_not_held_up_with_those_who_have_none(play: Play, road: str) -> None:
    await policy(play, cap=1)
    again = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 5}}}
    holder = await play.create(policy={"quota_policy_id": Q} | again, priority=3)
    held = await take(play)
    stopped = [await play.create(policy={"quota_policy_id": Q}, priority=5) for _ in range(3)]
    younger = [await play.create(policy={"quota_policy_id": Q}, priority=1) for _ in range(3)]
    await play.engine.fail(held.handle, reason="try again")
    await play.promoted(holder)

    assert await ask(play, road) == holder

    assert {await play.vector(e) for e in stopped} == {QUOTA_BLOCKED}
    assert {await play.vector(e) for e in younger} == {WAITING}


@pytest.mark.parametrize("road", ROADS)
async def test_the_best_that_may_run_is_given_out_however_many_before_it_may_not(play: Play, road: str) -> None:
    terms, _ = await exhausted_budget(play)
    await budget(play, B2, tokens=1)
    for _ in range(MANY):
        await play.create(policy=terms, priority=9)
    best = await play.create(policy={"budget_ids": [B2]}, priority=5)
    await play.create(priority=1)

    assert await ask(play, road) == best


@pytest.mark.parametrize("road", ROADS)
async def test_the_best_takeover_is_given_out_however_many_before_it_are_at_their_cap(play: Play, road: str) -> None:
    for _ in range(MANY):
        await play.claimed(ttl=1000, priority=9, policy={"max_reclaim_count": 0})
    best = await play.claimed(ttl=1000, priority=5)
    await play.create(priority=1)
    play.clock.advance_ms(1000)

    assert await ask(play, road) == best.execution_id


async def test_of_work_for_another_worker_a_scheduler_looks_at_the_first_only(play: Play) -> None:
    await register(play, "i1", capabilities=["gpu"])
    for _ in range(MANY):
        await play.create(policy=requires("gpu"), priority=9)
    assert await ask(play, "scheduler") is None
    play.store.calls.clear()
    assert await ask(play, "scheduler") is None
    looks = play.store.calls["scan"]
    for _ in range(MANY):
        await play.create(policy=requires("gpu"), priority=9)
    play.store.calls.clear()

    assert await ask(play, "scheduler") is None

    assert play.store.calls["scan"] == looks


async def test_work_for_nobody_is_blocked_the_first_of_it_at_once_and_the_rest_by_and_by(play: Play) -> None:
    unroutable = [await play.create(policy=requires("gpu")) for _ in range(MANY)]

    assert await ask(play, "scheduler") is None
    assert await play.vector(unroutable[0]) == ROUTE_BLOCKED
    for _ in range(MANY // 10):
        assert await ask(play, "scheduler") is None

    assert {await play.vector(e) for e in unroutable} == {ROUTE_BLOCKED}


@pytest.mark.parametrize("road", ROADS)
async def test_a_block_that_fails_holds_nobody_up(play: Play, road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terms, _ = await exhausted_budget(play)
    stuck = await play.create(policy=terms, priority=9)
    free = await play.create()
    settled = play.engine.runtime.decide_execution

    async def settle(execution_id: str, *given: Any) -> Any:
        if execution_id == stuck:
            raise errors.StoreUnavailable("away")
        return await settled(execution_id, *given)

    monkeypatch.setattr(play.engine.runtime, "decide_execution", settle)

    assert await ask(play, road) == free

    assert await play.vector(stuck) == WAITING
