"""EX-072 to EX-077, EX-081: operator actions."""

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
from tests.scenarios.env import WAITING, Env
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.scheduling.test_grants import MISSING
from tests.scenarios.waits import Waits

REPLAYED = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_replay_attempt/waiting"


@pytest.mark.spec("EX-072")
async def test_change_priority_moves_an_execution_in_the_queue(env: Env) -> None:
    engine = env.engine
    a = await env.create(priority=1)
    env.clock.advance_ms(10)
    b = await env.create(priority=1)
    assert await env.eligible() == [a, b]
    env.clock.advance_ms(10)
    before = await env.core(b)

    assert await engine.change_priority(b, 50) == Changed(b)

    assert await env.core(b) == before | {"priority": 50, "last_mutation_at": env.now}
    assert await env.eligible() == [b, a]
    assert (await env.grant_next("wa")).execution_id == b
    [event] = await env.operator_events()
    assert (event.execution_id, event.event_type, event.at) == (b, "priority_changed", env.now)
    assert event.details == {"old_priority": 1, "new_priority": 50}
    await engine.change_priority(a, 50)
    assert await env.eligible() == [a, b]
    grant = await env.live_grant(b)
    await engine.change_priority(b, 60, lane_id="elsewhere")
    assert await env.live_grant(b) == grant
    assert isinstance(await env.claim(b, "wa"), Claimed)
    assert (await env.grant_next("wb")).execution_id == a


@pytest.mark.spec("EX-073")
async def test_change_priority_clamps_and_refuses_executions_that_are_not_eligible(env: Env, waits: Waits) -> None:
    engine = env.engine
    e = await env.create(priority=3)
    for requested, stored in ((10_000, 9000), (-5, 0)):
        await engine.change_priority(e, requested)
        assert (await env.core(e))["priority"] == stored
        assert (await env.operator_events())[-1].details["new_priority"] == stored
    delayed = await env.create(delay_until=env.now + 1000)
    blocked = await env.create()
    await engine.block_execution_for_admission(blocked, reason="paused_by_operator")
    active = (await env.create_and_claim()).execution_id
    suspended = (await waits.create_suspended())[0].execution_id
    ended = await env.create()
    await engine.cancel_execution(ended)
    for one in (delayed, blocked, active, suspended, ended):
        async with env.refused(errors.ExecutionNotEligible):
            await engine.change_priority(one, 7)
    async with env.refused(errors.NotFound, entity="execution"):
        await engine.change_priority(MISSING, 7)


@pytest.mark.spec("EX-074")
async def test_a_replay_resets_a_completed_execution(env: Env) -> None:
    engine = env.engine
    t0 = env.now
    deadline = t0 + 60_000
    claim = await env.create_and_claim(
        input_payload=b"in", tags={"a.b": "c"}, execution_deadline_at=deadline, priority=3
    )
    e = claim.execution_id
    await engine.progress(claim.handle, pct=100, message="done")
    await engine.complete(claim.handle, result=b"R")
    env.clock.advance_ms(100)

    assert await engine.replay_execution(e) == Replayed(PublicState.WAITING)

    assert await env.vector(e) == REPLAYED
    core = await env.core(e)
    expected = {
        "replay_count": 1,
        "total_attempt_count": 1,
        "retry_count": 0,
        "current_lease_epoch": 1,
        "current_attempt_index": 0,
        "pending_previous_attempt_index": 0,
        "started_at": t0,
        "created_at": t0,
        "last_transition_at": env.now,
    }
    assert {name: core.get(name) for name in expected} == expected
    unset = {
        *("completed_at", "failure_reason", "cancellation_reason", "cancelled_by"),
        *("progress_pct", "progress_message", "progress_updated_at", "execution_deadline_at"),
    }
    assert not unset & set(core)
    assert await engine.get_execution_result(e) is None
    replayed = HistoryEntry("replay_initiated", env.now, {"replay_count": 1, "replay_type": "normal"})
    assert (await env.lease_history(e))[-1] == replayed
    [event] = await env.operator_events()
    assert (event.execution_id, event.event_type, event.details) == (e, "replayed", {"branch": "normal"})
    assert (await env.lease_feed(e))[-1].variant == "Revoked", "replays are not on the lease feed"
    again = await env.grant_and_claim(e)
    assert (again.attempt_index, again.attempt_type, again.lease_epoch) == (1, AttemptType.REPLAY, 2)
    first, second = await engine.attempt_history(e)
    assert first.attempt_state is AttemptRecordState.ENDED_SUCCESS
    assert second.lineage.replayed_from_attempt_index == 0
    assert (second.lineage.previous_attempt_index, second.lineage.retry_reason) == (None, None)
    core = await env.core(e)
    assert (core["total_attempt_count"], core["started_at"]) == (2, t0)
    assert not {name for name in core if name.startswith("pending_")}
    context = await engine.read_execution_context(e)
    assert (context.input_payload, context.tags) == (b"in", {"a.b": "c"})
    env.clock.now = deadline
    assert (await engine.sweep_once("execution_deadline")).processed == 0, "a replay does not restore the deadline"


