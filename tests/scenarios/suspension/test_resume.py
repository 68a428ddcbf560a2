"""SS-041 to SS-046: operator resumes, timeouts, and the resumed claim."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.pages import SuspendedEntry
from flowfabric.handles import HandleKind
from flowfabric.model.condition import AllConditions, Single, TimeoutOnly
from flowfabric.model.states import AttemptRecordState, PublicState
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.rules.suspension.resume import Resumed, SuspensionExpiry
from tests.scenarios.env import ACTIVE, DEFAULT_PARTITION, RESUMABLE, Env, terminal
from tests.scenarios.pages import all_pages
from tests.scenarios.waits import NO_TIMEOUT, SATISFIED, SUSPENDED, Waits, named

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}


@pytest.mark.spec("SS-041")
async def test_an_operator_resume_closes_the_suspension_and_its_waitpoints(env: Env, waits: Waits) -> None:
    both = AllConditions((Single("a"), Single("b")))
    claim, a = await waits.create_suspended(
        both, FreshWaitpoint(waits.new_id(), "a"), FreshWaitpoint(waits.new_id(), "b")
    )
    e, [b] = claim.execution_id, a.additional_waitpoints

    assert await env.engine.resume_execution(e, trigger_type="operator") == Resumed(PublicState.WAITING)

    assert await env.vector(e) == RESUMABLE
    root = await env.suspension(e)
    assert (root.close_reason, root.satisfied_at, root.closer_signal_id) == ("resumed", env.now, None)
    for one in (a, b):
        record = await waits.record(e, one.waitpoint_id)
        assert (record.close_reason, record.satisfied_at, record.closed_at) == ("resumed", env.now, env.now)
        async with env.refused(errors.TargetNotSignalable):
            await waits.send(e, "go", one)
    async with env.refused(errors.ExecutionNotSuspended):
        await env.engine.resume_execution(e)
    async with env.refused(errors.NotFound, entity="execution"):
        await env.engine.resume_execution(env.engine.new_execution_id())
    other, _ = await waits.create_suspended()
    instant, _ = await waits.create_suspended()
    assert await env.engine.resume_execution(instant.execution_id, resume_delay_ms=1) == Resumed(PublicState.DELAYED)
    delayed = await env.engine.resume_execution(other.execution_id, resume_delay_ms=1000)
    assert delayed == Resumed(PublicState.DELAYED)
    assert (await env.core(other.execution_id))["blocking_detail"] == "resume delay 1000ms"


@pytest.mark.spec("SS-042")
@pytest.mark.parametrize(
    ("behavior", "outcome", "attempt"),
    [
        (TimeoutBehavior.FAIL, "failed", AttemptRecordState.ENDED_FAILURE),
        (TimeoutBehavior.CANCEL, "cancelled", AttemptRecordState.ENDED_CANCELLED),
        (TimeoutBehavior.EXPIRE, "expired", AttemptRecordState.ENDED_FAILURE),
    ],
)
async def test_a_suspension_timeout_ends_the_execution(
    env: Env, waits: Waits, behavior: TimeoutBehavior, outcome: str, attempt: AttemptRecordState
) -> None:
    claim, e = await env.create_claimed(policy=RETRIES)
    await env.engine.append_frame(claim.handle, b"frame")
    p = await waits.suspend(claim, timeout_at=env.now + 100, timeout_behavior=behavior)

    env.clock.advance_ms(99)
    assert await env.engine.expire_suspension(e) is SuspensionExpiry.NOT_DUE
    assert await env.vector(e) == SUSPENDED.format(reason="waiting_for_signal")
    await waits.time_out(env.now + 1)

    assert await env.vector(e) == terminal(outcome)
    core = await env.core(e)
    assert core["failure_reason"] == f"suspension_timeout:{behavior.value}"
    assert core["completed_at"] == env.now
    assert (await env.attempt(e, 0)).attempt_state is attempt
    closed = await env.suspension(e)
    assert (closed.close_reason, closed.closed_at) == (f"timed_out_{behavior.value}", env.now)
    assert (await waits.record(e, p.waitpoint_id)).close_reason == f"timed_out_{behavior.value}"
    page = await env.engine.read_stream(e, 0)
    assert (page.closed_at, page.closed_reason) == (env.now, "suspension_timeout")
    assert await env.outcomes(e) == [outcome]
    assert (await env.row(e)).current_suspension_id is None


@pytest.mark.spec("SS-043")
async def test_a_suspension_timeout_resumes_with_a_timeout_signal(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(
        named("a", "b"), timeout_at=env.now + 100, timeout_behavior=TimeoutBehavior.AUTO_RESUME
    )
    e = claim.execution_id
    await waits.send(e, "a", p)
    emitted = await waits.signal_events(e)
    await waits.time_out(env.now + 100)

    assert await env.vector(e) == RESUMABLE
    closed = await env.suspension(e)
    assert closed.close_reason == "timed_out_auto_resume"
    again = await env.grant_and_resume(e)
    [seen] = await env.engine.observe_signals(again.handle)
    assert (seen.signal_name, seen.signal_category, seen.payload) == ("timeout", "system", None)
    assert (seen.source_type, seen.source_identity) == ("system", "suspension_timeout")
    assert await waits.signal_events(e) == emitted
    assert await env.completions(e) == []


@pytest.mark.spec("SS-043")
async def test_auto_resume_may_be_given_by_name(env: Env, waits: Waits) -> None:
    options: dict[str, Any] = {"timeout_behavior": "auto_resume", "timeout_at": env.now + 100}
    claim, _ = await waits.create_suspended(TimeoutOnly(), **options)

    await waits.time_out(env.now + 100)

    assert await env.vector(claim.execution_id) == RESUMABLE


@pytest.mark.spec("SS-044")
async def test_an_escalated_suspension_waits_for_an_operator(env: Env, waits: Waits) -> None:
    deadline = env.now + 100
    claim, p = await waits.create_suspended(named("go"), timeout_at=deadline, timeout_behavior=TimeoutBehavior.ESCALATE)
    e = claim.execution_id
    await waits.time_out(deadline)

    assert await env.vector(e) == SUSPENDED.format(reason="paused_by_operator")
    core = await env.core(e)
    assert core["blocking_detail"] == f"suspension escalated: timeout at {deadline}"
    assert core["last_transition_at"] == core["last_mutation_at"] == deadline
    page = await env.engine.list_suspended(DEFAULT_PARTITION)
    assert page.entries == [SuspendedEntry(e, NO_TIMEOUT, "waiting_for_operator_review")]
    [listed] = (await env.engine.list_pending_waitpoints(e)).entries
    assert (listed.state, listed.expires_at, (await waits.record(e, p.waitpoint_id)).expires_at) == (
        "active",
        None,
        None,
    )
    env.clock.advance_ms(10**9)
    async with env.unchanged():
        assert await env.sweep("suspension_timeout") == 0
    assert await waits.effect(e, "go", p) == SATISFIED


@pytest.mark.spec("SS-045")
async def test_a_signal_after_the_timeout_and_before_the_sweep_resumes(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(timeout_at=env.now + 100)
    e = claim.execution_id
    env.clock.advance_ms(101)

    assert await waits.effect(e, "go", p) == SATISFIED

    assert await env.sweep("suspension_timeout") == 0
    assert await env.engine.expire_suspension(e) is SuspensionExpiry.NOT_SUSPENDED
    assert await env.vector(e) == RESUMABLE
    assert await env.completions(e) == []


@pytest.mark.spec("SS-046")
async def test_a_stream_continues_across_a_resume(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    for text in (b"f1", b"f2"):
        await env.engine.append_frame(claim.handle, text)
    p = await waits.suspend(claim)

    async with env.refused(errors.StreamClosed):
        await env.engine.append_frame(claim.handle, b"no")
    assert (await env.engine.read_stream(e, 0)).closed_at is None
    await waits.send(e, "go", p)
    again = await env.grant_and_resume(e)
    assert again.handle.kind is HandleKind.RESUMED
    await env.engine.append_frame(again.handle, b"f3")

    page = await env.engine.read_stream(e, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["f1", "f2", "f3"]


async def test_a_resumed_claim_continues_the_same_attempt(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    e = claim.execution_id
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.resume(e)
    await waits.send(e, "go", p)
    async with env.refused(errors.InvalidClaimGrant):
        await env.resume(e)
    await env.grant(e, "wb")
    async with env.refused(errors.UseClaimResumedExecution):
        await env.claim(e, "wb")

    again = await env.resume(e, "wb")

    assert (again.attempt_id, again.attempt_index, again.lease_epoch) == (claim.attempt_id, 0, 2)
    assert await env.vector(e) == ACTIVE
    attempt = await env.attempt(e, 0)
    assert (attempt.attempt_state, attempt.resumed_at) == (AttemptRecordState.STARTED, env.now)
    assert attempt.suspension_id is None
    assert [event.variant for event in await env.lease_feed(e)] == ["Acquired", "Revoked", "Acquired"]


async def test_the_close_reason_of_a_waitpoint_survives_later_suspensions(env: Env, waits: Waits) -> None:
    options: dict[str, Any] = {"timeout_behavior": "auto_resume", "timeout_at": env.now + 100}
    claim, first = await waits.create_suspended(**options)
    e = claim.execution_id
    await waits.time_out(env.now + 100)
    closed = await waits.record(e, first.waitpoint_id)
    assert closed.close_reason == "timed_out_auto_resume"

    for _ in range(2):
        env.clock.advance_ms(1000)
        later = await waits.suspend(await env.grant_and_resume(e))
        await waits.send(e, "go", later)
        assert await waits.record(e, first.waitpoint_id) == closed


async def test_a_worker_claims_a_resumed_execution(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    assert await env.claim_next("wb") is None
    await waits.send(claim.execution_id, "go", p)

    again = await env.claim_next("wb")

    assert again is not None
    assert (again.attempt_id, again.handle.kind) == (claim.attempt_id, HandleKind.RESUMED)


async def test_a_suspended_attempt_keeps_its_remaining_timeout(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
    env.clock.advance_ms(400)
    p = await waits.suspend(claim)
    assert "attempt_timeout_at" not in await env.core(e)
    env.clock.advance_ms(10_000)
    await waits.send(e, "go", p)

    await env.grant_and_resume(e)

    assert (await env.core(e))["attempt_timeout_at"] == env.now + 600


async def test_cancel_and_deadline_close_the_waitpoints(env: Env, waits: Waits) -> None:
    for end, outcome, reason, stream in (
        ("cancel", "cancelled", "cancelled", "attempt_cancelled"),
        ("deadline", "expired", "expired:execution_deadline", "expired"),
    ):
        claim, e = await env.create_claimed(execution_deadline_at=env.now + 1000)
        await env.engine.append_frame(claim.handle, b"frame")
        p = await waits.suspend(claim)
        if end == "cancel":
            await env.engine.cancel_execution(e, reason="enough")
        else:
            await env.sweep("execution_deadline", after_ms=1000)

        assert await env.vector(e) == terminal(outcome)
        record = await waits.record(e, p.waitpoint_id)
        assert (record.state, record.close_reason) == ("closed", reason)
        assert (await env.engine.read_stream(e, 0)).closed_reason == stream
        async with env.refused(errors.TargetNotSignalable):
            await waits.send(e, "go", p)
        assert (await env.engine.list_suspended(DEFAULT_PARTITION)).entries == []


async def test_the_list_of_suspended_executions_is_paged_by_timeout(env: Env, waits: Waits) -> None:
    found = []
    for timeout in (300, 100, None, 200, 100):
        claim, p = await waits.create_suspended(timeout_at=None if timeout is None else env.now + timeout)
        found.append((NO_TIMEOUT if timeout is None else env.now + timeout, claim.execution_id, p))
    order = sorted(found)
    expected = [SuspendedEntry(e, score, "waiting_for_signal") for score, e, _ in order]

    async def pages(cursor: str | None = None) -> list[SuspendedEntry]:
        found = await all_pages(partial(env.engine.list_suspended, "{fp:86}"), cursor=cursor, limit=2)
        return [entry for page in found for entry in page.entries]

    assert await pages() == expected
    assert (await env.engine.list_suspended(DEFAULT_PARTITION, limit=0)).entries == []
    assert (await env.engine.list_suspended(DEFAULT_PARTITION, limit=5)).next_cursor is None
    resumed = order[1]
    await waits.send(resumed[1], "go", resumed[2])
    assert await pages(resumed[1]) == expected[2:]
    stranger = "{fp:86}:00000000-0000-4000-8000-000000000000"
    assert await pages(stranger) == [entry for entry in expected if entry.execution_id != resumed[1]]
    with pytest.raises(errors.InvalidInput):
        await env.engine.list_suspended("{b:1}")
