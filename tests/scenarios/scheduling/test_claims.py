"""S-072 to S-082: which executions the scheduler grants, and which it blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.load_queue import LoadQueue
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import ClaimGrant
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.limits.budget import Budget, BudgetDimension
from flowfabric.model.limits.quota import QuotaRequest, QuotaSlot
from flowfabric.stores.queries import Read, Scan
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.env import GRANT_MS, WAITING, Env
from tests.scenarios.limits.test_budgets import B2, B, budget, report
from tests.scenarios.limits.test_quotas import Q2, Q, check, policy, root
from tests.scenarios.scheduling.test_grants import requires
from tests.scenarios.scheduling.test_workers import ROUTE_BLOCKED, register

BUDGET_BLOCKED = "runnable/unowned/blocked_by_budget/waiting_for_budget/none/pending_first_attempt/rate_limited"
QUOTA_BLOCKED = "runnable/unowned/blocked_by_quota/waiting_for_quota/none/pending_first_attempt/rate_limited"


async def claim_admitted(env: Env, limit: int = 1, worker: str = "wa", **options: Any) -> list[str]:
    """Claim with admission and return the execution ids."""
    claimed = await env.engine.claim_admitted(
        "default", limit, worker_id=worker, worker_instance_id=f"{worker}-1", **options
    )
    return [one.execution_id for one in claimed]


CLAIM_METHODS = ("scheduler", "claim")


async def claim_via(env: Env, method: str, capabilities: tuple[str, ...] = ()) -> str | None:
    """Return the next execution for a worker, by a grant or by an admitted claim."""
    if method == "scheduler":
        grant = await env.grant_next(capabilities=capabilities)
        return None if grant is None else str(grant.execution_id)
    return next(iter(await claim_admitted(env, capabilities=capabilities)), None)


@pytest.mark.spec("S-072")
async def test_the_scheduler_grants_by_priority_then_age(env: Env) -> None:
    by_priority = {priority: await env.create(priority=priority) for priority in (1, 10, 5)}
    env.clock.advance_ms(1)
    younger = await env.create(priority=5)

    got = []
    for _ in range(4):
        grant = await env.grant_next()
        got.append(grant.execution_id)
        await env.claim(grant.execution_id)

    assert got == [by_priority[10], by_priority[5], younger, by_priority[1]]
    assert await env.grant_next() is None


@pytest.mark.spec("S-073")
async def test_a_granted_head_does_not_hide_the_queue(env: Env) -> None:
    x, y = await env.create(priority=9), await env.create(priority=1)

    assert (await env.grant_next("w1")).execution_id == x
    assert (await env.grant_next("w2")).execution_id == y
    assert await env.grant_next("w3") is None
    env.clock.advance_ms(GRANT_MS)
    assert (await env.grant_next("w3")).execution_id == x


@pytest.mark.spec("S-074")
async def test_concurrent_callers_are_granted_different_executions(env: Env) -> None:
    waiting = {await env.create() for _ in range(2)}

    grants = await asyncio.gather(env.grant_next("w1"), env.grant_next("w2"))

    assert {grant.execution_id for grant in grants} == waiting


@pytest.mark.spec("S-075")
async def test_one_worker_must_have_all_required_capabilities(env: Env) -> None:
    e = await env.create(policy=requires("gpu", "cuda"))
    await env.engine.block_route(e)
    await register(env, "i1", capabilities=["gpu"])
    await register(env, "i2", capabilities=["cuda"])
    await register(env, "i3", namespace="n2", capabilities=["gpu", "cuda"])
    await register(env, "i4", lanes=["mail"], capabilities=["gpu", "cuda"])

    assert await env.sweep("unblock") == 0
    assert await env.vector(e) == ROUTE_BLOCKED

    await register(env, "i5", capabilities=["gpu", "cuda"])
    assert await env.vector(e) == WAITING


@pytest.mark.spec("S-075")
async def test_the_unblock_sweep_finds_executions_that_a_registration_missed(env: Env) -> None:
    e = await env.create(policy=requires("gpu"))
    await register(env, "i1", capabilities=["gpu"])
    await env.engine.block_route(e)

    assert await env.sweep("unblock") == 1
    assert await env.vector(e) == WAITING


@pytest.mark.spec("S-076")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_an_execution_stays_eligible_when_another_worker_is_capable(env: Env, method: str) -> None:
    await register(env, "i1", capabilities=["gpu"])
    e = await env.create(policy=requires("gpu"))

    assert await claim_via(env, method, capabilities=("cpu",)) is None

    assert await env.vector(e) == WAITING


@pytest.mark.spec("S-077")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_budget_is_exhausted_when_usage_equals_the_limit(env: Env, method: str) -> None:
    await budget(env, tokens=10)
    await report(env, tokens=10)
    e = await env.create(policy={"budget_ids": [B]})
    hits = env.engine.metrics.counter_value("ff_budget_hit", dimension="tokens")

    assert await claim_via(env, method) is None

    assert await env.vector(e) == BUDGET_BLOCKED
    assert (await env.row(e)).blocking_text == f"budget {B}: tokens 10/10"
    assert env.engine.metrics.counter_value("ff_budget_hit", dimension="tokens") == hits + 1
    await env.engine.reset_budget(B)
    await env.engine.sweep_once("unblock")
    assert await claim_via(env, method) == e


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_budget_dimension_without_a_limit_blocks_nothing(env: Env, method: str) -> None:
    await budget(env, calls=0, tokens=5)
    await report(env, calls=1000, others=7, tokens=4)
    e = await env.create(policy={"budget_ids": [B]})

    assert await claim_via(env, method) == e


@pytest.mark.spec("S-077")
async def test_an_interrupted_attempt_resumes_after_its_budget_is_reset(env: Env) -> None:
    await budget(env, tokens=10)
    e = await env.create(policy={"budget_ids": [B]})
    assert await claim_via(env, "scheduler") == e
    await env.delay(await env.claim(e), 5)
    await report(env, tokens=10)
    await env.promote(e)

    assert await claim_via(env, "scheduler") is None
    began = BUDGET_BLOCKED.replace("pending_first_attempt", "attempt_interrupted")
    assert await env.vector(e) == began
    await env.engine.reset_budget(B)

    assert await claim_via(env, "scheduler") == e
    assert (await env.resume(e)).attempt_index == 0


@pytest.mark.spec("S-077")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_budget_reset_unblocks_without_a_sweep(env: Env, method: str) -> None:
    await budget(env, tokens=10)
    await report(env, tokens=10)
    waiting = {await env.create(policy={"budget_ids": [B]}) for _ in range(3)}
    assert await claim_via(env, method) is None

    await env.engine.reset_budget(B)

    assert {await claim_via(env, method) for _ in range(3)} == waiting


@pytest.mark.spec("S-078")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_claim_fails_closed_on_an_unreadable_budget(env: Env, method: str) -> None:
    await budget(env, tokens=10)
    e = await env.create(policy={"budget_ids": [B]})
    await write_limit(env, -1)

    with pytest.raises(errors.Corruption):
        await claim_via(env, method)

    assert await env.vector(e) == WAITING
    assert await env.live_grant(e) is None
    await write_limit(env, 10)
    assert await claim_via(env, method) == e


async def write_limit(env: Env, hard: int) -> None:
    """Patch a budget directly."""
    [row] = (await env.engine.runtime.load((Read(Budget, ("default", B)),))).rows[0]
    patch = Patch(BudgetDimension, ("default", B, "tokens"), {"hard_limit": hard})
    change = Change(guards=(Guard(Budget, ("default", B), row.revision),), writes=(patch,), id=1)
    assert await env.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-078")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_claim_fails_closed_when_the_store_is_unavailable(
    env: Env, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.runtime.backoff.StoreBackoff.__init__.__defaults__", (0.0,))
    await policy(env, cap=5)
    e = await env.create(policy={"quota_policy_ids": [Q]})
    await env.claim_next(lane="other")  # the queues are known: only admission is loaded
    flaky = FlakyStore(env.engine.store)
    env.engine.runtime.store = flaky
    env.engine.runtime.load_queue = LoadQueue(flaky)
    flaky.lose("load", Loss.REQUEST, times=50)

    with pytest.raises(errors.StoreUnavailable):
        await claim_via(env, method)

    flaky.heal()
    env.engine.runtime.store = flaky.inner
    env.engine.runtime.load_queue = LoadQueue(flaky.inner)
    assert await env.vector(e) == WAITING
    assert await env.live_grant(e) is None
    assert await claim_via(env, method) == e


@pytest.mark.spec("S-079")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_rate_limited_execution_is_blocked_until_the_window_ends(env: Env, method: str) -> None:
    await policy(env, window=60, rate=1)
    await check(env, env.engine.new_execution_id(), rate_limit=1)
    start = env.now
    e = await env.create(policy={"quota_policy_ids": [Q]})
    hits = env.engine.metrics.counter_value("ff_quota_hit", reason="rate")

    assert await claim_via(env, method) is None

    assert await env.vector(e) == QUOTA_BLOCKED
    assert (await env.row(e)).blocking_text == f"quota {Q}: 1 start per window, all used"
    assert env.engine.metrics.counter_value("ff_quota_hit", reason="rate") == hits + 1
    for later in (1, 30_000, 59_999):
        env.clock.now = start + later
        assert await env.sweep("unblock") == 0
        assert await env.vector(e) == QUOTA_BLOCKED
    env.clock.now = start + 60_000
    assert await env.sweep("unblock") == 1
    assert await claim_via(env, method) == e


@pytest.mark.spec("S-080")
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_capability_is_checked_before_quota(env: Env, method: str) -> None:
    await policy(env, cap=1, rate=5)
    await env.create(policy={"quota_policy_ids": [Q], **requires("gpu")})

    for _ in range(10):
        assert await claim_via(env, method, capabilities=("cpu",)) is None

    assert (await root(env)).active == 0
    assert await env.engine.runtime.scan(Scan(QuotaRequest)) == []
    assert await env.engine.runtime.scan(Scan(QuotaSlot)) == []


@pytest.mark.spec("S-081")
@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        ([""], False),
        (["a,b"], False),
        (["a b"], False),
        (["a\nb"], False),
        ([f"t{n}" for n in range(257)], False),
        (["x" * 4097], False),
        (["x" * 4096], True),
        ([f"t{n}" for n in range(256)], True),
    ],
)
@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_a_claim_validates_its_capabilities(env: Env, tokens: list[str], accepted: bool, method: str) -> None:
    async def requests() -> Any:
        if method == "scheduler":
            return await env.grant_next(capabilities=tokens)
        return await claim_admitted(env, capabilities=tokens)

    if accepted:
        assert not await requests()
    else:
        async with env.refused(errors.InvalidInput):
            await requests()


@pytest.mark.spec("S-082")
async def test_the_scheduler_reaches_every_partition(env: Env) -> None:
    for partition in (0, 31, 32, 137, 255):
        e = await env.create(execution_id=f"{{fp:{partition}}}:0e000000-0000-4000-8000-000000000{partition:03}")
        polls = []
        for _ in range(8):
            env.clock.advance_ms(250)
            polls.append(await env.grant_next())
        assert [grant.execution_id for grant in polls if grant] == [e]
        await env.claim(e)


# -- limits and claims ---------------------------------------------------------------------------------------------


async def test_claim_without_admission_ignores_limits(env: Env) -> None:
    await policy(env, cap=1)
    await budget(env, tokens=1)
    await report(env, tokens=1)
    first = await env.create(policy={"quota_policy_ids": [Q]})
    second = await env.create(policy={"budget_ids": [B]})
    third = await env.create()

    claimed = [await env.claim_next() for _ in range(4)]

    assert [one.execution_id for one in claimed if one] == [first, second, third]
    assert (await root(env)).active == 0


async def test_every_quota_policy_must_admit_and_partial_admissions_are_released(env: Env) -> None:
    await policy(env, cap=5)
    await policy(env, Q2, cap=1)
    blocker = await env.create(policy={"quota_policy_ids": [Q2]})
    e = await env.create(policy={"quota_policy_ids": [Q, Q2]})

    assert await claim_admitted(env, 5) == [blocker]

    assert await env.vector(e) == QUOTA_BLOCKED
    assert (await env.row(e)).blocked_on == f"quota:{Q2}"
    assert ((await root(env)).active, (await root(env, Q2)).active) == (0, 1)


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_an_execution_refused_by_one_policy_uses_no_rate_of_another(env: Env, method: str) -> None:
    await policy(env, rate=1)
    await policy(env, Q2, cap=1)
    await env.create(policy={"quota_policy_ids": [Q2]})
    assert await claim_via(env, method) is not None
    env.clock.advance_ms(1)
    refused = await env.create(policy={"quota_policy_ids": [Q, Q2]})
    assert await claim_via(env, method) is None
    assert (await env.row(refused)).blocked_on == f"quota:{Q2}"

    other = await env.create(policy={"quota_policy_ids": [Q]})

    assert await claim_via(env, method) == other
    assert [
        one.execution_id for one in await env.engine.runtime.scan(Scan(QuotaRequest)) if one.quota_policy_id == Q
    ] == [other]


async def test_many_executions_refused_by_one_policy_use_no_rate_of_another(env: Env) -> None:
    await policy(env, rate=10)
    await policy(env, Q2, cap=1)
    refused_by_second = [await env.create(policy={"quota_policy_ids": [Q, Q2]}) for _ in range(20)]
    others = [await env.create(policy={"quota_policy_ids": [Q]}) for _ in range(9)]

    got = set[str]()
    while more := await claim_admitted(env, 30):
        got.update(more)

    assert len(got.intersection(refused_by_second)) == 1
    assert got.issuperset(others)


async def test_an_execution_refused_to_two_processes_at_once_keeps_no_slot(env: Env) -> None:
    await policy(env, cap=1)
    await policy(env, Q2, cap=1)
    await env.create(policy={"quota_policy_ids": [Q2]})
    assert len(await claim_admitted(env)) == 1
    refused = await env.create(policy={"quota_policy_ids": [Q, Q2]})
    stores = [FlakyStore(env.store), FlakyStore(env.store)]
    gates = [flaky.stop_after("commit") for flaky in stores]
    requests = []
    for seed, (flaky, gate) in enumerate(zip(stores, gates, strict=True), start=2):
        process = Env(Engine(flaky, minter=SeededMinter(seed)), env.clock)
        requests.append(asyncio.ensure_future(claim_admitted(process)))
        async with asyncio.timeout(20):
            await gate.reached()  # the first policy has admitted it, the second is unchecked

    for gate, answer in zip(gates, requests, strict=True):
        gate.release()
        assert await answer == []

    assert (await env.row(refused)).blocked_on == f"quota:{Q2}"
    assert ((await root(env)).active, (await root(env, Q2)).active) == (0, 1)
    other = await env.create(policy={"quota_policy_ids": [Q]})
    assert await claim_admitted(env) == [other]


async def test_a_quota_request_from_before_a_replay_is_kept_when_another_policy_refuses(env: Env) -> None:
    await policy(env, rate=2)
    await policy(env, Q2, cap=1)
    e = await env.create(policy={"quota_policy_ids": [Q, Q2]})
    [claim] = await env.engine.claim_admitted("default", 1, worker_id="wa", worker_instance_id="wa-1")
    began = env.now
    await env.complete_and_deliver(claim)
    await env.engine.replay_execution(e)
    await env.create(priority=1, policy={"quota_policy_ids": [Q2]})
    env.clock.advance_ms(1000)

    assert e not in await claim_admitted(env, 5)

    [kept] = [one for one in await env.engine.runtime.scan(Scan(QuotaRequest)) if one.quota_policy_id == Q]
    assert (kept.execution_id, kept.admitted_at) == (e, began)


@pytest.mark.parametrize("method", CLAIM_METHODS)
async def test_budgets_are_checked_before_quotas_also_behind_a_refusal(env: Env, method: str) -> None:
    await policy(env, cap=1)
    await budget(env, tokens=10)
    await report(env, tokens=10)
    await env.create(policy={"quota_policy_ids": [Q]})
    assert await claim_via(env, method) is not None
    first = await env.create(policy={"quota_policy_ids": [Q]})
    env.clock.advance_ms(1)
    second = await env.create(policy={"quota_policy_ids": [Q], "budget_ids": [B]})

    assert await claim_via(env, method) is None

    assert (await env.vector(first), await env.vector(second)) == (QUOTA_BLOCKED, BUDGET_BLOCKED)


async def test_an_execution_is_blocked_by_each_exhausted_budget_in_turn(env: Env) -> None:
    await budget(env, tokens=10)
    await budget(env, B2, tokens=10)
    await report(env, B2, tokens=10)
    e = await env.create(policy={"budget_ids": [B, B2]})
    assert await claim_admitted(env) == []
    assert (await env.row(e)).blocked_on == f"budget:{B2}"

    await report(env, tokens=10)
    assert await env.sweep("unblock") == 0
    await env.engine.reset_budget(B2)
    assert await claim_admitted(env) == []
    assert (await env.row(e)).blocked_on == f"budget:{B}", "the other budget is exhausted"
    await env.engine.reset_budget(B)
    assert await claim_admitted(env) == [e]


async def test_undefined_and_unlimited_policies_admit_everything_and_write_no_slots(env: Env) -> None:
    await policy(env, Q2)
    executions = [await env.create(policy={"quota_policy_ids": [Q, Q2], "budget_ids": [B]}) for _ in range(3)]

    assert await claim_admitted(env, 5) == executions

    assert await env.engine.runtime.scan(Scan(QuotaSlot)) == []


async def test_a_quota_window_of_zero_is_a_minute(env: Env) -> None:
    await policy(env, window=0, rate=1)
    first = await env.create(policy={"quota_policy_ids": [Q]})
    env.clock.advance_ms(1)
    second = await env.create(policy={"quota_policy_ids": [Q]})
    assert await claim_admitted(env, 5) == [first]

    assert await env.sweep("unblock", after_ms=59_999) == 0
    assert await env.sweep("unblock", after_ms=1) == 1
    assert second in await claim_admitted(env, 5)


async def test_limited_and_unlimited_executions_are_claimed_in_one_order(env: Env) -> None:
    await policy(env, cap=9)
    limited = {priority: await env.create(priority=priority, policy={"quota_policy_ids": [Q]}) for priority in (8, 4)}
    plain = {priority: await env.create(priority=priority) for priority in (9, 6, 2)}

    got = [(await claim_admitted(env))[0] for _ in range(2)] + await claim_admitted(env, 5)

    assert got == [plain[9], limited[8], plain[6], limited[4], plain[2]]


async def test_a_takeover_needs_no_second_admission(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy={"quota_policy_ids": [Q]})
    assert await claim_admitted(env) == [e]
    env.clock.advance_ms(60_001)

    [again] = await env.engine.claim_admitted("default", worker_id="wb", worker_instance_id="wb-1")

    assert (again.execution_id, again.lease_epoch, again.attempt_type) == (e, 2, "reclaim")
    assert (await root(env)).active == 1


async def test_a_route_blocked_limited_execution_is_admitted_for_a_capable_worker(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy={"quota_policy_ids": [Q], **requires("gpu")})
    await env.engine.block_route(e)

    grant = await env.grant_next("wa", capabilities={"gpu"})

    assert isinstance(grant, ClaimGrant)
    assert (grant.execution_id, (await root(env)).active) == (e, 1)
