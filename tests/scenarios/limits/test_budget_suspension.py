"""The hard action `suspend`: a breach suspends the execution, and free capacity resumes it."""

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
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.rules.limits.budget import BudgetNeed, parse_need
from tests.scenarios.env import ACTIVE, RESUMABLE, Env
from tests.scenarios.limits.test_budgets import B, report
from tests.scenarios.limits.test_reservations import R1, R2, TTL

SPENDER = f"{{fp:86}}:{R2}"
RESET_MS = 3_600_000
BUDGET_SUSPENDED = "suspended/unowned/not_applicable/waiting_for_budget/none/attempt_interrupted/suspended"


async def create_suspending_budget(env: Env, action: str = "suspend") -> None:
    created = await env.engine.create_budget(
        B,
        dimensions=["tokens"],
        hard_limits=[100],
        soft_limits=[0],
        on_hard_limit=action,
        reset_interval_ms=RESET_MS,
    )
    assert created == BudgetCreated(B)


async def suspend_on_budget(env: Env, used: int = 95, wanted: int = 10) -> Claimed:
    """Suspend an execution that asked for too much: another one spent five and has five reserved."""
    await create_suspending_budget(env)
    await report(env, tokens=used - 10)
    await env.engine.record_spend(B, SPENDER, {"tokens": 5})
    await env.engine.reserve_budget(B, SPENDER, {"tokens": 5}, ttl_ms=TTL, reservation_id=R1)
    claim = await env.create_and_claim()
    breach = await env.engine.report_usage(claim.handle, B, {"tokens": wanted})
    assert breach == HardBreach("tokens", used - 5, 100, reserved=5, action="suspend", parked=True)
    return claim


async def test_a_breach_suspends_the_execution(env: Env) -> None:
    claim = await suspend_on_budget(env)

    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED
    row = await env.row(claim.execution_id)
    assert (row.blocked_on, row.blocked_at) == (f"asleep:{B}", env.now)
    assert await env.lease_events(claim.execution_id) == ["acquired", "released suspend"]
    assert (await env.engine.get_budget_status(B)).breach_count == 1


async def raise_limit(env: Env) -> None:
    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[105], soft_limits=[0])


async def remove_limit(env: Env) -> None:
    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[0], soft_limits=[0])


async def reset(env: Env) -> None:
    await env.engine.reset_budget(B)


async def release(env: Env) -> None:
    assert await env.engine.release_budget(B, SPENDER) == BudgetReleased(B, {"tokens": 5})


async def refund(env: Env) -> None:
    assert await env.engine.refund_budget(B, R1) == Refunded(R1, {"tokens": 5})


async def settle_less(env: Env) -> None:
    assert await env.engine.settle_budget(B, SPENDER, R1, {"tokens": 0}) == Ok()


async def expire_reservation(env: Env) -> None:
    assert await env.sweep("budget_reservations", after_ms=TTL) == 1


async def run_scheduled_reset(env: Env) -> None:
    assert await env.sweep("budget_reset", after_ms=RESET_MS) == 1


@pytest.mark.parametrize(
    "free_capacity",
    [
        *(raise_limit, remove_limit, reset, run_scheduled_reset),
        *(release, refund, settle_less, expire_reservation),
    ],
)
async def test_free_capacity_resumes_the_execution(env: Env, free_capacity: Any) -> None:
    claim = await suspend_on_budget(env)

    await free_capacity(env)

    e = claim.execution_id
    assert await env.vector(e) == RESUMABLE
    again = await env.claim_existing("wb")
    assert (again.execution_id, again.attempt_id, again.lease_epoch) == (e, claim.attempt_id, 2)
    assert await env.engine.report_usage(again.handle, B, {"tokens": 10}) == Ok()
    assert (await env.row(e)).blocked_on is None


async def test_too_little_capacity_does_not_resume_the_execution(env: Env) -> None:
    claim = await suspend_on_budget(env)

    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[104], soft_limits=[0])
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED
    assert await env.sweep("unblock") == 0
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED
    await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[105], soft_limits=[0])
    assert await env.vector(claim.execution_id) == RESUMABLE


