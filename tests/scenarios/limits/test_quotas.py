"""S-067 to S-071: quotas, and executions blocked by them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.answers.execution import Blocked, Rejected, Unblocked
from flowfabric.model.answers.limits import (
    AdmissionReleased,
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    QuotaLimits,
    QuotaPolicyCreated,
    QuotaPolicyExists,
    RateExceeded,
    Reconciled,
)
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest
from flowfabric.stores.queries import Read
from flowfabric.testing.invariants import scan_all
from tests.scenarios.env import WAITING, Env

Q = "0c000000-0000-4000-8000-000000000001"
Q2 = "0c000000-0000-4000-8000-000000000002"
BUDGET_BLOCKED = "runnable/unowned/blocked_by_budget/waiting_for_budget/none/pending_first_attempt/rate_limited"


async def policy(env: Env, policy_id: str = Q, *, window: int = 60, rate: int = 0, cap: int = 0) -> None:
    """Create a quota policy."""
    created = await env.engine.create_quota_policy(
        policy_id, window_seconds=window, max_requests_per_window=rate, max_concurrent=cap
    )
    assert created == QuotaPolicyCreated(policy_id)


async def check(env: Env, e: str, policy_id: str = Q, **options: Any) -> Any:
    """Check the admission of an execution."""
    numbers = {"window_seconds": 60, "rate_limit": 0, "concurrency_cap": 0} | options
    return await env.engine.check_admission(policy_id, e, **numbers)


async def root(env: Env, policy_id: str = Q) -> QuotaPolicy:
    loaded = await env.engine.runtime.load((Read(QuotaPolicy, ("default", policy_id)),))
    row: QuotaPolicy = loaded.rows[0][0]
    return row


async def patch_policy(env: Env, **fields: Any) -> None:
    """Patch a quota policy directly."""
    row = await root(env)
    guard = Guard(QuotaPolicy, ("default", Q), row.revision)
    change = Change(guards=(guard,), writes=(Patch(QuotaPolicy, ("default", Q), fields),), id=row.revision + 1)
    assert await env.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-067")
async def test_the_rate_limit_is_a_sliding_window(env: Env) -> None:
    e1, e2, e3, e4 = [await env.create() for _ in range(4)]
    start = env.now
    assert await check(env, e1, rate_limit=2) == Admitted()
    env.clock.now = start + 10_000
    assert await check(env, e2, rate_limit=2) == Admitted()

    env.clock.now = start + 20_000
    async with env.unchanged():
        assert await check(env, e3, rate_limit=2) == RateExceeded(40_000)
    env.clock.now = start + 59_999
    assert await check(env, e3, rate_limit=2) == RateExceeded(1)
    env.clock.now = start + 60_000
    assert await check(env, e3, rate_limit=2) == Admitted()
    assert await check(env, e4, rate_limit=2) == RateExceeded(10_000)


@pytest.mark.spec("S-067")
async def test_jitter_spreads_the_retry_time(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    await check(env, e1, rate_limit=1)
    waits = []
    for chance in (0.0, 0.5, 0.999_999):
        env.engine.runtime.random = lambda chance=chance: chance  # type: ignore[misc]
        waits.append((await check(env, e2, rate_limit=1, jitter_ms=100)).retry_after_ms)

    assert waits == [60_000, 60_050, 60_100]


@pytest.mark.spec("S-067")
async def test_rate_windows_are_per_dimension_and_policy(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    assert await check(env, e1, rate_limit=1) == Admitted()

    assert await check(env, e2, rate_limit=1, dimension="other") == Admitted()
    assert await check(env, e2, Q2, rate_limit=1) == Admitted()


@pytest.mark.spec("S-067")
async def test_concurrency_slots_are_per_policy_across_dimensions(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    assert await check(env, e1, concurrency_cap=1, dimension="a") == Admitted()

    assert await check(env, e1, concurrency_cap=1, dimension="b") == AlreadyAdmitted()
    assert await check(env, e2, concurrency_cap=1, dimension="b") == ConcurrencyExceeded()
    await env.engine.release_admission(Q, e1)
    assert await check(env, e2, concurrency_cap=1, dimension="b") == Admitted()


@pytest.mark.spec("S-068")
async def test_an_admission_is_idempotent_within_its_window(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    start = env.now
    assert await check(env, e1, concurrency_cap=1) == Admitted()

    env.clock.now = start + 30_000
    async with env.unchanged():
        assert await check(env, e1, concurrency_cap=1) == AlreadyAdmitted()
    env.clock.now = start + 60_000
    assert await check(env, e2, concurrency_cap=1) == ConcurrencyExceeded()
    assert await check(env, e1, concurrency_cap=1) == Admitted()
    assert (await root(env)).active == 1


@pytest.mark.spec("S-069")
async def test_the_rate_is_checked_before_concurrency(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    assert await check(env, e1, rate_limit=1, concurrency_cap=1) == Admitted()

    assert await check(env, e2, rate_limit=1, concurrency_cap=1) == RateExceeded(60_000)
    assert await check(env, e2, rate_limit=0, concurrency_cap=1) == ConcurrencyExceeded()


@pytest.mark.spec("S-070")
async def test_the_quota_reconciler_corrects_counters(env: Env) -> None:
    await policy(env, cap=2)
    e1, e2, e3 = [await env.create() for _ in range(3)]
    start = env.now
    await check(env, e2, concurrency_cap=2)
    env.clock.now = start + 30_000
    await check(env, e1, concurrency_cap=2)
    await patch_policy(env, active=5)

    done = await env.engine.sweep_once("quota_reconciler")

    assert (done.processed, done.errors, (await root(env)).active) == (1, 0, 2)
    assert await check(env, e3, concurrency_cap=2) == ConcurrencyExceeded()
    env.clock.now = start + 60_000
    partition = (await root(env)).partition
    assert await env.engine.reconcile_quota_counters(partition) == Reconciled(1, 0)
    assert (await root(env)).active == 1
    async with env.unchanged():
        assert await env.engine.reconcile_quota_counters(partition) == Reconciled(0, 0)


@pytest.mark.spec("S-070")
async def test_an_execution_that_outlasts_the_window_keeps_its_slot(env: Env) -> None:
    await policy(env, cap=1)
    claim = await env.create_and_claim()
    waiting = await env.create()
    await check(env, claim.execution_id, concurrency_cap=1)
    env.clock.advance_ms(60_000)

    assert await env.sweep("quota_reconciler") == 1  # the request left the window

    assert (await root(env)).active == 1
    assert await check(env, waiting, concurrency_cap=1) == ConcurrencyExceeded()
    await env.engine.cancel_execution(claim.execution_id)
    await env.engine.sweep_once("quota_reconciler")
    assert (await root(env)).active == 0


@pytest.mark.spec("S-070")
async def test_without_a_cap_an_expired_slot_is_still_subtracted(env: Env) -> None:
    await policy(env, rate=5)
    e1, e2 = await env.create(), await env.create()
    await check(env, e1, concurrency_cap=1)
    env.clock.advance_ms(60_000)

    await env.engine.sweep_once("quota_reconciler")

    assert (await root(env)).active == 0
    assert await check(env, e2, concurrency_cap=1) == Admitted()


@pytest.mark.spec("S-071")
async def test_block_and_unblock_change_the_state_vector(env: Env) -> None:
    e = await env.create()
    blocked = await env.engine.block_execution_for_admission(e, reason="waiting_for_budget", detail="why")
    assert blocked == Blocked(e, "waiting_for_budget")
    assert await env.vector(e) == BUDGET_BLOCKED
    assert await env.claim_next() is None
    assert await env.grant_next() is None

    async with env.refused(errors.ExecutionNotEligible):
        await env.engine.unblock_execution(e, expected_reason="waiting_for_quota")
    assert await env.engine.unblock_execution(e, expected_reason="waiting_for_budget") == Unblocked(e)
    assert await env.vector(e) == WAITING
    assert (await env.row(e)).blocked_on is None
    async with env.refused(errors.InvalidBlockingReason):
        await env.engine.block_execution_for_admission(e, reason="because")

    delayed = await env.create(delay_until=env.now + 1000)
    async with env.unchanged():
        assert isinstance(
            await env.engine.block_execution_for_admission(delayed, reason="waiting_for_budget"), Rejected
        )


# -- beyond the scenarios ------------------------------------------------------------------------------------------


async def test_a_quota_policy_is_defined_once(env: Env) -> None:
    assert await env.engine.read_quota_policy_limits(Q) is None
    created = await env.engine.create_quota_policy(
        Q, window_seconds=60, max_requests_per_window=2, max_concurrent=1, jitter_ms=5
    )
    assert created == QuotaPolicyCreated(Q)
    async with env.unchanged():
        again = await env.engine.create_quota_policy(Q, window_seconds=1, max_requests_per_window=1, max_concurrent=1)

    assert again == QuotaPolicyExists(Q)
    assert await env.engine.read_quota_policy_limits(Q) == QuotaLimits(60, 2, 1, 5)


async def test_admissions_do_not_define_a_quota_policy(env: Env) -> None:
    await check(env, await env.create(), concurrency_cap=1)
    assert await env.engine.read_quota_policy_limits(Q) is None

    await policy(env, cap=3)

    assert await env.engine.read_quota_policy_limits(Q) == QuotaLimits(60, 0, 3)
    assert (await root(env)).active == 1


async def test_unreadable_limits_are_reported_as_corruption(env: Env) -> None:
    await policy(env, cap=3)
    await patch_policy(env, active_concurrency_cap=-1)

    with pytest.raises(errors.Corruption, match="a negative limit"):
        await env.engine.read_quota_policy_limits(Q)


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({"window_seconds": -1}, "window_seconds: -1 is not within 0..315360000"),
        ({"max_requests_per_window": -1}, f"max_requests_per_window: -1 is not within 0..{2**63 - 1}"),
        ({"max_concurrent": 1.5}, "max_concurrent: not a whole number"),
    ],
)
async def test_limits_must_be_non_negative_integers(env: Env, options: dict[str, Any], detail: str) -> None:
    numbers: dict[str, Any] = {"window_seconds": 60, "max_requests_per_window": 1, "max_concurrent": 1} | options
    async with env.refused(errors.InvalidInput, detail):
        await env.engine.create_quota_policy(Q, **numbers)


async def test_a_release_frees_one_slot_once_and_keeps_the_rate_window(env: Env) -> None:
    e1, e2, e3 = [await env.create() for _ in range(3)]
    await check(env, e1, rate_limit=2, concurrency_cap=2)
    await check(env, e2, rate_limit=2, concurrency_cap=2)

    assert await env.engine.release_admission(Q, e1) == AdmissionReleased()
    assert (await root(env)).active == 1
    async with env.unchanged():
        assert await env.engine.release_admission(Q, e1) == AdmissionReleased()
        assert await env.engine.release_admission(Q, e3) == AdmissionReleased()
    assert await check(env, e3, rate_limit=2, concurrency_cap=2) == RateExceeded(60_000)


async def test_a_second_request_of_an_execution_moves_its_window_entry(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    start = env.now
    await check(env, e1, rate_limit=2)
    await env.engine.release_admission(Q, e1)
    env.clock.now = start + 30_000
    assert await check(env, e1, rate_limit=2) == Admitted()

    assert await check(env, e2, rate_limit=2) == Admitted()
    env.clock.now = start + 60_000
    assert await check(env, await env.create(), rate_limit=2) == RateExceeded(30_000)


async def test_expired_requests_are_swept_and_those_of_a_window_are_kept(env: Env) -> None:
    assert await check(env, await env.create(), rate_limit=9) == Admitted()
    env.clock.advance_ms(30_000)
    again = await env.create()
    assert await check(env, again, rate_limit=9, window_seconds=30) == Admitted()
    assert await env.sweep("quota_windows", after_ms=30_000) == 2
    assert await check(env, again, rate_limit=1) == Admitted()

    assert await env.sweep("quota_windows") == 0
    assert [row.execution_id for row in await scan_all(env.engine.store, QuotaRequest)] == [again]


async def test_a_request_that_moves_while_it_is_swept_stays(env: Env) -> None:
    execution = await env.create()
    assert await check(env, execution, rate_limit=9) == Admitted()
    env.clock.advance_ms(60_000)
    (expired,) = (await env.engine.store.due(QuotaRequest, "expires_at", limit=9)).rows
    assert await check(env, execution, rate_limit=9) == Admitted()

    assert not await env.engine.quota_slots.delete_expired_request(expired)
    assert isinstance(await check(env, await env.create(), rate_limit=1), RateExceeded)


async def test_slots_of_a_zero_window_never_expire(env: Env) -> None:
    e1, e2 = await env.create(), await env.create()
    await check(env, e1, window_seconds=0, concurrency_cap=1)
    await env.sweep("quota_reconciler", after_ms=10**12)

    assert await check(env, e2, window_seconds=0, concurrency_cap=1) == ConcurrencyExceeded()
    assert await check(env, e1, window_seconds=0, concurrency_cap=1) == AlreadyAdmitted()


async def test_one_of_two_concurrent_requests_gets_the_last_slot(env: Env) -> None:
    executions = [await env.create() for _ in range(2)]

    answers = await asyncio.gather(*(check(env, e, concurrency_cap=1) for e in executions))

    assert sorted(map(repr, answers)) == [repr(Admitted()), repr(ConcurrencyExceeded())]
