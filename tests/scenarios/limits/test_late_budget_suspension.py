"""Sleeping on a budget when words are lost, late or repeated: it sleeps once, and is woken for what it sleeps on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.types import GateArgs
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.answers.limits import HardBreach, Ok
from flowfabric.model.gate import GateKind
from flowfabric.model.owned_id import NamespacedId
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.limits import usage
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan
from flowfabric.testing import FlakyStore
from flowfabric.testing.faults import Loss
from tests.scenarios.limits.test_budget_suspension import ASLEEP, asleep, raise_the_limit, reset, sleepy
from tests.scenarios.limits.test_budgets import B, report
from tests.scenarios.play import ACTIVE, RESUMABLE, Play, terminal
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, pull
from tests.scenarios.waits import Waits

B2 = "0b000000-0000-4000-8000-000000000002"


async def make_room_only(play: Play) -> None:
    """Raise the limit as a process that dies before it wakes anybody."""
    limits = (("tokens", 105, 0),)
    await play.engine.aggregates.budgets.decide_and_commit(
        NamespacedId("default", B), lambda sheet, now: usage.change_limits(sheet, limits, now)
    )


async def suspension(engine: Engine, e: str) -> Suspension:
    [root] = (await engine.runtime.load((Read(Suspension, (e,)),))).rows[0]
    assert isinstance(root, Suspension)
    return root


# -- lost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [0, 1], ids=["breach", "sleep"])
@pytest.mark.parametrize("loss", Loss)
async def test_a_breach_whose_words_get_lost_puts_to_sleep_once(
    store: Store, clock: ManualClock, loss: Loss, nth: int
) -> None:
    flaky = FlakyStore(store)
    engine = Engine(flaky, minter=SeededMinter(1))
    await engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    play = Play(engine, clock)
    await sleepy(play)
    held = await play.claimed()
    flaky.lose("commit", loss, after=nth)

    breach = await engine.report_usage(held.handle, B, {"tokens": 101})

    assert flaky.losses == [("commit", loss)]
    assert breach == HardBreach("tokens", 0, 100, action="suspend", parked=True)
    assert await play.vector(held.execution_id) == ASLEEP
    assert await play.told(held.execution_id) == ["acquired", "released suspend"]
    assert len(await store.scan(Scan(Waitpoint))) == 1
    assert (await engine.get_budget_status(B)).breach_count == 1


@pytest.mark.parametrize("nth", [0, 1], ids=["limit", "wake"])
@pytest.mark.parametrize("loss", Loss)
async def test_a_raised_limit_whose_words_get_lost_wakes_once(
    store: Store, clock: ManualClock, loss: Loss, nth: int
) -> None:
    flaky = FlakyStore(store)
    engine = Engine(flaky, minter=SeededMinter(1))
    play = Play(engine, clock)
    held = await asleep(play)
    flaky.lose("commit", loss, after=nth)

    await raise_the_limit(play)

    assert flaky.losses == [("commit", loss)]
    assert await play.vector(held.execution_id) == RESUMABLE
    assert (await engine.get_budget_status(B)).hard_limits == {"tokens": 105}
    again = await play.pull("wb")
    assert again is not None
    assert (again.attempt_id, again.lease_epoch) == (held.attempt_id, 2)


# -- repeated ------------------------------------------------------------------------------------------------------


async def test_a_report_that_is_repeated_while_it_sleeps_is_told_so(play: Play) -> None:
    held = await asleep(play)
    first = (await suspension(play.engine, held.execution_id)).suspension_id

    again = await play.engine.report_usage(held.handle, B, {"tokens": 10})

    assert isinstance(again, HardBreach)
    assert again.parked
    assert await play.vector(held.execution_id) == ASLEEP
    assert (await suspension(play.engine, held.execution_id)).suspension_id == first
    assert len(await play.engine.runtime.scan(Scan(Waitpoint))) == 1


async def test_room_that_is_made_twice_wakes_once(play: Play) -> None:
    held = await asleep(play)

    await asyncio.gather(raise_the_limit(play), raise_the_limit(play), reset(play))

    assert await play.vector(held.execution_id) == RESUMABLE
    assert (await play.engine.sweep_once("unblock")).processed == 0


async def test_it_sleeps_and_wakes_where_no_key_is_there_to_sign_with(keyless: Engine, clock: ManualClock) -> None:
    play = Play(keyless, clock)
    held = await asleep(play)
    [waitpoint] = await keyless.runtime.scan(Scan(Waitpoint))
    assert (waitpoint.waitpoint_key, waitpoint.token_kid) == (BudgetNeed(B, "tokens", 10).key, "")

    await raise_the_limit(play)

    assert await play.vector(held.execution_id) == RESUMABLE


async def test_a_sleeper_can_be_cancelled(play: Play) -> None:
    held = await asleep(play)

    await play.engine.cancel_execution(held.execution_id)

    assert await play.vector(held.execution_id) == terminal("cancelled")
    async with play.untouched():
        assert (await play.engine.sweep_once("unblock")).processed == 0
    await raise_the_limit(play)
    assert await play.vector(held.execution_id) == terminal("cancelled")


# -- zombies and late words ----------------------------------------------------------------------------------------


async def test_a_zombie_puts_nobody_to_sleep_and_hears_nothing_of_another_s_sleep(play: Play) -> None:
    held = await asleep(play)
    await reset(play)
    await report(play, tokens=95)
    again = await play.pull("wb")
    assert again is not None

    zombie = await play.engine.report_usage(held.handle, B, {"tokens": 10})
    assert zombie == HardBreach("tokens", 95, 100, reserved=5, action="suspend")
    assert await play.vector(held.execution_id) == ACTIVE
    assert isinstance(await play.engine.report_usage(again.handle, B, {"tokens": 10}), HardBreach)
    assert await play.vector(held.execution_id) == ASLEEP

    zombie = await play.engine.report_usage(held.handle, B, {"tokens": 10})
    assert zombie == HardBreach("tokens", 95, 100, reserved=5, action="suspend")


async def moved_on(play: Play, held: Claimed) -> None:
    """An operator lets the sleeper go on, and it waits for an approval now."""
    await play.engine.resume_execution(held.execution_id, trigger_type="operator")
    again = await play.pull("wb")
    assert again is not None
    await Waits(play).suspend(again, reason_code="waiting_for_approval")


async def test_a_late_word_does_not_wake_it_from_another_wait(play: Play) -> None:
    held = await asleep(play)
    row = await play.sheet(held.execution_id)
    await make_room_only(play)
    flaky = FlakyStore(play.store.store)
    slow = Engine(flaky, minter=SeededMinter(9))
    gate = flaky.stop_before("commit")
    waking = asyncio.create_task(slow.budget_suspender.resume_budget_suspended([row]))
    await gate.reached()

    await moved_on(play, held)
    gate.release()

    assert await waking == 0
    assert (await play.sheet(held.execution_id)).blocking_reason == "waiting_for_approval"


async def test_a_function_that_waits_for_something_else_by_now_gets_no_message(play: Play) -> None:
    await sleepy(play)
    await report(play, tokens=95)
    held = await play.claimed()
    need = BudgetNeed(B, "tokens", 10)
    await play.engine.open_gate(held.handle, GateArgs(name="b", kind=GateKind.MAILBOX, mailbox=need.key))
    await play.engine.open_gate(held.handle, GateArgs(name="t", kind=GateKind.TIMER, expires_in_ms=1000))
    await play.engine.park(held.handle, ("t",))

    await raise_the_limit(play)

    root = await suspension(play.engine, held.execution_id)
    assert (root.closed_at, root.mail) == (None, None)


# -- many ----------------------------------------------------------------------------------------------------------


async def sleepers(play: Play, *amounts: int) -> list[str]:
    """Executions that need so much, in the order in which they are served."""
    found: list[str] = []
    for amount in amounts:
        held = await play.claimed()
        assert isinstance(await play.engine.report_usage(held.handle, B, {"tokens": amount}), HardBreach)
        found.append(held.execution_id)
        play.clock.advance_ms(1)
    return found


async def awake(play: Play, executions: list[str]) -> list[bool]:
    return [await play.vector(e) == RESUMABLE for e in executions]


async def test_room_for_some_wakes_as_many_as_fit_the_first_first(play: Play) -> None:
    await sleepy(play)
    await report(play, tokens=95)
    executions = await sleepers(play, 10, 10, 10)

    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[115], soft_limits=[0])

    assert await awake(play, executions) == [True, True, False]
    for _ in range(2):
        again = await play.pull()
        assert again is not None
        assert await play.engine.report_usage(again.handle, B, {"tokens": 10}) == Ok()
    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[125], soft_limits=[0])
    assert await awake(play, executions[2:]) == [True]


Makes = Callable[[Play], Awaitable[object]]


async def by_the_sweep(play: Play) -> None:
    await make_room_only(play)
    for _ in range(4):
        await play.engine.sweep_once("unblock", batch=2)


@pytest.mark.parametrize("makes_room", [raise_the_limit, by_the_sweep])
async def test_many_who_need_too_much_do_not_hide_one_who_does_not(
    play: Play, monkeypatch: pytest.MonkeyPatch, makes_room: Makes
) -> None:
    monkeypatch.setattr("flowfabric.engine.limits.unblocker.PAGE_SIZE", 2)
    monkeypatch.setattr("flowfabric.engine.sweeps.unblock.PAGE_SIZE", 2)
    await sleepy(play)
    await report(play, tokens=100)
    executions = await sleepers(play, 50, 50, 50, 50, 5)
    queued = await play.create(policy={"budget_ids": [B]})
    assert await pull(play) == []
    assert await play.vector(queued) == BUDGET_BLOCKED

    await makes_room(play)

    assert await awake(play, executions) == [False, False, False, False, True]
    assert (await play.sheet(queued)).eligibility_state == "eligible_now"


async def test_what_waits_for_two_budgets_does_not_hide_what_waits_for_one(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.sweeps.unblock.PAGE_SIZE", 2)
    await sleepy(play)
    await play.engine.create_budget(B2, dimensions=["tokens"], hard_limits=[1], soft_limits=[0])
    await report(play, tokens=100)
    both = [await play.create(policy={"budget_ids": [B, B2]}, priority=1) for _ in range(4)]
    one = await play.create(policy={"budget_ids": [B]})
    assert await pull(play, 10) == []
    await report(play, B2, tokens=1)
    await make_room_only(play)

    for _ in range(3):
        await play.engine.sweep_once("unblock", batch=2)

    assert (await play.sheet(one)).eligibility_state == "eligible_now"
    assert {await play.vector(e) for e in both} == {BUDGET_BLOCKED}
