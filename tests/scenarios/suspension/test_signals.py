"""SS-033 to SS-040: a signal is accepted once, within its limits, and reaches the one it resumed."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.condition import AllConditions, OperatorOnly, Single
from flowfabric.rules.suspension.arguments import FreshWaitpoint, ResumePolicy
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from tests.scenarios.play import RESUMABLE, Play
from tests.scenarios.waits import ANY, APPENDED, BUFFERED, NO_OP, SATISFIED, Waits, count, named

RESUME_DELAY = "runnable/unowned/not_eligible_until_time/waiting_for_resume_delay/none/attempt_interrupted/delayed"


@pytest.mark.spec("SS-033")
async def test_retry_of_the_resuming_signal(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    e = held.execution_id
    first = await waits.send(e, "go", p, idempotency_key="i1")
    assert isinstance(first, Accepted)

    assert await waits.send(e, "go", p, idempotency_key="i1") == DuplicateDelivery(first.signal_id)
    assert await play.vector(e) == RESUMABLE
    async with play.refused(errors.TargetNotSignalable):
        await waits.send(e, "go", p)


@pytest.mark.spec("SS-034")
async def test_dedup_scope_and_ttl(play: Play, waits: Waits) -> None:
    never = AllConditions((Single("x"), Single("y"), OperatorOnly()))
    held, x = await waits.suspended(never, FreshWaitpoint(waits.id(), "x"), FreshWaitpoint(waits.id(), "y"))
    e, [y] = held.execution_id, x.additional_waitpoints

    assert await waits.effect(e, "go", x, idempotency_key="i") == APPENDED
    assert await waits.effect(e, "go", y, idempotency_key="i") == APPENDED
    repeated = "appended_to_waitpoint_duplicate"
    assert await waits.effect(e, "go", x, idempotency_key="i", dedup_ttl_ms=0) == repeated

    assert await waits.effect(e, "go", x, idempotency_key="j", dedup_ttl_ms=1000) == repeated
    play.clock.advance_ms(999)
    assert isinstance(await waits.send(e, "go", x, idempotency_key="j"), DuplicateDelivery)
    play.clock.advance_ms(1)
    assert await waits.effect(e, "go", x, idempotency_key="j") == repeated


@pytest.mark.spec("SS-035")
async def test_signal_cap(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(OperatorOnly())
    e = held.execution_id
    assert await waits.effect(e, "a", p, max_signals_per_execution=2, idempotency_key="i") == NO_OP
    assert isinstance(await waits.send(e, "a", p, max_signals_per_execution=2, idempotency_key="i"), DuplicateDelivery)
    assert await waits.effect(e, "b", p, max_signals_per_execution=2) == NO_OP

    async with play.refused(errors.SignalLimitExceeded):
        await waits.send(e, "c", p, max_signals_per_execution=2)
    assert await waits.effect(e, "d", p, max_signals_per_execution=0) == NO_OP


@pytest.mark.spec("SS-035")
async def test_the_cap_counts_what_is_buffered_too(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "k", 60_000)
    assert await waits.effect(held.execution_id, "a", pending, max_signals_per_execution=1) == BUFFERED

    async with play.refused(errors.SignalLimitExceeded):
        await waits.send(held.execution_id, "b", pending, max_signals_per_execution=1)


@pytest.mark.spec("SS-036")
async def test_payload_limit_and_fidelity(play: Play, waits: Waits) -> None:
    exact = bytes(range(256)) * 256
    held, p = await waits.suspended(count(2))
    e = held.execution_id

    async with play.refused(errors.PayloadTooLarge):
        await waits.send(e, "go", p, payload=exact + b"x")
    assert await waits.effect(e, "go", p, payload=exact) == APPENDED
    assert await waits.effect(e, "go", p, source="bo", payload=b"") == SATISFIED

    again = await play.resumed(e)
    first, second = await play.engine.observe_signals(again.handle)
    assert (first.payload, second.payload) == (exact, None)


@pytest.mark.spec("SS-037")
async def test_resume_delay(play: Play, waits: Waits) -> None:
    policy = ResumePolicy(resume_delay_ms=5000)
    held, p = await waits.suspended(named("go"), resume_policy=policy)
    e = held.execution_id

    assert await waits.effect(e, "go", p) == SATISFIED
    assert await play.vector(e) == RESUME_DELAY
    core = await play.core(e)
    assert (core["delay_until"], core["blocking_detail"]) == (
        play.now + 5000,
        "resume delay 5000ms after signal go",
    )
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.resume(e)
    play.clock.advance_ms(4999)
    assert await play.pull() is None
    async with play.refused(errors.ExecutionNotEligible):
        await play.grant(e)
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.resume(e)
    play.clock.advance_ms(1)
    await play.promoted(e)
    assert await play.vector(e) == RESUMABLE
    assert (await play.resumed(e)).attempt_id == held.attempt_id

    other, q = await waits.suspended(named("go"), resume_policy=policy)
    assert await waits.effect(other.execution_id, "go", q, resume_delay_ms=0) == SATISFIED
    assert await play.vector(other.execution_id) == RESUMABLE


@pytest.mark.spec("SS-038")
async def test_approval_signal(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(named("approved"))
    e = held.execution_id

    async def approve(
        execution: str = e, lane: str = "default", waitpoint: str = p.waitpoint_id
    ) -> Accepted | DuplicateDelivery:
        return await play.engine.deliver_approval_signal(
            execution,
            lane_id=lane,
            waitpoint_id=waitpoint,
            signal_name="approved",
            idempotency_suffix="d1",
            signal_dedup_ttl_ms=60_000,
        )

    with pytest.raises(errors.InvalidInput, match="lane_mismatch"):
        await approve(lane="other")
    async with play.refused(errors.NotFound, entity="waitpoint"):
        await approve(waitpoint=waits.id())
    async with play.refused(errors.NotFound, entity="execution"):
        await approve(play.engine.new_execution_id())
    first = await approve()
    assert isinstance(first, Accepted)
    assert first.effect == SATISFIED
    assert await approve() == DuplicateDelivery(first.signal_id)
    again = await play.resumed(e)
    [seen] = await play.engine.observe_signals(again.handle)
    assert (seen.signal_category, seen.source_type, seen.source_identity) == ("approval", "operator", "")

    other, q = await waits.suspended(ANY)
    rejected = await play.engine.deliver_approval_signal(
        other.execution_id,
        lane_id="default",
        waitpoint_id=q.waitpoint_id,
        signal_name="rejected",
        idempotency_suffix="d1",
        signal_dedup_ttl_ms=60_000,
    )
    assert isinstance(rejected, Accepted)
    assert rejected.effect == SATISFIED


@pytest.mark.spec("SS-039")
async def test_observe_only_satisfiers(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(named("ready"))
    e = held.execution_id
    for name in ("a", "b"):
        assert await waits.effect(e, name, p) == NO_OP
    assert await play.engine.observe_signals(held.handle) == []
    given = {"payload": b"X", "signal_category": "decision", "correlation_id": "c-1"}
    assert await waits.effect(e, "ready", p, source="jane", **given) == SATISFIED

    again = await play.resumed(e)

    [seen] = await play.engine.observe_signals(again.handle)
    assert (seen.signal_name, seen.payload, seen.signal_category) == ("ready", b"X", "decision")
    assert (seen.source_identity, seen.correlation_id, seen.accepted_at) == ("jane", "c-1", play.now)


@pytest.mark.spec("SS-040")
async def test_observe_returns_nothing(play: Play, waits: Waits) -> None:
    fresh = await play.claimed()
    assert await play.engine.observe_signals(fresh.handle) == []

    held, p = await waits.suspended(named("a", "b"))
    assert await waits.effect(held.execution_id, "a", p) == APPENDED
    await play.engine.resume_execution(held.execution_id, trigger_type="operator")
    by_operator = await play.resumed(held.execution_id)
    assert await play.engine.observe_signals(by_operator.handle) == []

    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
    retried = await play.claimed(policy=policy)
    q = await waits.suspend(retried)
    assert await waits.effect(retried.execution_id, "go", q) == SATISFIED
    resumed = await play.resumed(retried.execution_id)
    assert len(await play.engine.observe_signals(resumed.handle)) == 1
    await play.engine.fail(resumed.handle, reason="flaky")
    await play.promoted(retried.execution_id)
    later = await play.claimed_again(retried.execution_id)
    assert await play.engine.observe_signals(later.handle) == []


async def test_the_log_keeps_the_newest_and_those_that_count(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(named("first", "last"))
    e = held.execution_id
    assert await waits.effect(e, "first", p, signal_maxlen=2) == APPENDED
    for _ in range(4):
        await waits.send(e, "noise", p, signal_maxlen=2)
    kept = [row.seq for row in (await play.everything())["ff_signal"]]
    assert kept == [1, 4, 5]

    assert await waits.effect(e, "last", p, signal_maxlen=2) == SATISFIED

    again = await play.resumed(e)
    observed = await play.engine.observe_signals(again.handle)
    assert [signal.signal_name for signal in observed] == ["first", "last"]
    assert (await waits.record(e, p.waitpoint_id)).signal_count == 6


async def test_only_what_the_buffer_still_holds_counts_at_the_wait(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    for name in ("a", "b"):
        await waits.send(held.execution_id, name, pending, signal_maxlen=1)

    await waits.on_pending(held, pending, named("a", "b", key="kp"))

    assert await waits.effect(held.execution_id, "a", pending) == SATISFIED


async def test_a_signal_to_an_ended_execution_is_refused(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "k", 60_000)
    await play.engine.complete(held.handle)

    async with play.refused(errors.TargetNotSignalable):
        await waits.send(held.execution_id, "go", pending)
