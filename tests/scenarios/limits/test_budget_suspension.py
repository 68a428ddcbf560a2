"""The hard action `suspend`: a breach puts the execution to sleep, and room in the budget wakes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.types import GateArgs
from flowfabric.handles import Handle
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.answers.limits import BudgetCreated, BudgetReleased, HardBreach, Ok, Refunded, Reserved
from flowfabric.model.gate import GateKind, GateMemo, GateOutcome
from flowfabric.rules.limits.budget import BudgetNeed, parse_need
from tests.scenarios.limits.test_budgets import B, report
from tests.scenarios.limits.test_reservations import R1, R2, TTL
from tests.scenarios.play import ACTIVE, RESUMABLE, Play

SPENDER = f"{{fp:86}}:{R2}"
RESET_MS = 3_600_000
ASLEEP = "suspended/unowned/not_applicable/waiting_for_budget/none/attempt_interrupted/suspended"


async def sleepy(play: Play, hard: int = 100, action: str = "suspend") -> None:
    created = await play.engine.create_budget(
        B,
        dimensions=["tokens"],
        hard_limits=[hard],
        soft_limits=[0],
        on_hard_limit=action,
        reset_interval_ms=RESET_MS,
    )
    assert created == BudgetCreated(B)


async def asleep(play: Play, used: int = 95, wanted: int = 10) -> Claimed:
    """An execution that asked for more than there was: five were spent by another, five are reserved for it."""
    await sleepy(play)
    await report(play, tokens=used - 10)
    await play.engine.record_spend(B, SPENDER, {"tokens": 5})
    await play.engine.reserve_budget(B, SPENDER, {"tokens": 5}, ttl_ms=TTL, reservation_id=R1)
    held = await play.claimed()
    breach = await play.engine.report_usage(held.handle, B, {"tokens": wanted})
    assert breach == HardBreach("tokens", used - 5, 100, reserved=5, action="suspend", parked=True)
    return held


async def test_a_breach_puts_the_execution_to_sleep(play: Play) -> None:
    held = await asleep(play)

    assert await play.vector(held.execution_id) == ASLEEP
    row = await play.sheet(held.execution_id)
    assert (row.blocked_on, row.blocked_at) == (f"asleep:{B}", play.now)
    assert await play.told(held.execution_id) == ["acquired", "released suspend"]
    assert (await play.engine.get_budget_status(B)).breach_count == 1


async def raise_the_limit(play: Play) -> None:
    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[105], soft_limits=[0])


async def lift_the_limit(play: Play) -> None:
    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[0], soft_limits=[0])


async def reset(play: Play) -> None:
    await play.engine.reset_budget(B)


async def release(play: Play) -> None:
    assert await play.engine.release_budget(B, SPENDER) == BudgetReleased(B, {"tokens": 5})


async def refund(play: Play) -> None:
    assert await play.engine.refund_budget(B, R1) == Refunded(R1, {"tokens": 5})


async def settle_for_less(play: Play) -> None:
    assert await play.engine.settle_budget(B, SPENDER, R1, {"tokens": 0}) == Ok()


async def outlast_the_reservation(play: Play) -> None:
    play.clock.advance_ms(TTL)
    assert (await play.engine.sweep_once("budget_reservations")).processed == 1


async def wait_for_the_scheduled_reset(play: Play) -> None:
    play.clock.advance_ms(RESET_MS)
    assert (await play.engine.sweep_once("budget_reset")).processed == 1


@pytest.mark.parametrize(
    "makes_room",
    [
        *(raise_the_limit, lift_the_limit, reset, wait_for_the_scheduled_reset),
        *(release, refund, settle_for_less, outlast_the_reservation),
    ],
)
async def test_room_wakes_it_and_it_goes_on(play: Play, makes_room: Any) -> None:
    held = await asleep(play)

    await makes_room(play)

    e = held.execution_id
    assert await play.vector(e) == RESUMABLE
    again = await play.pull("wb")
    assert again is not None
    assert (again.execution_id, again.attempt_id, again.lease_epoch) == (e, held.attempt_id, 2)
    assert await play.engine.report_usage(again.handle, B, {"tokens": 10}) == Ok()
    assert (await play.sheet(e)).blocked_on is None


async def test_too_little_room_does_not_wake_it(play: Play) -> None:
    held = await asleep(play)

    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[104], soft_limits=[0])
    assert await play.vector(held.execution_id) == ASLEEP
    assert (await play.engine.sweep_once("unblock")).processed == 0
    assert await play.vector(held.execution_id) == ASLEEP
    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[105], soft_limits=[0])
    assert await play.vector(held.execution_id) == RESUMABLE


async def test_the_sweep_wakes_what_a_dead_process_did_not(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await asleep(play)

    async def dies(budget_id: str, *, namespace: str) -> bool:
        return True

    monkeypatch.setattr(play.engine.unblocker, "unblock_budget_waiters", dies)
    await raise_the_limit(play)
    assert await play.vector(held.execution_id) == ASLEEP
    assert (await play.engine.sweep_once("unblock")).processed == 1
    assert await play.vector(held.execution_id) == RESUMABLE


async def test_room_made_while_it_falls_asleep_is_not_slept_through(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sleepy(play)
    await report(play, tokens=95)
    held = await play.claimed()
    other = Engine(play.store.store, minter=SeededMinter(9))
    sleep = play.engine.budget_suspender.suspend_for_budget
    falling, proceed = asyncio.Event(), asyncio.Event()

    async def slowly(handle: Handle, need: BudgetNeed) -> bool:
        falling.set()
        await proceed.wait()
        return await sleep(handle, need)

    monkeypatch.setattr(play.engine.budget_suspender, "suspend_for_budget", slowly)
    reporting = asyncio.create_task(play.engine.report_usage(held.handle, B, {"tokens": 10}))
    await falling.wait()
    await other.reset_budget(B)
    proceed.set()

    assert isinstance(await reporting, HardBreach)
    assert await play.vector(held.execution_id) == RESUMABLE


async def test_reserving_and_spending_fall_asleep_too_when_they_show_their_handle(play: Play) -> None:
    await sleepy(play)
    held = await play.claimed()
    e = held.execution_id
    await report(play, tokens=95)

    told = await play.engine.record_spend(B, e, {"tokens": 10})
    assert told == HardBreach("tokens", 95, 100, action="suspend")
    assert await play.vector(e) == ACTIVE
    spent = await play.engine.record_spend(B, e, {"tokens": 10}, handle=held.handle)
    assert isinstance(spent, HardBreach)
    assert spent.parked
    await reset(play)
    again = await play.pull()
    assert again is not None
    await report(play, tokens=95)
    breach = await play.engine.reserve_budget(B, e, {"tokens": 10}, ttl_ms=TTL, reservation_id=R1, handle=again.handle)
    assert isinstance(breach, HardBreach)
    assert await play.vector(e) == ASLEEP
    await reset(play)
    assert isinstance(await play.engine.reserve_budget(B, e, {"tokens": 10}, ttl_ms=TTL), Reserved)


@pytest.mark.parametrize("action", ["", "fail", "reject", "warn"])
async def test_every_other_action_only_tells_the_reporter(play: Play, action: str) -> None:
    await sleepy(play, action=action)
    held = await play.claimed()

    breach = await play.engine.report_usage(held.handle, B, {"tokens": 101})

    assert breach == HardBreach("tokens", 0, 100, action=action)
    assert await play.vector(held.execution_id) == ACTIVE


async def test_a_worker_that_lost_its_lease_is_told_and_puts_nobody_to_sleep(play: Play) -> None:
    await sleepy(play)
    held = await play.claimed()
    play.clock.advance_ms(30_000)
    again = await play.pull("wb")
    assert again is not None

    breach = await play.engine.report_usage(held.handle, B, {"tokens": 101})

    assert breach == HardBreach("tokens", 0, 100, action="suspend")
    assert await play.vector(held.execution_id) == ACTIVE
    await play.engine.complete(again.handle)


async def test_a_durable_function_sleeps_on_a_mailbox_of_that_name(play: Play) -> None:
    await sleepy(play)
    await report(play, tokens=95)
    held = await play.claimed()
    gate = GateArgs(name="budget.1", kind=GateKind.MAILBOX, mailbox=BudgetNeed(B, "tokens", 10).key)
    await play.engine.open_gate(held.handle, gate)
    await play.engine.park(held.handle, ("budget.1",), reason_code="paused_by_budget")
    assert await play.vector(held.execution_id) == ASLEEP

    await raise_the_limit(play)

    assert await play.vector(held.execution_id) == RESUMABLE
    again = await play.pull()
    assert again is not None
    memo = await play.engine.open_gate(again.handle, gate)
    assert isinstance(memo, GateMemo)
    assert (memo.ended_as, memo.payload) == (GateOutcome.SATISFIED, b"null")


def test_a_need_is_read_back_from_its_key() -> None:
    need = BudgetNeed(B, "a:strange:name", 7)
    assert parse_need(need.key, "a") == need
    for other in (None, "", "approve", "budget:", f"budget:{B}", f"budget:{B}:x:y"):
        assert parse_need(other, "a") is None
