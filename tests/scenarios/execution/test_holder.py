"""What a handle from outside may do: the server's cancel, its check of a lease, and grants with their keys."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric import errors
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.answers.execution import Cancelled, Claimed, GrantNotFound
from tests.scenarios.play import Play
from tests.scenarios.scheduling.test_grant_redemption import granted, worker

OTHER = "99999999-9999-4999-8999-999999999999"


def altered(held: Claimed, **given: object) -> Handle:
    """A handle of the same execution that differs in these fields."""
    fields = msgspec.structs.replace(held.handle.fields, **given)
    return Handle.mint(held.handle.backend, HandleKind.FRESH, fields)


async def revoked(play: Play) -> Claimed:
    held = await play.claimed()
    await play.engine.revoke_lease(held.execution_id)
    return held


@pytest.mark.parametrize(
    "made_up", [{"lease_id": OTHER}, {"lease_epoch": 0}, {"lease_epoch": 9}, {"attempt_id": OTHER}]
)
@pytest.mark.parametrize("phase", ["active", "delayed", "expired", "suspended"])
async def test_a_made_up_handle_cancels_nothing(play: Play, phase: str, made_up: dict[str, object]) -> None:
    held = await play.claimed()
    if phase == "delayed":
        await play.delayed(held)
    elif phase == "expired":
        await play.expired(held)
    elif phase == "suspended":
        await play.engine.wait_children(held.handle)
    before = await play.engine.describe_execution(held.execution_id)

    with pytest.raises(errors.StaleLease):
        await play.engine.cancel_as_holder(altered(held, **made_up))
    assert await play.engine.describe_execution(held.execution_id) == before
    cancelled = await play.engine.cancel_as_holder(held.handle, reason="mine")
    assert await play.engine.cancel_as_holder(held.handle) == cancelled, "again is success"


async def test_a_waiting_execution_that_nobody_held_is_cancelled_by_no_handle(play: Play) -> None:
    held, e = await play.claimed(), await play.create()

    with pytest.raises(errors.StaleLease):
        await play.engine.cancel_as_holder(altered(held, execution_id=e))
    assert await play.engine.read_execution_state(e) == "waiting"


async def test_the_holder_of_a_revoked_lease_cancels_nothing(play: Play) -> None:
    held = await revoked(play)

    with pytest.raises(errors.LeaseRevoked):
        await play.engine.cancel_as_holder(held.handle)


async def test_a_stale_handle_does_not_hear_that_an_execution_is_cancelled(play: Play) -> None:
    held = await play.claimed()
    await play.engine.cancel_execution(held.execution_id)

    with pytest.raises(errors.ExecutionNotActive):
        await play.engine.cancel_as_holder(altered(held, lease_epoch=0))
    assert await play.engine.cancel_as_holder(held.handle) == Cancelled(held.execution_id)


async def test_a_lease_is_required_to_be_live_and_current(play: Play) -> None:
    held = await play.claimed()
    await play.engine.require_lease(held.handle)
    for wrong in ({"lease_id": OTHER}, {"lease_epoch": 7}, {"attempt_id": OTHER}, {"attempt_index": 3}):
        with pytest.raises(errors.StaleLease):
            await play.engine.require_lease(altered(held, **wrong))
    await play.expired(held)
    with pytest.raises(errors.LeaseExpired):
        await play.engine.require_lease(held.handle)
    with pytest.raises(errors.LeaseRevoked):
        await play.engine.require_lease((await revoked(play)).handle)


@pytest.mark.parametrize("kind", ["claim", "resume", "reclaim"])
async def test_a_redeemer_is_refused_with_another_key_than_was_issued(play: Play, kind: str) -> None:
    grant = await granted(play, kind)
    redeemer = worker(play, max_concurrent_tasks=9)
    other = grant.grant_key[:-1] + ("0" if grant.grant_key[-1] != "0" else "1")
    for key in ("", "pg:nonsense", other):
        forged = msgspec.structs.replace(grant, grant_key=key)
        if kind == "reclaim":
            assert isinstance(await redeemer.claim_from_grant(forged), GrantNotFound)
        else:
            with pytest.raises(errors.InvalidClaimGrant):
                await redeemer.claim_from_grant(forged)

    assert isinstance(await redeemer.claim_from_grant(grant), Claimed)


async def test_a_grant_that_was_issued_without_a_key_needs_none(play: Play) -> None:
    e = await play.create()
    await play.grant(e, "wa")

    claimed = await play.engine.claim_execution(e, worker_id="wa", worker_instance_id="wa-1", grant_key="")
    assert claimed.execution_id == e


async def test_a_grant_of_a_key_that_was_rotated_away_is_still_redeemed(play: Play) -> None:
    grant = await granted(play)
    await play.engine.rotate_waitpoint_hmac_secret_all("k2", "22" * 32, 0)

    assert isinstance(await worker(play).claim_from_grant(grant), Claimed)
