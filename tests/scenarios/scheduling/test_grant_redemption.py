"""EX-031: redeeming grants within the capacity of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.claiming.redeemer import GrantRedeemer
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import Claimed, ClaimGrant, GrantNotFound, NotReclaimable, ReclaimGrant
from tests.scenarios.env import GRANT_MS, LEASE_MS, Env, terminal

KINDS = {"claim": HandleKind.FRESH, "resume": HandleKind.RESUMED, "reclaim": HandleKind.RECLAIMED}


def redeemer_for(env: Env, **options: Any) -> GrantRedeemer:
    return env.engine.redeemer(worker_id="wa", worker_instance_id="wa-1", **options)


async def grant_of_kind(env: Env, kind: str = "claim") -> Any:
    """Create an execution and return the grant of this kind for `wa`."""
    if kind == "claim":
        await env.create()
    else:
        claim = await env.create_and_claim("wz")
        if kind == "resume":
            await env.delay(claim)
            await env.promote(claim.execution_id)
        else:
            await env.expire_lease(claim)
    return await env.grant_next("wa")


@pytest.mark.spec("EX-031")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_at_capacity_keeps_its_grant(env: Env, kind: str) -> None:
    redeemer = redeemer_for(env, lease_ttl_ms=10 * LEASE_MS)
    first = await redeemer.claim_from_grant(await grant_of_kind(env))
    assert isinstance(first, Claimed)
    grant = await grant_of_kind(env, kind)

    async with env.refused(errors.WorkerAtCapacity, pool="tasks", max=1, retryable=True):
        await redeemer.claim_from_grant(grant)
    env.clock.advance_ms(GRANT_MS - 1)
    await env.engine.complete(first.handle)
    redeemer.finished(first.handle)

    claimed = await redeemer.claim_from_grant(grant)
    assert isinstance(claimed, Claimed)
    assert (claimed.execution_id, claimed.handle.kind) == (grant.execution_id, KINDS[kind])
    await env.engine.complete(claimed.handle)
    assert await env.vector(grant.execution_id) == terminal("success")


async def test_a_grant_that_could_not_be_redeemed_uses_no_capacity(env: Env) -> None:
    redeemer = redeemer_for(env)
    expired_reclaim, expired_claim = await grant_of_kind(env, "reclaim"), await grant_of_kind(env)
    env.clock.advance_ms(GRANT_MS)
    async with env.refused(errors.ClaimGrantExpired):
        await redeemer.claim_from_grant(expired_claim)
    async with env.unchanged():
        assert await redeemer.claim_from_grant(expired_reclaim) == GrantNotFound(expired_reclaim.execution_id)
    await env.engine.cancel_execution(expired_reclaim.execution_id)
    assert isinstance(await redeemer.claim_from_grant(expired_reclaim), NotReclaimable)

    assert isinstance(await redeemer.claim_from_grant(await env.grant_next("wa")), Claimed)


async def test_a_task_that_lost_its_lease_still_uses_capacity_beside_its_takeover(env: Env) -> None:
    redeemer = redeemer_for(env, lease_ttl_ms=LEASE_MS, max_concurrent_tasks=2)
    lost = await redeemer.claim_from_grant(await grant_of_kind(env))
    assert isinstance(lost, Claimed)
    await env.expire_lease(lost)
    takeover = await redeemer.claim_from_grant(await env.grant_next("wa"))
    assert isinstance(takeover, Claimed)
    assert takeover.execution_id == lost.execution_id
    grant = await grant_of_kind(env)

    async with env.refused(errors.WorkerAtCapacity):  # both tasks run
        await redeemer.claim_from_grant(grant)
    redeemer.finished(lost.handle)
    assert isinstance(await redeemer.claim_from_grant(grant), Claimed)
    further = await grant_of_kind(env)
    async with env.refused(errors.WorkerAtCapacity):
        await redeemer.claim_from_grant(further)


async def test_a_resume_grant_continues_the_attempt_and_uses_capacity(env: Env) -> None:
    redeemer = redeemer_for(env, lease_ttl_ms=LEASE_MS)
    handle = await redeemer.claim_from_resume_grant(await grant_of_kind(env, "resume"))

    assert (handle.kind, handle.fields.attempt_index, handle.fields.lease_epoch) == (HandleKind.RESUMED, 0, 2)
    assert handle.fields.lease_ttl_ms == LEASE_MS
    with pytest.raises(errors.WorkerAtCapacity):
        await redeemer.claim_from_grant(await grant_of_kind(env))


async def test_a_reclaim_grant_is_valid_for_its_own_execution_until_it_expires(env: Env) -> None:
    redeemer = redeemer_for(env, max_concurrent_tasks=2)
    grant = await grant_of_kind(env, "reclaim")
    assert isinstance(grant, ReclaimGrant)
    e = grant.execution_id
    for execution, lane in ((env.engine.new_execution_id(), "default"), (e, "other")):
        async with env.refused(errors.InvalidInput, "grant: for another execution or lane"):
            await redeemer.claim_from_reclaim_grant(grant, execution_id=execution, lane_id=lane)
    env.clock.advance_ms(GRANT_MS)
    async with env.refused(errors.InvalidInput, "grant: its time is over"):
        await redeemer.claim_from_reclaim_grant(grant, execution_id=e, lane_id="default")

    again = await env.issue_reclaim_grant(e, "wa")
    claimed = await redeemer.claim_from_reclaim_grant(again, execution_id=e, lane_id="default")

    assert isinstance(claimed, Claimed)
    assert (claimed.handle.kind, claimed.attempt_index) == (HandleKind.RECLAIMED, 1)


async def test_invalid_grants_and_worker_settings_are_refused(env: Env) -> None:
    redeemer, claim = redeemer_for(env), await grant_of_kind(env)
    assert isinstance(claim, ClaimGrant)
    for wrong in (None, "grant", claim):
        async with env.refused(errors.InvalidInput, "grant: not a reclaim grant"):
            await redeemer.claim_from_reclaim_grant(wrong, execution_id=claim.execution_id, lane_id="default")  # type: ignore[arg-type]
    for call in (redeemer.claim_from_grant, redeemer.claim_from_resume_grant):
        async with env.refused(errors.InvalidInput, "grant: not a claim grant"):
            await call(None)  # type: ignore[arg-type]
    for wrongly in ({"max_concurrent_tasks": 0}, {"lease_ttl_ms": 0}):
        with pytest.raises(errors.InvalidInput):
            redeemer_for(env, **wrongly)

    assert isinstance(await redeemer.claim_from_grant(claim), Claimed)
