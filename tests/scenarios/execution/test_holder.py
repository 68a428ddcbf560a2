"""Handles from clients: the server's cancel, its lease check, and grants with their keys."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric import errors
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.answers.execution import Cancelled, Claimed, GrantNotFound
from tests.scenarios.env import Env
from tests.scenarios.scheduling.test_grant_redemption import grant_of_kind, redeemer_for

OTHER = "99999999-9999-4999-8999-999999999999"


def altered_handle(claim: Claimed, **options: object) -> Handle:
    """Return a handle of the claim with these fields replaced."""
    fields = msgspec.structs.replace(claim.handle.fields, **options)
    return Handle.mint(claim.handle.backend, HandleKind.FRESH, fields)


async def create_revoked(env: Env) -> Claimed:
    claim = await env.create_and_claim()
    await env.engine.revoke_lease(claim.execution_id)
    return claim


@pytest.mark.parametrize("forged", [{"lease_id": OTHER}, {"lease_epoch": 0}, {"lease_epoch": 9}, {"attempt_id": OTHER}])
@pytest.mark.parametrize("phase", ["active", "delayed", "expired", "suspended"])
async def test_a_forged_handle_cannot_cancel(env: Env, phase: str, forged: dict[str, object]) -> None:
    claim = await env.create_and_claim()
    if phase == "delayed":
        await env.delay(claim)
    elif phase == "expired":
        await env.expire_lease(claim)
    elif phase == "suspended":
        await env.engine.wait_children(claim.handle)
    before = await env.engine.describe_execution(claim.execution_id)

    with pytest.raises(errors.StaleLease):
        await env.engine.cancel_as_holder(altered_handle(claim, **forged))
    assert await env.engine.describe_execution(claim.execution_id) == before
    cancelled = await env.engine.cancel_as_holder(claim.handle, reason="mine")
    assert await env.engine.cancel_as_holder(claim.handle) == cancelled, "a second cancel succeeds"


async def test_no_handle_cancels_an_execution_that_was_never_claimed(env: Env) -> None:
    claim, e = await env.create_and_claim(), await env.create()

    with pytest.raises(errors.StaleLease):
        await env.engine.cancel_as_holder(altered_handle(claim, execution_id=e))
    assert await env.engine.read_execution_state(e) == "waiting"


async def test_the_holder_of_a_revoked_lease_cannot_cancel(env: Env) -> None:
    claim = await create_revoked(env)

    with pytest.raises(errors.LeaseRevoked):
        await env.engine.cancel_as_holder(claim.handle)


async def test_a_stale_handle_is_refused_on_a_cancelled_execution(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.cancel_execution(claim.execution_id)

    with pytest.raises(errors.ExecutionNotActive):
        await env.engine.cancel_as_holder(altered_handle(claim, lease_epoch=0))
    assert await env.engine.cancel_as_holder(claim.handle) == Cancelled(claim.execution_id)


async def test_require_lease_accepts_only_the_live_current_lease(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.require_lease(claim.handle)
    for wrong in ({"lease_id": OTHER}, {"lease_epoch": 7}, {"attempt_id": OTHER}, {"attempt_index": 3}):
        with pytest.raises(errors.StaleLease):
            await env.engine.require_lease(altered_handle(claim, **wrong))
    await env.expire_lease(claim)
    with pytest.raises(errors.LeaseExpired):
        await env.engine.require_lease(claim.handle)
    with pytest.raises(errors.LeaseRevoked):
        await env.engine.require_lease((await create_revoked(env)).handle)


@pytest.mark.parametrize("kind", ["claim", "resume", "reclaim"])
async def test_a_grant_is_not_redeemed_with_another_key(env: Env, kind: str) -> None:
    grant = await grant_of_kind(env, kind)
    redeemer = redeemer_for(env, max_concurrent_tasks=9)
    other = grant.grant_key[:-1] + ("0" if grant.grant_key[-1] != "0" else "1")
    for key in ("", "pg:nonsense", other):
        forged = msgspec.structs.replace(grant, grant_key=key)
        if kind == "reclaim":
            assert isinstance(await redeemer.claim_from_grant(forged), GrantNotFound)
        else:
            with pytest.raises(errors.InvalidClaimGrant):
                await redeemer.claim_from_grant(forged)

    assert isinstance(await redeemer.claim_from_grant(grant), Claimed)


async def test_a_grant_issued_without_a_key_is_redeemed_without_one(env: Env) -> None:
    e = await env.create()
    await env.grant(e, "wa")

    claimed = await env.engine.claim_execution(e, worker_id="wa", worker_instance_id="wa-1", grant_key="")
    assert claimed.execution_id == e


async def test_a_grant_is_redeemed_after_its_signing_key_was_rotated(env: Env) -> None:
    grant = await grant_of_kind(env)
    await env.engine.rotate_waitpoint_hmac_secret_all("k2", "22" * 32, 0)

    assert isinstance(await redeemer_for(env).claim_from_grant(grant), Claimed)
