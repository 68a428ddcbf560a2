"""Budget suspensions when messages are lost, late or repeated: one suspension, resumed for its own need."""

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
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.limits import usage
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan
from flowfabric.testing import FlakyStore
from flowfabric.testing.flaky_store import Loss
from tests.scenarios.env import ACTIVE, RESUMABLE, Env, terminal
from tests.scenarios.limits.test_budget_suspension import (
    BUDGET_SUSPENDED,
    create_suspending_budget,
    raise_limit,
    reset,
    suspend_on_budget,
)
from tests.scenarios.limits.test_budgets import B, report
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, claim_admitted
from tests.scenarios.waits import Waits

B2 = "0b000000-0000-4000-8000-000000000002"


async def raise_limit_without_unblock(env: Env) -> None:
    """Raise the limit as a process that dies before it unblocks."""
    limits = (("tokens", 105, 0),)
    await env.engine.aggregates.budgets.decide_and_commit(
        NamespacedId("default", B), lambda aggregate, now: usage.change_limits(aggregate, limits, now)
    )


async def suspension(engine: Engine, e: str) -> Suspension:
    [root] = (await engine.runtime.load((Read(Suspension, (e,)),))).rows[0]
    assert isinstance(root, Suspension)
    return root


# -- lost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [0, 1], ids=["breach", "suspend"])
@pytest.mark.parametrize("loss", Loss)
async def test_a_breach_with_a_lost_message_suspends_once(
    store: Store, clock: ManualClock, loss: Loss, nth: int
) -> None:
    flaky = FlakyStore(store)
    engine = Engine(flaky, minter=SeededMinter(1))
    await engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    env = Env(engine, clock)
    await create_suspending_budget(env)
    claim = await env.create_and_claim()
    flaky.lose("commit", loss, after=nth)

    breach = await engine.report_usage(claim.handle, B, {"tokens": 101})

    assert flaky.losses == [("commit", loss)]
    assert breach == HardBreach("tokens", 0, 100, action="suspend", parked=True)
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED
    assert await env.lease_events(claim.execution_id) == ["acquired", "released suspend"]
    assert len(await store.scan(Scan(Waitpoint))) == 1
    assert (await engine.get_budget_status(B)).breach_count == 1


@pytest.mark.parametrize("nth", [0, 1], ids=["limit", "resume"])
@pytest.mark.parametrize("loss", Loss)
async def test_a_raised_limit_with_a_lost_message_resumes_once(
    store: Store, clock: ManualClock, loss: Loss, nth: int
) -> None:
    flaky = FlakyStore(store)
    engine = Engine(flaky, minter=SeededMinter(1))
    env = Env(engine, clock)
    claim = await suspend_on_budget(env)
    flaky.lose("commit", loss, after=nth)

    await raise_limit(env)

    assert flaky.losses == [("commit", loss)]
    assert await env.vector(claim.execution_id) == RESUMABLE
    assert (await engine.get_budget_status(B)).hard_limits == {"tokens": 105}
    again = await env.claim_existing("wb")
    assert (again.attempt_id, again.lease_epoch) == (claim.attempt_id, 2)


# -- repeated ------------------------------------------------------------------------------------------------------


async def test_a_repeated_report_of_a_suspended_execution_reports_the_suspension(env: Env) -> None:
    claim = await suspend_on_budget(env)
    first = (await suspension(env.engine, claim.execution_id)).suspension_id

    again = await env.engine.report_usage(claim.handle, B, {"tokens": 10})

    assert isinstance(again, HardBreach)
    assert again.parked
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED
    assert (await suspension(env.engine, claim.execution_id)).suspension_id == first
    assert len(await env.engine.runtime.scan(Scan(Waitpoint))) == 1


async def test_capacity_freed_twice_resumes_once(env: Env) -> None:
    claim = await suspend_on_budget(env)

    await asyncio.gather(raise_limit(env), raise_limit(env), reset(env))

    assert await env.vector(claim.execution_id) == RESUMABLE
    assert await env.sweep("unblock") == 0


async def test_a_budget_suspension_needs_no_signing_key(keyless: Engine, clock: ManualClock) -> None:
    env = Env(keyless, clock)
    claim = await suspend_on_budget(env)
    [waitpoint] = await keyless.runtime.scan(Scan(Waitpoint))
    assert (waitpoint.waitpoint_key, waitpoint.token_kid) == (BudgetNeed(B, "tokens", 10).key, "")

    await raise_limit(env)

    assert await env.vector(claim.execution_id) == RESUMABLE


async def test_an_execution_suspended_on_a_budget_can_be_cancelled(env: Env) -> None:
    claim = await suspend_on_budget(env)

    await env.engine.cancel_execution(claim.execution_id)

    assert await env.vector(claim.execution_id) == terminal("cancelled")
    async with env.unchanged():
        assert await env.sweep("unblock") == 0
    await raise_limit(env)
    assert await env.vector(claim.execution_id) == terminal("cancelled")


# -- stale holders and late messages ---------------------------------------------------------------------------------


