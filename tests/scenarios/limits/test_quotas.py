"""S-067 to S-071: quotas, and being blocked by them."""

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
from flowfabric.model.quota import QuotaPolicy
from flowfabric.stores.queries import Read
from tests.scenarios.play import WAITING, Play

Q = "0c000000-0000-4000-8000-000000000001"
Q2 = "0c000000-0000-4000-8000-000000000002"
BUDGET_BLOCKED = "runnable/unowned/blocked_by_budget/waiting_for_budget/none/pending_first_attempt/rate_limited"


async def policy(play: Play, policy_id: str = Q, *, window: int = 60, rate: int = 0, cap: int = 0) -> None:
    """A quota policy."""
    created = await play.engine.create_quota_policy(
        policy_id, window_seconds=window, max_requests_per_window=rate, max_concurrent=cap
    )
    assert created == QuotaPolicyCreated(policy_id)


async def check(play: Play, e: str, policy_id: str = Q, **given: Any) -> Any:
    """What an execution that asks to be admitted hears."""
    numbers = {"window_seconds": 60, "rate_limit": 0, "concurrency_cap": 0} | given
    return await play.engine.check_admission(policy_id, e, **numbers)


async def root(play: Play, policy_id: str = Q) -> QuotaPolicy:
    loaded = await play.engine.runtime.load((Read(QuotaPolicy, ("default", policy_id)),))
    row: QuotaPolicy = loaded.rows[0][0]
    return row


async def corrupt(play: Play, **fields: Any) -> None:
    """Write into a policy what no rule would."""
    row = await root(play)
    guard = Guard(QuotaPolicy, ("default", Q), row.revision)
    change = Change(guards=(guard,), writes=(Patch(QuotaPolicy, ("default", Q), fields),), id=row.revision + 1)
    assert await play.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-067")
async def test_sliding_window(play: Play) -> None:
    e1, e2, e3, e4 = [await play.create() for _ in range(4)]
    start = play.now
    assert await check(play, e1, rate_limit=2) == Admitted()
    play.clock.now = start + 10_000
    assert await check(play, e2, rate_limit=2) == Admitted()

    play.clock.now = start + 20_000
    async with play.untouched():
        assert await check(play, e3, rate_limit=2) == RateExceeded(40_000)
    play.clock.now = start + 59_999
    assert await check(play, e3, rate_limit=2) == RateExceeded(1)
    play.clock.now = start + 60_000
    assert await check(play, e3, rate_limit=2) == Admitted()
    assert await check(play, e4, rate_limit=2) == RateExceeded(10_000)


