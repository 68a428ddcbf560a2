"""EX-040 to EX-049: complete, fail, retry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import (
    AlreadyTerminal,
    Cancelled,
    Claimed,
    Completed,
    Expired,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.rules.execution.fences import Fence
from tests.scenarios.env import EXPIRED_LEASE, LEASE_MS, Env, fence_of, lease_fields, terminal
from tests.scenarios.scheduling.test_grants import MISSING

RETRY_BACKOFF = "runnable/unowned/not_eligible_until_time/waiting_for_retry_backoff/none/pending_retry_attempt/delayed"


def retries(count: int, categories: tuple[str, ...] = (), **backoff: Any) -> dict[str, Any]:
    """Return a policy with this many retries."""
    backoff = backoff or {"type": "fixed", "delay_ms": 500}
    return {"retry_policy": {"max_retries": count, "backoff": backoff, "retryable_categories": list(categories)}}


@pytest.mark.spec("EX-040")
async def test_complete_ends_the_execution_and_releases_its_lease(env: Env) -> None:
    t0 = env.now
    policy = {"timeout_policy": {"attempt_timeout_ms": 20_000}}
    claim, e = await env.create_claimed(policy=policy, execution_deadline_at=t0 + 25_000)
    before = await env.core(e)
    assert before["attempt_timeout_at"] == t0 + 20_000
    assert before["execution_deadline_at"] == t0 + 25_000
    env.clock.advance_ms(1000)
    t = env.now

    assert await env.engine.complete(claim.handle, result=b"R") == Completed(e)

    assert await env.vector(e) == terminal("success")
    core = await env.core(e)
    removed = {
        *("current_lease_id", "current_worker_id", "current_worker_instance_id"),
        *("lease_expires_at", "lease_last_renewed_at", "lease_renewal_deadline"),
        *("attempt_timeout_at", "execution_deadline_at"),
    }
    assert core == {name: value for name, value in before.items() if name not in removed} | {
        "lifecycle_phase": "terminal",
        "ownership_state": "unowned",
        "terminal_outcome": "success",
        "attempt_state": "attempt_terminal",
        "public_state": "completed",
        "completed_at": t,
        "last_transition_at": t,
        "last_mutation_at": t,
    }
    kept = (core["current_lease_epoch"], core["current_attempt_id"], core["current_attempt_index"])
    assert kept == (1, claim.attempt_id, 0)
    [attempt] = await env.engine.attempt_history(e)
    assert (attempt.attempt_state, attempt.ended_at) == (AttemptRecordState.ENDED_SUCCESS, t)
    released = HistoryEntry("released", t, lease_fields(claim) | {"reason": "completed"})
    assert (await env.lease_history(e))[1:] == [released]
    [done] = await env.completions()
    assert (done.execution_id, done.outcome, done.flow_id, done.at) == (e, "success", None, t)
    assert [(event.variant, event.revoked_by) for event in await env.lease_feed()][1:] == [("Revoked", "backend")]
    env.clock.advance_ms(60_000)
    async with env.unchanged():
        for sweep in ("attempt_timeout", "execution_deadline", "lease_expiry"):
            assert await env.sweep(sweep) == 0


@pytest.mark.spec("EX-041")
async def test_a_second_complete_by_the_same_holder_changes_nothing(env: Env) -> None:
    claim, e = await env.create_claimed()
    await env.engine.complete(claim.handle, result=b"R1")
    env.clock.advance_ms(LEASE_MS * 2)

    async with env.unchanged():
        assert await env.engine.complete(claim.handle, result=b"R2") == Completed(e)
        assert await env.engine.complete(execution_id=e, fence=fence_of(claim), result=b"R2") == Completed(e)

    assert await env.engine.get_execution_result(e) == b"R1"
    facts: dict[str, Any] = {"terminal_outcome": "success", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
        await env.engine.fail(claim.handle, reason="too late")
    async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
        await env.engine.complete(execution_id=e, fence=Fence(claim.lease_id, 2, claim.attempt_id))


@pytest.mark.spec("EX-042")
async def test_an_operator_override_completes_without_a_fence(env: Env) -> None:
    engine, override = env.engine, "operator_override"
    claim, e = await env.create_claimed()
    for source in (None, "someone"):
        async with env.refused(errors.InvalidInput, "fence_required"):
            await engine.complete(execution_id=e, source=source)
    async with env.refused(errors.InvalidInput, "partial_fence_triple"):
        await engine.complete(execution_id=e, fence=Fence(lease_id=claim.lease_id), source=override)

    assert await engine.complete(execution_id=e, source=override, result=b"op") == Completed(e)
    assert await engine.get_execution_result(e) == b"op"

    waiting = await env.create()
    async with env.refused(errors.ExecutionNotActive, lifecycle_phase="runnable", attempt_id=""):
        await engine.complete(execution_id=waiting, source=override)
    async with env.refused(errors.NotFound, entity="execution"):
        await engine.complete(execution_id=MISSING, source=override)
    revoked = await env.create_and_claim()
    await env.revoke_lease(revoked)
    async with env.refused(errors.LeaseRevoked):
        await engine.complete(execution_id=revoked.execution_id, source=override)
    expired = await env.create_and_claim()
    env.clock.advance_ms(LEASE_MS)
    with pytest.raises(errors.LeaseExpired):
        await engine.complete(execution_id=expired.execution_id, source=override)
    assert await env.vector(expired.execution_id) == EXPIRED_LEASE
    assert await env.lease_events(expired.execution_id) == ["acquired", "expired"]


async def test_blank_fence_fields_count_as_missing(env: Env) -> None:
    engine, blank = env.engine, Fence("", None, "")
    claim, e = await env.create_claimed()
    async with env.refused(errors.InvalidInput, "fence_required"):
        await engine.complete(execution_id=e, fence=blank)
    async with env.refused(errors.InvalidInput, "fence_required"):
        await engine.renew(execution_id=e, attempt_index=0, fence=blank, lease_ttl_ms=LEASE_MS)
    async with env.refused(errors.InvalidInput, "partial_fence_triple"):
        await engine.complete(execution_id=e, fence=Fence(claim.lease_id, 1, ""))

    assert await engine.complete(execution_id=e, fence=blank, source="operator_override") == Completed(e)


@pytest.mark.spec("EX-043")
async def test_a_result_is_stored_as_it_was_given_even_when_empty(env: Env) -> None:
    for result in (None, b"", b"x", bytes(range(256))):
        claim = await env.create_and_claim()
        assert await env.engine.get_execution_result(claim.execution_id) is None
        await env.engine.complete(claim.handle, result=result)
        assert await env.engine.get_execution_result(claim.execution_id) == result


@pytest.mark.spec("EX-044")
@pytest.mark.parametrize("why", ["no policy", "no retries", "unparsable", "permanent", "cancelled"])
async def test_a_failure_that_cannot_be_retried_is_terminal(env: Env, why: str) -> None:
    policy = None if why == "no policy" else retries(0 if why == "no retries" else 3)
    claim, e = await env.create_claimed(policy=policy)
    env.clock.advance_ms(10)
    category = why if why in ("permanent", "cancelled") else "x"
    own = "{not json" if why == "unparsable" else None

    answer = await env.engine.fail(claim.handle, reason="boom", category=category, retry_policy=own)

    assert answer == TerminalFailed(e)
    assert await env.vector(e) == terminal("failed")
    core = await env.core(e)
    assert (core["failure_reason"], core["completed_at"], core["retry_count"]) == ("boom", env.now, 0)
    assert not {"current_lease_id", "current_worker_id", "lease_expires_at", "delay_until"} & set(core)
    assert core["current_attempt_id"] == claim.attempt_id
    attempt = await env.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.ENDED_FAILURE
    assert (attempt.failure_reason, attempt.failure_category, attempt.ended_at) == ("boom", category, env.now)
    assert await env.lease_events(e) == ["acquired", "released failed_terminal"]
    assert await env.outcomes() == ["failed"]
    async with env.unchanged():
        assert await env.engine.fail(claim.handle, reason="other") == TerminalFailed(e)


async def test_a_blank_retry_policy_keeps_the_policy_of_the_execution(env: Env) -> None:
    claim = await env.create_and_claim(policy=retries(1))

    assert isinstance(await env.engine.fail(claim.handle, reason="boom", retry_policy=""), RetryScheduled)


@pytest.mark.spec("EX-045")
async def test_a_retryable_failure_schedules_a_retry(env: Env) -> None:
    deadline = env.now + 90_000
    claim, e = await env.create_claimed(policy=retries(2), execution_deadline_at=deadline)
    env.clock.advance_ms(10)
    t = env.now

    answer = await env.engine.fail(claim.handle, reason="flaky", category="transient")

    assert answer == RetryScheduled(e, t + 500, 1)
    assert await env.vector(e) == RETRY_BACKOFF
    core = await env.core(e)
    expected = {
        "blocking_detail": f"retry backoff until {t + 500} (attempt 0 failed: flaky)",
        "retry_count": 1,
        "total_attempt_count": 1,
        "current_attempt_index": 0,
        "current_lease_epoch": 1,
        "delay_until": t + 500,
        "failure_reason": "flaky",
        "pending_retry_reason": "flaky",
        "pending_previous_attempt_index": 0,
        "execution_deadline_at": deadline,
        "last_transition_at": t,
    }
    assert {name: core.get(name) for name in expected} == expected
    assert not {"current_attempt_id", "current_lease_id", "completed_at", "lease_expires_at"} & set(core)
    [attempt] = await env.engine.attempt_history(e)
    assert (attempt.attempt_state, attempt.failure_reason) == (AttemptRecordState.ENDED_FAILURE, "flaky")
    assert await env.lease_events(e) == ["acquired", "released failed_retry_scheduled"]
    assert await env.outcomes() == []
    async with env.unchanged():
        assert await env.engine.fail(claim.handle, reason="again") == answer
    facts: dict[str, Any] = {
        "terminal_outcome": "none",
        "lease_epoch": 1,
        "lifecycle_phase": "runnable",
        "attempt_id": "",
    }
    async with env.refused(errors.ExecutionNotActive, **facts):
        await env.engine.complete(claim.handle)
    await env.promote(e)
    async with env.unchanged():
        assert await env.engine.fail(claim.handle, reason="again") == RetryScheduled(e, 0, 1)


@pytest.mark.spec("EX-046")
async def test_a_retry_attempt_records_its_lineage(env: Env) -> None:
    t0 = env.now
    claim, e = await env.create_claimed(policy=retries(2))
    await env.engine.fail(claim.handle, reason="flaky")
    await env.promote(e)
    assert env.now == t0 + 500

    again = await env.grant_and_claim(e, "wb")

    assert (again.attempt_index, again.attempt_type, again.lease_epoch) == (1, AttemptType.RETRY, 2)
    attempt = await env.attempt(e, 1)
    assert (attempt.lineage.previous_attempt_index, attempt.lineage.retry_reason) == (0, "flaky")
    assert (attempt.started_at, attempt.worker_id) == (t0 + 500, "wb")
    core = await env.core(e)
    assert (core["started_at"], core["total_attempt_count"], core["retry_count"]) == (t0, 2, 1)
    assert not {name for name in core if name.startswith("pending_")}
    async with env.refused(errors.StaleLease):
        await env.engine.fail(claim.handle, reason="late")


async def backoffs(env: Env, policy: dict[str, Any], count: int) -> list[int]:
    """Return the backoff after each of several failures."""
    e = await env.create(policy=policy)
    delays_ms = []
    for _ in range(count):
        await env.grant(e)
        answer = await env.engine.fail((await env.claim(e)).handle, reason="flaky")
        assert isinstance(answer, RetryScheduled)
        delays_ms.append(answer.delay_until - env.now)
        await env.promote(e)
    return delays_ms


@pytest.mark.spec("EX-047")
@pytest.mark.parametrize(
    ("backoff", "delays_ms"),
    [
        (
            {"type": "exponential", "initial_delay_ms": 1000, "multiplier": 2, "max_delay_ms": 3000, "jitter": False},
            [1000, 2000, 3000, 3000],
        ),
        ({"type": "exponential"}, [1000, 2000, 4000]),
        ({"type": "fixed"}, [1000, 1000]),
        ({"type": "lunar"}, [1000, 1000]),
    ],
)
async def test_successive_failures_back_off_as_the_policy_says(
    env: Env, backoff: dict[str, Any], delays_ms: list[int]
) -> None:
    assert await backoffs(env, retries(4, **backoff), len(delays_ms)) == delays_ms


@pytest.mark.spec("EX-047")
@pytest.mark.parametrize(("chance", "delay_ms"), [(0.0, 500), (0.999999, 1000)])
async def test_jitter_spreads_the_first_backoff(env: Env, chance: float, delay_ms: int) -> None:
    env.engine.runtime.random = lambda: chance

    assert await backoffs(env, retries(1, type="exponential", initial_delay_ms=1000, jitter=True), 1) == [delay_ms]


@pytest.mark.spec("EX-048")
async def test_only_retryable_categories_are_retried(env: Env) -> None:
    claim, e = await env.create_claimed(policy=retries(5, ("rate_limit",)))
    assert isinstance(await env.engine.fail(claim.handle, reason="r", category="rate_limit"), RetryScheduled)
    await env.promote(e)
    again = await env.grant_and_claim(e)
    assert await env.engine.fail(again.handle, reason="b", category="bad_output") == TerminalFailed(e)

    free = await env.create_and_claim(policy=retries(5))
    for category in ("rate_limit", "bad_output"):
        answer = await env.engine.fail(free.handle, reason="r", category=category)
        assert isinstance(answer, RetryScheduled)
        await env.promote(free.execution_id)
        free = await env.grant_and_claim(free.execution_id)


@pytest.mark.spec("EX-049")
@pytest.mark.parametrize("first", ["complete", "cancel"])
@pytest.mark.parametrize("processes", [1, 2])
async def test_one_of_a_concurrent_complete_and_cancel_wins(env: Env, first: str, processes: int) -> None:
    engine = env.engine
    operator = engine if processes == 1 else Engine(engine.store, minter=SeededMinter(9))
    claim, e = await env.create_claimed()
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "complete": lambda: engine.complete(claim.handle, result=b"R"),
        "cancel": lambda: operator.cancel_execution(e, reason="stop"),
    }
    order = [first, *(name for name in calls if name != first)]

    answers = dict(
        zip(order, await asyncio.gather(*(calls[name]() for name in order), return_exceptions=True), strict=True)
    )

    won = "complete" if answers["complete"] == Completed(e) else "cancel"
    lost = answers["cancel" if won == "complete" else "complete"]
    outcome = "success" if won == "complete" else "cancelled"
    assert answers[won] == (Completed(e) if won == "complete" else Cancelled(e))
    assert isinstance(lost, errors.ExecutionNotActive)
    assert (lost.terminal_outcome, lost.lifecycle_phase, lost.attempt_id) == (outcome, "terminal", claim.attempt_id)
    assert await env.vector(e) == terminal(outcome)
    assert await env.outcomes() == [outcome]
    assert len([entry for entry in await env.lease_events(e) if entry.startswith("released")]) == 1
    ended = AttemptRecordState.ENDED_SUCCESS if won == "complete" else AttemptRecordState.ENDED_CANCELLED
    assert (await env.attempt(e, 0)).attempt_state is ended
    if won == "cancel":
        assert await engine.cancel_execution(e) == Cancelled(e)


@pytest.mark.spec("EX-049")
async def test_exactly_one_of_many_concurrent_terminal_calls_wins(env: Env) -> None:
    engine, other = env.engine, Engine(env.engine.store, minter=SeededMinter(9))
    claim, e = await env.create_claimed()

    answers: tuple[Any, ...] = await asyncio.gather(
        other.expire_execution(e),
        engine.fail(claim.handle, reason="boom"),
        engine.complete(claim.handle),
        other.cancel_execution(e),
        engine.expire_execution(e),
        return_exceptions=True,
    )

    assert len(await env.outcomes(e)) == 1
    assert len(await env.lease_events(e)) == 2
    won = [answer for answer in answers if isinstance(answer, Expired | TerminalFailed | Completed | Cancelled)]
    lost = [answer for answer in answers if isinstance(answer, errors.ExecutionNotActive | AlreadyTerminal)]
    assert (len(won), len(lost)) == (1, 4)
    assert (await env.vector(e)).startswith("terminal/unowned/")


async def test_one_of_many_concurrent_redemptions_of_a_grant_wins(env: Env) -> None:
    e = await env.create()
    await env.grant(e, "wa")

    claims: list[Any] = await asyncio.gather(
        *(env.claim(e, "wa", instance=f"wa-{number}") for number in range(8)), return_exceptions=True
    )

    assert sum(isinstance(one, Claimed) for one in claims) == 1
    lost = [one for one in claims if not isinstance(one, Claimed)]
    assert all(isinstance(one, errors.ExecutionNotLeaseable | errors.InvalidClaimGrant) for one in lost)
    assert (await env.core(e))["current_lease_epoch"] == 1
    assert await env.lease_events(e) == ["acquired"]