@pytest.mark.spec("EX-074")
@pytest.mark.parametrize("method", ["grant", "claim"])
async def test_every_outcome_can_be_replayed(env: Env, method: str) -> None:
    engine = env.engine

    async def failed(claim: Claimed) -> None:
        assert await engine.fail(claim.handle, reason="boom") == TerminalFailed(claim.execution_id)

    async def cancelled(claim: Claimed) -> None:
        await env.revoke_lease(claim)
        assert await engine.cancel_execution(claim.execution_id) == Cancelled(claim.execution_id)

    async def expired(claim: Claimed) -> None:
        await engine.expire_execution(claim.execution_id)

    async def capped(claim: Claimed) -> None:
        await env.expire_lease(claim)
        await env.reclaim(claim.execution_id, max_reclaim_count=0)

    for end in (failed, cancelled, expired, capped):
        claim, e = await env.create_claimed()
        await end(claim)
        await engine.replay_execution(e)
        assert await env.vector(e) == REPLAYED
        again = await env.grant_and_claim(e) if method == "grant" else await env.claim_next("wb")
        assert again is not None
        assert (again.execution_id, again.attempt_type, again.lease_epoch) == (e, AttemptType.REPLAY, 2)
        assert (await env.attempt(e, 1)).lineage.replayed_from_attempt_index == 0
        await engine.renew(again.handle)
        assert await engine.complete(again.handle) == Completed(e)


@pytest.mark.spec("EX-074")
async def test_an_execution_that_never_ran_can_be_replayed(env: Env) -> None:
    e = await env.create()
    await env.engine.cancel_execution(e)
    await env.engine.replay_execution(e)
    assert await env.vector(e) == REPLAYED

    claimed = await env.grant_and_claim(e)

    assert (claimed.attempt_index, claimed.attempt_type, claimed.lease_epoch) == (0, AttemptType.REPLAY, 1)
    assert (await env.attempt(e, 0)).lineage.replayed_from_attempt_index is None


@pytest.mark.spec("EX-075")
async def test_a_replay_is_refused_before_the_end_and_beyond_its_limit(env: Env, waits: Waits) -> None:
    engine = env.engine
    async with env.refused(errors.NotFound, entity="execution"):
        await engine.replay_execution(MISSING)
    waiting, active = await env.create(), (await env.create_and_claim()).execution_id
    delayed = await env.create(delay_until=env.now + 1000)
    suspended = (await waits.create_suspended())[0].execution_id
    for e in (waiting, active, delayed, suspended):
        async with env.refused(errors.ExecutionNotTerminal):
            await engine.replay_execution(e)

    limited = await env.create(policy={"max_replay_count": 1})
    await engine.cancel_execution(limited)
    await engine.replay_execution(limited)
    await engine.cancel_execution(limited)
    async with env.refused(errors.MaxReplaysExhausted, retryable=False):
        await engine.replay_execution(limited)

    free = await env.create()
    for count in range(1, 11):
        await engine.cancel_execution(free)
        await engine.replay_execution(free)
        assert (await env.core(free))["replay_count"] == count
    await engine.cancel_execution(free)
    async with env.refused(errors.MaxReplaysExhausted):
        await engine.replay_execution(free)