async def test_a_previous_holder_neither_suspends_nor_sees_the_suspension_of_the_current_one(env: Env) -> None:
    claim = await suspend_on_budget(env)
    await reset(env)
    await report(env, tokens=95)
    again = await env.claim_existing("wb")

    stale = await env.engine.report_usage(claim.handle, B, {"tokens": 10})
    assert stale == HardBreach("tokens", 95, 100, reserved=5, action="suspend")
    assert await env.vector(claim.execution_id) == ACTIVE
    assert isinstance(await env.engine.report_usage(again.handle, B, {"tokens": 10}), HardBreach)
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED

    stale = await env.engine.report_usage(claim.handle, B, {"tokens": 10})
    assert stale == HardBreach("tokens", 95, 100, reserved=5, action="suspend")


async def resume_and_suspend_again(env: Env, claim: Claimed) -> None:
    """Resume a suspended execution as an operator; it then suspends for an approval."""
    await env.engine.resume_execution(claim.execution_id, trigger_type="operator")
    again = await env.claim_existing("wb")
    await Waits(env).suspend(again, reason_code="waiting_for_approval")


async def test_a_late_budget_resume_does_not_end_another_suspension(env: Env) -> None:
    claim = await suspend_on_budget(env)
    row = await env.row(claim.execution_id)
    await raise_limit_without_unblock(env)
    flaky = FlakyStore(env.store.store)
    slow = Engine(flaky, minter=SeededMinter(9))
    gate = flaky.stop_before("commit")
    waking = asyncio.create_task(slow.budget_suspender.resume_budget_suspended([row]))
    await gate.reached()

    await resume_and_suspend_again(env, claim)
    gate.release()

    assert await waking == 0
    assert (await env.row(claim.execution_id)).blocking_reason == "waiting_for_approval"


async def test_a_function_waiting_on_another_gate_gets_no_budget_message(env: Env) -> None:
    await create_suspending_budget(env)
    await report(env, tokens=95)
    claim = await env.create_and_claim()
    need = BudgetNeed(B, "tokens", 10)
    await env.engine.open_gate(claim.handle, GateArgs(name="b", kind=GateKind.MAILBOX, mailbox=need.key))
    await env.engine.open_gate(claim.handle, GateArgs(name="t", kind=GateKind.TIMER, expires_in_ms=1000))
    await env.engine.park(claim.handle, ("t",))

    await raise_limit(env)

    root = await suspension(env.engine, claim.execution_id)
    assert (root.closed_at, root.mail) == (None, None)


# -- many ----------------------------------------------------------------------------------------------------------


async def suspend_many(env: Env, *amounts: int) -> list[str]:
    """Suspend executions that need these amounts, in serving order."""
    found: list[str] = []
    for amount in amounts:
        claim = await env.create_and_claim()
        assert isinstance(await env.engine.report_usage(claim.handle, B, {"tokens": amount}), HardBreach)
        found.append(claim.execution_id)
        env.clock.advance_ms(1)
    return found


async def are_resumable(env: Env, executions: list[str]) -> list[bool]:
    return [await env.vector(e) == RESUMABLE for e in executions]


async def test_freed_capacity_resumes_as_many_as_fit_in_order(env: Env) -> None:
    await create_suspending_budget(env)
    await report(env, tokens=95)
    executions = await suspend_many(env, 10, 10, 10)

    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[115], soft_limits=[0])

    assert await are_resumable(env, executions) == [True, True, False]
    for _ in range(2):
        again = await env.claim_existing()
        assert await env.engine.report_usage(again.handle, B, {"tokens": 10}) == Ok()
    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[125], soft_limits=[0])
    assert await are_resumable(env, executions[2:]) == [True]


FreesCapacity = Callable[[Env], Awaitable[object]]


async def raise_limit_and_sweep(env: Env) -> None:
    await raise_limit_without_unblock(env)
    for _ in range(4):
        await env.engine.sweep_once("unblock", batch=2)


@pytest.mark.parametrize("free_capacity", [raise_limit, raise_limit_and_sweep])
async def test_executions_that_need_too_much_do_not_hide_one_that_fits(
    env: Env, monkeypatch: pytest.MonkeyPatch, free_capacity: FreesCapacity
) -> None:
    monkeypatch.setattr("flowfabric.engine.limits.unblocker.PAGE_SIZE", 2)
    monkeypatch.setattr("flowfabric.engine.sweeps.unblock.PAGE_SIZE", 2)
    await create_suspending_budget(env)
    await report(env, tokens=100)
    executions = await suspend_many(env, 50, 50, 50, 50, 5)
    queued = await env.create(policy={"budget_ids": [B]})
    assert await claim_admitted(env) == []
    assert await env.vector(queued) == BUDGET_BLOCKED

    await free_capacity(env)

    assert await are_resumable(env, executions) == [False, False, False, False, True]
    assert (await env.row(queued)).eligibility_state == "eligible_now"


async def test_executions_blocked_by_two_budgets_do_not_hide_one_blocked_by_one(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.sweeps.unblock.PAGE_SIZE", 2)
    await create_suspending_budget(env)
    await env.engine.create_budget(B2, dimensions=["tokens"], hard_limits=[1], soft_limits=[0])
    await report(env, tokens=100)
    both = [await env.create(policy={"budget_ids": [B, B2]}, priority=1) for _ in range(4)]
    one = await env.create(policy={"budget_ids": [B]})
    assert await claim_admitted(env, 10) == []
    await report(env, B2, tokens=1)
    await raise_limit_without_unblock(env)

    for _ in range(3):
        await env.engine.sweep_once("unblock", batch=2)

    assert (await env.row(one)).eligibility_state == "eligible_now"
    assert {await env.vector(e) for e in both} == {BUDGET_BLOCKED}
