"""EX-026 to EX-030: claim order, and operator claims."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.claiming import ready_queues
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed, ClaimGrant, OperatorClaim, ReclaimGrant, RetryScheduled
from flowfabric.model.states import AttemptType
from flowfabric.rules.security import grant_key as grant_keys
from flowfabric.rules.security.grant_key import GrantFault
from tests.executions import claim_one
from tests.scenarios.env import ACTIVE, LEASE_MS, WAITING, Env, terminal
from tests.scenarios.scheduling.test_grants import MISSING, requires

RETRY_ONCE = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
ROUTE_BLOCKED = "runnable/unowned/blocked_by_route/waiting_for_capable_worker/none/pending_first_attempt/waiting"


async def after_a_retry(env: Env, a: str) -> None:
    claim = await env.grant_and_claim(a, "wa")
    assert isinstance(await env.engine.fail(claim.handle, reason="flaky"), RetryScheduled)
    await env.promote(a)


async def after_a_delay(env: Env, a: str) -> None:
    await env.grant(a)
    await env.delay(await env.claim(a))
    await env.promote(a)


async def after_a_block(env: Env, a: str) -> None:
    await env.engine.block_execution_for_admission(a, reason="waiting_for_quota")
    await env.engine.unblock_execution(a)


async def after_a_replay(env: Env, a: str) -> None:
    await env.engine.complete((await env.grant_and_claim(a, "wa")).handle)
    await env.engine.replay_execution(a)


async def after_an_expiry(env: Env, a: str) -> None:
    await env.grant(a)
    await env.expire_lease(await env.claim(a))


RETURNS = [after_a_retry, after_a_delay, after_a_block, after_a_replay, after_an_expiry]


@pytest.mark.spec("EX-026")
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("method", ["scheduler", "claim"])
async def test_returning_executions_keep_their_age(env: Env, returns: Any, method: str) -> None:
    a = await env.create(policy=RETRY_ONCE)
    env.clock.advance_ms(10)
    b = await env.create(policy=RETRY_ONCE)

    await returns(env, a)

    if method == "claim":
        claimed = [await env.claim_next("wc"), await env.claim_next("wc")]
    else:
        claimed = [await env.grant_next("wc"), await env.grant_next("wc")]
    assert [one.execution_id for one in claimed if one] == [a, b]


@pytest.mark.spec("EX-027")
async def test_an_unroutable_execution_does_not_block_the_lane(env: Env) -> None:
    a = await env.create(priority=9, policy=requires("gpu"))
    b = await env.create(priority=1)

    grant = await env.grant_next("wa")

    assert isinstance(grant, ClaimGrant)
    assert grant.execution_id == b
    assert await env.grant_next("wb") is None
    assert await env.live_grant(a) is None


@pytest.mark.spec("EX-027")
@pytest.mark.parametrize("method", ["scheduler", "claim"])
async def test_a_capable_worker_claims_a_route_blocked_execution_at_once(env: Env, method: str) -> None:
    a = await env.create(priority=9, policy=requires("gpu"))
    b = await env.create(priority=1)
    await env.engine.block_route(a)
    assert await env.vector(a) == ROUTE_BLOCKED
    core = await env.core(a)
    assert core["blocking_detail"] == "no connected worker satisfies required_capabilities"
    assert await env.eligible() == [b]

    if method == "scheduler":
        grant = await env.grant_next("wa", capabilities={"gpu"})
        assert grant.execution_id == a
        assert await env.vector(a) == WAITING
        claimed = await env.claim(a, "wa")
    else:
        pulled = await env.claim_existing("wa", capabilities={"gpu"})
        claimed = pulled

    assert (claimed.execution_id, claimed.attempt_type) == (a, AttemptType.INITIAL)
    assert await env.vector(a) == ACTIVE
    assert "blocking_detail" not in await env.core(a)


@pytest.mark.spec("EX-027")
async def test_a_grant_unblocks_an_execution_that_was_route_blocked_concurrently(env: Env) -> None:
    a = await env.create(policy=requires("gpu"))
    other_engine = Engine(env.store.store, minter=SeededMinter(2))
    grant, _ = await env.race(env.grant_next("wa", capabilities={"gpu"}), lambda: other_engine.block_route(a))

    assert (grant.execution_id, await env.vector(a)) == (a, WAITING)
    assert await env.live_grant(a) is not None
    assert "blocking_detail" not in await env.core(a)
    assert (await env.claim(a, "wa")).lease_epoch == 1


@pytest.mark.spec("EX-027")
async def test_a_worker_without_the_capability_skips_route_blocked_executions(env: Env) -> None:
    a = await env.create(priority=9, policy=requires("gpu"))
    await env.engine.block_route(a)

    async with env.unchanged():
        assert await env.grant_next("wa", capabilities={"cpu"}) is None
        assert await env.claim_next("wa", capabilities={"cpu"}) is None
    async with env.refused(errors.ExecutionNotEligible):
        await env.grant(a, capabilities={"gpu"})


async def test_takeovers_and_waiting_executions_are_claimed_in_one_order(env: Env) -> None:
    claims = {}
    for priority in (7, 3):
        e = await env.create(priority=priority)
        await env.grant(e)
        claims[priority] = await env.claim(e)
    waiting = {priority: await env.create(priority=priority) for priority in (9, 5, 1)}
    for claim in claims.values():
        await env.engine.revoke_lease(claim.execution_id)

    claimed = [await env.claim_next("wb") for _ in range(6)]

    assert claimed[-1] is None
    order = [waiting[9], claims[7].execution_id, waiting[5], claims[3].execution_id, waiting[1]]
    assert [one.execution_id for one in claimed if one] == order
    assert [one.attempt_type for one in claimed if one] == ["initial", "reclaim", "initial", "reclaim", "initial"]


CLAIM_OPERATIONS = ["claim", "claim_admitted", "claim_for_worker"]


@pytest.mark.parametrize("ttl", [1, 100, LEASE_MS])
@pytest.mark.parametrize("method", CLAIM_OPERATIONS)
async def test_a_lease_that_expires_after_a_scan_is_taken_over_in_queue_order(env: Env, method: str, ttl: int) -> None:
    await env.create(priority=9)
    claim = await claim_one(env.engine, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=ttl)
    await env.create()
    env.clock.advance_ms(ttl)

    answer = await getattr(env.engine, method)("default", worker_id="wb", worker_instance_id="wb-1")

    claimed = answer[0] if isinstance(answer, list) else answer
    assert claimed.execution_id == claim.execution_id


async def test_an_expired_lease_of_another_process_is_taken_over_in_queue_order(env: Env) -> None:
    other = Engine(env.engine.store, minter=SeededMinter(9))
    await env.create(priority=9)
    claim = await claim_one(other, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=100)
    for _ in range(2):
        await env.create()
    assert await env.claim_next("wb") is not None  # a scan while the lease is live
    env.clock.advance_ms(100)

    claimed = await env.claim_next("wb")

    assert claimed is not None
    assert claimed.execution_id == claim.execution_id


async def test_a_lease_shortened_by_a_renewal_is_taken_over_in_queue_order(env: Env) -> None:
    await env.create(priority=9)
    claim = await env.claim_existing("wa")
    await env.create()
    await env.engine.renew(claim.handle, lease_ttl_ms=50)
    env.clock.advance_ms(50)

    claimed = await env.claim_next("wb")

    assert claimed is not None
    assert claimed.execution_id == claim.execution_id


async def test_a_lease_claimed_under_another_lane_name_is_taken_over_in_its_own_lane(env: Env) -> None:
    urgent = await env.create(priority=9)
    for _ in range(2):
        await env.create()
    await env.grant(urgent, "wa")
    assert await env.claim_next("wb") is not None  # a scan before the lease exists
    await env.claim(urgent, "wa", lane_id="elsewhere", ttl=100)
    env.clock.advance_ms(100)

    claimed = await env.claim_next("wb")

    assert claimed is not None
    assert claimed.execution_id == urgent


async def test_claim_many_merges_takeovers_and_waiting_executions(env: Env) -> None:
    low = (await env.create_and_claim(priority=2)).execution_id
    high = (await env.create_and_claim(priority=8)).execution_id
    waiting = {priority: await env.create(priority=priority) for priority in (9, 5, 1)}
    env.clock.advance_ms(LEASE_MS)

    claimed = await env.engine.claim_many(
        "default", 10, worker_id="wb", worker_instance_id="wb-1", lease_ttl_ms=LEASE_MS
    )

    assert [one.execution_id for one in claimed] == [waiting[9], high, waiting[5], low, waiting[1]]


async def test_the_scheduler_merges_takeovers_and_waiting_executions(env: Env) -> None:
    expired = (await env.create_and_claim(priority=5)).execution_id
    first, last = await env.create(priority=9), await env.create(priority=1)
    env.clock.advance_ms(LEASE_MS)

    grants = [await env.grant_next("wb") for _ in range(4)]

    assert [grant.execution_id for grant in grants if grant] == [first, expired, last]
    assert [type(grant) for grant in grants[:3]] == [ClaimGrant, ReclaimGrant, ClaimGrant]
    assert isinstance(await env.reclaim(expired, "wb"), Claimed)


@pytest.mark.parametrize("method", ["scheduler", "claim"])
async def test_a_takeover_at_the_cap_fails_the_execution_and_claims_the_next(env: Env, method: str) -> None:
    capped = [await env.create_and_claim(priority=9, policy={"max_reclaim_count": 0}) for _ in range(12)]
    expired = (await env.create_and_claim(priority=1)).execution_id
    env.clock.advance_ms(LEASE_MS)

    claimed: Any = await env.grant_next("wb") if method == "scheduler" else await env.claim_next("wb")

    assert claimed.execution_id == expired
    for one in capped:
        assert await env.vector(one.execution_id) == terminal("failed")
        assert (await env.core(one.execution_id))["failure_reason"] == "max_reclaims_exceeded"


@pytest.mark.parametrize("method", ["scheduler", "claim"])
@pytest.mark.parametrize(
    "others", [{"lane": "main"}, {"policy": requires("gpu")}, {"priority": 1}], ids=["lane", "capability", "priority"]
)
async def test_the_first_takeover_of_a_lane_is_found_behind_many_expired_leases(
    env: Env, monkeypatch: pytest.MonkeyPatch, method: str, others: dict[str, Any]
) -> None:
    monkeypatch.setattr(ready_queues, "EXPIRED_LEASES_BATCH", 2)
    lane, capabilities = others.get("lane", "default"), {"gpu"}
    for _ in range(5):
        e = await env.create(**others)
        await env.grant(e, "wz", capabilities=capabilities, lane=lane)
        await env.claim(e, "wz")
    env.clock.advance_ms(1)
    best = (await env.create_and_claim("wz", priority=9)).execution_id
    env.clock.advance_ms(LEASE_MS)

    claimed: Any = await env.grant_next("wb") if method == "scheduler" else await env.claim_next("wb")

    assert claimed is not None
    assert claimed.execution_id == best


async def test_a_lease_revoked_by_another_process_is_taken_over_at_once(env: Env) -> None:
    other = Engine(env.engine.store, minter=SeededMinter(9))
    await env.revoke_lease(await env.create_and_claim())
    assert await other.claim("default", worker_id="wb", worker_instance_id="wb-1") is not None
    claim = await env.create_and_claim()
    assert await other.claim("default", worker_id="wb", worker_instance_id="wb-1") is None
    await env.revoke_lease(claim)

    claimed = await claim_one(other, worker_id="wb", worker_instance_id="wb-1")
    assert (claimed.execution_id, claimed.attempt_type) == (claim.execution_id, AttemptType.RECLAIM)


async def test_a_busy_worker_discovers_a_new_queue_soon(env: Env) -> None:
    other = Engine(env.engine.store, minter=SeededMinter(9))
    for _ in range(3):
        await env.create()
    await claim_one(other, worker_id="wb", worker_instance_id="wb-1", capabilities={"gpu"})
    urgent = await env.create(priority=9, policy=requires("gpu"))
    env.clock.advance_ms(2000)
    await other.describe_execution(urgent)  # any call updates the clock estimate of an engine

    claimed = await claim_one(other, worker_id="wb", worker_instance_id="wb-1", capabilities={"gpu"})
    assert claimed.execution_id == urgent


@pytest.mark.parametrize("each", ["capability", "tenant"])
@pytest.mark.parametrize("method", CLAIM_OPERATIONS)
async def test_claims_follow_priority_across_many_queues(
    env: Env, monkeypatch: pytest.MonkeyPatch, method: str, each: str
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 3)
    kind = {n: requires(f"c{n}") if each == "capability" else {"fairness_key": f"t{n}"} for n in range(10)}
    created = {n: await env.create(priority=n, policy=kind[n]) for n in (4, 9, 1, 7, 3, 8, 2, 6, 5, 0)}
    claim, capabilities = getattr(env.engine, method), {f"c{n}" for n in range(10)}

    answers = [
        await claim("default", worker_id="wb", worker_instance_id="wb-1", capabilities=capabilities) for _ in created
    ]

    got = [(answer[0] if isinstance(answer, list) else answer).execution_id for answer in answers]
    assert got == [created[n] for n in reversed(range(10))]


async def test_claim_many_follows_priority_across_many_queues(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 3)
    deep = [await env.create(priority=9, policy={"fairness_key": "t0"}) for _ in range(2)]
    kinds = {n: await env.create(priority=n, policy={"fairness_key": f"t{n}"}) for n in (1, 5, 2, 4, 3)}
    await env.create(priority=0, policy={"fairness_key": "t0"})

    claimed = await env.engine.claim_many("default", 5, worker_id="wb", worker_instance_id="wb-1")

    got = [one.execution_id for one in claimed]
    assert got == [*deep, kinds[5], kinds[4], kinds[3]][: len(got)]
    assert len(got) >= 3


async def test_granted_heads_do_not_hide_the_queue_or_takeovers(env: Env) -> None:
    heads = [await env.create(priority=9) for _ in range(25)]
    for e in heads:
        await env.grant(e, "wx")
    revoked = [await env.create_and_claim(priority=8) for _ in range(25)]
    for claim in revoked:
        await env.revoke_lease(claim)
        await env.issue_reclaim_grant(claim.execution_id, "wx")
    late = await env.create_and_claim(priority=5)
    await env.revoke_lease(late)
    last = await env.create(priority=1)

    grants = [await env.grant_next("wb"), await env.grant_next("wb"), await env.grant_next("wb")]
    assert [grant.execution_id for grant in grants if grant] == [late.execution_id, last]

    env.clock.advance_ms(5000)
    grant = await env.grant_next("wb")
    assert grant.execution_id == heads[0], "an expired grant hides nothing, without a sweep"


async def test_concurrent_schedulers_never_grant_an_execution_twice(env: Env) -> None:
    created = {await env.create() for _ in range(30)}

    grants = await asyncio.gather(*(env.grant_next(f"w{number}") for number in range(35)))

    granted = [grant.execution_id for grant in grants if grant]
    assert len(granted) == 30
    assert set(granted) == created


@pytest.mark.spec("EX-028")
async def test_an_operator_grants_and_claims_a_waiting_execution(env: Env) -> None:
    e = await env.create(policy=requires("gpu"))

    answer = await env.engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=30_000)

    core = await env.core(e)
    assert answer == OperatorClaim(core["current_lease_id"], 1, 0)
    assert await env.vector(e) == ACTIVE
    assert (core["current_worker_id"], core["current_worker_instance_id"]) == ("operator", "operator")
    assert (core["lease_expires_at"], core["lease_renewal_deadline"]) == (env.now + 30_000, env.now + 20_000)
    assert (await env.row(e)).grant is None
    assert await env.lease_events(e) == ["acquired issue_grant_and_claim"]


@pytest.mark.spec("EX-028")
async def test_an_operator_grants_and_claims_an_interrupted_execution(env: Env) -> None:
    claim, e = await env.create_claimed()
    await env.delay(claim)
    await env.promote(e)

    answer = await env.engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=30_000)

    assert (answer.lease_epoch, answer.attempt_index) == (2, 0)
    assert (await env.core(e))["current_attempt_id"] == claim.attempt_id
    assert (await env.lease_events(e))[-1] == "acquired issue_grant_and_claim_resumed"


@pytest.mark.spec("EX-029")
async def test_an_operator_claim_of_an_execution_that_is_not_eligible_is_refused(env: Env) -> None:
    active = (await env.create_and_claim()).execution_id
    granted = await env.create()
    await env.grant(granted, "wa")
    delayed = await env.create(delay_until=env.now + 1000)
    waiting = await env.create()

    async def operator(e: str, lane: str = "default") -> Any:
        return await env.engine.issue_grant_and_claim(e, lane_id=lane, lease_duration_ms=30_000)

    async with env.refused(errors.NotFound, entity="execution"):
        await operator(MISSING)
    async with env.refused(errors.ExecutionNotEligible):
        await operator(active)
    async with env.refused(errors.GrantAlreadyExists):
        await operator(granted)
    async with env.refused(errors.ExecutionNotEligible):
        await operator(delayed)
    async with env.refused(errors.ExecutionNotInEligibleSet):
        await operator(waiting, "main")
    claim = await env.existing_grant(granted)
    assert claim.worker_id == "wa"


@pytest.mark.spec("EX-030")
async def test_a_scheduler_grant_is_signed_and_survives_key_rotation(env: Env) -> None:
    engine, e = env.engine, await env.create()
    grant = await env.grant_next("wa")
    assert (grant.execution_id, grant.partition_key, grant.lane_id) == (e, "{fp:86}", "default")
    assert grant.expires_at_ms == env.now + 5000
    stored = await env.existing_grant(e)
    assert stored.key_id == grant_keys.grant_id(grant.grant_key)

    await engine.rotate_waitpoint_hmac_secret_all("k2", "ffeeddccbbaa99887766554433221100" * 2, 1000)

    assert await engine.verify_grant(e, grant.grant_key) is None
    env.clock.advance_ms(4999)
    assert await engine.verify_grant(e, grant.grant_key) is None
    env.clock.advance_ms(1)
    assert await engine.verify_grant(e, grant.grant_key) is GrantFault.EXPIRED
    env.clock.advance_ms(-5000)
    await env.create()
    assert ":k2:" in (await env.grant_next("wb")).grant_key
    assert isinstance(await env.claim(e, "wa"), Claimed)


@pytest.mark.spec("EX-030")
async def test_an_altered_grant_key_is_not_verified(env: Env) -> None:
    engine, e = env.engine, await env.create()
    key = (await env.grant_next("wa")).grant_key
    end = key.split(":")[4]

    stranger, later = "99999999-9999-4999-8999-999999999999", str(int(end) + 1)
    for old, new in ((e[-36:], stranger), ("{fp:86}", "{fp:85}"), (end, later)):
        assert await engine.verify_grant(e, key.replace(old, new)) is GrantFault.SIGNATURE_MISMATCH
    assert await engine.verify_grant(e, key.replace("pg:", "pg:reclaim:")) is GrantFault.SIGNATURE_MISMATCH
    assert await engine.verify_grant(e, key[:-1] + ("0" if key[-1] != "0" else "1")) is GrantFault.SIGNATURE_MISMATCH
    assert await engine.verify_grant(e, key.replace(":k1:", ":k7:")) is GrantFault.UNKNOWN_KID
    assert await engine.verify_grant(e, "pg:") is GrantFault.MALFORMED
    assert await engine.verify_grant(MISSING, key) is GrantFault.UNKNOWN_GRANT
    await env.claim(e, "wa")
    assert await engine.verify_grant(e, key) is GrantFault.UNKNOWN_GRANT, "a grant is used once"


@pytest.mark.spec("EX-030")
async def test_the_scheduler_grants_nothing_without_a_signing_key(keyless: Engine, clock: ManualClock) -> None:
    env = Env(keyless, clock)
    await env.create()
    expired = await env.create_and_claim()
    await env.expire_lease(expired)

    async with env.refused(errors.Unavailable, op="claim_for_worker"):
        await env.grant_next("wa")
    async with env.refused(errors.Unavailable, op="issue_reclaim_grant"):
        await env.issue_reclaim_grant(expired.execution_id)
