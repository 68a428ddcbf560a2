"""SS-041 to SS-046: other ways out of a suspension, and the way back in."""

from __future__ import annotations

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
from tests.scenarios.play import ACTIVE, DEFAULT_PARTITION, RESUMABLE, Play, terminal
from tests.scenarios.waits import NO_TIMEOUT, SATISFIED, SUSPENDED, Waits, named

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}


@pytest.mark.spec("SS-041")
async def test_operator_resume(play: Play, waits: Waits) -> None:
    both = AllConditions((Single("a"), Single("b")))
    held, a = await waits.suspended(both, FreshWaitpoint(waits.id(), "a"), FreshWaitpoint(waits.id(), "b"))
    e, [b] = held.execution_id, a.additional_waitpoints

    assert await play.engine.resume_execution(e, trigger_type="operator") == Resumed(PublicState.WAITING)

    assert await play.vector(e) == RESUMABLE
    root = await play.engine.describe_suspension(e)
    assert root is not None
    assert (root.close_reason, root.satisfied_at, root.closer_signal_id) == ("resumed", play.now, None)
    for one in (a, b):
        record = await waits.record(e, one.waitpoint_id)
        assert (record.close_reason, record.satisfied_at, record.closed_at) == ("resumed", play.now, play.now)
        async with play.refused(errors.TargetNotSignalable):
            await waits.send(e, "go", one)
    async with play.refused(errors.ExecutionNotSuspended):
        await play.engine.resume_execution(e)
    async with play.refused(errors.NotFound, entity="execution"):
        await play.engine.resume_execution(play.engine.new_execution_id())
    other, _ = await waits.suspended()
    instant, _ = await waits.suspended()
    assert await play.engine.resume_execution(instant.execution_id, resume_delay_ms=1) == Resumed(PublicState.DELAYED)
    delayed = await play.engine.resume_execution(other.execution_id, resume_delay_ms=1000)
    assert delayed == Resumed(PublicState.DELAYED)
    assert (await play.core(other.execution_id))["blocking_detail"] == "resume delay 1000ms"


@pytest.mark.spec("SS-042")
@pytest.mark.parametrize(
    ("behavior", "outcome", "attempt"),
    [
        (TimeoutBehavior.FAIL, "failed", AttemptRecordState.ENDED_FAILURE),
        (TimeoutBehavior.CANCEL, "cancelled", AttemptRecordState.ENDED_CANCELLED),
        (TimeoutBehavior.EXPIRE, "expired", AttemptRecordState.ENDED_FAILURE),
    ],
)
async def test_timeout_fail_cancel_expire(
    play: Play, waits: Waits, behavior: TimeoutBehavior, outcome: str, attempt: AttemptRecordState
) -> None:
    held = await play.claimed(policy=RETRIES)
    e = held.execution_id
    await play.engine.append_frame(held.handle, b"frame")
    p = await waits.suspend(held, timeout_at=play.now + 100, timeout_behavior=behavior)

    play.clock.advance_ms(99)
    assert await play.engine.expire_suspension(e) is SuspensionExpiry.NOT_DUE
    assert await play.vector(e) == SUSPENDED.format(reason="waiting_for_signal")
    await waits.time_out(play.now + 1)

    assert await play.vector(e) == terminal(outcome)
    core = await play.core(e)
    assert core["failure_reason"] == f"suspension_timeout:{behavior.value}"
    assert core["completed_at"] == play.now
    assert (await play.attempt(e, 0)).attempt_state is attempt
    closed = await play.engine.describe_suspension(e)
    assert closed is not None
    assert (closed.close_reason, closed.closed_at) == (f"timed_out_{behavior.value}", play.now)
    assert (await waits.record(e, p.waitpoint_id)).close_reason == f"timed_out_{behavior.value}"
    page = await play.engine.read_stream(e, 0)
    assert (page.closed_at, page.closed_reason) == (play.now, "suspension_timeout")
    assert await play.outcomes(e) == [outcome]
    assert (await play.sheet(e)).current_suspension_id is None


