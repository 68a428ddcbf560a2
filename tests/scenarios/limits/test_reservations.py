"""Reservations: room in a budget that is kept free until it is settled, refunded or over."""

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
from tests.scenarios.limits.test_budgets import UNKNOWN, B, budget, report, usage
from tests.scenarios.play import WAITING, Play
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, pull

R1 = "0d000000-0000-4000-8000-000000000001"
R2 = "0d000000-0000-4000-8000-000000000002"
R3 = "0d000000-0000-4000-8000-000000000003"
TTL = 1000


async def reserve(play: Play, e: str, reservation: str = R1, ttl: int = TTL, **amounts: int) -> Any:
    return await play.engine.reserve_budget(B, e, amounts, ttl_ms=ttl, reservation_id=reservation)


async def settle(play: Play, e: str, reservation: str = R1, **amounts: int) -> Any:
    return await play.engine.settle_budget(B, e, reservation, amounts)


async def reserved(play: Play) -> dict[str, int]:
    return (await play.engine.get_budget_status(B)).reserved


async def test_a_reservation_counts_against_the_limit_until_it_is_settled(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    assert await reserve(play, e, tokens=60) == Reserved(R1, play.now + TTL)
    assert (await usage(play), await reserved(play)) == ({}, {"tokens": 60})

    assert await report(play, tokens=41) == HardBreach("tokens", current_usage=0, hard_limit=100, reserved=60)
    assert isinstance(await reserve(play, e, R2, tokens=41), HardBreach)
    assert await report(play, tokens=40) == Ok()
    assert await settle(play, e, tokens=25) == Ok()

    assert (await usage(play), await reserved(play)) == ({"tokens": 65}, {})
    assert (await play.engine.get_budget_status(B)).breach_count == 2
    assert await report(play, tokens=35) == Ok()


async def test_more_than_can_be_counted_is_not_reserved_without_a_limit_either(play: Play) -> None:
    await budget(play, tokens=0)
    e = await play.create()
    assert isinstance(await reserve(play, e, tokens=2**63 - 2), Reserved)

    # The two are settled in one batch: the one that is refused does not take the other along.
    both = [reserve(play, e, R2, tokens=2), reserve(play, e, R3, tokens=1)]
    answers = await asyncio.gather(*both, return_exceptions=True)

    assert isinstance(answers[0], errors.InvalidInput)
    assert answers[1] == Reserved(R3, play.now + TTL)
    assert await reserved(play) == {"tokens": 2**63 - 1}


async def test_settling_again_changes_nothing(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=60)
    assert await settle(play, e, tokens=25) == Ok()

    async with play.untouched():
        assert await settle(play, e, tokens=25) == AlreadyApplied()
        assert await reserve(play, e, tokens=60) == AlreadyApplied()


async def test_what_was_settled_stands_in_the_execution_s_ledger(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=60)
    await settle(play, e, tokens=25)

    await play.engine.release_budget(B, e)

    assert await usage(play) == {"tokens": 0}


async def test_a_refund_gives_the_room_back(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=100)

    assert await play.engine.refund_budget(B, R1) == Refunded(R1, {"tokens": 100})

    async with play.untouched():
        assert await play.engine.refund_budget(B, R1) == Refunded(R1, {})
    assert await report(play, tokens=100) == Ok()


async def test_a_reservation_is_over_at_the_end_of_its_time(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=100)

    play.clock.advance_ms(TTL - 1)
    assert isinstance(await report(play, tokens=1), HardBreach)
    play.clock.advance_ms(1)
    assert await report(play, tokens=1) == Ok()
    assert await reserved(play) == {}


async def test_asking_again_makes_a_reservation_last_longer_and_not_larger(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=60)
    play.clock.advance_ms(TTL - 1)

    assert await reserve(play, e, tokens=60) == Reserved(R1, play.now + TTL)

    play.clock.advance_ms(TTL - 1)
    assert await reserved(play) == {"tokens": 60}
    assert isinstance(await report(play, tokens=41), HardBreach)


async def test_the_sweep_lets_go_of_what_is_over_and_wakes_what_waits_for_it(play: Play) -> None:
    await budget(play, tokens=100)
    e, waiting = await play.create(lane="mail"), await play.create(policy={"budget_ids": [B]})
    await reserve(play, e, tokens=60)
    await reserve(play, e, R2, ttl=5000, tokens=40)
    assert await pull(play) == []
    assert await play.vector(waiting) == BUDGET_BLOCKED

    play.clock.advance_ms(TTL - 1)
    assert (await play.engine.sweep_once("budget_reservations")).processed == 0
    play.clock.advance_ms(1)
    done = await play.engine.sweep_once("budget_reservations")

    assert (done.processed, await reserved(play)) == (1, {"tokens": 40})
    assert await play.vector(waiting) == WAITING
    assert (await play.engine.sweep_once("budget_reservations")).next_at == play.now + 4000


async def test_settling_more_than_was_promised_is_a_report_like_any_other(play: Play) -> None:
    await budget(play, tokens=(100, 90))
    e = await play.create()
    await reserve(play, e, tokens=60)
    await report(play, tokens=30)

    assert await settle(play, e, tokens=71) == HardBreach("tokens", current_usage=30, hard_limit=100)
    assert (await usage(play), await reserved(play)) == ({"tokens": 30}, {"tokens": 60})
    assert await settle(play, e, tokens=70) == SoftBreach("tokens", current_usage=100, soft_limit=90)
    assert (await usage(play), await reserved(play)) == ({"tokens": 100}, {})


async def test_settling_within_the_promise_applies_even_when_the_limit_was_lowered(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=60)
    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[10], soft_limits=[0])

    assert await settle(play, e, tokens=60) == Ok()
    assert await usage(play) == {"tokens": 60}


