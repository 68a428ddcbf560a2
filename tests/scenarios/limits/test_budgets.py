"""S-056 to S-066: budgets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.handles import BackendTag, Handle, HandleKind
from flowfabric.model.answers.limits import (
    AlreadyApplied,
    BudgetCreated,
    BudgetExists,
    BudgetReleased,
    BudgetReset,
    HardBreach,
    Ok,
    Reconciled,
    SoftBreach,
)
from tests.scenarios.env import ACTIVE, WAITING, Env

B = "0b000000-0000-4000-8000-000000000001"
B2 = "0b000000-0000-4000-8000-000000000002"
UNKNOWN = "0b000000-0000-4000-8000-00000000ffff"


async def budget(env: Env, budget_id: str = B, *, reset: int = 0, **limits: int | tuple[int, int]) -> None:
    """Create a budget with a hard limit, or a hard and a soft one, for each dimension."""
    pairs = {name: limit if isinstance(limit, tuple) else (limit, 0) for name, limit in limits.items()}
    created = await env.engine.create_budget(
        budget_id,
        dimensions=list(pairs),
        hard_limits=[hard for hard, _ in pairs.values()],
        soft_limits=[soft for _, soft in pairs.values()],
        reset_interval_ms=reset,
    )
    assert created == BudgetCreated(budget_id)


async def report(env: Env, budget_id: str = B, key: str | None = None, **deltas: int) -> Any:
    """Report usage as an administrator, in argument order."""
    return await env.engine.report_usage_admin(
        budget_id, dimensions=list(deltas), deltas=list(deltas.values()), dedup_key=key
    )


async def usage(env: Env, budget_id: str = B) -> dict[str, int]:
    return (await env.engine.get_budget_status(budget_id)).usage


@pytest.mark.spec("S-056")
async def test_a_created_budget_shows_its_definition(env: Env) -> None:
    created = await env.engine.create_budget(
        B,
        scope_type="flow",
        scope_id="f-1",
        enforcement_mode="strict",
        on_hard_limit="fail",
        on_soft_limit="warn",
        dimensions=["tokens", "cost"],
        hard_limits=[100, 0],
        soft_limits=[80, 0],
    )
    assert created == BudgetCreated(B)

    status = await env.engine.get_budget_status(B)
    assert (status.scope_type, status.scope_id, status.enforcement_mode) == ("flow", "f-1", "strict")
    assert (status.on_hard_limit, status.on_soft_limit) == ("fail", "warn")
    assert status.hard_limits == {"tokens": 100, "cost": 0}
    assert status.soft_limits == {"tokens": 80, "cost": 0}
    assert (status.usage, status.breach_count, status.soft_breach_count) == ({}, 0, 0)
    assert (status.created_at, status.next_reset_at) == (str(env.now), None)
    assert (status.last_breach_at, status.last_breach_dim) == (None, None)

    async with env.unchanged():
        again = await env.engine.create_budget(B, dimensions=["x"], hard_limits=[1], soft_limits=[1])
    assert again == BudgetExists(B)


@pytest.mark.spec("S-057")
@pytest.mark.parametrize(
    ("dimensions", "hard", "soft", "detail"),
    [
        (["a", "b"], [1], [1, 1], "dimensions, hard_limits and soft_limits: of different lengths, 2, 1 and 2"),
        (["a"], [1], [], "dimensions, hard_limits and soft_limits: of different lengths, 1, 1 and 0"),
        ([f"d{n}" for n in range(65)], [1] * 65, [1] * 65, "too_many_dimensions: limit=64, got=65"),
        (["a", "a"], [1, 1], [1, 1], "dimensions: one is named twice"),
        ([""], [1], [1], "dimension: empty"),
        (["a"], [-1], [1], f"hard_limits: -1 is not within 0..{2**63 - 1}"),
        (["a"], [1], [True], "soft_limits: not a whole number"),
    ],
)
async def test_an_invalid_budget_definition_is_refused(
    env: Env, dimensions: list[str], hard: list[int], soft: list[int], detail: str
) -> None:
    async with env.refused(errors.InvalidInput, detail):
        await env.engine.create_budget(B, dimensions=dimensions, hard_limits=hard, soft_limits=soft)


@pytest.mark.spec("S-057")
@pytest.mark.parametrize(
    ("dimensions", "deltas", "detail"),
    [
        (["a", "b"], [1, 2, 3], "dimensions and deltas: of different lengths, 2 and 3"),
        ([f"d{n}" for n in range(65)], [1] * 65, "too_many_dimensions: limit=64, got=65"),
        (["a"], [-1], f"a: -1 is not within 0..{2**63 - 1}"),
        (["a", "a"], [2**63 - 1, 1], f"a: {2**63} is not within 0..{2**63 - 1}"),
    ],
)
async def test_an_invalid_usage_report_is_refused(
    env: Env, dimensions: list[str], deltas: list[int], detail: str
) -> None:
    await budget(env, a=100)
    async with env.refused(errors.InvalidInput, detail):
        await env.engine.report_usage_admin(B, dimensions=dimensions, deltas=deltas)


@pytest.mark.spec("S-057")
async def test_a_budget_may_have_64_dimensions(env: Env) -> None:
    names = [f"d{n:02}" for n in range(64)]
    created = await env.engine.create_budget(B, dimensions=names, hard_limits=[9] * 64, soft_limits=[0] * 64)

    assert created == BudgetCreated(B)
    assert await env.engine.report_usage_admin(B, dimensions=names, deltas=[1] * 64) == Ok()
    assert await usage(env) == dict.fromkeys(names, 1)


@pytest.mark.spec("S-058")
async def test_a_hard_breach_is_all_or_nothing(env: Env) -> None:
    await budget(env, tokens=100, cost=5)
    assert await report(env, cost=5) == Ok()
    env.clock.advance_ms(7)

    breach = await report(env, cost=1, tokens=10)

    assert breach == HardBreach("cost", current_usage=5, hard_limit=5)
    status = await env.engine.get_budget_status(B)
    assert status.usage == {"cost": 5}
    assert (status.breach_count, status.last_breach_dim, status.last_breach_at) == (1, "cost", str(env.now))


@pytest.mark.spec("S-059")
async def test_the_reported_dimension_follows_request_order_on_the_admin_call(env: Env) -> None:
    await budget(env, x=1, y=1)
    await report(env, x=1, y=1)
    claim = await env.create_and_claim()

    admin = await env.engine.report_usage_admin(B, dimensions=["y", "x"], deltas=[1, 1])
    worker = await env.engine.report_usage(claim.handle, B, {"y": 1, "x": 1})
    spender = await env.engine.record_spend(B, claim.execution_id, {"y": 1, "x": 1})

    assert admin == HardBreach("y", current_usage=1, hard_limit=1)
    assert worker == spender == HardBreach("x", current_usage=1, hard_limit=1)


@pytest.mark.spec("S-060")
async def test_a_repeated_usage_report_is_applied_once(env: Env) -> None:
    await budget(env, tokens=100)
    await budget(env, B2, tokens=100)

    answers = [await report(env, key="k", tokens=10) for _ in range(2)]

    assert answers == [Ok(), AlreadyApplied()]
    assert await usage(env) == {"tokens": 10}
    assert await report(env, B2, key="k", tokens=10) == Ok()


@pytest.mark.spec("S-060")
async def test_the_three_usage_calls_share_their_keys_for_a_day(env: Env) -> None:
    await budget(env, tokens=100)
    claim = await env.create_and_claim()
    assert await env.engine.record_spend(B, claim.execution_id, {"tokens": 1}, idempotency_key="k") == Ok()

    env.clock.advance_ms(24 * 3_600_000 - 1)
    assert await report(env, key="k", tokens=1) == AlreadyApplied()
    assert await env.engine.report_usage(claim.handle, B, {"tokens": 1}, dedup_key="k") == AlreadyApplied()

    env.clock.advance_ms(1)
    assert await report(env, key="k", tokens=1) == Ok()
    assert await report(env, key="k", tokens=1) == AlreadyApplied()
    assert await usage(env) == {"tokens": 2}


@pytest.mark.spec("S-061")
async def test_a_hard_breach_does_not_burn_the_dedup_key(env: Env) -> None:
    await budget(env, tokens=10)
    await report(env, tokens=8)
    assert isinstance(await report(env, key="k", tokens=5), HardBreach)

    await env.engine.reset_budget(B)

    assert await report(env, key="k", tokens=5) == Ok()
    assert await usage(env) == {"tokens": 5}


@pytest.mark.spec("S-062")
async def test_release_budget_returns_what_an_execution_spent(env: Env) -> None:
    await budget(env, tokens=100)
    e1, e2 = await env.create(), await env.create()
    await env.engine.record_spend(B, e1, {"tokens": 8})
    await env.engine.record_spend(B, e2, {"tokens": 5})
    assert await usage(env) == {"tokens": 13}

    assert await env.engine.release_budget(B, e1) == BudgetReleased(B, {"tokens": 8})
    assert await usage(env) == {"tokens": 5}
    async with env.unchanged():
        assert await env.engine.release_budget(B, e1) == BudgetReleased(B, {})
        assert await env.engine.release_budget(B, await never_spent(env)) == BudgetReleased(B, {})
    assert await env.engine.release_budget(B, e2) == BudgetReleased(B, {"tokens": 5})
    assert await usage(env) == {"tokens": 0}


async def never_spent(env: Env) -> str:
    return env.engine.new_execution_id()


@pytest.mark.spec("S-063")
async def test_a_release_after_a_reset_returns_nothing(env: Env) -> None:
    await budget(env, tokens=100)
    e1, e2 = await env.create(), await env.create()
    await env.engine.record_spend(B, e1, {"tokens": 10})
    await env.engine.reset_budget(B)
    await env.engine.record_spend(B, e2, {"tokens": 8})

    await env.engine.release_budget(B, e1)

    assert await usage(env) == {"tokens": 8}


async def test_a_reset_clears_the_ledger_of_its_own_budget_only(env: Env) -> None:
    await budget(env, tokens=100)
    await budget(env, B2, tokens=100)
    e = await env.create()
    for one in (B, B2):
        await env.engine.record_spend(one, e, {"tokens": 8})

    await env.engine.reset_budget(B)

    assert await env.engine.release_budget(B, e) == BudgetReleased(B, {})
    assert await env.engine.release_budget(B2, e) == BudgetReleased(B2, {"tokens": 8})


async def test_an_undefined_budget_cannot_be_reset_or_changed(env: Env) -> None:
    await report(env, tokens=7)

    async with env.refused(errors.NotFound, entity="budget"):
        await env.engine.reset_budget(B)
    async with env.refused(errors.NotFound, entity="budget"):
        await env.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[1], soft_limits=[0])


@pytest.mark.spec("S-064")
async def test_a_manual_reset_clears_usage_and_schedules_the_next(env: Env) -> None:
    await budget(env, reset=60_000, tokens=50)
    await budget(env, B2, tokens=50)
    await report(env, tokens=40)
    assert isinstance(await report(env, tokens=11), HardBreach)
    env.clock.advance_ms(10)

    assert await env.engine.reset_budget(B) == BudgetReset(env.now + 60_000)

    status = await env.engine.get_budget_status(B)
    assert (status.usage, status.breach_count) == ({"tokens": 0}, 1)
    assert (status.last_breach_at, status.last_breach_dim) == (None, None)
    assert status.next_reset_at == str(env.now + 60_000)
    assert await env.engine.reset_budget(B2) == BudgetReset(0)
    async with env.refused(errors.NotFound, entity="budget"):
        await env.engine.reset_budget(UNKNOWN)


@pytest.mark.spec("S-064")
async def test_a_scheduled_reset_runs_when_due_and_does_not_catch_up(env: Env) -> None:
    await budget(env, reset=60_000, tokens=50)
    await report(env, tokens=40)
    assert await env.sweep("budget_reset", after_ms=59_999) == 0

    env.clock.advance_ms(150_001)
    done = await env.engine.sweep_once("budget_reset")

    assert (done.processed, done.errors) == (1, 0)
    status = await env.engine.get_budget_status(B)
    assert (status.usage, status.next_reset_at) == ({"tokens": 0}, str(env.now + 60_000))
    assert await env.sweep("budget_reset") == 0


@pytest.mark.spec("S-064")
async def test_a_manual_reset_makes_the_scheduled_one_a_no_op(env: Env) -> None:
    await budget(env, reset=60_000, tokens=50)
    env.clock.advance_ms(60_000)
    env.store.after_due = lambda: env.engine.reset_budget(B)

    assert await env.sweep("budget_reset") == 0

    assert (await env.engine.get_budget_status(B)).next_reset_at == str(env.now + 60_000)


@pytest.mark.spec("S-065")
async def test_concurrent_usage_reports_never_exceed_the_limit(env: Env) -> None:
    await budget(env, tokens=100)
    before = env.store.calls["commit"]

    answers = await asyncio.gather(*(report(env, tokens=3) for _ in range(50)))

    breaches = [answer for answer in answers if isinstance(answer, HardBreach)]
    assert (len(breaches), len(answers) - len(breaches)) == (17, 33)
    status = await env.engine.get_budget_status(B)
    assert (status.usage, status.breach_count) == ({"tokens": 99}, 17)
    assert env.store.calls["commit"] - before <= 2, "concurrent reports share commits"


@pytest.mark.spec("S-066")
async def test_a_breach_does_not_affect_running_or_queued_executions(env: Env) -> None:
    await budget(env, tokens=10)
    claim = await env.create_and_claim(policy={"budget_ids": [B]})
    queued = await env.create(policy={"budget_ids": [B]})

    assert isinstance(await env.engine.report_usage(claim.handle, B, {"tokens": 11}), HardBreach)

    assert await env.vector(claim.execution_id) == ACTIVE
    assert await env.vector(queued) == WAITING
    await env.engine.complete(claim.handle)


# -- beyond the scenarios ------------------------------------------------------------------------------------------


async def test_usage_of_an_undefined_budget_counts_once_it_is_defined(env: Env) -> None:
    assert await report(env, tokens=7) == Ok()
    with pytest.raises(errors.NotFound):
        await env.engine.get_budget_status(B)
    assert await env.engine.read_budget_usage_and_limits(B) == ({}, {})

    await budget(env, tokens=(10, 6))

    assert await usage(env) == {"tokens": 7}
    assert await report(env, tokens=3) == SoftBreach("tokens", current_usage=10, soft_limit=6)
    assert await report(env, tokens=1) == HardBreach("tokens", current_usage=10, hard_limit=10)
    assert await env.engine.read_budget_usage_and_limits(B) == (
        {"tokens": 10},
        {"hard:tokens": 10, "soft:tokens": 6},
    )


async def test_a_soft_breach_names_the_first_dimension_beyond_its_limit(env: Env) -> None:
    await budget(env, b=(0, 1), a=(0, 1))
    assert await report(env, b=1, a=1) == Ok()

    answer = await env.engine.report_usage_admin(B, dimensions=["b", "a"], deltas=[1, 1])

    assert answer == SoftBreach("b", current_usage=2, soft_limit=1)
    assert (await env.engine.get_budget_status(B)).soft_breach_count == 1


async def test_duplicate_dimensions_in_one_report_are_added_up(env: Env) -> None:
    await budget(env, tokens=10)

    breach = await env.engine.report_usage_admin(B, dimensions=["tokens", "tokens"], deltas=[6, 5])
    assert breach == HardBreach("tokens", current_usage=0, hard_limit=10)
    assert await env.engine.report_usage_admin(B, dimensions=["tokens", "tokens"], deltas=[6, 4]) == Ok()
    assert await usage(env) == {"tokens": 10}


async def test_a_dimension_without_a_limit_is_tracked_and_zero_is_a_delta(env: Env) -> None:
    await budget(env, tokens=0)

    assert await report(env, tokens=5, calls=0) == Ok()

    assert await usage(env) == {"tokens": 5, "calls": 0}
    assert (await env.engine.get_budget_status(B)).hard_limits == {"tokens": 0}


async def test_usage_beyond_the_largest_integer_is_refused(env: Env) -> None:
    await budget(env, tokens=0)
    await report(env, tokens=2**63 - 1)

    async with env.refused(errors.InvalidInput, f"tokens: {2**63} in use would be more than {2**63 - 1}"):
        await report(env, tokens=1)


async def test_usage_is_reported_only_with_a_handle_of_this_store(env: Env) -> None:
    await budget(env, tokens=10)
    claim = await env.create_and_claim()
    other = next(tag for tag in BackendTag if tag is not claim.handle.backend)
    foreign = Handle(other, HandleKind.FRESH, claim.handle.opaque)

    async with env.refused(errors.HandleFromOtherBackend):
        await env.engine.report_usage(foreign, B, {"tokens": 1})
    async with env.refused(errors.InvalidInput, "handle: not a handle"):
        await env.engine.report_usage("handle", B, {"tokens": 1})  # type: ignore[arg-type]


async def test_usage_is_reported_after_the_lease_expired(env: Env) -> None:
    await budget(env, tokens=10)
    claim = await env.create_and_claim()
    await env.expire_lease(claim)

    assert await env.engine.report_usage(claim.handle, B, {"tokens": 1}) == Ok()


async def test_the_reconciler_sets_and_clears_the_breach_marker(env: Env) -> None:
    await report(env, tokens=7)
    await budget(env, tokens=5)
    await budget(env, B2, reset=1000, tokens=5)
    partition = (await env.dump())["ff_budget_policy"][0].partition

    assert await env.engine.reconcile_budget_counters(partition) == Reconciled(1, 0)
    async with env.unchanged():
        assert await env.engine.reconcile_budget_counters(partition) == Reconciled(0, 0)
    assert "breached_at" not in await usage(env)

    await env.engine.reset_budget(B)
    assert await env.engine.reconcile_budget_counters(partition) == Reconciled(1, 0)
