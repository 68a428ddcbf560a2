"""Fairness under limits: blocked executions are unblocked by priority, then by weighted share, then by age."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.limits import unblocker
from flowfabric.ids import SeededMinter
from flowfabric.model.execution import Execution
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where
from tests.scenarios.checked_store import CheckedStore
from tests.scenarios.env import Env
from tests.scenarios.limits.test_budgets import B, budget, report
from tests.scenarios.limits.test_quotas import Q2, Q, policy
from tests.scenarios.scheduling.test_fairness import tenant
from tests.scenarios.scheduling.test_sweeps import patch_execution

ONE, BOTH = [Q], [Q, Q2]


@pytest.fixture
async def env(store: Store, clock: ManualClock) -> Env:
    """An engine without the checked store: checking hundreds of rows after each write is slow."""
    return Env(Engine(store, minter=SeededMinter(1)), clock)


async def submit(env: Env, key: str, count: int, quotas: list[str], **more: Any) -> list[str]:
    options = {name: more.pop(name) for name in ("priority", "lane") if name in more}
    terms = tenant(key, quota_policy_ids=quotas, **more)
    created: list[str] = []
    for _ in range(count):
        env.clock.advance_ms(1)
        created.append(await env.create(policy=terms, **options))
    return created


async def run_in_order(env: Env, count: int, *engines: Engine, slots: int = 1) -> list[str]:
    """Run `count` executions in claim order; workers request more than the limit admits.

    The engines alternate claims and completions. A claim that finds the limit full blocks executions.
    """
    engines = engines or (env.engine,)
    order: list[str] = []
    running: list[Any] = []
    for number in range(4 * count + 8):
        engine = engines[number % len(engines)]
        claimed = await engine.claim_admitted("default", slots, worker_id="w", worker_instance_id=f"w-{number % 2}")
        running += claimed
        order += [one.execution_id for one in claimed]
        if len(order) >= count:
            break
        if not claimed and running:
            await engine.complete(running.pop(0).handle)
            await engine.outbox.wait_for_deliveries()
    for claim in running:
        await env.engine.complete(claim.handle)
    return order[:count]


def positions(order: list[str], some: list[str]) -> list[int]:
    return [order.index(one) for one in some]


async def blocked(env: Env) -> list[Execution]:
    return await env.engine.runtime.scan(Scan(Execution, (Where("blocked_on", "starts", "quota:"),), limit=1000))


async def fill_quota(env: Env, quotas: list[str]) -> Any:
    """Fill the limit with an execution of another lane."""
    await env.create(policy={"quota_policy_ids": quotas}, lane="elsewhere")
    [claim] = await env.engine.claim_admitted("elsewhere", worker_id="w", worker_instance_id="w-9")
    return claim


@pytest.mark.parametrize("slots", [1, 10])
@pytest.mark.parametrize("caps", [(1,), (1, 1), (3, 1), (1, 3)])
async def test_a_late_tenant_gets_every_second_slot(env: Env, caps: tuple[int, ...], slots: int) -> None:
    for quota, cap in zip(BOTH, caps, strict=False):
        await policy(env, quota, cap=cap)
    quotas = BOTH[: len(caps)]
    many = await submit(env, "a", 200, quotas)
    max_named = await submit(env, "b", 5, quotas)

    order = await run_in_order(env, 14, slots=slots)

    assert positions(order, max_named) == [1, 3, 5, 7, 9]
    ran = [one for one in order if one in many]
    assert ran == many[: len(ran)], "a tenant is served by age"


async def test_weights_hold_under_a_limit(env: Env) -> None:
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    gold = await submit(env, "gold", 20, ONE, fairness_weight=3)
    await submit(env, "silver", 20, ONE)
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    assert len(await blocked(env)) == 40
    await env.complete_and_deliver(claim)

    order = await run_in_order(env, 16)

    assert [sum(one in gold for one in order[start : start + 4]) for start in (0, 4, 8, 12)] == [3, 3, 3, 3]


async def test_priority_precedes_fairness_under_a_limit(env: Env) -> None:
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    low = await submit(env, "a", 5, ONE)
    others = await submit(env, "b", 5, ONE)
    urgent = await submit(env, "a", 3, ONE, priority=7)
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    await env.complete_and_deliver(claim)

    order = await run_in_order(env, 9)

    assert order[:3] == urgent
    assert {len(set(order[3:]) & set(some)) for some in (low, others)} == {3}


async def test_each_of_many_tenants_is_served_under_a_limit(env: Env) -> None:
    await policy(env, cap=1)
    many = await submit(env, "a", 200, ONE)
    others = [(await submit(env, f"tenant-{number}", 1, ONE))[0] for number in range(100)]

    order = await run_in_order(env, 103)

    assert set(others) <= set(order)
    assert len(set(order) & set(many)) == 3


async def test_tenants_beyond_one_page_are_all_reached(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unblocker, "MAX_LISTS", 4)
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    everyone = [(await submit(env, f"tenant-{number}", 1, ONE))[0] for number in range(11)]
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    await env.complete_and_deliver(claim)

    assert set(await run_in_order(env, 11)) == set(everyone)


async def test_a_process_that_never_saw_a_tenant_serves_it_fairly(env: Env) -> None:
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    await submit(env, "a", 150, ONE)
    max_named = await submit(env, "b", 2, ONE)
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    other_engine = Engine(env.engine.store, minter=SeededMinter(9))

    await other_engine.complete(claim.handle)  # it never claimed and never saw the tenants
    await other_engine.outbox.wait_for_deliveries()
    order = await run_in_order(env, 6, other_engine)

    assert positions(order, max_named) == [1, 3]


async def test_two_processes_share_fairly_under_a_limit(env: Env) -> None:
    await policy(env, cap=1)
    await submit(env, "a", 60, ONE)
    max_named = await submit(env, "b", 5, ONE)

    order = await run_in_order(env, 24, env.engine, Engine(env.engine.store, minter=SeededMinter(9)))

    assert positions(order, max_named)[-1] <= 20


async def test_fairness_is_kept_per_lane(env: Env) -> None:
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    await submit(env, "a", 4, ONE)
    lone = await submit(env, "a", 2, ONE, lane="other")
    max_named = await submit(env, "b", 2, ONE)
    for lane in ("default", "other"):
        assert await env.engine.claim_admitted(lane, worker_id="w", worker_instance_id="w") == []

    order = [await _unblocked_by(env, claim)]
    for _ in range(7):
        lane = next(row.lane_id for row in await _ready(env))
        [claim] = await env.engine.claim_admitted(lane, worker_id="w", worker_instance_id="w")
        order.append(await _unblocked_by(env, claim))

    assert positions(order, lone) == [1, 2], "it is older than the next execution of the first lane"
    assert positions(order, max_named) == [3, 5]


async def _ready(env: Env) -> list[Execution]:
    return await env.engine.runtime.scan(Scan(Execution, (Where("line", "set"),), limit=10))


async def _unblocked_by(env: Env, claim: Any) -> str:
    await env.complete_and_deliver(claim)
    [row] = await _ready(env)
    return row.execution_id


async def test_executions_blocked_by_an_earlier_release_take_part(env: Env) -> None:
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    old = await submit(env, "a", 2, ONE)
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    for name in old:  # an earlier release wrote the name of the limit only
        await patch_execution(env, name, blocked_on=f"quota:{Q}")
    max_named = await submit(env, "b", 2, ONE)
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    await env.complete_and_deliver(claim)

    order = await run_in_order(env, 4)

    assert order == [old[0], max_named[0], old[1], max_named[1]]


async def test_executions_blocked_by_a_budget_are_unblocked_when_the_limit_rises(env: Env) -> None:
    await budget(env, tokens=1)
    await report(env, tokens=1)
    names = [await env.create(policy=tenant(key, budget_ids=[B])) for key in "ab" * 40]
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []

    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[9], soft_limits=[0])

    assert {row.execution_id for row in await env.engine.runtime.scan(Scan(Execution, (Where("line", "set"),)))} == set(
        names
    )


@pytest.mark.parametrize("keys", [1, 100])
async def test_a_freed_slot_unblocks_one_execution_in_few_round_trips(
    env: Env, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await policy(env, cap=1)
    claim = await fill_quota(env, ONE)
    for number in range(120):
        await submit(env, f"tenant-{number % keys}", 1, ONE)
    assert await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    monkeypatch.setattr(env.engine.unblocker, "unblock_quota_waiters", _skip_unblock)
    await env.complete_and_deliver(claim)
    checked = CheckedStore(env.engine.store)

    assert await Engine(checked, minter=SeededMinter(9)).unblocker.unblock_quota_waiters(
        NamespacedId(DEFAULT_NAMESPACE, Q)
    )

    assert len(await blocked(env)) == 119
    calls = {verb: checked.calls[verb] for verb in ("scan", "load", "commit")}
    assert calls == {"scan": 2, "load": 2, "commit": 1}


async def _skip_unblock(*_: Any, **__: Any) -> bool:
    return True
