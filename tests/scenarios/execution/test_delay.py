"""EX-050 to EX-052: delay, and resuming the attempt."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import Completed, Delayed, Moved, Promotion
from flowfabric.model.states import AttemptRecordState, AttemptType, PublicState
from tests.scenarios.env import ACTIVE, DELAYED, RESUMABLE, Env


@pytest.mark.spec("EX-050")
async def test_a_delayed_attempt_resumes_under_a_new_lease(env: Env) -> None:
    deadline = env.now + 90_000
    claim, e = await env.create_claimed(execution_deadline_at=deadline)
    before = await env.core(e)
    env.clock.advance_ms(100)
    t = env.now

    assert await env.engine.delay(claim.handle, delay_until=t + 1000) == Delayed(e, PublicState.DELAYED)

    assert await env.vector(e) == DELAYED
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
    assert await env.core(e) == {name: value for name, value in before.items() if name not in lease} | changed
    parked = await env.attempt(e, 0)
    assert parked.attempt_state is AttemptRecordState.SUSPENDED
    assert (parked.suspended_at, parked.suspension_id, parked.ended_at) == (t, "worker_delay", None)
    assert await env.lease_events(e) == ["acquired", "released worker_delay"]
    assert await env.outcomes() == []

    env.clock.now = t + 999
    assert await env.engine.promote_delayed(e) is Promotion.NOT_YET_DUE
    env.clock.now = t + 1000
    assert await env.sweep("delayed_promoter") == 1
    assert await env.vector(e) == RESUMABLE
    resumed = await env.grant_and_resume(e, "wb")

    assert resumed.handle.kind is HandleKind.RESUMED
    assert (resumed.attempt_id, resumed.attempt_index, resumed.lease_epoch) == (claim.attempt_id, 0, 2)
    assert resumed.attempt_type is AttemptType.INITIAL
    assert await env.vector(e) == ACTIVE
    [attempt] = await env.engine.attempt_history(e)
    assert attempt.attempt_state is AttemptRecordState.STARTED
    assert (attempt.resumed_at, attempt.suspended_at, attempt.suspension_id) == (env.now, None, None)
    assert (attempt.lease_id, attempt.lease_epoch, attempt.worker_id) == (resumed.lease_id, 2, "wb")
    core = await env.core(e)
    assert (core["total_attempt_count"], core["started_at"]) == (1, before["started_at"])
    assert core["execution_deadline_at"] == deadline
    assert "delay_until" not in core
    assert await env.lease_events(e) == ["acquired", "released worker_delay", "acquired claim_resumed"]


@pytest.mark.spec("EX-050")
async def test_a_worker_claim_resumes_a_delayed_attempt(env: Env) -> None:
    claim = await env.create_and_claim(input_payload=b"in")
    await env.delay(claim)
    await env.promote(claim.execution_id)

    resumed = await env.claim_next("wb")

    assert resumed is not None
    assert (resumed.attempt_id, resumed.attempt_index, resumed.lease_epoch) == (claim.attempt_id, 0, 2)
    assert resumed.handle.kind is HandleKind.RESUMED
    assert resumed.payload is not None
    assert resumed.payload.input_payload == b"in"
    assert (await env.lease_events(claim.execution_id))[-1] == "acquired claim_resumed"
    assert (await env.attempt(claim.execution_id, 0)).resumed_at == env.now


@pytest.mark.spec("EX-050")
@pytest.mark.parametrize("early", [1, 0, 10**9])
async def test_a_delay_into_the_past_is_promoted_by_the_next_sweep(env: Env, early: int) -> None:
    claim, e = await env.create_claimed()

    assert await env.engine.delay(claim.handle, delay_until=env.now - early) == Delayed(e)

    assert await env.vector(e) == DELAYED
    assert await env.sweep("delayed_promoter") == 1
    assert await env.vector(e) == RESUMABLE


@pytest.mark.spec("EX-051")
async def test_wait_children_without_dependencies_makes_the_execution_claimable_at_once(env: Env) -> None:
    claim, e = await env.create_claimed()
    env.clock.advance_ms(10)

    assert await env.engine.wait_children(claim.handle) == Moved(e, PublicState.WAITING)

    assert await env.vector(e) == RESUMABLE
    parked = await env.attempt(e, 0)
    assert parked.attempt_state is AttemptRecordState.SUSPENDED
    assert (parked.suspended_at, parked.suspension_id) == (env.now, "waiting_children")
    assert await env.lease_events(e) == ["acquired", "released waiting_children"]
    assert "blocking_detail" not in await env.core(e)
    assert await env.eligible() == [e]
    resumed = await env.grant_and_resume(e)
    assert (resumed.attempt_id, resumed.lease_epoch) == (claim.attempt_id, 2)


@pytest.mark.spec("EX-052")
async def test_a_handle_from_before_a_delay_is_refused(env: Env) -> None:
    claim, e = await env.create_claimed("wa")
    await env.delay(claim)
    facts: dict[str, Any] = {"lifecycle_phase": "runnable", "terminal_outcome": "none", "lease_epoch": 1}
    for verb in (env.engine.complete, env.engine.wait_children, env.engine.renew):
        async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
            await verb(claim.handle)
    async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
        await env.engine.fail(claim.handle, reason="late")

    await env.promote(e)
    resumed = await env.grant_and_resume(e, "wb")

    async with env.refused(errors.StaleLease):
        await env.engine.complete(claim.handle)
    assert await env.engine.complete(resumed.handle) == Completed(e)
