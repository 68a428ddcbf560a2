"""Reservations hold capacity of a budget until they are settled, refunded or expired."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.answers.limits import (
    AlreadyApplied,
    HardBreach,
    LimitsChanged,
    Ok,
    Refunded,
    Reserved,
    SoftBreach,
)
from tests.scenarios.env import WAITING, Env
from tests.scenarios.limits.test_budgets import UNKNOWN, B, budget, report, usage
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, claim_admitted

R1 = "0d000000-0000-4000-8000-000000000001"
R2 = "0d000000-0000-4000-8000-000000000002"
R3 = "0d000000-0000-4000-8000-000000000003"
TTL = 1000


async def reserve(env: Env, e: str, reservation: str = R1, ttl: int = TTL, **amounts: int) -> Any:
    return await env.engine.reserve_budget(B, e, amounts, ttl_ms=ttl, reservation_id=reservation)


async def create_with_reservation(env: Env, tokens: int, of: int | tuple[int, int] = 100) -> str:
    """Define the budget and create an execution that has reserved some of it."""
    await budget(env, tokens=of)
    e = await env.create()
    await reserve(env, e, tokens=tokens)
    return e


async def settle(env: Env, e: str, reservation: str = R1, **amounts: int) -> Any:
    return await env.engine.settle_budget(B, e, reservation, amounts)


async def reserved(env: Env) -> dict[str, int]:
    return (await env.engine.get_budget_status(B)).reserved


async def test_a_reservation_counts_against_the_limit_until_it_is_settled(env: Env) -> None:
    await budget(env, tokens=100)
    e = await env.create()
    assert await reserve(env, e, tokens=60) == Reserved(R1, env.now + TTL)
    assert (await usage(env), await reserved(env)) == ({}, {"tokens": 60})

    assert await report(env, tokens=41) == HardBreach("tokens", current_usage=0, hard_limit=100, reserved=60)
    assert isinstance(await reserve(env, e, R2, tokens=41), HardBreach)
    assert await report(env, tokens=40) == Ok()
    assert await settle(env, e, tokens=25) == Ok()

    assert (await usage(env), await reserved(env)) == ({"tokens": 65}, {})
    assert (await env.engine.get_budget_status(B)).breach_count == 2
    assert await report(env, tokens=35) == Ok()


async def test_a_reservation_beyond_the_largest_integer_is_refused(env: Env) -> None:
    await budget(env, tokens=0)
    e = await env.create()
    assert isinstance(await reserve(env, e, tokens=2**63 - 2), Reserved)

    # Both are in one batch: the refused one does not affect the other.
    both = [reserve(env, e, R2, tokens=2), reserve(env, e, R3, tokens=1)]
    answers = await asyncio.gather(*both, return_exceptions=True)

    assert isinstance(answers[0], errors.InvalidInput)
    assert answers[1] == Reserved(R3, env.now + TTL)
    assert await reserved(env) == {"tokens": 2**63 - 1}


async def test_settling_again_changes_nothing(env: Env) -> None:
    e = await create_with_reservation(env, 60)
    assert await settle(env, e, tokens=25) == Ok()

    async with env.unchanged():
        assert await settle(env, e, tokens=25) == AlreadyApplied()
        assert await reserve(env, e, tokens=60) == AlreadyApplied()


async def test_a_settlement_is_recorded_in_the_ledger_of_the_execution(env: Env) -> None:
    e = await create_with_reservation(env, 60)
    await settle(env, e, tokens=25)

    await env.engine.release_budget(B, e)

    assert await usage(env) == {"tokens": 0}


async def test_a_refund_frees_the_reserved_amount(env: Env) -> None:
    await create_with_reservation(env, 100)

    assert await env.engine.refund_budget(B, R1) == Refunded(R1, {"tokens": 100})

    async with env.unchanged():
        assert await env.engine.refund_budget(B, R1) == Refunded(R1, {})
    assert await report(env, tokens=100) == Ok()


async def test_a_reservation_expires_at_its_ttl(env: Env) -> None:
    await create_with_reservation(env, 100)

    env.clock.advance_ms(TTL - 1)
    assert isinstance(await report(env, tokens=1), HardBreach)
    env.clock.advance_ms(1)
    assert await report(env, tokens=1) == Ok()
    assert await reserved(env) == {}


async def test_reserving_again_extends_the_ttl_and_not_the_amount(env: Env) -> None:
    e = await create_with_reservation(env, 60)
    env.clock.advance_ms(TTL - 1)

    assert await reserve(env, e, tokens=60) == Reserved(R1, env.now + TTL)

    env.clock.advance_ms(TTL - 1)
    assert await reserved(env) == {"tokens": 60}
    assert isinstance(await report(env, tokens=41), HardBreach)


async def test_the_reservation_sweep_releases_expired_reservations_and_unblocks(env: Env) -> None:
    await budget(env, tokens=100)
    e, waiting = await env.create(lane="mail"), await env.create(policy={"budget_ids": [B]})
    await reserve(env, e, tokens=60)
    await reserve(env, e, R2, ttl=5000, tokens=40)
    assert await claim_admitted(env) == []
    assert await env.vector(waiting) == BUDGET_BLOCKED

    assert await env.sweep("budget_reservations", after_ms=TTL - 1) == 0
    env.clock.advance_ms(1)
    done = await env.engine.sweep_once("budget_reservations")

    assert (done.processed, await reserved(env)) == (1, {"tokens": 40})
    assert await env.vector(waiting) == WAITING
    assert (await env.engine.sweep_once("budget_reservations")).next_at == env.now + 4000


async def test_after_a_settlement_the_next_reservation_still_expires(env: Env) -> None:
    e = await create_with_reservation(env, 60)
    await reserve(env, e, R2, ttl=5000, tokens=40)
    await settle(env, e, tokens=60)

    env.clock.advance_ms(TTL)
    done = await env.engine.sweep_once("budget_reservations")
    assert (done.processed, await reserved(env)) == (0, {"tokens": 40})
    assert (await env.engine.sweep_once("budget_reservations")).next_at == env.now + 4000

    env.clock.advance_ms(4000)
    assert await report(env, tokens=40) == Ok()
    assert (await usage(env), await reserved(env)) == ({"tokens": 100}, {})


async def test_settling_more_than_reserved_is_checked_like_a_report(env: Env) -> None:
    await budget(env, tokens=(100, 90))
    e = await env.create()
    await reserve(env, e, tokens=60)
    await report(env, tokens=30)

    assert await settle(env, e, tokens=71) == HardBreach("tokens", current_usage=30, hard_limit=100)
    assert (await usage(env), await reserved(env)) == ({"tokens": 30}, {"tokens": 60})
    assert await settle(env, e, tokens=70) == SoftBreach("tokens", current_usage=100, soft_limit=90)
    assert (await usage(env), await reserved(env)) == ({"tokens": 100}, {})


async def test_settling_within_the_reservation_succeeds_after_the_limit_was_lowered(env: Env) -> None:
    e = await create_with_reservation(env, 60)
    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[10], soft_limits=[0])

    assert await settle(env, e, tokens=60) == Ok()
    assert await usage(env) == {"tokens": 60}


async def test_a_settlement_after_the_ttl_is_checked_like_a_report(env: Env) -> None:
    e = await create_with_reservation(env, 60)
    env.clock.advance_ms(TTL)
    await report(env, tokens=50)

    assert await settle(env, e, tokens=60) == HardBreach("tokens", current_usage=50, hard_limit=100)
    assert await settle(env, e, tokens=50) == Ok()
    assert await settle(env, e, tokens=50) == AlreadyApplied()


async def test_a_reservation_belongs_to_one_execution(env: Env) -> None:
    await budget(env, tokens=100)
    e, other = await env.create(), await env.create()
    await reserve(env, e, tokens=60)

    for operation in (settle, reserve):
        async with env.refused(errors.InvalidInput, "reservation_id: of another execution"):
            await operation(env, other, tokens=1)


async def test_reservations_survive_a_reset(env: Env) -> None:
    await budget(env, tokens=100)
    e = await env.create()
    await report(env, tokens=40)
    await reserve(env, e, tokens=60)

    await env.engine.reset_budget(B)

    assert (await usage(env), await reserved(env)) == ({"tokens": 0}, {"tokens": 60})
    assert isinstance(await report(env, tokens=41), HardBreach)


async def test_reservations_of_an_undefined_budget_count_once_it_is_defined(env: Env) -> None:
    e = await env.create()
    assert isinstance(await reserve(env, e, tokens=60), Reserved)

    await budget(env, tokens=100)

    assert isinstance(await report(env, tokens=41), HardBreach)


async def test_concurrent_reservations_never_exceed_the_limit(env: Env) -> None:
    await budget(env, tokens=100)
    e = await env.create()

    answers = await asyncio.gather(*(env.engine.reserve_budget(B, e, {"tokens": 3}, ttl_ms=TTL) for _ in range(50)))

    assert sum(isinstance(answer, Reserved) for answer in answers) == 33
    assert await reserved(env) == {"tokens": 99}


async def test_an_execution_blocked_by_reservations_is_unblocked_by_a_refund(env: Env) -> None:
    await budget(env, tokens=100)
    e, waiting = await env.create(lane="mail"), await env.create(policy={"budget_ids": [B]})
    await reserve(env, e, tokens=100)
    assert await claim_admitted(env) == []

    await env.engine.refund_budget(B, R1)

    assert await claim_admitted(env) == [waiting]


async def test_raising_a_limit_unblocks_executions(env: Env) -> None:
    await budget(env, tokens=100)
    await report(env, tokens=100)
    waiting = await env.create(policy={"budget_ids": [B]})
    assert await claim_admitted(env) == []

    changed = await env.engine.change_budget_limits(
        B, dimensions=["tokens", "calls"], hard_limits=[200, 7], soft_limits=[150, 0]
    )

    assert changed == LimitsChanged(B)
    assert await claim_admitted(env) == [waiting]
    status = await env.engine.get_budget_status(B)
    assert (status.hard_limits, status.soft_limits) == ({"tokens": 200, "calls": 7}, {"tokens": 150, "calls": 0})
    async with env.refused(errors.NotFound, entity="budget"):
        await env.engine.change_budget_limits(UNKNOWN, dimensions=["x"], hard_limits=[1], soft_limits=[1])


@pytest.mark.parametrize("amounts", [{"tokens": -1}, {"": 1}, {"tokens": 2**63}])
async def test_invalid_amounts_are_refused(env: Env, amounts: dict[str, int]) -> None:
    await budget(env, tokens=100)
    e = await env.create()
    async with env.refused(errors.InvalidInput):
        await env.engine.reserve_budget(B, e, amounts, ttl_ms=TTL)
    async with env.refused(errors.InvalidInput):
        await env.engine.settle_budget(B, e, R1, amounts)


async def test_usage_is_taken_from_a_reservation_piece_by_piece_and_the_rest_is_refunded(env: Env) -> None:
    e = await create_with_reservation(env, 60)

    first = await env.engine.record_spend(B, e, {"tokens": 25}, idempotency_key="a", reservation_id=R1, acknowledged=())
    async with env.unchanged():
        again = await env.engine.record_spend(
            B, e, {"tokens": 25}, idempotency_key="a", reservation_id=R1, acknowledged=()
        )
    assert (first, again) == (Ok(), AlreadyApplied())
    assert (await usage(env), await reserved(env)) == ({"tokens": 25}, {"tokens": 35})

    refused = await env.engine.record_spend(B, e, {"tokens": 76}, reservation_id=R1)
    assert isinstance(refused, HardBreach)
    assert await env.engine.refund_budget(B, R1, execution_id=e, acknowledged=["a"]) == Refunded(R1, {"tokens": 35})
    assert (await usage(env), await reserved(env)) == ({"tokens": 25}, {})


async def test_a_key_is_kept_until_it_is_acknowledged_and_a_day_longer(env: Env) -> None:
    await budget(env, tokens=100)
    e = await env.create()
    hour = 60 * 60 * 1000

    async def spend(key: str, *acknowledged: str) -> Any:
        return await env.engine.record_spend(B, e, {"tokens": 1}, idempotency_key=key, acknowledged=acknowledged)

    assert await spend("a") == Ok()
    env.clock.advance_ms(25 * hour)
    assert await spend("a") == AlreadyApplied()
    assert await spend("b", "a") == Ok()
    env.clock.advance_ms(23 * hour)
    assert await spend("a") == AlreadyApplied()
    env.clock.advance_ms(2 * hour)
    assert await spend("b") == AlreadyApplied()
    assert await spend("a") == Ok(), "nobody repeats what was acknowledged"
    assert await usage(env) == {"tokens": 3}


async def test_an_earlier_lease_does_not_refund_what_a_later_one_has_taken_up(env: Env) -> None:
    await budget(env, tokens=100)
    e = await env.create()
    for epoch in (1, 2):
        await env.engine.reserve_budget(B, e, {"tokens": 60}, ttl_ms=TTL, reservation_id=R1, epoch=epoch)

    assert await env.engine.refund_budget(B, R1, execution_id=e, epoch=1) == Refunded(R1, {})
    assert await reserved(env) == {"tokens": 60}
    assert await env.engine.refund_budget(B, R1, execution_id=e, epoch=2) == Refunded(R1, {"tokens": 60})


async def test_an_expired_reservation_is_made_again_for_what_was_not_drawn(env: Env) -> None:
    e = await create_with_reservation(env, 60, of=60)
    await env.engine.record_spend(B, e, {"tokens": 25}, reservation_id=R1)
    env.clock.advance_ms(TTL)

    assert isinstance(await reserve(env, e, tokens=60), HardBreach)
    again = await env.engine.reserve_budget(B, e, {"tokens": 60}, ttl_ms=TTL, reservation_id=R1, drawn={"tokens": 25})

    assert again == Reserved(R1, env.now + TTL)
    assert (await usage(env), await reserved(env)) == ({"tokens": 25}, {"tokens": 35})
