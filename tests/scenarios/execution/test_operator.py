"""EX-072 to EX-077, EX-081: what operators do."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.model.answers.execution import (
    Blocked,
    Cancelled,
    Changed,
    Claimed,
    Completed,
    Rejected,
    Replayed,
    RetryScheduled,
    TerminalFailed,
    Unblocked,
)
from flowfabric.model.states import AttemptRecordState, AttemptType, PublicState
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.play import WAITING, Play
from tests.scenarios.scheduling.test_grants import MISSING
from tests.scenarios.waits import Waits

REPLAYED = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_replay_attempt/waiting"


@pytest.mark.spec("EX-072")
async def test_change_priority_reorders(play: Play) -> None:
    engine = play.engine
    a = await play.create(priority=1)
    play.clock.advance_ms(10)
    b = await play.create(priority=1)
    assert await play.eligible() == [a, b]
    play.clock.advance_ms(10)
    before = await play.core(b)

    assert await engine.change_priority(b, 50) == Changed(b)

    assert await play.core(b) == before | {"priority": 50, "last_mutation_at": play.now}
    assert await play.eligible() == [b, a]
    assert (await play.next_for("wa")).execution_id == b
    [event] = await play.operator_events()
    assert (event.execution_id, event.event_type, event.at) == (b, "priority_changed", play.now)
    assert event.details == {"old_priority": 1, "new_priority": 50}
    await engine.change_priority(a, 50)
    assert await play.eligible() == [a, b]
    grant = await play.live_grant(b)
    await engine.change_priority(b, 60, lane_id="elsewhere")
    assert await play.live_grant(b) == grant
    assert isinstance(await play.claim(b, "wa"), Claimed)
    assert (await play.next_for("wb")).execution_id == a


@pytest.mark.spec("EX-073")
async def test_change_priority_clamps_and_refusals(play: Play, waits: Waits) -> None:
    engine = play.engine
    e = await play.create(priority=3)
    for asked, stored in ((10_000, 9000), (-5, 0)):
        await engine.change_priority(e, asked)
        assert (await play.core(e))["priority"] == stored
        assert (await play.operator_events())[-1].details["new_priority"] == stored
    delayed = await play.create(delay_until=play.now + 1000)
    blocked = await play.create()
    await engine.block_execution_for_admission(blocked, reason="paused_by_operator")
    active = (await play.claimed()).execution_id
    suspended = (await waits.suspended())[0].execution_id
    ended = await play.create()
    await engine.cancel_execution(ended)
    for one in (delayed, blocked, active, suspended, ended):
        async with play.refused(errors.ExecutionNotEligible):
            await engine.change_priority(one, 7)
    async with play.refused(errors.NotFound, entity="execution"):
        await engine.change_priority(MISSING, 7)


@pytest.mark.spec("EX-074")
async def test_replay_a_completed_execution(play: Play) -> None:
    engine = play.engine
    t0 = play.now
    deadline = t0 + 60_000
    held = await play.claimed(input_payload=b"in", tags={"a.b": "c"}, execution_deadline_at=deadline, priority=3)
    e = held.execution_id
    await engine.progress(held.handle, pct=100, message="done")
    await engine.complete(held.handle, result=b"R")
    play.clock.advance_ms(100)

    assert await engine.replay_execution(e) == Replayed(PublicState.WAITING)

    assert await play.vector(e) == REPLAYED
    core = await play.core(e)
    expected = {
        "replay_count": 1,
        "total_attempt_count": 1,
        "retry_count": 0,
        "current_lease_epoch": 1,
        "current_attempt_index": 0,
        "pending_previous_attempt_index": 0,
        "started_at": t0,
        "created_at": t0,
        "last_transition_at": play.now,
    }
    assert {name: core.get(name) for name in expected} == expected
    unset = {
        *("completed_at", "failure_reason", "cancellation_reason", "cancelled_by"),
        *("progress_pct", "progress_message", "progress_updated_at", "execution_deadline_at"),
    }
    assert not unset & set(core)
    assert await engine.get_execution_result(e) is None
    replayed = HistoryEntry("replay_initiated", play.now, {"replay_count": 1, "replay_type": "normal"})
    assert (await play.history(e))[-1] == replayed
    [event] = await play.operator_events()
    assert (event.execution_id, event.event_type, event.details) == (e, "replayed", {"branch": "normal"})
    assert (await play.lease_feed(e))[-1].variant == "Revoked", "the lease feed does not tell of replays"
    again = await play.claimed_again(e)
    assert (again.attempt_index, again.attempt_type, again.lease_epoch) == (1, AttemptType.REPLAY, 2)
    first, second = await engine.attempt_history(e)
    assert first.attempt_state is AttemptRecordState.ENDED_SUCCESS
    assert second.lineage.replayed_from_attempt_index == 0
    assert (second.lineage.previous_attempt_index, second.lineage.retry_reason) == (None, None)
    core = await play.core(e)
    assert (core["total_attempt_count"], core["started_at"]) == (2, t0)
    assert not {name for name in core if name.startswith("pending_")}
    context = await engine.read_execution_context(e)
    assert (context.input_payload, context.tags) == (b"in", {"a.b": "c"})
    play.clock.now = deadline
    assert (await engine.sweep_once("execution_deadline")).processed == 0, "a replay does not arm the deadline again"


@pytest.mark.spec("EX-074")
@pytest.mark.parametrize("road", ["grant", "pull"])
async def test_every_outcome_can_be_replayed(play: Play, road: str) -> None:
    engine = play.engine

    async def failed(held: Claimed) -> None:
        assert await engine.fail(held.handle, reason="boom") == TerminalFailed(held.execution_id)

    async def cancelled(held: Claimed) -> None:
        await play.revoked(held)
        assert await engine.cancel_execution(held.execution_id) == Cancelled(held.execution_id)

    async def expired(held: Claimed) -> None:
        await engine.expire_execution(held.execution_id)

    async def capped(held: Claimed) -> None:
        await play.expired(held)
        await play.reclaim(held.execution_id, max_reclaim_count=0)

    for end in (failed, cancelled, expired, capped):
        held = await play.claimed()
        e = held.execution_id
        await end(held)
        await engine.replay_execution(e)
        assert await play.vector(e) == REPLAYED
        again = await play.claimed_again(e) if road == "grant" else await play.pull("wb")
        assert again is not None
        assert (again.execution_id, again.attempt_type, again.lease_epoch) == (e, AttemptType.REPLAY, 2)
        assert (await play.attempt(e, 1)).lineage.replayed_from_attempt_index == 0
        await engine.renew(again.handle)
        assert await engine.complete(again.handle) == Completed(e)


@pytest.mark.spec("EX-074")
async def test_what_never_ran_can_be_replayed_too(play: Play) -> None:
    e = await play.create()
    await play.engine.cancel_execution(e)
    await play.engine.replay_execution(e)
    assert await play.vector(e) == REPLAYED

    claimed = await play.claimed_again(e)

    assert (claimed.attempt_index, claimed.attempt_type, claimed.lease_epoch) == (0, AttemptType.REPLAY, 1)
    assert (await play.attempt(e, 0)).lineage.replayed_from_attempt_index is None


@pytest.mark.spec("EX-075")
async def test_replay_limits_and_gating(play: Play, waits: Waits) -> None:
    engine = play.engine
    async with play.refused(errors.NotFound, entity="execution"):
        await engine.replay_execution(MISSING)
    waiting, active = await play.create(), (await play.claimed()).execution_id
    delayed = await play.create(delay_until=play.now + 1000)
    suspended = (await waits.suspended())[0].execution_id
    for e in (waiting, active, delayed, suspended):
        async with play.refused(errors.ExecutionNotTerminal):
            await engine.replay_execution(e)

    limited = await play.create(policy={"max_replay_count": 1})
    await engine.cancel_execution(limited)
    await engine.replay_execution(limited)
    await engine.cancel_execution(limited)
    async with play.refused(errors.MaxReplaysExhausted, retryable=False):
        await engine.replay_execution(limited)

    free = await play.create()
    for count in range(1, 11):
        await engine.cancel_execution(free)
        await engine.replay_execution(free)
        assert (await play.core(free))["replay_count"] == count
    await engine.cancel_execution(free)
    async with play.refused(errors.MaxReplaysExhausted):
        await engine.replay_execution(free)


@pytest.mark.spec("EX-077")
async def test_replay_does_not_reset_retry_budget(play: Play) -> None:
    engine = play.engine
    held = await play.claimed(policy=retries(1))
    e = held.execution_id
    assert isinstance(await engine.fail(held.handle, reason="one"), RetryScheduled)
    await play.promoted(e)
    assert await engine.fail((await play.claimed_again(e)).handle, reason="two") == TerminalFailed(e)
    assert (await play.core(e))["retry_count"] == 1

    await engine.replay_execution(e)

    assert await engine.fail((await play.claimed_again(e)).handle, reason="three") == TerminalFailed(e)
    assert (await play.core(e))["retry_count"] == 1
    assert await play.outcomes(e) == ["failed", "failed"]


def blocked(eligibility: str, reason: str, public: str) -> str:
    """The vector of a blocked execution that never ran."""
    return f"runnable/unowned/{eligibility}/{reason}/none/pending_first_attempt/{public}"


@pytest.mark.spec("EX-081")
async def test_block_and_unblock(play: Play) -> None:
    engine, e = play.engine, await play.create()
    play.clock.advance_ms(10)

    answer = await engine.block_execution_for_admission(e, reason="waiting_for_quota", detail="window is full")

    assert answer == Blocked(e, "waiting_for_quota")
    assert await play.vector(e) == blocked("blocked_by_quota", "waiting_for_quota", "rate_limited")
    core = await play.core(e)
    assert (core["blocking_detail"], core["last_transition_at"]) == ("window is full", play.now)
    assert await play.eligible() == []
    async with play.untouched():
        assert await play.pull() is None
        assert await play.next_for() is None
    async with play.refused(errors.ExecutionNotEligible):
        await engine.unblock_execution(e, expected_reason="waiting_for_budget")
    assert await engine.unblock_execution(e, expected_reason="waiting_for_quota") == Unblocked(e)
    assert await play.vector(e) == WAITING
    assert "blocking_detail" not in await play.core(e)
    assert await play.eligible() == [e]
    async with play.refused(errors.ExecutionNotEligible):
        await engine.unblock_execution(e)


@pytest.mark.spec("EX-081")
@pytest.mark.parametrize(
    ("reason", "eligibility", "public", "clearable"),
    [
        ("waiting_for_budget", "blocked_by_budget", "rate_limited", True),
        ("waiting_for_quota", "blocked_by_quota", "rate_limited", True),
        ("waiting_for_capable_worker", "blocked_by_route", "waiting", True),
        ("paused_by_operator", "blocked_by_operator", "waiting", True),
        ("paused_by_policy", "blocked_by_lane_state", "waiting", False),
    ],
)
async def test_every_reason_and_its_state(
    play: Play, reason: str, eligibility: str, public: str, clearable: bool
) -> None:
    engine, e = play.engine, await play.create()

    assert await engine.block_execution_for_admission(e, reason=reason) == Blocked(e, reason)

    assert await play.vector(e) == blocked(eligibility, reason, public)
    if clearable:
        assert await engine.unblock_execution(e) == Unblocked(e)
        assert await play.vector(e) == WAITING
    else:
        async with play.refused(errors.ExecutionNotEligible):
            await engine.unblock_execution(e)
        assert await engine.cancel_execution(e) == Cancelled(e)


@pytest.mark.spec("EX-081")
async def test_wrong_reasons_and_wrong_states(play: Play) -> None:
    engine, e = play.engine, await play.create()
    for reason in ("foo", "", "waiting_for_children", "none"):
        async with play.refused(errors.InvalidBlockingReason, reason):
            await engine.block_execution_for_admission(e, reason=reason)
    for expected in ("paused_by_flow_cancel", "paused_by_operator", "foo"):
        async with play.refused(errors.InvalidBlockingReason):
            await engine.unblock_execution(e, expected_reason=expected)
    async with play.refused(errors.NotFound, entity="execution"):
        await engine.unblock_execution(MISSING)
    active = (await play.claimed()).execution_id
    async with play.refused(errors.ExecutionNotEligible):
        await engine.unblock_execution(active)
    ended = await play.create()
    await engine.cancel_execution(ended)
    delayed = await play.create(delay_until=play.now + 1000)
    twice = await play.create()
    await engine.block_route(twice)
    for one, word in (
        (ended, "execution_not_active"),
        (active, "execution_not_eligible"),
        (delayed, "execution_not_eligible"),
        (twice, "execution_not_eligible"),
        (MISSING, "execution_not_found"),
    ):
        async with play.untouched():
            answer: Any = await engine.block_execution_for_admission(one, reason="waiting_for_quota")
        assert isinstance(answer, Rejected)
        assert answer.message.startswith(word)