async def test_a_settlement_that_comes_too_late_needs_room_like_any_report(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await reserve(play, e, tokens=60)
    play.clock.advance_ms(TTL)
    await report(play, tokens=50)

    assert await settle(play, e, tokens=60) == HardBreach("tokens", current_usage=50, hard_limit=100)
    assert await settle(play, e, tokens=50) == Ok()
    assert await settle(play, e, tokens=50) == AlreadyApplied()


async def test_a_reservation_belongs_to_one_execution(play: Play) -> None:
    await budget(play, tokens=100)
    e, other = await play.create(), await play.create()
    await reserve(play, e, tokens=60)

    for asks in (settle, reserve):
        async with play.refused(errors.InvalidInput, "reservation_id: of another execution"):
            await asks(play, other, tokens=1)


async def test_reservations_survive_a_reset_and_keys_do_too(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    await report(play, tokens=40)
    await reserve(play, e, tokens=60)

    await play.engine.reset_budget(B)

    assert (await usage(play), await reserved(play)) == ({"tokens": 0}, {"tokens": 60})
    assert isinstance(await report(play, tokens=41), HardBreach)


async def test_reservations_of_an_undefined_budget_are_kept_and_counted_once_it_is_defined(play: Play) -> None:
    e = await play.create()
    assert isinstance(await reserve(play, e, tokens=60), Reserved)

    await budget(play, tokens=100)

    assert isinstance(await report(play, tokens=41), HardBreach)


async def test_fifty_concurrent_reservations_never_promise_more_than_there_is(play: Play) -> None:
    await budget(play, tokens=100)
    e = await play.create()

    answers = await asyncio.gather(*(play.engine.reserve_budget(B, e, {"tokens": 3}, ttl_ms=TTL) for _ in range(50)))

    assert sum(isinstance(answer, Reserved) for answer in answers) == 33
    assert await reserved(play) == {"tokens": 99}


async def test_exhausted_by_reservations_means_blocked_and_a_refund_sets_free(play: Play) -> None:
    await budget(play, tokens=100)
    e, waiting = await play.create(lane="mail"), await play.create(policy={"budget_ids": [B]})
    await reserve(play, e, tokens=100)
    assert await pull(play) == []

    await play.engine.refund_budget(B, R1)

    assert await pull(play) == [waiting]


async def test_raising_a_limit_sets_free_what_waits(play: Play) -> None:
    await budget(play, tokens=100)
    await report(play, tokens=100)
    waiting = await play.create(policy={"budget_ids": [B]})
    assert await pull(play) == []

    changed = await play.engine.change_budget_limits(
        B, dimensions=["tokens", "calls"], hard_limits=[200, 7], soft_limits=[150, 0]
    )

    assert changed == LimitsChanged(B)
    assert await pull(play) == [waiting]
    status = await play.engine.get_budget_status(B)
    assert (status.hard_limits, status.soft_limits) == ({"tokens": 200, "calls": 7}, {"tokens": 150, "calls": 0})
    async with play.refused(errors.NotFound, entity="budget"):
        await play.engine.change_budget_limits(UNKNOWN, dimensions=["x"], hard_limits=[1], soft_limits=[1])


@pytest.mark.parametrize("amounts", [{"tokens": -1}, {"": 1}, {"tokens": 2**63}])
async def test_amounts_that_make_no_sense_are_refused(play: Play, amounts: dict[str, int]) -> None:
    await budget(play, tokens=100)
    e = await play.create()
    async with play.refused(errors.InvalidInput):
        await play.engine.reserve_budget(B, e, amounts, ttl_ms=TTL)
    async with play.refused(errors.InvalidInput):
        await play.engine.settle_budget(B, e, R1, amounts)
