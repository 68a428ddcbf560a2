"""EX-053 to EX-060: cancel, expire, deadlines and attempt timeouts."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.answers.execution import (
    AlreadyTerminal,
    Cancelled,
    Claimed,
    Completed,
    Expired,
    NotDue,
    Promotion,
)
from flowfabric.model.states import AttemptRecordState
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.execution.fences import Fence
from tests.scenarios.durable_function import DurableFunction
from tests.scenarios.env import ACTIVE, LEASE_MS, Env, fence_of, lease_operations, terminal
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.scheduling.test_grants import MISSING, requires
from tests.scenarios.waits import Waits


async def waiting(env: Env) -> str:
    return await env.create()


async def delayed(env: Env) -> str:
    return await env.create(delay_until=env.now + 5000)


async def blocked(env: Env) -> str:
    e = await env.create()
    await env.engine.block_execution_for_admission(e, reason="waiting_for_quota", detail="full")
    return e


async def route_blocked(env: Env) -> str:
    e = await env.create(policy=requires("gpu"))
    await env.engine.block_route(e)
    return e


async def granted(env: Env) -> str:
    e = await env.create()
    await env.grant(e)
    return e


NEVER_CLAIMED = [waiting, delayed, blocked, route_blocked, granted]


@pytest.mark.spec("EX-053")
@pytest.mark.parametrize("state", NEVER_CLAIMED)
async def test_cancelling_an_execution_that_was_never_claimed_ends_it_without_an_attempt(env: Env, state: Any) -> None:
    e = await state(env)
    env.clock.advance_ms(10)

    assert await env.engine.cancel_execution(e, reason="no longer needed") == Cancelled(e)

    assert await env.vector(e) == terminal("cancelled", "pending_first_attempt")
    core = await env.core(e)
    assert (core["cancellation_reason"], core["cancelled_by"]) == ("no longer needed", "operator_override")
    assert core["completed_at"] == env.now
    assert not {"blocking_detail", "delay_until", "failure_reason"} & set(core)
    assert await env.engine.attempt_history(e) == []
    assert await env.lease_history(e) == []
    assert await env.outcomes() == ["cancelled"]
    assert await env.eligible() == []
    env.clock.advance_ms(5000)
    async with env.unchanged():
        assert await env.claim_next(capabilities={"gpu"}) is None
        assert await env.sweep("delayed_promoter") == 0


@pytest.mark.spec("EX-053")
async def test_cancelling_an_unclaimed_execution_needs_no_fence_from_any_source(env: Env) -> None:
    for source, by in (("worker", "worker"), ("flow_cascade", "flow_cascade"), ("cron 7", "cron 7"), ("", None)):
        e = await env.create()
        assert await env.engine.cancel_execution(e, source=source) == Cancelled(e)
        assert (await env.core(e))["cancelled_by"] == (by or e)
    async with env.refused(errors.NotFound, entity="execution"):
        await env.engine.cancel_execution(MISSING)


@pytest.mark.spec("EX-054")
async def test_an_operator_cancel_revokes_the_lease_of_an_active_execution(env: Env) -> None:
    claim, e = await env.create_claimed()
    env.clock.advance_ms(10)

    assert await env.engine.cancel_execution(e, reason="stop") == Cancelled(e)

    assert await env.vector(e) == terminal("cancelled")
    attempt = await env.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.ENDED_CANCELLED
    assert (attempt.failure_reason, attempt.ended_at) == ("cancelled: stop", env.now)
    assert await env.lease_events(e) == ["acquired", "released cancelled"]
    assert [(event.variant, event.revoked_by) for event in await env.lease_feed(e)][1:] == [("Revoked", "operator")]
    assert await env.outcomes() == ["cancelled"]
    facts: dict[str, Any] = {"terminal_outcome": "cancelled", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    for name, call in lease_operations(env.engine, claim.handle, env.now).items():
        if name != "cancel":
            async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
                await call()


@pytest.mark.spec("EX-054")
async def test_a_cancel_by_the_lease_holder_requires_its_fence(env: Env) -> None:
    engine = env.engine
    claim, e = await env.create_claimed()
    other = "99999999-9999-4999-8999-999999999999"

    for fence in (Fence(), Fence(lease_id=claim.lease_id), Fence(lease_epoch=1, attempt_id=claim.attempt_id)):
        async with env.refused(errors.InvalidInput, "fence_required"):
            await engine.cancel_execution(e, source="lease_holder", fence=fence)
    for fence in (Fence(other, 1), Fence(claim.lease_id, 2), Fence(claim.lease_id, 1, other)):
        async with env.refused(errors.StaleLease):
            await engine.cancel_execution(e, source="lease_holder", fence=fence)
    env.clock.advance_ms(LEASE_MS)
    await engine.mark_lease_expired_if_due(e)
    fence = Fence(claim.lease_id, 1)
    assert await engine.cancel_execution(e, source="lease_holder", fence=fence) == Cancelled(e)
    assert (await env.core(e))["cancelled_by"] == "lease_holder"
    assert [(event.variant, event.revoked_by) for event in await env.lease_feed(e)][-1] == ("Revoked", "backend")


async def test_a_lease_cancelled_by_a_system_timeout_is_revoked_by_the_reconciler(env: Env) -> None:
    claim = await env.create_and_claim()

    await env.engine.cancel_execution(claim.execution_id, reason="too late", source="system_timeout")

    revocations = [(event.variant, event.revoked_by) for event in await env.lease_feed(claim.execution_id)]
    assert revocations[1:] == [("Revoked", "reconciler")]
    assert (await env.core(claim.execution_id))["cancelled_by"] == "system_timeout"


@pytest.mark.spec("EX-055")
async def test_a_cancel_of_a_terminal_execution_is_idempotent_or_refused(env: Env) -> None:
    engine = env.engine
    e = await env.create()
    await engine.cancel_execution(e, reason="a")
    env.clock.advance_ms(10)
    async with env.unchanged():
        assert await engine.cancel_execution(e, reason="b") == Cancelled(e)
        assert await engine.cancel_execution(e, reason="b", source="worker") == Cancelled(e)
    assert (await env.core(e))["cancellation_reason"] == "a"

    claim = await env.create_and_claim()
    await engine.complete(claim.handle)
    facts: dict[str, Any] = {"terminal_outcome": "success", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
        await engine.cancel_execution(claim.execution_id)


@pytest.mark.spec("EX-056")
async def test_a_cancel_during_retry_backoff_ends_the_execution(env: Env) -> None:
    claim, e = await env.create_claimed(policy=retries(1))
    await env.engine.fail(claim.handle, reason="flaky")

    await env.engine.cancel_execution(e)

    assert await env.vector(e) == terminal("cancelled")
    [attempt] = await env.engine.attempt_history(e)
    assert (attempt.attempt_state, attempt.failure_reason) == (AttemptRecordState.ENDED_FAILURE, "flaky")
    assert await env.lease_events(e) == ["acquired", "released failed_retry_scheduled"]
    env.clock.advance_ms(500)
    async with env.unchanged():
        assert await env.engine.promote_delayed(e) is Promotion.NOT_RUNNABLE
        assert await env.engine.promote_delayed(MISSING) is Promotion.NOT_FOUND


@pytest.mark.spec("EX-056")
@pytest.mark.parametrize("end", ["cancel", "expire"])
async def test_an_interrupted_attempt_ends_with_its_execution(env: Env, end: str) -> None:
    claim, e = await env.create_claimed()
    await env.delay(claim)
    env.clock.advance_ms(10)

    if end == "cancel":
        await env.engine.cancel_execution(e, reason="stop")
    else:
        await env.engine.expire_execution(e, "execution_deadline")

    assert await env.vector(e) == terminal("cancelled" if end == "cancel" else "expired")
    [attempt] = await env.engine.attempt_history(e)
    ended = AttemptRecordState.ENDED_CANCELLED if end == "cancel" else AttemptRecordState.ENDED_FAILURE
    reason = "cancelled: stop" if end == "cancel" else "execution_deadline"
    assert (attempt.attempt_state, attempt.failure_reason, attempt.ended_at) == (ended, reason, env.now)
    assert await env.lease_events(e) == ["acquired", "released worker_delay"]


@pytest.mark.spec("EX-057")
async def test_a_repeated_cancel_by_handle_succeeds_for_the_current_holder_only(env: Env) -> None:
    claim, e = await env.create_claimed()
    assert await env.engine.cancel(claim.handle, reason="mine") == Cancelled(e)
    assert (await env.core(e))["cancelled_by"] == "worker"
    async with env.unchanged():
        assert await env.engine.cancel(claim.handle, reason="again") == Cancelled(e)

    old = await env.create_and_claim()
    await env.expire_lease(old)
    new = await env.grant_and_reclaim(old.execution_id)
    async with env.refused(errors.StaleLease):
        await env.engine.cancel(old.handle)
    await env.engine.complete(new.handle)
    async with env.refused(errors.ExecutionNotActive, terminal_outcome="success", lease_epoch=2):
        await env.engine.cancel(old.handle)


@pytest.mark.spec("EX-057")
async def test_a_stale_handle_may_cancel_an_execution_that_is_already_cancelled(env: Env) -> None:
    old = await env.create_and_claim()
    await env.expire_lease(old)
    new = await env.grant_and_reclaim(old.execution_id)
    await env.engine.cancel(new.handle, reason="theirs")

    async with env.unchanged():
        assert await env.engine.cancel(old.handle, reason="mine") == Cancelled(old.execution_id)


@pytest.mark.spec("EX-058")
@pytest.mark.parametrize("lease", ["live", "expired", "revoked"])
async def test_expiring_an_active_execution_ends_it_and_its_attempt(env: Env, lease: str) -> None:
    claim, e = await env.create_claimed(policy=retries(3))
    if lease == "expired":
        await env.expire_lease(claim)
    elif lease == "revoked":
        await env.revoke_lease(claim)
    before = await env.lease_events(e)
    env.clock.advance_ms(10)

    assert await env.engine.expire_execution(e) == Expired(e)

    assert await env.vector(e) == terminal("expired")
    core = await env.core(e)
    assert (core["failure_reason"], core["completed_at"], core["retry_count"]) == ("attempt_timeout", env.now, 0)
    assert not {"lease_expired_at", "lease_revoked_at", "lease_revoke_reason", "lease_expires_at"} & set(core)
    attempt = await env.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.ENDED_FAILURE
    assert (attempt.failure_reason, attempt.ended_at) == ("attempt_timeout", env.now)
    assert await env.lease_events(e) == [*before, "released expired:attempt_timeout"]
    assert (await env.lease_feed(e))[-1].variant == "Expired"
    assert await env.outcomes() == ["expired"]
    async with env.refused(errors.ExecutionNotActive, terminal_outcome="expired", lease_epoch=1):
        await env.engine.complete(claim.handle)
    async with env.unchanged():
        assert await env.engine.expire_execution(e) == AlreadyTerminal(e)
        assert await env.engine.expire_execution(MISSING) == AlreadyTerminal(MISSING)


@pytest.mark.spec("EX-059")
@pytest.mark.parametrize("state", NEVER_CLAIMED)
@pytest.mark.parametrize("named", ["argument", "policy"])
async def test_an_unclaimed_execution_expires_at_its_deadline(env: Env, state: Any, named: str) -> None:
    t = env.now + 10_000
    create = env.create

    async def with_deadline(**options: Any) -> Any:
        if named == "argument":
            return await create(execution_deadline_at=t, **options)
        policy = {"timeout_policy": {"execution_deadline_ms": 10_000}} | options.pop("policy", {})
        return await create(policy=policy, **options)

    env.create = with_deadline  # type: ignore[method-assign]
    e = await state(env)
    assert (await env.core(e))["execution_deadline_at"] == t
    env.clock.now = t - 1
    assert await env.sweep("execution_deadline") == 0
    env.clock.now = t

    assert await env.sweep("execution_deadline") == 1

    assert await env.vector(e) == terminal("expired", "pending_first_attempt")
    core = await env.core(e)
    assert (core["failure_reason"], core["completed_at"]) == ("execution_deadline", t)
    assert await env.lease_history(e) == []
    assert await env.outcomes() == ["expired"]


@pytest.mark.spec("EX-059")
async def test_a_deadline_covers_retries_and_delays(env: Env) -> None:
    t = env.now + 10_000
    claim = await env.create_and_claim(policy=retries(3, type="fixed", delay_ms=60_000), execution_deadline_at=t)
    await env.engine.fail(claim.handle, reason="flaky")
    parked = await env.create_and_claim(execution_deadline_at=t)
    await env.delay(parked, 60_000)
    named = await env.create_and_claim(claim={"execution_deadline_at": t})
    env.clock.now = t

    assert await env.sweep("execution_deadline") == 3

    for one in (claim, parked, named):
        assert await env.vector(one.execution_id) == terminal("expired")
    assert (await env.lease_events(named.execution_id))[-1] == "released expired:execution_deadline"


async def claim_with_timeout(env: Env, where: str = "claim", timeout: int = 1000, **policy: Any) -> Claimed:
    """Create and claim an execution with an attempt timeout."""
    if where == "claim":
        return await env.create_and_claim(policy=policy or None, claim={"attempt_timeout_ms": timeout})
    return await env.create_and_claim(policy=policy | {"timeout_policy": {"attempt_timeout_ms": timeout}})


async def assert_times_out_at(env: Env, e: str, instant: int) -> None:
    """Assert that the sweep expires the execution at the instant and not a millisecond before."""
    assert (await env.core(e))["attempt_timeout_at"] == instant
    env.clock.now = instant - 1
    assert await env.sweep("attempt_timeout") == 0
    env.clock.now = instant
    assert await env.sweep("attempt_timeout") == 1
    assert await env.vector(e) == terminal("expired")
    assert (await env.core(e))["failure_reason"] == "attempt_timeout"


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("where", ["claim", "policy"])
async def test_an_attempt_timeout_expires_the_execution_at_its_instant(env: Env, where: str) -> None:
    claim = await claim_with_timeout(env, where, **retries(3))

    await assert_times_out_at(env, claim.execution_id, env.now + 1000)


@pytest.mark.spec("EX-060")
async def test_a_retry_clears_the_attempt_timeout(env: Env) -> None:
    t = env.now
    claim = await claim_with_timeout(env, "policy", **retries(3, type="fixed", delay_ms=60_000))
    env.clock.now = t + 500
    await env.engine.fail(claim.handle, reason="flaky")
    env.clock.now = t + 1000
    async with env.unchanged():
        assert await env.sweep("attempt_timeout") == 0
    await env.promote(claim.execution_id)
    await env.grant_and_claim(claim.execution_id)

    await assert_times_out_at(env, claim.execution_id, env.now + 1000)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("method", ["named", "stored", "claim", "operator", "longer"])
async def test_a_resumed_attempt_keeps_its_remaining_timeout(env: Env, method: str) -> None:
    t = env.now
    claim = await claim_with_timeout(env)
    e = claim.execution_id
    env.clock.now = t + 400
    await env.delay(claim, 5000)
    assert "attempt_timeout_at" not in await env.core(e)
    env.clock.now = t + 1000
    assert await env.sweep("attempt_timeout") == 0
    await env.promote(e)
    env.clock.advance_ms(77)
    u = env.now

    match method:
        case "named":
            await env.grant_and_resume(e, remaining_attempt_timeout_ms=600)
        case "stored":
            await env.grant_and_resume(e)
        case "claim":
            assert await env.claim_next("wb") is not None
        case "operator":
            await env.engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=30_000)
        case _:
            await env.grant_and_resume(e, remaining_attempt_timeout_ms=2000)

    await assert_times_out_at(env, e, u + (2000 if method == "longer" else 600))


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("wait", ["suspend", "park"])
async def test_an_attempt_resumed_after_a_wait_keeps_its_remaining_timeout(env: Env, waits: Waits, wait: str) -> None:
    t = env.now
    claim = await claim_with_timeout(env)
    e = claim.execution_id
    env.clock.now = t + 400
    if wait == "suspend":
        await waits.suspend(claim, timeout_at=t + 5000, timeout_behavior=TimeoutBehavior.AUTO_RESUME)
    else:
        await DurableFunction(env, waits, e, claim).timer("nap", 4600)
        await env.engine.park(claim.handle, ("nap",))
    await waits.time_out(t + 5000)

    await env.grant_and_resume(e)

    await assert_times_out_at(env, e, t + 5000 + 600)


@pytest.mark.parametrize("reason", ["sibling_quorum_satisfied", "sibling_quorum_impossible"])
@pytest.mark.parametrize("source", ["flow_cascade", "system_timeout", "somebody"])
async def test_the_cancel_source_is_stored_even_with_a_reason_reserved_for_the_engine(
    env: Env, reason: str, source: str
) -> None:
    e = await env.create()

    await env.engine.cancel_execution(e, reason=reason, source=source)

    core = await env.core(e)
    assert (core["cancelled_by"], core["cancellation_reason"]) == (source, reason)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("late_ms", [0, 250])
async def test_a_delay_after_the_attempt_timeout_does_not_reset_it(env: Env, late_ms: int) -> None:
    claim = await claim_with_timeout(env)
    e = claim.execution_id
    env.clock.advance_ms(1000 + late_ms)
    await env.delay(claim, 5000)
    await env.promote(e)

    await env.grant_and_resume(e)

    await assert_times_out_at(env, e, env.now + 1)


@pytest.mark.spec("EX-060")
async def test_a_block_preserves_the_remaining_attempt_timeout(env: Env) -> None:
    t = env.now
    claim = await claim_with_timeout(env)
    e = claim.execution_id
    env.clock.now = t + 400
    await env.engine.wait_children(claim.handle)
    await env.engine.block_execution_for_admission(e, reason="waiting_for_quota")
    await env.engine.unblock_execution(e)

    await env.grant_and_resume(e)

    await assert_times_out_at(env, e, t + 400 + 600)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("where", ["policy", "claim"])
async def test_a_takeover_restarts_the_attempt_timeout(env: Env, where: str) -> None:
    claim = await claim_with_timeout(env, where, timeout=40_000)
    await env.expire_lease(claim)

    again = await env.grant_and_reclaim(claim.execution_id)

    assert again.lease_expires_at == env.now + LEASE_MS
    await assert_times_out_at(env, claim.execution_id, env.now + 40_000)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("finished_by", ["complete", "retry"])
async def test_a_due_timeout_whose_attempt_has_ended_changes_nothing(env: Env, finished_by: str) -> None:
    claim = await claim_with_timeout(env, "policy", **retries(3))
    e = claim.execution_id
    env.clock.advance_ms(1000)

    async def finish() -> None:
        if finished_by == "complete":
            await env.engine.complete(claim.handle)
        else:
            await env.engine.fail(claim.handle, reason="flaky")

    env.store.after_due = finish
    done = await env.engine.sweep_once("attempt_timeout")

    assert (done.processed, done.errors) == (0, 0)
    assert (await env.vector(e)).startswith("terminal/" if finished_by == "complete" else "runnable/")
    async with env.unchanged():
        late = await env.engine.expire_if_due(e, "attempt_timeout")
        assert late == (AlreadyTerminal(e) if finished_by == "complete" else NotDue(e))


@pytest.mark.spec("EX-060")
async def test_a_timeout_of_zero_sets_no_timer(env: Env) -> None:
    for claim in (
        await claim_with_timeout(env, timeout=0),
        await claim_with_timeout(env, "policy", timeout=0),
        await env.create_and_claim(),
    ):
        assert "attempt_timeout_at" not in await env.core(claim.execution_id)
    assert await env.sweep("attempt_timeout", after_ms=10) == 0


async def test_an_attempt_completes_before_its_timeout(env: Env) -> None:
    claim = await claim_with_timeout(env)
    assert await env.vector(claim.execution_id) == ACTIVE
    env.clock.advance_ms(999)

    assert await env.engine.complete(execution_id=claim.execution_id, fence=fence_of(claim)) == Completed(
        claim.execution_id
    )
