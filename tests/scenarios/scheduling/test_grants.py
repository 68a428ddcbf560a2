"""EX-017 to EX-025: grants, and the claims that redeem them."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import Claimed, ClaimGrant
from flowfabric.model.execution import Grant
from flowfabric.model.states import AttemptRecordState, AttemptType
from tests.scenarios.env import ACTIVE, RESUMABLE, WAITING, Env

L = "33333333-3333-4333-8333-333333333333"
A = "22222222-2222-4222-8222-222222222222"
MISSING = "{fp:86}:11111111-1111-4111-8111-111111111111"


def requires(*capabilities: str) -> dict[str, Any]:
    """Return a policy that requires these capabilities."""
    return {"routing_requirements": {"required_capabilities": list(capabilities)}}


async def resumable(env: Env) -> Claimed:
    """Create an execution whose delay has ended; return the claim from before the delay."""
    claim = await env.create_and_claim()
    await env.delay(claim)
    await env.promote(claim.execution_id)
    return claim


@pytest.mark.spec("EX-017")
async def test_a_grant_changes_no_state_and_excludes_others_until_it_expires(env: Env) -> None:
    e = await env.create()
    before = await env.core(e)

    await env.grant(e, "wa", ttl=5000)

    assert await env.vector(e) == WAITING
    assert await env.core(e) == before
    assert await env.eligible() == [e]
    grant = await env.existing_grant(e)
    assert (grant.worker_id, grant.worker_instance_id, grant.lane_id) == ("wa", "wa-1", "default")
    assert (grant.created_at, grant.expires_at) == (env.now, env.now + 5000)
    env.clock.advance_ms(4999)
    for worker in ("wa", "wb"):
        async with env.refused(errors.GrantAlreadyExists):
            await env.grant(e, worker)
    env.clock.advance_ms(1)
    await env.grant(e, "wb")


@pytest.mark.spec("EX-017")
@pytest.mark.parametrize("kind", ["claim", "reclaim"])
async def test_a_grant_stores_its_annotations(env: Env, kind: str) -> None:
    e = await env.create()
    offer: Any = env.engine.issue_claim_grant
    if kind == "reclaim":
        await env.grant(e)
        await env.expire_lease(await env.claim(e))
        offer = env.engine.issue_reclaim_grant
    notes: dict[str, Any] = {
        "capability_hash": "h1",
        "route_snapshot_json": '{"zone":"b"}',
        "admission_summary": "two of three",
    }
    who = {"lane_id": "default", "worker_id": "wb", "worker_instance_id": "wb-1"}

    await offer(e, **who, worker_capabilities=(), grant_ttl_ms=5000, **notes)

    grant = await env.existing_grant(e)
    t = env.now
    assert grant == Grant(kind, "wb", "wb-1", "default", t, t + 5000, key_id=grant.key_id, **notes)


@pytest.mark.spec("EX-017")
async def test_a_grant_for_an_execution_that_is_not_eligible_is_refused(env: Env) -> None:
    delayed = await env.create(delay_until=env.now + 1000)
    active = (await env.create_and_claim()).execution_id
    terminal = await env.create()
    await env.engine.cancel_execution(terminal)
    waiting = await env.create()

    async with env.refused(errors.NotFound, entity="execution"):
        await env.grant(MISSING)
    for e in (delayed, active, terminal):
        async with env.refused(errors.ExecutionNotEligible):
            await env.grant(e)
    async with env.refused(errors.ExecutionNotInEligibleSet):
        await env.grant(waiting, lane="main")


@pytest.mark.spec("EX-018")
async def test_a_grant_requires_matching_capabilities(env: Env) -> None:
    for offer in ({"gpu", "cuda"}, {"cuda", "gpu", "x"}):
        await env.grant(await env.create(policy=requires("gpu", "cuda")), capabilities=offer)
    await env.grant(await env.create(), capabilities=())

    e = await env.create(policy=requires("gpu", "cuda"))
    for offer, missing in (({"GPU", "cuda"}, "gpu"), (set(), "cuda,gpu")):
        env.clock.advance_ms(10)
        before = await env.core(e)
        with pytest.raises(errors.CapabilityMismatch) as caught:
            await env.grant(e, capabilities=offer)
        assert caught.value.detail == missing
        stamped = {"last_capability_mismatch_at": env.now, "last_mutation_at": env.now}
        assert await env.core(e) == before | stamped
        assert await env.vector(e) == WAITING
        assert await env.live_grant(e) is None
    assert e in await env.eligible()


@pytest.mark.spec("EX-018")
async def test_presented_capabilities_may_be_joined_by_commas(env: Env) -> None:
    e = await env.create(policy={"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}})

    await env.grant(e, capabilities={"gpu,,cuda", " ", ""})

    assert await env.live_grant(e) is not None


@pytest.mark.spec("EX-018")
@pytest.mark.parametrize(
    ("capabilities", "detail"),
    [
        ([f"{number:03}" for number in range(257)], "worker:too_many_tokens"),
        (["x" * 4097], "worker:too_many_bytes"),
        (["x" * 100_000], "worker:too_many_bytes"),
        (["x" * 2048, "y" * 2048], "worker:too_many_bytes"),
    ],
)
async def test_too_many_capabilities_are_refused_after_the_state_checks(
    env: Env, capabilities: list[str], detail: str
) -> None:
    e = await env.create()
    async with env.refused(errors.NotFound):
        await env.grant(MISSING, capabilities=capabilities)
    async with env.refused(errors.ExecutionNotInEligibleSet):
        await env.grant(e, capabilities=capabilities, lane="other")
    async with env.refused(errors.InvalidCapabilities, detail=detail):
        await env.grant(e, capabilities=capabilities)


@pytest.mark.spec("EX-018")
async def test_the_longest_capability_lists_are_accepted(env: Env) -> None:
    for capabilities in ([f"{number:03}" for number in range(256)], ["x" * 4096], ["x" * 2048, "y" * 2047]):
        e = await env.create()
        await env.grant(e, capabilities=capabilities)
        assert await env.live_grant(e) is not None


@pytest.mark.spec("EX-019")
async def test_a_fresh_claim_starts_the_first_attempt(env: Env) -> None:
    e = await env.create()
    await env.grant(e)
    env.clock.advance_ms(100)
    t = env.now

    claimed = await env.claim(e, lease_id=L, attempt_id=A)

    fields = claimed.handle.fields
    assert claimed == Claimed(e, L, 1, 0, A, AttemptType.INITIAL, t + 30_000, claimed.handle)
    assert claimed.handle.kind is HandleKind.FRESH
    assert (fields.execution_id, fields.lease_id, fields.attempt_id) == (e, L, A)
    assert (fields.lease_epoch, fields.attempt_index, fields.lease_ttl_ms) == (1, 0, 30_000)
    assert (fields.lane_id, fields.worker_instance_id) == ("default", "wa-1")
    assert await env.vector(e) == ACTIVE
    core = await env.core(e)
    expected = {
        "started_at": t,
        "total_attempt_count": 1,
        "current_attempt_index": 0,
        "current_attempt_id": A,
        "current_lease_id": L,
        "current_lease_epoch": 1,
        "current_worker_id": "wa",
        "current_worker_instance_id": "wa-1",
        "current_lane": "default",
        "lease_acquired_at": t,
        "lease_last_renewed_at": t,
        "lease_expires_at": t + 30_000,
        "lease_renewal_deadline": t + 20_000,
        "last_transition_at": t,
        "last_mutation_at": t,
    }
    assert {name: core.get(name) for name in expected} == expected
    assert (await env.row(e)).grant is None
    assert await env.eligible() == []
    identity = {"lease_id": L, "lease_epoch": 1, "attempt_id": A, "attempt_index": 0, "worker_id": "wa"}
    assert await env.lease_history(e) == [HistoryEntry("acquired", t, identity | {"worker_instance_id": "wa-1"})]
    [attempt] = await env.engine.attempt_history(e)
    assert (attempt.attempt_id, attempt.attempt_state) == (A, AttemptRecordState.STARTED)
    assert (attempt.started_at, attempt.lease_id, attempt.lease_epoch) == (t, L, 1)
    assert (attempt.worker_id, attempt.worker_instance_id, attempt.ended_at) == ("wa", "wa-1", None)


@pytest.mark.spec("EX-019")
async def test_a_claim_overrides_timeout_and_deadline_and_zero_removes_the_timeout(env: Env) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 700}}
    t = env.now

    async def times(**named: Any) -> tuple[Any, Any]:
        claim = await env.create_and_claim(policy=policy, execution_deadline_at=t + 9000, claim=named)
        core = await env.core(claim.execution_id)
        return core.get("attempt_timeout_at"), core.get("execution_deadline_at")

    assert await times() == (t + 700, t + 9000)
    assert await times(attempt_timeout_ms=50, execution_deadline_at=t + 60) == (t + 50, t + 60)
    assert await times(attempt_timeout_ms=0, execution_deadline_at=0) == (None, t + 9000)


@pytest.mark.spec("EX-020")
async def test_a_grant_is_redeemed_by_its_own_worker_only(env: Env) -> None:
    e = await env.create()
    async with env.refused(errors.InvalidClaimGrant):
        await env.claim(e, "wa")
    await env.grant(e, "wa")
    async with env.refused(errors.InvalidClaimGrant):
        await env.claim(e, "wb")

    claimed = await env.claim(e, "wa", instance="wa-2")

    assert claimed.handle.fields.worker_instance_id == "wa-2"
    assert (await env.core(e))["current_worker_instance_id"] == "wa-2"


@pytest.mark.spec("EX-021")
async def test_an_expired_claim_grant_is_refused(env: Env) -> None:
    e = await env.create()
    await env.grant(e, "wa", ttl=200)
    env.clock.advance_ms(200)

    async with env.refused(errors.ClaimGrantExpired):
        await env.claim(e, "wa")

    assert await env.vector(e) == WAITING
    assert await env.eligible() == [e]
    await env.grant(e, "wb")
    claimed = await env.claim(e, "wb")
    assert (claimed.lease_epoch, claimed.attempt_index) == (1, 0)


@pytest.mark.spec("EX-021")
async def test_a_grant_is_valid_until_its_last_millisecond(env: Env) -> None:
    e = await env.create()
    await env.grant(e, "wa", ttl=200)
    env.clock.advance_ms(199)

    assert (await env.claim(e, "wa")).lease_epoch == 1


@pytest.mark.spec("EX-021")
async def test_a_grant_that_expires_before_the_commit_is_not_redeemed(env: Env) -> None:
    fresh, interrupted = await env.create(), (await resumable(env)).execution_id
    await env.grant(fresh, ttl=200)
    await env.grant(interrupted, ttl=500)

    with pytest.raises(errors.ClaimGrantExpired):
        await env.commit_late(env.claim(fresh), 200)
    with pytest.raises(errors.ClaimGrantExpired):
        await env.commit_late(env.resume(interrupted), 300)

    assert [await env.vector(e) for e in (fresh, interrupted)] == [WAITING, RESUMABLE]
    await env.grant(fresh, ttl=200)
    assert (await env.commit_late(env.claim(fresh), 199)).lease_epoch == 1


@pytest.mark.spec("EX-022")
async def test_a_claim_is_refused_when_the_state_changed_after_the_grant(env: Env) -> None:
    engine = env.engine
    cancelled = await env.create()
    await env.grant(cancelled)
    await engine.cancel_execution(cancelled)
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.claim(cancelled)
    assert await engine.read_execution_state(cancelled) == "cancelled"
    assert await env.live_grant(cancelled) is None

    blocked = await env.create()
    await env.grant(blocked)
    grant = await env.live_grant(blocked)
    await engine.block_execution_for_admission(blocked, reason="waiting_for_budget")
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.claim(blocked)
    assert await env.live_grant(blocked) == grant
    env.clock.advance_ms(4999)
    await engine.unblock_execution(blocked, expected_reason="waiting_for_budget")
    assert (await env.claim(blocked)).lease_epoch == 1


@pytest.mark.spec("EX-023")
async def test_an_active_execution_cannot_be_claimed_or_granted(env: Env) -> None:
    e = (await env.create_and_claim("wa")).execution_id

    async with env.refused(errors.ExecutionNotLeaseable):
        await env.claim(e, "wb")
    async with env.refused(errors.ExecutionNotEligible):
        await env.grant(e, "wb")


@pytest.mark.spec("EX-024")
async def test_a_fresh_claim_refuses_an_interrupted_attempt(env: Env) -> None:
    first = await resumable(env)
    e = first.execution_id
    assert await env.vector(e) == RESUMABLE
    await env.grant(e, "wa")
    async with env.refused(errors.UseClaimResumedExecution):
        await env.claim(e, "wa")
    assert await env.live_grant(e) is not None

    resumed = await env.resume(e, "wa")

    assert resumed.handle.kind is HandleKind.RESUMED
    assert (resumed.attempt_id, resumed.attempt_index, resumed.lease_epoch) == (first.attempt_id, 0, 2)
    assert resumed.attempt_type is AttemptType.INITIAL
    assert resumed.lease_id != first.lease_id
    assert await env.vector(e) == ACTIVE


@pytest.mark.spec("EX-024")
async def test_a_resumed_claim_refuses_an_attempt_that_was_not_interrupted(env: Env) -> None:
    e = await env.create()
    await env.grant(e)

    async with env.refused(errors.NotAResumedExecution):
        await env.resume(e)
    async with env.refused(errors.NotFound, entity="execution"):
        await env.resume(MISSING)


@pytest.mark.spec("EX-025")
async def test_a_resume_grant_is_refused_to_others_and_after_expiry_and_after_use(env: Env) -> None:
    engine = env.engine
    e = (await resumable(env)).execution_id
    await env.grant(e, "wa", ttl=200)
    async with env.refused(errors.InvalidClaimGrant):
        await env.resume(e, "wb")
    env.clock.advance_ms(200)
    before = await env.core(e)
    with pytest.raises(errors.ClaimGrantExpired):
        await env.resume(e, "wa")
    assert await env.core(e) == before | {"last_mutation_at": env.now}
    assert (await env.row(e)).grant is None

    grant = await env.grant_next("wa")
    assert isinstance(grant, ClaimGrant)
    handle = await engine.claim_from_resume_grant(grant, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=30_000)
    assert (handle.kind, handle.fields.lease_epoch) == (HandleKind.RESUMED, 2)
    async with env.refused(errors.ExecutionNotLeaseable):
        await engine.claim_from_resume_grant(grant, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=30_000)
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.resume(e, "wa")
    assert await env.lease_events(e) == ["acquired", "released worker_delay", "acquired claim_resumed"]
