"""SS-033 to SS-040: signals are deduplicated, limited, and observed by the resumed attempt."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.condition import AllConditions, OperatorOnly, Single
from flowfabric.rules.suspension.arguments import FreshWaitpoint, ResumePolicy
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from tests.scenarios.env import RESUMABLE, Env
from tests.scenarios.waits import ANY, APPENDED, BUFFERED, NO_OP, SATISFIED, Waits, count, named

RESUME_DELAY = "runnable/unowned/not_eligible_until_time/waiting_for_resume_delay/none/attempt_interrupted/delayed"


@pytest.mark.spec("SS-033")
async def test_a_repeated_resuming_signal_is_a_duplicate(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    e = claim.execution_id
    first = await waits.send(e, "go", p, idempotency_key="i1")
    assert isinstance(first, Accepted)

    assert await waits.send(e, "go", p, idempotency_key="i1") == DuplicateDelivery(first.signal_id)
    assert await env.vector(e) == RESUMABLE
    async with env.refused(errors.TargetNotSignalable):
        await waits.send(e, "go", p)


@pytest.mark.spec("SS-034")
async def test_signal_deduplication_is_per_waitpoint_and_ends_with_its_ttl(env: Env, waits: Waits) -> None:
    never = AllConditions((Single("x"), Single("y"), OperatorOnly()))
    claim, x = await waits.create_suspended(
        never, FreshWaitpoint(waits.new_id(), "x"), FreshWaitpoint(waits.new_id(), "y")
    )
    e, [y] = claim.execution_id, x.additional_waitpoints

    assert await waits.effect(e, "go", x, idempotency_key="i") == APPENDED
    assert await waits.effect(e, "go", y, idempotency_key="i") == APPENDED
    repeated = "appended_to_waitpoint_duplicate"
    assert await waits.effect(e, "go", x, idempotency_key="i", dedup_ttl_ms=0) == repeated

    assert await waits.effect(e, "go", x, idempotency_key="j", dedup_ttl_ms=1000) == repeated
    env.clock.advance_ms(999)
    assert isinstance(await waits.send(e, "go", x, idempotency_key="j"), DuplicateDelivery)
    env.clock.advance_ms(1)
    assert await waits.effect(e, "go", x, idempotency_key="j") == repeated


@pytest.mark.spec("SS-035")
async def test_signals_beyond_the_limit_are_refused(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(OperatorOnly())
    e = claim.execution_id
    assert await waits.effect(e, "a", p, max_signals_per_execution=2, idempotency_key="i") == NO_OP
    assert isinstance(await waits.send(e, "a", p, max_signals_per_execution=2, idempotency_key="i"), DuplicateDelivery)
    assert await waits.effect(e, "b", p, max_signals_per_execution=2) == NO_OP

    async with env.refused(errors.SignalLimitExceeded):
        await waits.send(e, "c", p, max_signals_per_execution=2)
    assert await waits.effect(e, "d", p, max_signals_per_execution=0) == NO_OP


@pytest.mark.spec("SS-035")
async def test_the_signal_limit_counts_buffered_signals(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("k", 60_000)
    assert await waits.effect(claim.execution_id, "a", pending, max_signals_per_execution=1) == BUFFERED

    async with env.refused(errors.SignalLimitExceeded):
        await waits.send(claim.execution_id, "b", pending, max_signals_per_execution=1)


@pytest.mark.spec("SS-036")
async def test_a_payload_is_stored_exactly_up_to_its_limit(env: Env, waits: Waits) -> None:
    exact = bytes(range(256)) * 256
    claim, p = await waits.create_suspended(count(2))
    e = claim.execution_id

    async with env.refused(errors.PayloadTooLarge):
        await waits.send(e, "go", p, payload=exact + b"x")
    assert await waits.effect(e, "go", p, payload=exact) == APPENDED
    assert await waits.effect(e, "go", p, source="bo", payload=b"") == SATISFIED

    again = await env.grant_and_resume(e)
    first, second = await env.engine.observe_signals(again.handle)
    assert (first.payload, second.payload) == (exact, None)


@pytest.mark.spec("SS-037")
async def test_a_resume_delay_postpones_the_claim(env: Env, waits: Waits) -> None:
    policy = ResumePolicy(resume_delay_ms=5000)
    claim, p = await waits.create_suspended(named("go"), resume_policy=policy)
    e = claim.execution_id

    assert await waits.effect(e, "go", p) == SATISFIED
    assert await env.vector(e) == RESUME_DELAY
    core = await env.core(e)
    assert (core["delay_until"], core["blocking_detail"]) == (
        env.now + 5000,
        "resume delay 5000ms after signal go",
    )
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.resume(e)
    env.clock.advance_ms(4999)
    assert await env.claim_next() is None
    async with env.refused(errors.ExecutionNotEligible):
        await env.grant(e)
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.resume(e)
    env.clock.advance_ms(1)
    await env.promote(e)
    assert await env.vector(e) == RESUMABLE
    assert (await env.grant_and_resume(e)).attempt_id == claim.attempt_id

    other, q = await waits.create_suspended(named("go"), resume_policy=policy)
    assert await waits.effect(other.execution_id, "go", q, resume_delay_ms=0) == SATISFIED
    assert await env.vector(other.execution_id) == RESUMABLE


@pytest.mark.spec("SS-038")
async def test_an_approval_signal_resumes_its_own_lane_and_waitpoint(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(named("approved"))

    async def approve(
        execution: str = claim.execution_id,
        lane: str = "default",
        waitpoint: str = p.waitpoint_id,
        name: str = "approved",
    ) -> Accepted | DuplicateDelivery:
        return await env.engine.deliver_approval_signal(
            execution,
            lane_id=lane,
            waitpoint_id=waitpoint,
            signal_name=name,
            idempotency_suffix="d1",
            signal_dedup_ttl_ms=60_000,
        )

    with pytest.raises(errors.InvalidInput, match="lane_mismatch"):
        await approve(lane="other")
    async with env.refused(errors.NotFound, entity="waitpoint"):
        await approve(waitpoint=waits.new_id())
    async with env.refused(errors.NotFound, entity="execution"):
        await approve(env.engine.new_execution_id())
    first = await approve()
    assert isinstance(first, Accepted)
    assert first.effect == SATISFIED
    assert await approve() == DuplicateDelivery(first.signal_id)
    again = await env.grant_and_resume(claim.execution_id)
    [seen] = await env.engine.observe_signals(again.handle)
    assert (seen.signal_category, seen.source_type, seen.source_identity) == ("approval", "operator", "")

    other, q = await waits.create_suspended(ANY)
    rejected = await approve(other.execution_id, waitpoint=q.waitpoint_id, name="rejected")
    assert isinstance(rejected, Accepted)
    assert rejected.effect == SATISFIED


@pytest.mark.spec("SS-039")
async def test_observe_signals_returns_only_satisfying_signals(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(named("ready"))
    e = claim.execution_id
    for name in ("a", "b"):
        assert await waits.effect(e, name, p) == NO_OP
    assert await env.engine.observe_signals(claim.handle) == []
    options = {"payload": b"X", "signal_category": "decision", "correlation_id": "c-1"}
    assert await waits.effect(e, "ready", p, source="jane", **options) == SATISFIED

    again = await env.grant_and_resume(e)

    [seen] = await env.engine.observe_signals(again.handle)
    assert (seen.signal_name, seen.payload, seen.signal_category) == ("ready", b"X", "decision")
    assert (seen.source_identity, seen.correlation_id, seen.accepted_at) == ("jane", "c-1", env.now)


@pytest.mark.spec("SS-040")
async def test_observe_signals_is_empty_without_a_signal_resume(env: Env, waits: Waits) -> None:
    fresh = await env.create_and_claim()
    assert await env.engine.observe_signals(fresh.handle) == []

    claim, p = await waits.create_suspended(named("a", "b"))
    assert await waits.effect(claim.execution_id, "a", p) == APPENDED
    await env.engine.resume_execution(claim.execution_id, trigger_type="operator")
    by_operator = await env.grant_and_resume(claim.execution_id)
    assert await env.engine.observe_signals(by_operator.handle) == []

    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
    retried = await env.create_and_claim(policy=policy)
    q = await waits.suspend(retried)
    assert await waits.effect(retried.execution_id, "go", q) == SATISFIED
    resumed = await env.grant_and_resume(retried.execution_id)
    assert len(await env.engine.observe_signals(resumed.handle)) == 1
    await env.engine.fail(resumed.handle, reason="flaky")
    await env.promote(retried.execution_id)
    later = await env.grant_and_claim(retried.execution_id)
    assert await env.engine.observe_signals(later.handle) == []


async def test_the_signal_log_keeps_the_newest_and_the_satisfying_signals(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(named("first", "last"))
    e = claim.execution_id
    assert await waits.effect(e, "first", p, signal_maxlen=2) == APPENDED
    for _ in range(4):
        await waits.send(e, "noise", p, signal_maxlen=2)
    kept = [row.seq for row in (await env.dump())["ff_signal"]]
    assert kept == [1, 4, 5]

    assert await waits.effect(e, "last", p, signal_maxlen=2) == SATISFIED

    again = await env.grant_and_resume(e)
    observed = await env.engine.observe_signals(again.handle)
    assert [signal.signal_name for signal in observed] == ["first", "last"]
    assert (await waits.record(e, p.waitpoint_id)).signal_count == 6


async def test_only_signals_still_buffered_count_at_activation(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    for name in ("a", "b"):
        await waits.send(claim.execution_id, name, pending, signal_maxlen=1)

    await waits.suspend_on_pending(claim, pending, named("a", "b", key="kp"))

    assert await waits.effect(claim.execution_id, "a", pending) == SATISFIED


async def test_a_signal_to_an_ended_execution_is_refused(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("k", 60_000)
    await env.engine.complete(claim.handle)

    async with env.refused(errors.TargetNotSignalable):
        await waits.send(claim.execution_id, "go", pending)