@pytest.mark.spec("EX-077")
async def test_a_replay_does_not_reset_the_retry_count(env: Env) -> None:
    engine = env.engine
    claim, e = await env.create_claimed(policy=retries(1))
    assert isinstance(await engine.fail(claim.handle, reason="one"), RetryScheduled)
    await env.promote(e)
    assert await engine.fail((await env.grant_and_claim(e)).handle, reason="two") == TerminalFailed(e)
    assert (await env.core(e))["retry_count"] == 1

    await engine.replay_execution(e)

    assert await engine.fail((await env.grant_and_claim(e)).handle, reason="three") == TerminalFailed(e)
    assert (await env.core(e))["retry_count"] == 1
    assert await env.outcomes(e) == ["failed", "failed"]


def blocked(eligibility: str, reason: str, public: str) -> str:
    """The vector of a blocked execution that never ran."""
    return f"runnable/unowned/{eligibility}/{reason}/none/pending_first_attempt/{public}"


@pytest.mark.spec("EX-081")
async def test_a_blocked_execution_is_claimable_after_unblock(env: Env) -> None:
    engine, e = env.engine, await env.create()
    env.clock.advance_ms(10)

    answer = await engine.block_execution_for_admission(e, reason="waiting_for_quota", detail="window is full")

    assert answer == Blocked(e, "waiting_for_quota")
    assert await env.vector(e) == blocked("blocked_by_quota", "waiting_for_quota", "rate_limited")
    core = await env.core(e)
    assert (core["blocking_detail"], core["last_transition_at"]) == ("window is full", env.now)
    assert await env.eligible() == []
    async with env.unchanged():
        assert await env.claim_next() is None
        assert await env.grant_next() is None
    async with env.refused(errors.ExecutionNotEligible):
        await engine.unblock_execution(e, expected_reason="waiting_for_budget")
    assert await engine.unblock_execution(e, expected_reason="waiting_for_quota") == Unblocked(e)
    assert await env.vector(e) == WAITING
    assert "blocking_detail" not in await env.core(e)
    assert await env.eligible() == [e]
    async with env.refused(errors.ExecutionNotEligible):
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
async def test_every_blocking_reason_has_its_own_state(
    env: Env, reason: str, eligibility: str, public: str, clearable: bool
) -> None:
    engine, e = env.engine, await env.create()

    assert await engine.block_execution_for_admission(e, reason=reason) == Blocked(e, reason)

    assert await env.vector(e) == blocked(eligibility, reason, public)
    if clearable:
        assert await engine.unblock_execution(e) == Unblocked(e)
        assert await env.vector(e) == WAITING
    else:
        async with env.refused(errors.ExecutionNotEligible):
            await engine.unblock_execution(e)
        assert await engine.cancel_execution(e) == Cancelled(e)


@pytest.mark.spec("EX-081")
async def test_block_and_unblock_refuse_unknown_reasons_and_wrong_states(env: Env) -> None:
    engine, e = env.engine, await env.create()
    for reason in ("foo", "", "waiting_for_children", "none"):
        async with env.refused(errors.InvalidBlockingReason, reason):
            await engine.block_execution_for_admission(e, reason=reason)
    for expected in ("paused_by_flow_cancel", "paused_by_operator", "foo"):
        async with env.refused(errors.InvalidBlockingReason):
            await engine.unblock_execution(e, expected_reason=expected)
    async with env.refused(errors.NotFound, entity="execution"):
        await engine.unblock_execution(MISSING)
    active = (await env.create_and_claim()).execution_id
    async with env.refused(errors.ExecutionNotEligible):
        await engine.unblock_execution(active)
    ended = await env.create()
    await engine.cancel_execution(ended)
    delayed = await env.create(delay_until=env.now + 1000)
    twice = await env.create()
    await engine.block_route(twice)
    for one, kind in (
        (ended, "execution_not_active"),
        (active, "execution_not_eligible"),
        (delayed, "execution_not_eligible"),
        (twice, "execution_not_eligible"),
        (MISSING, "execution_not_found"),
    ):
        async with env.unchanged():
            answer: Any = await engine.block_execution_for_admission(one, reason="waiting_for_quota")
        assert isinstance(answer, Rejected)
        assert answer.message.startswith(kind)
