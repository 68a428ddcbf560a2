"""Fairness: weighted shares between tenants, and ageing, under load."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from flowfabric.engine.claiming import ready_queues
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from tests.scenarios.env import LEASE_MS, Env
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.scheduling.test_claims import CLAIM_METHODS, claim_admitted, claim_via
from tests.scenarios.scheduling.test_grants import requires


def tenant(name: str, weight: int = 1, **more: Any) -> dict[str, Any]:
    return {"fairness_key": name, "fairness_weight": weight, **more}


async def next_execution(env: Env, method: str) -> str | None:
    """Return the next execution for a worker by grant, admitted claim, plain claim or namespaced claim."""
    if method == "namespaces":
        return next(iter(await claim_admitted(env, namespaces={"default"})), None)
    if method != "bare":
        return await claim_via(env, method)
    claimed = await env.claim_next()
    return None if claimed is None else claimed.execution_id


@pytest.mark.parametrize("method", [*CLAIM_METHODS, "bare"])
async def test_a_flood_from_one_tenant_does_not_starve_another(env: Env, method: str) -> None:
    await env.create_each([{"policy": tenant("flood")}] * 30)
    env.clock.advance_ms(1000)
    late = set(await env.create_each([{"policy": tenant("late")}] * 5))

    got = [await next_execution(env, method) for _ in range(10)]

    assert late <= set(got)
    assert len(set(got)) == 10


async def test_a_batch_claim_is_shared_by_weight(env: Env) -> None:
    names: dict[str, str] = {}
    for name, weight in (("gold", 3), ("silver", 1)):
        for _ in range(12):
            names[await env.create(policy=tenant(name, weight))] = name

    got = Counter(names[e] for e in await claim_admitted(env, 8))

    assert got == {"gold": 6, "silver": 2}


async def test_fairness_spans_queues_of_other_capabilities_and_limits(env: Env) -> None:
    await policy(env, cap=100)
    names: dict[str, str] = {}
    for n in range(10):
        terms = tenant("a", routing_requirements={"required_capabilities": ["gpu"]} if n % 2 else None)
        names[await env.create(policy=terms)] = "a"
        names[await env.create(policy=tenant("b", quota_policy_ids=[Q]))] = "b"
    env.clock.advance_ms(1000)
    for _ in range(10):
        names[await env.create()] = "none"

    got = [names[e] for _ in range(5) for e in await claim_admitted(env, 3, capabilities={"gpu"})]

    assert Counter(got) == {"a": 5, "b": 5, "none": 5}


async def test_priority_precedes_fairness(env: Env) -> None:
    low = [await env.create(policy=tenant("low")) for _ in range(2)]
    high = {await env.create(priority=5, policy=tenant("high")) for _ in range(4)}

    got = [(await claim_admitted(env))[0] for _ in range(6)]

    assert set(got[:4]) == high
    assert set(got[4:]) == set(low)


async def test_two_engines_share_fairly_without_coordination(env: Env) -> None:
    names: dict[str, str] = {}
    for name in ("flood", "late"):
        for _ in range(40 if name == "flood" else 8):
            names[await env.create(policy=tenant(name))] = name
    workers = [env.engine, Engine(env.engine.store, minter=SeededMinter(9))]

    got: Counter[str] = Counter()
    for n in range(20):
        [claimed] = await workers[n % 2].claim_admitted("default", worker_id="w", worker_instance_id=f"w-{n % 2}")
        got[names[claimed.execution_id]] += 1

    assert got["late"] == 8


@pytest.mark.parametrize("ageing", [True, False])
async def test_ageing_prevents_starvation_of_low_priority(env: Env, ageing: bool) -> None:
    terms = {"ageing": 1000} if ageing else {}
    patient = await env.create(priority=0, policy=terms)

    got = []
    for _ in range(12):  # two urgent executions arrive for each claimed one
        for _ in range(2):
            await env.create(priority=5, policy=terms)
        env.clock.advance_ms(1000)
        got += await claim_admitted(env)

    assert (patient in got) is ageing
    if ageing:
        assert got.index(patient) == 10, "five priority steps equal five seconds of age"


async def test_the_ageing_of_a_lane_applies_to_executions_without_their_own(env: Env) -> None:
    ageing = Engine(env.engine.store, minter=SeededMinter(9), settings=Settings(ageing_ms={"default": 1000}))
    env = Env(ageing, env.clock)
    patient = await env.create(priority=0)
    elsewhere = await env.create(priority=0, lane="other")
    env.clock.advance_ms(6000)
    urgent = await env.create(priority=5)
    own = await env.create(priority=5, policy={"ageing": 1300})
    urgent_elsewhere = await env.create(priority=5, lane="other")

    assert [*await claim_admitted(env), *await claim_admitted(env), *await claim_admitted(env)] == [
        own,
        patient,
        urgent,
    ]
    claimed = [await env.claim_next(lane="other") for _ in range(2)]
    assert [one.execution_id for one in claimed if one] == [urgent_elsewhere, elsewhere]


@pytest.mark.parametrize("method", [*CLAIM_METHODS, "bare", "namespaces"])
@pytest.mark.parametrize("max_queues", [64, 5])
async def test_a_new_tenant_is_served_within_one_round_of_many_tenants(
    env: Env, monkeypatch: pytest.MonkeyPatch, method: str, max_queues: int
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", max_queues)
    for _ in range(4):
        await env.create_each({"policy": tenant(f"t{n:02}")} for n in range(12))
        env.clock.advance_ms(1)
    for _ in range(3):
        await next_execution(env, method)
    late = await env.create(policy=tenant("newcomer"))

    got = [await next_execution(env, method) for _ in range(26)]

    assert late in got[:13], "one round of all tenants"
    assert len(set(got)) == 26


@pytest.mark.parametrize("batch", [1, 4, 15])
@pytest.mark.parametrize("limited", [12, 6, 0])
async def test_weights_hold_with_many_tenants(env: Env, batch: int, limited: int) -> None:
    await policy(env, cap=100)
    tenants = [f"t{n:02}" for n in range(12)]
    limits = [{"quota_policy_ids": [Q]} if n < limited else {} for n in range(12)]
    terms = [tenant(name, 4 if n == 0 else 1, **limits[n]) for n, name in enumerate(tenants)]
    names: dict[str, str] = {}
    for _ in range(12):
        created = await env.create_each({"policy": each} for each in terms)
        names |= zip(created, tenants, strict=True)
        env.clock.advance_ms(1)

    got: Counter[str] = Counter()
    while got.total() < 30:
        got.update(names[e] for e in await claim_admitted(env, min(batch, 30 - got.total())))

    assert got == {"t00": 8} | {f"t{n:02}": 2 for n in range(1, 12)}


@pytest.mark.parametrize("max_compared", [1024, 70])
@pytest.mark.parametrize("each", ["tenant", "capability"])
async def test_every_one_of_very_many_queues_is_reached(
    env: Env, monkeypatch: pytest.MonkeyPatch, max_compared: int, each: str
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_COMPARED_QUEUES", max_compared)
    names = [f"t{n:03}" for n in range(150)]
    terms = {name: tenant(name) if each == "tenant" else requires(name) for name in names}
    waiting = set(await env.create_each({"policy": terms[name]} for name in names))

    got = set()
    while claimed := await claim_admitted(env, 40, capabilities=names):
        got.update(claimed)

    assert got == waiting


@pytest.mark.parametrize("method", ["admitted", "bare", "namespaces"])
@pytest.mark.parametrize("max_compared", [1024, 64])
async def test_a_batch_claim_serves_as_many_tenants_as_its_limit_allows(
    env: Env, monkeypatch: pytest.MonkeyPatch, method: str, max_compared: int
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 10)
    monkeypatch.setattr(ready_queues, "MAX_COMPARED_QUEUES", max_compared)
    tenants = [f"t{n:02}" for n in range(30)]
    names: dict[str, str] = {}
    for _ in range(3):
        created = await env.create_each({"policy": tenant(name)} for name in tenants)
        names |= zip(created, tenants, strict=True)
        env.clock.advance_ms(1)
    urgent = set(await env.create_each([{"priority": 1, "policy": tenant("urgent")}] * 5))

    async def claimed(count: int) -> list[str]:
        if method != "bare":
            return await claim_admitted(env, count, namespaces={"default"} if method == "namespaces" else None)
        got = await env.engine.claim_many(
            "default", count, worker_id="w", worker_instance_id="w", lease_ttl_ms=LEASE_MS
        )
        return [one.execution_id for one in got]

    first, second, rest = await claimed(20), await claimed(20), await claimed(100)

    assert set(first[:5]) == urgent, "priority precedes fairness"
    assert len({names[e] for e in first[5:]}) == 15
    assert len({names[e] for e in [*first[5:], *second[:15]]}) == 30, "each tenant once before any twice"
    assert len({*first, *second, *rest}) == 95
