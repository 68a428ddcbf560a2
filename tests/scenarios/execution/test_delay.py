"""EX-050 to EX-052: work put back on the shelf."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import Completed, Delayed, Moved, Promotion
from flowfabric.model.states import AttemptRecordState, AttemptType, PublicState
from tests.scenarios.play import ACTIVE, DELAYED, RESUMABLE, Play


@pytest.mark.spec("EX-050")
async def test_worker_delay_and_resume(play: Play) -> None:
    deadline = play.now + 90_000
    held = await play.claimed(execution_deadline_at=deadline)
    e = held.execution_id
    before = await play.core(e)
    play.clock.advance_ms(100)
    t = play.now

    assert await play.engine.delay(held.handle, delay_until=t + 1000) == Delayed(e, PublicState.DELAYED)

    assert await play.vector(e) == DELAYED
    lease = {
        *("current_lease_id", "current_worker_id", "current_worker_instance_id"),
        *("lease_expires_at", "lease_last_renewed_at", "lease_renewal_deadline"),
    }
    changed = {
        "lifecycle_phase": "runnable",
        "ownership_state": "unowned",
        "eligibility_state": "not_eligible_until_time",
        "blocking_reason": "waiting_for_delay",
        "attempt_state": "attempt_interrupted",
        "public_state": "delayed",
        "blocking_detail": f"delayed until {t + 1000}",
        "delay_until": t + 1000,
        "last_transition_at": t,
        "last_mutation_at": t,
    }
    assert await play.core(e) == {name: value for name, value in before.items() if name not in lease} | changed
    parked = await play.attempt(e, 0)
    assert parked.attempt_state is AttemptRecordState.SUSPENDED
    assert (parked.suspended_at, parked.suspension_id, parked.ended_at) == (t, "worker_delay", None)
    assert await play.told(e) == ["acquired", "released worker_delay"]
    assert await play.outcomes() == []

    play.clock.now = t + 999
    assert await play.engine.promote_delayed(e) is Promotion.NOT_YET_DUE
    play.clock.now = t + 1000
    assert (await play.engine.sweep_once("delayed_promoter")).processed == 1
    assert await play.vector(e) == RESUMABLE
    resumed = await play.resumed(e, "wb")

    assert resumed.handle.kind is HandleKind.RESUMED
    assert (resumed.attempt_id, resumed.attempt_index, resumed.lease_epoch) == (held.attempt_id, 0, 2)
    assert resumed.attempt_type is AttemptType.INITIAL
    assert await play.vector(e) == ACTIVE
    [attempt] = await play.engine.attempt_history(e)
    assert attempt.attempt_state is AttemptRecordState.STARTED
    assert (attempt.resumed_at, attempt.suspended_at, attempt.suspension_id) == (play.now, None, None)
    assert (attempt.lease_id, attempt.lease_epoch, attempt.worker_id) == (resumed.lease_id, 2, "wb")
    core = await play.core(e)
    assert (core["total_attempt_count"], core["started_at"]) == (1, before["started_at"])
    assert core["execution_deadline_at"] == deadline
    assert "delay_until" not in core
    assert await play.told(e) == ["acquired", "released worker_delay", "acquired claim_resumed"]


@pytest.mark.spec("EX-050")
async def test_a_pull_resumes_like_a_grant(play: Play) -> None:
    held = await play.claimed(input_payload=b"in")
    await play.delayed(held)
    await play.promoted(held.execution_id)

    resumed = await play.pull("wb")

    assert resumed is not None
    assert (resumed.attempt_id, resumed.attempt_index, resumed.lease_epoch) == (held.attempt_id, 0, 2)
    assert resumed.handle.kind is HandleKind.RESUMED
    assert resumed.payload is not None
    assert resumed.payload.input_payload == b"in"
    assert (await play.told(held.execution_id))[-1] == "acquired claim_resumed"
    assert (await play.attempt(held.execution_id, 0)).resumed_at == play.now


@pytest.mark.spec("EX-050")
@pytest.mark.parametrize("early", [1, 0, 10**9])
async def test_a_delay_into_the_past_is_over_at_the_next_pass(play: Play, early: int) -> None:
    held = await play.claimed()
    e = held.execution_id

    assert await play.engine.delay(held.handle, delay_until=play.now - early) == Delayed(e)

    assert await play.vector(e) == DELAYED
    assert (await play.engine.sweep_once("delayed_promoter")).processed == 1
    assert await play.vector(e) == RESUMABLE


@pytest.mark.spec("EX-051")
async def test_with_no_dependency_the_work_is_claimable_at_once(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    play.clock.advance_ms(10)

    assert await play.engine.wait_children(held.handle) == Moved(e, PublicState.WAITING)

    assert await play.vector(e) == RESUMABLE
    parked = await play.attempt(e, 0)
    assert parked.attempt_state is AttemptRecordState.SUSPENDED
    assert (parked.suspended_at, parked.suspension_id) == (play.now, "waiting_children")
    assert await play.told(e) == ["acquired", "released waiting_children"]
    assert "blocking_detail" not in await play.core(e)
    assert await play.eligible() == [e]
    resumed = await play.resumed(e)
    assert (resumed.attempt_id, resumed.lease_epoch) == (held.attempt_id, 2)


@pytest.mark.spec("EX-052")
async def test_old_handle_after_delay(play: Play) -> None:
    held = await play.claimed("wa")
    e = held.execution_id
    await play.delayed(held)
    facts: dict[str, Any] = {"lifecycle_phase": "runnable", "terminal_outcome": "none", "lease_epoch": 1}
    for verb in (play.engine.complete, play.engine.wait_children, play.engine.renew):
        async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
            await verb(held.handle)
    async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
        await play.engine.fail(held.handle, reason="late")

    await play.promoted(e)
    resumed = await play.resumed(e, "wb")

    async with play.refused(errors.StaleLease):
        await play.engine.complete(held.handle)
    assert await play.engine.complete(resumed.handle) == Completed(e)
