"""EX-031, and what else a worker that redeems grants itself may rely on."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.claiming.redeemer import GrantRedeemer
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import Claimed, ClaimGrant, GrantNotFound, NotReclaimable, ReclaimGrant
from tests.scenarios.play import GRANT_MS, LEASE_MS, Play, terminal

KINDS = {"claim": HandleKind.FRESH, "resume": HandleKind.RESUMED, "reclaim": HandleKind.RECLAIMED}


def worker(play: Play, **given: Any) -> GrantRedeemer:
    return play.engine.redeemer(worker_id="wa", worker_instance_id="wa-1", **given)


async def granted(play: Play, kind: str = "claim") -> Any:
    """What the scheduler offers to `wa`: an execution of its own for each kind of grant."""
    if kind == "claim":
        await play.create()
    else:
        held = await play.claimed("wz")
        if kind == "resume":
            await play.delayed(held)
            await play.promoted(held.execution_id)
        else:
            await play.expired(held)
    return await play.next_for("wa")


@pytest.mark.spec("EX-031")
@pytest.mark.parametrize("kind", KINDS)
async def test_at_capacity_worker_keeps_the_grant(play: Play, kind: str) -> None:
    busy = worker(play, lease_ttl_ms=10 * LEASE_MS)
    first = await busy.claim_from_grant(await granted(play))
    assert isinstance(first, Claimed)
    grant = await granted(play, kind)

    async with play.refused(errors.WorkerAtCapacity, pool="tasks", max=1, retryable=True):
        await busy.claim_from_grant(grant)
    play.clock.advance_ms(GRANT_MS - 1)
    await play.engine.complete(first.handle)
    busy.finished(first.handle)

    claimed = await busy.claim_from_grant(grant)
    assert isinstance(claimed, Claimed)
    assert (claimed.execution_id, claimed.handle.kind) == (grant.execution_id, KINDS[kind])
    await play.engine.complete(claimed.handle)
    assert await play.vector(grant.execution_id) == terminal("success")


async def test_a_grant_that_could_not_be_redeemed_takes_no_place(play: Play) -> None:
    one = worker(play)
    gone, late = await granted(play, "reclaim"), await granted(play)
    play.clock.advance_ms(GRANT_MS)
    async with play.refused(errors.ClaimGrantExpired):
        await one.claim_from_grant(late)
    async with play.untouched():
        assert await one.claim_from_grant(gone) == GrantNotFound(gone.execution_id)
    await play.engine.cancel_execution(gone.execution_id)
    assert isinstance(await one.claim_from_grant(gone), NotReclaimable)

    assert isinstance(await one.claim_from_grant(await play.next_for("wa")), Claimed)


async def test_a_task_that_lost_its_lease_keeps_its_place_beside_the_one_that_took_over(play: Play) -> None:
    one = worker(play, lease_ttl_ms=LEASE_MS, max_concurrent_tasks=2)
    lost = await one.claim_from_grant(await granted(play))
    assert isinstance(lost, Claimed)
    await play.expired(lost)
    taken = await one.claim_from_grant(await play.next_for("wa"))
    assert isinstance(taken, Claimed)
    assert taken.execution_id == lost.execution_id
    grant = await granted(play)

    async with play.refused(errors.WorkerAtCapacity):  # both tasks run
        await one.claim_from_grant(grant)
    one.finished(lost.handle)
    assert isinstance(await one.claim_from_grant(grant), Claimed)
    further = await granted(play)
    async with play.refused(errors.WorkerAtCapacity):
        await one.claim_from_grant(further)


async def test_a_resume_grant_goes_on_with_the_attempt_and_takes_a_place(play: Play) -> None:
    one = worker(play, lease_ttl_ms=LEASE_MS)
    handle = await one.claim_from_resume_grant(await granted(play, "resume"))

    assert (handle.kind, handle.fields.attempt_index, handle.fields.lease_epoch) == (HandleKind.RESUMED, 0, 2)
    assert handle.fields.lease_ttl_ms == LEASE_MS
    with pytest.raises(errors.WorkerAtCapacity):
        await one.claim_from_grant(await granted(play))


async def test_a_reclaim_grant_is_good_for_its_own_execution_and_in_time_only(play: Play) -> None:
    one = worker(play, max_concurrent_tasks=2)
    grant = await granted(play, "reclaim")
    assert isinstance(grant, ReclaimGrant)
    e = grant.execution_id
    for execution, lane in ((play.engine.new_execution_id(), "default"), (e, "other")):
        async with play.refused(errors.InvalidInput, "grant: for another execution or lane"):
            await one.claim_from_reclaim_grant(grant, execution_id=execution, lane_id=lane)
    play.clock.advance_ms(GRANT_MS)
    async with play.refused(errors.InvalidInput, "grant: its time is over"):
        await one.claim_from_reclaim_grant(grant, execution_id=e, lane_id="default")

    again = await play.reclaim_grant(e, "wa")
    claimed = await one.claim_from_reclaim_grant(again, execution_id=e, lane_id="default")

    assert isinstance(claimed, Claimed)
    assert (claimed.handle.kind, claimed.attempt_index) == (HandleKind.RECLAIMED, 1)


async def test_what_is_no_grant_or_no_worker_is_refused(play: Play) -> None:
    one, claim = worker(play), await granted(play)
    assert isinstance(claim, ClaimGrant)
    for wrong in (None, "grant", claim):
        async with play.refused(errors.InvalidInput, "grant: not a reclaim grant"):
            await one.claim_from_reclaim_grant(wrong, execution_id=claim.execution_id, lane_id="default")  # type: ignore[arg-type]
    for call in (one.claim_from_grant, one.claim_from_resume_grant):
        async with play.refused(errors.InvalidInput, "grant: not a claim grant"):
            await call(None)  # type: ignore[arg-type]
    for wrongly in ({"max_concurrent_tasks": 0}, {"lease_ttl_ms": 0}):
        with pytest.raises(errors.InvalidInput):
            worker(play, **wrongly)

    assert isinstance(await one.claim_from_grant(claim), Claimed)
