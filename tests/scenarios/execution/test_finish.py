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
from flowfabric.rules.execution.lease import Fence
from tests.scenarios.play import EXPIRED_LEASE, LEASE_MS, Play, fence_of, terminal
from tests.scenarios.scheduling.test_grants import MISSING

RETRY_BACKOFF = "runnable/unowned/not_eligible_until_time/waiting_for_retry_backoff/none/pending_retry_attempt/delayed"


def retries(count: int, categories: tuple[str, ...] = (), **backoff: Any) -> dict[str, Any]:
    """A policy with so many retries."""
    backoff = backoff or {"type": "fixed", "delay_ms": 500}
    return {"retry_policy": {"max_retries": count, "backoff": backoff, "retryable_categories": list(categories)}}


@pytest.mark.spec("EX-040")
async def test_complete(play: Play) -> None:
    t0 = play.now
    policy = {"timeout_policy": {"attempt_timeout_ms": 20_000}}
    held = await play.claimed(policy=policy, execution_deadline_at=t0 + 25_000)
    e = held.execution_id
    before = await play.core(e)
    assert before["attempt_timeout_at"] == t0 + 20_000
    assert before["execution_deadline_at"] == t0 + 25_000
    play.clock.advance_ms(1000)
    t = play.now

    assert await play.engine.complete(held.handle, result=b"R") == Completed(e)

    assert await play.vector(e) == terminal("success")
    core = await play.core(e)
    gone = {
        *("current_lease_id", "current_worker_id", "current_worker_instance_id"),
        *("lease_expires_at", "lease_last_renewed_at", "lease_renewal_deadline"),
        *("attempt_timeout_at", "execution_deadline_at"),
    }
    assert core == {name: value for name, value in before.items() if name not in gone} | {
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
    assert kept == (1, held.attempt_id, 0)
    [attempt] = await play.engine.attempt_history(e)
    assert (attempt.attempt_state, attempt.ended_at) == (AttemptRecordState.ENDED_SUCCESS, t)
    released = HistoryEntry(
        "released",
        t,
        {
            "lease_id": held.lease_id,
            "lease_epoch": 1,
            "attempt_id": held.attempt_id,
            "attempt_index": 0,
            "worker_id": "wa",
            "worker_instance_id": "wa-1",
            "reason": "completed",
        },
    )
    assert (await play.history(e))[1:] == [released]
    [done] = await play.completions()
    assert (done.execution_id, done.outcome, done.flow_id, done.at) == (e, "success", None, t)
    assert [(news.variant, news.revoked_by) for news in await play.lease_feed()][1:] == [("Revoked", "backend")]
    play.clock.advance_ms(60_000)
    async with play.untouched():
        for sweep in ("attempt_timeout", "execution_deadline", "lease_expiry"):
            assert (await play.engine.sweep_once(sweep)).processed == 0


@pytest.mark.spec("EX-041")
async def test_complete_replay_by_the_same_holder(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    await play.engine.complete(held.handle, result=b"R1")
    play.clock.advance_ms(LEASE_MS * 2)

    async with play.untouched():
        assert await play.engine.complete(held.handle, result=b"R2") == Completed(e)
        assert await play.engine.complete(execution_id=e, fence=fence_of(held), result=b"R2") == Completed(e)

    assert await play.engine.get_execution_result(e) == b"R1"
    facts: dict[str, Any] = {"terminal_outcome": "success", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
        await play.engine.fail(held.handle, reason="too late")
    async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
        await play.engine.complete(execution_id=e, fence=Fence(held.lease_id, 2, held.attempt_id))


@pytest.mark.spec("EX-042")
async def test_operator_override_completion(play: Play) -> None:
    engine, override = play.engine, "operator_override"
    held = await play.claimed()
    e = held.execution_id
    for source in (None, "someone"):
        async with play.refused(errors.InvalidInput, "fence_required"):
            await engine.complete(execution_id=e, source=source)
    async with play.refused(errors.InvalidInput, "partial_fence_triple"):
        await engine.complete(execution_id=e, fence=Fence(lease_id=held.lease_id), source=override)

    assert await engine.complete(execution_id=e, source=override, result=b"op") == Completed(e)
    assert await engine.get_execution_result(e) == b"op"

    waiting = await play.create()
    async with play.refused(errors.ExecutionNotActive, lifecycle_phase="runnable", attempt_id=""):
        await engine.complete(execution_id=waiting, source=override)
    async with play.refused(errors.NotFound, entity="execution"):
        await engine.complete(execution_id=MISSING, source=override)
    revoked = await play.claimed()
    await play.revoked(revoked)
    async with play.refused(errors.LeaseRevoked):
        await engine.complete(execution_id=revoked.execution_id, source=override)
    lapsed = await play.claimed()
    play.clock.advance_ms(LEASE_MS)
    with pytest.raises(errors.LeaseExpired):
        await engine.complete(execution_id=lapsed.execution_id, source=override)
    assert await play.vector(lapsed.execution_id) == EXPIRED_LEASE
    assert await play.told(lapsed.execution_id) == ["acquired", "expired"]


async def test_blank_parts_of_a_fence_are_parts_that_were_not_given(play: Play) -> None:
    engine, blank = play.engine, Fence("", None, "")
    held = await play.claimed()
    e = held.execution_id
    async with play.refused(errors.InvalidInput, "fence_required"):
        await engine.complete(execution_id=e, fence=blank)
    async with play.refused(errors.InvalidInput, "fence_required"):
        await engine.renew(execution_id=e, attempt_index=0, fence=blank, lease_ttl_ms=LEASE_MS)
    async with play.refused(errors.InvalidInput, "partial_fence_triple"):
        await engine.complete(execution_id=e, fence=Fence(held.lease_id, 1, ""))

    assert await engine.complete(execution_id=e, fence=blank, source="operator_override") == Completed(e)


@pytest.mark.spec("EX-043")
async def test_result_presence(play: Play) -> None:
    for result in (None, b"", b"x", bytes(range(256))):
        held = await play.claimed()
        assert await play.engine.get_execution_result(held.execution_id) is None
        await play.engine.complete(held.handle, result=result)
        assert await play.engine.get_execution_result(held.execution_id) == result


@pytest.mark.spec("EX-044")
@pytest.mark.parametrize("why", ["no policy", "no retries", "unparsable", "permanent", "cancelled"])
async def test_fail_without_usable_policy(play: Play, why: str) -> None:
    policy = None if why == "no policy" else retries(0 if why == "no retries" else 3)
    held = await play.claimed(policy=policy)
    e = held.execution_id
    play.clock.advance_ms(10)
    category = why if why in ("permanent", "cancelled") else "x"
    own = "{not json" if why == "unparsable" else None

    answer = await play.engine.fail(held.handle, reason="boom", category=category, retry_policy=own)

    assert answer == TerminalFailed(e)
    assert await play.vector(e) == terminal("failed")
    core = await play.core(e)
    assert (core["failure_reason"], core["completed_at"], core["retry_count"]) == ("boom", play.now, 0)
    assert not {"current_lease_id", "current_worker_id", "lease_expires_at", "delay_until"} & set(core)
    assert core["current_attempt_id"] == held.attempt_id
    attempt = await play.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.ENDED_FAILURE
    assert (attempt.failure_reason, attempt.failure_category, attempt.ended_at) == ("boom", category, play.now)
    assert await play.told(e) == ["acquired", "released failed_terminal"]
    assert await play.outcomes() == ["failed"]
    async with play.untouched():
        assert await play.engine.fail(held.handle, reason="other") == TerminalFailed(e)


async def test_a_blank_retry_policy_leaves_the_execution_s_own_in_force(play: Play) -> None:
    held = await play.claimed(policy=retries(1))

    assert isinstance(await play.engine.fail(held.handle, reason="boom", retry_policy=""), RetryScheduled)


@pytest.mark.spec("EX-045")
async def test_fail_with_retry_scheduled(play: Play) -> None:
    deadline = play.now + 90_000
    held = await play.claimed(policy=retries(2), execution_deadline_at=deadline)
    e = held.execution_id
    play.clock.advance_ms(10)
    t = play.now

    answer = await play.engine.fail(held.handle, reason="flaky", category="transient")

    assert answer == RetryScheduled(e, t + 500, 1)
    assert await play.vector(e) == RETRY_BACKOFF
    core = await play.core(e)
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
    [attempt] = await play.engine.attempt_history(e)
    assert (attempt.attempt_state, attempt.failure_reason) == (AttemptRecordState.ENDED_FAILURE, "flaky")
    assert await play.told(e) == ["acquired", "released failed_retry_scheduled"]
    assert await play.outcomes() == []
    async with play.untouched():
        assert await play.engine.fail(held.handle, reason="again") == answer
    facts: dict[str, Any] = {
        "terminal_outcome": "none",
        "lease_epoch": 1,
        "lifecycle_phase": "runnable",
        "attempt_id": "",
    }
    async with play.refused(errors.ExecutionNotActive, **facts):
        await play.engine.complete(held.handle)
    await play.promoted(e)
    async with play.untouched():
        assert await play.engine.fail(held.handle, reason="again") == RetryScheduled(e, 0, 1)


@pytest.mark.spec("EX-046")
async def test_retry_claim_lineage(play: Play) -> None:
    t0 = play.now
    held = await play.claimed(policy=retries(2))
    e = held.execution_id
    await play.engine.fail(held.handle, reason="flaky")
    await play.promoted(e)
    assert play.now == t0 + 500

    again = await play.claimed_again(e, "wb")

    assert (again.attempt_index, again.attempt_type, again.lease_epoch) == (1, AttemptType.RETRY, 2)
    attempt = await play.attempt(e, 1)
    assert (attempt.lineage.previous_attempt_index, attempt.lineage.retry_reason) == (0, "flaky")
    assert (attempt.started_at, attempt.worker_id) == (t0 + 500, "wb")
    core = await play.core(e)
    assert (core["started_at"], core["total_attempt_count"], core["retry_count"]) == (t0, 2, 1)
    assert not {name for name in core if name.startswith("pending_")}
    async with play.refused(errors.StaleLease):
        await play.engine.fail(held.handle, reason="late")


async def failures(play: Play, policy: dict[str, Any], count: int) -> list[int]:
    """The pauses after so many failures in a row."""
    e = await play.create(policy=policy)
    pauses = []
    for _ in range(count):
        await play.grant(e)
        answer = await play.engine.fail((await play.claim(e)).handle, reason="flaky")
        assert isinstance(answer, RetryScheduled)
        pauses.append(answer.delay_until - play.now)
        await play.promoted(e)
    return pauses


@pytest.mark.spec("EX-047")
@pytest.mark.parametrize(
    ("backoff", "pauses"),
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
async def test_backoff_of_successive_failures(play: Play, backoff: dict[str, Any], pauses: list[int]) -> None:
    assert await failures(play, retries(4, **backoff), len(pauses)) == pauses


@pytest.mark.spec("EX-047")
@pytest.mark.parametrize(("chance", "pause"), [(0.0, 500), (0.999999, 1000)])
async def test_jitter_spreads_the_first_pause(play: Play, chance: float, pause: int) -> None:
    play.engine.runtime.random = lambda: chance

    assert await failures(play, retries(1, type="exponential", initial_delay_ms=1000, jitter=True), 1) == [pause]


@pytest.mark.spec("EX-048")
async def test_retryable_categories_filter(play: Play) -> None:
    held = await play.claimed(policy=retries(5, ("rate_limit",)))
    e = held.execution_id
    assert isinstance(await play.engine.fail(held.handle, reason="r", category="rate_limit"), RetryScheduled)
    await play.promoted(e)
    again = await play.claimed_again(e)
    assert await play.engine.fail(again.handle, reason="b", category="bad_output") == TerminalFailed(e)

    free = await play.claimed(policy=retries(5))
    for category in ("rate_limit", "bad_output"):
        answer = await play.engine.fail(free.handle, reason="r", category=category)
        assert isinstance(answer, RetryScheduled)
        await play.promoted(free.execution_id)
        free = await play.claimed_again(free.execution_id)


@pytest.mark.spec("EX-049")
@pytest.mark.parametrize("first", ["complete", "cancel"])
@pytest.mark.parametrize("processes", [1, 2])
async def test_complete_versus_cancel_race(play: Play, first: str, processes: int) -> None:
    engine = play.engine
    operator = engine if processes == 1 else Engine(engine.store, minter=SeededMinter(9))
    held = await play.claimed()
    e = held.execution_id
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "complete": lambda: engine.complete(held.handle, result=b"R"),
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
    assert (lost.terminal_outcome, lost.lifecycle_phase, lost.attempt_id) == (outcome, "terminal", held.attempt_id)
    assert await play.vector(e) == terminal(outcome)
    assert await play.outcomes() == [outcome]
    assert len([entry for entry in await play.told(e) if entry.startswith("released")]) == 1
    ended = AttemptRecordState.ENDED_SUCCESS if won == "complete" else AttemptRecordState.ENDED_CANCELLED
    assert (await play.attempt(e, 0)).attempt_state is ended
    if won == "cancel":
        assert await engine.cancel_execution(e) == Cancelled(e)


@pytest.mark.spec("EX-049")
async def test_of_many_ends_exactly_one_takes_effect(play: Play) -> None:
    engine, other = play.engine, Engine(play.engine.store, minter=SeededMinter(9))
    held = await play.claimed()
    e = held.execution_id

    ends: tuple[Any, ...] = await asyncio.gather(
        other.expire_execution(e),
        engine.fail(held.handle, reason="boom"),
        engine.complete(held.handle),
        other.cancel_execution(e),
        engine.expire_execution(e),
        return_exceptions=True,
    )

    assert len(await play.outcomes(e)) == 1
    assert len(await play.told(e)) == 2
    won = [end for end in ends if isinstance(end, Expired | TerminalFailed | Completed | Cancelled)]
    lost = [end for end in ends if isinstance(end, errors.ExecutionNotActive | AlreadyTerminal)]
    assert (len(won), len(lost)) == (1, 4)
    assert (await play.vector(e)).startswith("terminal/unowned/")


async def test_of_many_claims_of_one_grant_one_wins(play: Play) -> None:
    e = await play.create()
    await play.grant(e, "wa")

    claims: list[Any] = await asyncio.gather(
        *(play.claim(e, "wa", instance=f"wa-{number}") for number in range(8)), return_exceptions=True
    )

    assert sum(isinstance(one, Claimed) for one in claims) == 1
    lost = [one for one in claims if not isinstance(one, Claimed)]
    assert all(isinstance(one, errors.ExecutionNotLeaseable | errors.InvalidClaimGrant) for one in lost)
    assert (await play.core(e))["current_lease_epoch"] == 1
    assert await play.told(e) == ["acquired"]