async def test_the_unblock_sweep_resumes_after_a_process_died(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = await suspend_on_budget(env)

    async def skip_unblock(budget: NamespacedId) -> bool:
        return True

    monkeypatch.setattr(env.engine.unblocker, "unblock_budget_waiters", skip_unblock)
    await raise_limit(env)
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED
    assert await env.sweep("unblock") == 1
    assert await env.vector(claim.execution_id) == RESUMABLE


async def test_capacity_freed_during_the_suspend_resumes_the_execution(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_suspending_budget(env)
    await report(env, tokens=95)
    claim = await env.create_and_claim()
    other = Engine(env.store.store, minter=SeededMinter(9))
    suspend = env.engine.budget_suspender.suspend_for_budget
    suspending, proceed = asyncio.Event(), asyncio.Event()

    async def delayed_suspend(handle: Handle, need: BudgetNeed) -> bool:
        suspending.set()
        await proceed.wait()
        return await suspend(handle, need)

    monkeypatch.setattr(env.engine.budget_suspender, "suspend_for_budget", delayed_suspend)
    reporting = asyncio.create_task(env.engine.report_usage(claim.handle, B, {"tokens": 10}))
    await suspending.wait()
    await other.reset_budget(B)
    proceed.set()

    assert isinstance(await reporting, HardBreach)
    assert await env.vector(claim.execution_id) == RESUMABLE


async def test_reserve_and_spend_with_a_handle_suspend_the_execution(env: Env) -> None:
    await create_suspending_budget(env)
    claim, e = await env.create_claimed()
    await report(env, tokens=95)

    breach = await env.engine.record_spend(B, e, {"tokens": 10})
    assert breach == HardBreach("tokens", 95, 100, action="suspend")
    assert await env.vector(e) == ACTIVE
    spent = await env.engine.record_spend(B, e, {"tokens": 10}, handle=claim.handle)
    assert isinstance(spent, HardBreach)
    assert spent.parked
    await reset(env)
    again = await env.claim_existing()
    await report(env, tokens=95)
    reserved = await env.engine.reserve_budget(B, e, {"tokens": 10}, ttl_ms=TTL, reservation_id=R1, handle=again.handle)
    assert isinstance(reserved, HardBreach)
    assert await env.vector(e) == BUDGET_SUSPENDED
    await reset(env)
    assert isinstance(await env.engine.reserve_budget(B, e, {"tokens": 10}, ttl_ms=TTL), Reserved)


@pytest.mark.parametrize("action", ["", "fail", "reject", "warn"])
async def test_every_other_action_only_reports_the_breach(env: Env, action: str) -> None:
    await create_suspending_budget(env, action=action)
    claim = await env.create_and_claim()

    breach = await env.engine.report_usage(claim.handle, B, {"tokens": 101})

    assert breach == HardBreach("tokens", 0, 100, action=action)
    assert await env.vector(claim.execution_id) == ACTIVE


async def test_a_breach_reported_by_a_previous_holder_suspends_nothing(env: Env) -> None:
    await create_suspending_budget(env)
    claim = await env.create_and_claim()
    env.clock.advance_ms(30_000)
    again = await env.claim_existing("wb")

    breach = await env.engine.report_usage(claim.handle, B, {"tokens": 101})

    assert breach == HardBreach("tokens", 0, 100, action="suspend")
    assert await env.vector(claim.execution_id) == ACTIVE
    await env.engine.complete(again.handle)


async def test_a_durable_function_waits_on_the_mailbox_of_its_budget(env: Env) -> None:
    await create_suspending_budget(env)
    await report(env, tokens=95)
    claim = await env.create_and_claim()
    gate = GateArgs(name="budget.1", kind=GateKind.MAILBOX, mailbox=BudgetNeed(B, "tokens", 10).key)
    await env.engine.open_gate(claim.handle, gate)
    await env.engine.park(claim.handle, ("budget.1",), reason_code="paused_by_budget")
    assert await env.vector(claim.execution_id) == BUDGET_SUSPENDED

    await raise_limit(env)

    assert await env.vector(claim.execution_id) == RESUMABLE
    again = await env.claim_existing()
    memo = await env.engine.open_gate(again.handle, gate)
    assert isinstance(memo, GateMemo)
    assert (memo.ended_as, memo.payload) == (GateOutcome.SATISFIED, b"null")


def test_a_budget_need_is_parsed_from_its_key() -> None:
    need = BudgetNeed(B, "a:strange:name", 7)
    assert parse_need(need.key, "a") == need
    for other in (None, "", "approve", "budget:", f"budget:{B}", f"budget:{B}:x:y"):
        assert parse_need(other, "a") is None