@pytest.mark.spec("SS-043")
async def test_timeout_auto_resume(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(
        named("a", "b"), timeout_at=play.now + 100, timeout_behavior=TimeoutBehavior.AUTO_RESUME
    )
    e = held.execution_id
    await waits.send(e, "a", p)
    told = await waits.signals_told(e)
    await waits.time_out(play.now + 100)

    assert await play.vector(e) == RESUMABLE
    closed = await play.engine.describe_suspension(e)
    assert closed is not None
    assert closed.close_reason == "timed_out_auto_resume"
    again = await play.resumed(e)
    [seen] = await play.engine.observe_signals(again.handle)
    assert (seen.signal_name, seen.signal_category, seen.payload) == ("timeout", "system", None)
    assert (seen.source_type, seen.source_identity) == ("system", "suspension_timeout")
    assert await waits.signals_told(e) == told
    assert await play.completions(e) == []


@pytest.mark.spec("SS-043")
async def test_the_older_name_means_the_same(play: Play, waits: Waits) -> None:
    given: dict[str, Any] = {"timeout_behavior": "auto_resume", "timeout_at": play.now + 100}
    held, _ = await waits.suspended(TimeoutOnly(), **given)

    await waits.time_out(play.now + 100)

    assert await play.vector(held.execution_id) == RESUMABLE


@pytest.mark.spec("SS-044")
async def test_timeout_escalate(play: Play, waits: Waits) -> None:
    deadline = play.now + 100
    held, p = await waits.suspended(named("go"), timeout_at=deadline, timeout_behavior=TimeoutBehavior.ESCALATE)
    e = held.execution_id
    await waits.time_out(deadline)

    assert await play.vector(e) == SUSPENDED.format(reason="paused_by_operator")
    core = await play.core(e)
    assert core["blocking_detail"] == f"suspension escalated: timeout at {deadline}"
    assert core["last_transition_at"] == core["last_mutation_at"] == deadline
    page = await play.engine.list_suspended(DEFAULT_PARTITION)
    assert page.entries == [SuspendedEntry(e, NO_TIMEOUT, "waiting_for_operator_review")]
    [listed] = (await play.engine.list_pending_waitpoints(e)).entries
    assert (listed.state, listed.expires_at, (await waits.record(e, p.waitpoint_id)).expires_at) == (
        "active",
        None,
        None,
    )
    play.clock.advance_ms(10**9)
    async with play.untouched():
        assert (await play.engine.sweep_once("suspension_timeout")).processed == 0
    assert await waits.effect(e, "go", p) == SATISFIED


@pytest.mark.spec("SS-045")
async def test_signal_beats_timeout(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(timeout_at=play.now + 100)
    e = held.execution_id
    play.clock.advance_ms(101)

    assert await waits.effect(e, "go", p) == SATISFIED

    assert (await play.engine.sweep_once("suspension_timeout")).processed == 0
    assert await play.engine.expire_suspension(e) is SuspensionExpiry.NOT_SUSPENDED
    assert await play.vector(e) == RESUMABLE
    assert await play.completions(e) == []


@pytest.mark.spec("SS-046")
async def test_stream_continues_across_resume(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    for text in (b"f1", b"f2"):
        await play.engine.append_frame(held.handle, text)
    p = await waits.suspend(held)

    async with play.refused(errors.StreamClosed):
        await play.engine.append_frame(held.handle, b"no")
    assert (await play.engine.read_stream(e, 0)).closed_at is None
    await waits.send(e, "go", p)
    again = await play.resumed(e)
    assert again.handle.kind is HandleKind.RESUMED
    await play.engine.append_frame(again.handle, b"f3")

    page = await play.engine.read_stream(e, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["f1", "f2", "f3"]


async def test_the_resumed_claim_goes_on_with_the_same_attempt(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    e = held.execution_id
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.resume(e)
    await waits.send(e, "go", p)
    async with play.refused(errors.InvalidClaimGrant):
        await play.resume(e)
    await play.grant(e, "wb")
    async with play.refused(errors.UseClaimResumedExecution):
        await play.claim(e, "wb")

    again = await play.resume(e, "wb")

    assert (again.attempt_id, again.attempt_index, again.lease_epoch) == (held.attempt_id, 0, 2)
    assert await play.vector(e) == ACTIVE
    attempt = await play.attempt(e, 0)
    assert (attempt.attempt_state, attempt.resumed_at) == (AttemptRecordState.STARTED, play.now)
    assert attempt.suspension_id is None
    assert [news.variant for news in await play.lease_feed(e)] == ["Acquired", "Revoked", "Acquired"]


async def test_what_closed_a_waitpoint_is_still_told_when_the_execution_waits_for_something_else(
    play: Play, waits: Waits
) -> None:
    given: dict[str, Any] = {"timeout_behavior": "auto_resume", "timeout_at": play.now + 100}
    held, first = await waits.suspended(**given)
    e = held.execution_id
    await waits.time_out(play.now + 100)
    closed = await waits.record(e, first.waitpoint_id)
    assert closed.close_reason == "timed_out_auto_resume"

    for _ in range(2):
        play.clock.advance_ms(1000)
        later = await waits.suspend(await play.resumed(e))
        await waits.send(e, "go", later)
        assert await waits.record(e, first.waitpoint_id) == closed


async def test_a_worker_that_pulls_gets_what_was_resumed(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    assert await play.pull("wb") is None
    await waits.send(held.execution_id, "go", p)

    again = await play.pull("wb")

    assert again is not None
    assert (again.attempt_id, again.handle.kind) == (held.attempt_id, HandleKind.RESUMED)


async def test_the_attempt_keeps_the_time_it_had_left(play: Play, waits: Waits) -> None:
    held = await play.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
    e = held.execution_id
    play.clock.advance_ms(400)
    p = await waits.suspend(held)
    assert "attempt_timeout_at" not in await play.core(e)
    play.clock.advance_ms(10_000)
    await waits.send(e, "go", p)

    await play.resumed(e)

    assert (await play.core(e))["attempt_timeout_at"] == play.now + 600


async def test_cancel_and_deadline_close_what_was_waited_on(play: Play, waits: Waits) -> None:
    for way, outcome, reason, stream in (
        ("cancel", "cancelled", "cancelled", "attempt_cancelled"),
        ("deadline", "expired", "expired:execution_deadline", "expired"),
    ):
        held = await play.claimed(execution_deadline_at=play.now + 1000)
        e = held.execution_id
        await play.engine.append_frame(held.handle, b"frame")
        p = await waits.suspend(held)
        if way == "cancel":
            await play.engine.cancel_execution(e, reason="enough")
        else:
            play.clock.advance_ms(1000)
            await play.engine.sweep_once("execution_deadline")

        assert await play.vector(e) == terminal(outcome)
        record = await waits.record(e, p.waitpoint_id)
        assert (record.state, record.close_reason) == ("closed", reason)
        assert (await play.engine.read_stream(e, 0)).closed_reason == stream
        async with play.refused(errors.TargetNotSignalable):
            await waits.send(e, "go", p)
        assert (await play.engine.list_suspended(DEFAULT_PARTITION)).entries == []


async def test_the_list_of_suspended_executions_is_paged_by_timeout(play: Play, waits: Waits) -> None:
    found = []
    for timeout in (300, 100, None, 200, 100):
        held, p = await waits.suspended(timeout_at=None if timeout is None else play.now + timeout)
        found.append((NO_TIMEOUT if timeout is None else play.now + timeout, held.execution_id, p))
    order = sorted(found)
    expected = [SuspendedEntry(e, score, "waiting_for_signal") for score, e, _ in order]

    async def pages(cursor: str | None = None) -> list[SuspendedEntry]:
        entries = []
        while True:
            page = await play.engine.list_suspended("{fp:86}", cursor=cursor, limit=2)
            entries += page.entries
            cursor = page.next_cursor
            if cursor is None:
                return entries

    assert await pages() == expected
    assert (await play.engine.list_suspended(DEFAULT_PARTITION, limit=0)).entries == []
    assert (await play.engine.list_suspended(DEFAULT_PARTITION, limit=5)).next_cursor is None
    gone = order[1]
    await waits.send(gone[1], "go", gone[2])
    assert await pages(gone[1]) == expected[2:]
    stranger = "{fp:86}:00000000-0000-4000-8000-000000000000"
    assert await pages(stranger) == [entry for entry in expected if entry.execution_id != gone[1]]
    with pytest.raises(errors.InvalidInput):
        await play.engine.list_suspended("{b:1}")