@pytest.mark.spec("S-067")
async def test_jitter_spreads_the_retries_evenly_up_to_its_length(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    await check(play, e1, rate_limit=1)
    waits = []
    for chance in (0.0, 0.5, 0.999_999):
        play.engine.runtime.random = lambda chance=chance: chance  # type: ignore[misc]
        waits.append((await check(play, e2, rate_limit=1, jitter_ms=100)).retry_after_ms)

    assert waits == [60_000, 60_050, 60_100]


@pytest.mark.spec("S-067")
async def test_windows_of_other_dimensions_and_policies_are_apart(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    assert await check(play, e1, rate_limit=1) == Admitted()

    assert await check(play, e2, rate_limit=1, dimension="other") == Admitted()
    assert await check(play, e2, Q2, rate_limit=1) == Admitted()


@pytest.mark.spec("S-067")
async def test_slots_and_their_counter_are_of_the_policy_whatever_the_dimension(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    assert await check(play, e1, concurrency_cap=1, dimension="a") == Admitted()

    assert await check(play, e1, concurrency_cap=1, dimension="b") == AlreadyAdmitted()
    assert await check(play, e2, concurrency_cap=1, dimension="b") == ConcurrencyExceeded()
    await play.engine.release_admission(Q, e1)
    assert await check(play, e2, concurrency_cap=1, dimension="b") == Admitted()


@pytest.mark.spec("S-068")
async def test_idempotent_admission(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    start = play.now
    assert await check(play, e1, concurrency_cap=1) == Admitted()

    play.clock.now = start + 30_000
    async with play.untouched():
        assert await check(play, e1, concurrency_cap=1) == AlreadyAdmitted()
    play.clock.now = start + 60_000
    assert await check(play, e2, concurrency_cap=1) == ConcurrencyExceeded()
    assert await check(play, e1, concurrency_cap=1) == Admitted()
    assert (await root(play)).active == 1


@pytest.mark.spec("S-069")
async def test_concurrency_after_rate(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    assert await check(play, e1, rate_limit=1, concurrency_cap=1) == Admitted()

    assert await check(play, e2, rate_limit=1, concurrency_cap=1) == RateExceeded(60_000)
    assert await check(play, e2, rate_limit=0, concurrency_cap=1) == ConcurrencyExceeded()


@pytest.mark.spec("S-070")
async def test_the_reconciler_heals_drift(play: Play) -> None:
    await policy(play, cap=2)
    e1, e2, e3 = [await play.create() for _ in range(3)]
    start = play.now
    await check(play, e2, concurrency_cap=2)
    play.clock.now = start + 30_000
    await check(play, e1, concurrency_cap=2)
    await corrupt(play, active=5)

    done = await play.engine.sweep_once("quota_reconciler")

    assert (done.processed, done.errors, (await root(play)).active) == (1, 0, 2)
    assert await check(play, e3, concurrency_cap=2) == ConcurrencyExceeded()
    play.clock.now = start + 60_000
    partition = (await root(play)).partition
    assert await play.engine.reconcile_quota_counters(partition) == Reconciled(1, 0)
    assert (await root(play)).active == 1
    async with play.untouched():
        assert await play.engine.reconcile_quota_counters(partition) == Reconciled(0, 0)


@pytest.mark.spec("S-070")
async def test_work_that_runs_longer_than_the_window_keeps_its_slot(play: Play) -> None:
    await policy(play, cap=1)
    held = await play.claimed()
    waiting = await play.create()
    await check(play, held.execution_id, concurrency_cap=1)
    play.clock.advance_ms(60_000)

    assert (await play.engine.sweep_once("quota_reconciler")).processed == 1  # the request left the window

    assert (await root(play)).active == 1
    assert await check(play, waiting, concurrency_cap=1) == ConcurrencyExceeded()
    await play.engine.cancel_execution(held.execution_id)
    await play.engine.sweep_once("quota_reconciler")
    assert (await root(play)).active == 0


@pytest.mark.spec("S-070")
async def test_without_a_cap_nothing_is_recounted_but_a_dead_slot_takes_its_count_along(play: Play) -> None:
    await policy(play, rate=5)
    e1, e2 = await play.create(), await play.create()
    await check(play, e1, concurrency_cap=1)
    play.clock.advance_ms(60_000)

    await play.engine.sweep_once("quota_reconciler")

    assert (await root(play)).active == 0
    assert await check(play, e2, concurrency_cap=1) == Admitted()


@pytest.mark.spec("S-071")
async def test_block_and_unblock_transitions(play: Play) -> None:
    e = await play.create()
    blocked = await play.engine.block_execution_for_admission(e, reason="waiting_for_budget", detail="why")
    assert blocked == Blocked(e, "waiting_for_budget")
    assert await play.vector(e) == BUDGET_BLOCKED
    assert await play.pull() is None
    assert await play.next_for() is None

    async with play.refused(errors.ExecutionNotEligible):
        await play.engine.unblock_execution(e, expected_reason="waiting_for_quota")
    assert await play.engine.unblock_execution(e, expected_reason="waiting_for_budget") == Unblocked(e)
    assert await play.vector(e) == WAITING
    assert (await play.sheet(e)).blocked_on is None
    async with play.refused(errors.InvalidBlockingReason):
        await play.engine.block_execution_for_admission(e, reason="because")

    delayed = await play.create(delay_until=play.now + 1000)
    async with play.untouched():
        assert isinstance(
            await play.engine.block_execution_for_admission(delayed, reason="waiting_for_budget"), Rejected
        )


# -- beyond the scenarios ------------------------------------------------------------------------------------------


async def test_a_policy_is_defined_once_and_read_back(play: Play) -> None:
    assert await play.engine.read_quota_policy_limits(Q) is None
    created = await play.engine.create_quota_policy(
        Q, window_seconds=60, max_requests_per_window=2, max_concurrent=1, jitter_ms=5
    )
    assert created == QuotaPolicyCreated(Q)
    async with play.untouched():
        again = await play.engine.create_quota_policy(Q, window_seconds=1, max_requests_per_window=1, max_concurrent=1)

    assert again == QuotaPolicyExists(Q)
    assert await play.engine.read_quota_policy_limits(Q) == QuotaLimits(60, 2, 1, 5)


async def test_a_policy_that_admitted_before_it_was_defined_is_still_undefined(play: Play) -> None:
    await check(play, await play.create(), concurrency_cap=1)
    assert await play.engine.read_quota_policy_limits(Q) is None

    await policy(play, cap=3)

    assert await play.engine.read_quota_policy_limits(Q) == QuotaLimits(60, 0, 3)
    assert (await root(play)).active == 1


async def test_unreadable_limits_are_corruption(play: Play) -> None:
    await policy(play, cap=3)
    await corrupt(play, active_concurrency_cap=-1)

    with pytest.raises(errors.Corruption, match="a negative limit"):
        await play.engine.read_quota_policy_limits(Q)


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ({"window_seconds": -1}, "window_seconds: -1 is not within 0..315360000"),
        ({"max_requests_per_window": -1}, f"max_requests_per_window: -1 is not within 0..{2**63 - 1}"),
        ({"max_concurrent": 1.5}, "max_concurrent: not a whole number"),
    ],
)
async def test_limits_are_whole_numbers_from_zero(play: Play, given: dict[str, Any], detail: str) -> None:
    numbers: dict[str, Any] = {"window_seconds": 60, "max_requests_per_window": 1, "max_concurrent": 1} | given
    async with play.refused(errors.InvalidInput, detail):
        await play.engine.create_quota_policy(Q, **numbers)


async def test_releasing_frees_one_slot_once_and_leaves_the_window(play: Play) -> None:
    e1, e2, e3 = [await play.create() for _ in range(3)]
    await check(play, e1, rate_limit=2, concurrency_cap=2)
    await check(play, e2, rate_limit=2, concurrency_cap=2)

    assert await play.engine.release_admission(Q, e1) == AdmissionReleased()
    assert (await root(play)).active == 1
    async with play.untouched():
        assert await play.engine.release_admission(Q, e1) == AdmissionReleased()
        assert await play.engine.release_admission(Q, e3) == AdmissionReleased()
    assert await check(play, e3, rate_limit=2, concurrency_cap=2) == RateExceeded(60_000)


async def test_a_second_request_of_an_execution_moves_its_entry(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    start = play.now
    await check(play, e1, rate_limit=2)
    await play.engine.release_admission(Q, e1)
    play.clock.now = start + 30_000
    assert await check(play, e1, rate_limit=2) == Admitted()

    assert await check(play, e2, rate_limit=2) == Admitted()
    play.clock.now = start + 60_000
    assert await check(play, await play.create(), rate_limit=2) == RateExceeded(30_000)


async def test_a_window_of_zero_gives_slots_that_never_lapse(play: Play) -> None:
    e1, e2 = await play.create(), await play.create()
    await check(play, e1, window_seconds=0, concurrency_cap=1)
    play.clock.advance_ms(10**12)
    await play.engine.sweep_once("quota_reconciler")

    assert await check(play, e2, window_seconds=0, concurrency_cap=1) == ConcurrencyExceeded()
    assert await check(play, e1, window_seconds=0, concurrency_cap=1) == AlreadyAdmitted()


async def test_of_two_at_the_last_slot_exactly_one_is_admitted(play: Play) -> None:
    executions = [await play.create() for _ in range(2)]

    answers = await asyncio.gather(*(check(play, e, concurrency_cap=1) for e in executions))

    assert sorted(map(repr, answers)) == [repr(Admitted()), repr(ConcurrencyExceeded())]
