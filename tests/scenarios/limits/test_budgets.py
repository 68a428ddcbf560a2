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
from tests.scenarios.play import ACTIVE, WAITING, Play

B = "0b000000-0000-4000-8000-000000000001"
B2 = "0b000000-0000-4000-8000-000000000002"
UNKNOWN = "0b000000-0000-4000-8000-00000000ffff"


async def budget(play: Play, budget_id: str = B, *, reset: int = 0, **limits: int | tuple[int, int]) -> None:
    """A budget with a hard limit, or a hard and a soft one, for each dimension."""
    pairs = {name: limit if isinstance(limit, tuple) else (limit, 0) for name, limit in limits.items()}
    created = await play.engine.create_budget(
        budget_id,
        dimensions=list(pairs),
        hard_limits=[hard for hard, _ in pairs.values()],
        soft_limits=[soft for _, soft in pairs.values()],
        reset_interval_ms=reset,
    )
    assert created == BudgetCreated(budget_id)


async def report(play: Play, budget_id: str = B, key: str | None = None, **deltas: int) -> Any:
    """Usage reported by an administrator, in the order given."""
    return await play.engine.report_usage_admin(
        budget_id, dimensions=list(deltas), deltas=list(deltas.values()), dedup_key=key
    )


async def usage(play: Play, budget_id: str = B) -> dict[str, int]:
    return (await play.engine.get_budget_status(budget_id)).usage


@pytest.mark.spec("S-056")
async def test_create_and_status(play: Play) -> None:
    created = await play.engine.create_budget(
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

    status = await play.engine.get_budget_status(B)
    assert (status.scope_type, status.scope_id, status.enforcement_mode) == ("flow", "f-1", "strict")
    assert (status.on_hard_limit, status.on_soft_limit) == ("fail", "warn")
    assert status.hard_limits == {"tokens": 100, "cost": 0}
    assert status.soft_limits == {"tokens": 80, "cost": 0}
    assert (status.usage, status.breach_count, status.soft_breach_count) == ({}, 0, 0)
    assert (status.created_at, status.next_reset_at) == (str(play.now), None)
    assert (status.last_breach_at, status.last_breach_dim) == (None, None)

    async with play.untouched():
        again = await play.engine.create_budget(B, dimensions=["x"], hard_limits=[1], soft_limits=[1])
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
async def test_array_and_size_validation_of_a_definition(
    play: Play, dimensions: list[str], hard: list[int], soft: list[int], detail: str
) -> None:
    async with play.refused(errors.InvalidInput, detail):
        await play.engine.create_budget(B, dimensions=dimensions, hard_limits=hard, soft_limits=soft)


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
async def test_array_and_size_validation_of_a_report(
    play: Play, dimensions: list[str], deltas: list[int], detail: str
) -> None:
    await budget(play, a=100)
    async with play.refused(errors.InvalidInput, detail):
        await play.engine.report_usage_admin(B, dimensions=dimensions, deltas=deltas)


@pytest.mark.spec("S-057")
async def test_sixty_four_dimensions_are_enough(play: Play) -> None:
    names = [f"d{n:02}" for n in range(64)]
    created = await play.engine.create_budget(B, dimensions=names, hard_limits=[9] * 64, soft_limits=[0] * 64)

    assert created == BudgetCreated(B)
    assert await play.engine.report_usage_admin(B, dimensions=names, deltas=[1] * 64) == Ok()
    assert await usage(play) == dict.fromkeys(names, 1)


@pytest.mark.spec("S-058")
async def test_a_hard_breach_is_all_or_nothing(play: Play) -> None:
    await budget(play, tokens=100, cost=5)
    assert await report(play, cost=5) == Ok()
    play.clock.advance_ms(7)

    breach = await report(play, cost=1, tokens=10)

    assert breach == HardBreach("cost", current_usage=5, hard_limit=5)
    status = await play.engine.get_budget_status(B)
    assert status.usage == {"cost": 5}
    assert (status.breach_count, status.last_breach_dim, status.last_breach_at) == (1, "cost", str(play.now))


@pytest.mark.spec("S-059")
async def test_the_reported_dimension_follows_request_order_on_the_admin_call(play: Play) -> None:
    await budget(play, x=1, y=1)
    await report(play, x=1, y=1)
    held = await play.claimed()

    admin = await play.engine.report_usage_admin(B, dimensions=["y", "x"], deltas=[1, 1])
    worker = await play.engine.report_usage(held.handle, B, {"y": 1, "x": 1})
    spender = await play.engine.record_spend(B, held.execution_id, {"y": 1, "x": 1})

    assert admin == HardBreach("y", current_usage=1, hard_limit=1)
    assert worker == spender == HardBreach("x", current_usage=1, hard_limit=1)


@pytest.mark.spec("S-060")
async def test_dedup_on_success(play: Play) -> None:
    await budget(play, tokens=100)
    await budget(play, B2, tokens=100)

    answers = [await report(play, key="k", tokens=10) for _ in range(2)]

    assert answers == [Ok(), AlreadyApplied()]
    assert await usage(play) == {"tokens": 10}
    assert await report(play, B2, key="k", tokens=10) == Ok()


@pytest.mark.spec("S-060")
async def test_the_three_calls_share_their_keys_for_a_day(play: Play) -> None:
    await budget(play, tokens=100)
    held = await play.claimed()
    assert await play.engine.record_spend(B, held.execution_id, {"tokens": 1}, idempotency_key="k") == Ok()

    play.clock.advance_ms(24 * 3_600_000 - 1)
    assert await report(play, key="k", tokens=1) == AlreadyApplied()
    assert await play.engine.report_usage(held.handle, B, {"tokens": 1}, dedup_key="k") == AlreadyApplied()

    play.clock.advance_ms(1)
    assert await report(play, key="k", tokens=1) == Ok()
    assert await report(play, key="k", tokens=1) == AlreadyApplied()
    assert await usage(play) == {"tokens": 2}


@pytest.mark.spec("S-061")
async def test_a_hard_breach_does_not_burn_the_dedup_key(play: Play) -> None:
    await budget(play, tokens=10)
    await report(play, tokens=8)
    assert isinstance(await report(play, key="k", tokens=5), HardBreach)

    await play.engine.reset_budget(B)

    assert await report(play, key="k", tokens=5) == Ok()
    assert await usage(play) == {"tokens": 5}


@pytest.mark.spec("S-062")
async def test_spend_and_release(play: Play) -> None:
    await budget(play, tokens=100)
    e1, e2 = await play.create(), await play.create()
    await play.engine.record_spend(B, e1, {"tokens": 8})
    await play.engine.record_spend(B, e2, {"tokens": 5})
    assert await usage(play) == {"tokens": 13}

    assert await play.engine.release_budget(B, e1) == BudgetReleased(B, {"tokens": 8})
    assert await usage(play) == {"tokens": 5}
    async with play.untouched():
        assert await play.engine.release_budget(B, e1) == BudgetReleased(B, {})
        assert await play.engine.release_budget(B, await never_spent(play)) == BudgetReleased(B, {})
    assert await play.engine.release_budget(B, e2) == BudgetReleased(B, {"tokens": 5})
    assert await usage(play) == {"tokens": 0}


async def never_spent(play: Play) -> str:
    return play.engine.new_execution_id()


@pytest.mark.spec("S-063")
async def test_release_after_reset_must_not_steal(play: Play) -> None:
    await budget(play, tokens=100)
    e1, e2 = await play.create(), await play.create()
    await play.engine.record_spend(B, e1, {"tokens": 10})
    await play.engine.reset_budget(B)
    await play.engine.record_spend(B, e2, {"tokens": 8})

    await play.engine.release_budget(B, e1)

    assert await usage(play) == {"tokens": 8}


async def test_a_reset_forgets_the_ledger_of_its_own_budget_only(play: Play) -> None:
    await budget(play, tokens=100)
    await budget(play, B2, tokens=100)
    e = await play.create()
    for one in (B, B2):
        await play.engine.record_spend(one, e, {"tokens": 8})

    await play.engine.reset_budget(B)

    assert await play.engine.release_budget(B, e) == BudgetReleased(B, {})
    assert await play.engine.release_budget(B2, e) == BudgetReleased(B2, {"tokens": 8})


async def test_a_budget_that_was_only_used_has_neither_limits_to_change_nor_a_period_to_begin(play: Play) -> None:
    await report(play, tokens=7)

    async with play.refused(errors.NotFound, entity="budget"):
        await play.engine.reset_budget(B)
    async with play.refused(errors.NotFound, entity="budget"):
        await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[1], soft_limits=[0])


@pytest.mark.spec("S-064")
async def test_manual_and_scheduled_reset(play: Play) -> None:
    await budget(play, reset=60_000, tokens=50)
    await budget(play, B2, tokens=50)
    await report(play, tokens=40)
    assert isinstance(await report(play, tokens=11), HardBreach)
    play.clock.advance_ms(10)

    assert await play.engine.reset_budget(B) == BudgetReset(play.now + 60_000)

    status = await play.engine.get_budget_status(B)
    assert (status.usage, status.breach_count) == ({"tokens": 0}, 1)
    assert (status.last_breach_at, status.last_breach_dim) == (None, None)
    assert status.next_reset_at == str(play.now + 60_000)
    assert await play.engine.reset_budget(B2) == BudgetReset(0)
    async with play.refused(errors.NotFound, entity="budget"):
        await play.engine.reset_budget(UNKNOWN)


@pytest.mark.spec("S-064")
async def test_the_scheduled_reset_comes_when_it_is_due_and_does_not_catch_up(play: Play) -> None:
    await budget(play, reset=60_000, tokens=50)
    await report(play, tokens=40)
    play.clock.advance_ms(59_999)
    assert (await play.engine.sweep_once("budget_reset")).processed == 0

    play.clock.advance_ms(150_001)
    done = await play.engine.sweep_once("budget_reset")

    assert (done.processed, done.errors) == (1, 0)
    status = await play.engine.get_budget_status(B)
    assert (status.usage, status.next_reset_at) == ({"tokens": 0}, str(play.now + 60_000))
    assert (await play.engine.sweep_once("budget_reset")).processed == 0


@pytest.mark.spec("S-064")
async def test_a_manual_reset_makes_the_scheduled_one_a_no_op(play: Play) -> None:
    await budget(play, reset=60_000, tokens=50)
    play.clock.advance_ms(60_000)
    play.store.after_due = lambda: play.engine.reset_budget(B)

    assert (await play.engine.sweep_once("budget_reset")).processed == 0

    assert (await play.engine.get_budget_status(B)).next_reset_at == str(play.now + 60_000)


@pytest.mark.spec("S-065")
async def test_concurrent_reports_never_overshoot(play: Play) -> None:
    await budget(play, tokens=100)
    before = play.store.calls["commit"]

    answers = await asyncio.gather(*(report(play, tokens=3) for _ in range(50)))

    breaches = [answer for answer in answers if isinstance(answer, HardBreach)]
    assert (len(breaches), len(answers) - len(breaches)) == (17, 33)
    status = await play.engine.get_budget_status(B)
    assert (status.usage, status.breach_count) == ({"tokens": 99}, 17)
    assert play.store.calls["commit"] - before <= 2, "reports that arrive together are written together"


@pytest.mark.spec("S-066")
async def test_a_breach_does_not_touch_running_work(play: Play) -> None:
    await budget(play, tokens=10)
    held = await play.claimed(policy={"budget_ids": [B]})
    queued = await play.create(policy={"budget_ids": [B]})

    assert isinstance(await play.engine.report_usage(held.handle, B, {"tokens": 11}), HardBreach)

    assert await play.vector(held.execution_id) == ACTIVE
    assert await play.vector(queued) == WAITING
    await play.engine.complete(held.handle)


# -- beyond the scenarios ------------------------------------------------------------------------------------------


async def test_an_unknown_budget_records_usage_and_is_defined_later(play: Play) -> None:
    assert await report(play, tokens=7) == Ok()
    with pytest.raises(errors.NotFound):
        await play.engine.get_budget_status(B)
    assert await play.engine.read_budget_usage_and_limits(B) == ({}, {})

    await budget(play, tokens=(10, 6))

    assert await usage(play) == {"tokens": 7}
    assert await report(play, tokens=3) == SoftBreach("tokens", current_usage=10, soft_limit=6)
    assert await report(play, tokens=1) == HardBreach("tokens", current_usage=10, hard_limit=10)
    assert await play.engine.read_budget_usage_and_limits(B) == (
        {"tokens": 10},
        {"hard:tokens": 10, "soft:tokens": 6},
    )


async def test_a_soft_breach_names_the_first_dimension_beyond_its_limit(play: Play) -> None:
    await budget(play, b=(0, 1), a=(0, 1))
    assert await report(play, b=1, a=1) == Ok()

    answer = await play.engine.report_usage_admin(B, dimensions=["b", "a"], deltas=[1, 1])

    assert answer == SoftBreach("b", current_usage=2, soft_limit=1)
    assert (await play.engine.get_budget_status(B)).soft_breach_count == 1


async def test_duplicate_dimensions_in_one_report_are_added_up(play: Play) -> None:
    await budget(play, tokens=10)

    breach = await play.engine.report_usage_admin(B, dimensions=["tokens", "tokens"], deltas=[6, 5])
    assert breach == HardBreach("tokens", current_usage=0, hard_limit=10)
    assert await play.engine.report_usage_admin(B, dimensions=["tokens", "tokens"], deltas=[6, 4]) == Ok()
    assert await usage(play) == {"tokens": 10}


async def test_a_dimension_without_a_limit_is_tracked_and_zero_is_a_delta(play: Play) -> None:
    await budget(play, tokens=0)

    assert await report(play, tokens=5, calls=0) == Ok()

    assert await usage(play) == {"tokens": 5, "calls": 0}
    assert (await play.engine.get_budget_status(B)).hard_limits == {"tokens": 0}


async def test_usage_that_no_store_could_count_is_refused(play: Play) -> None:
    await budget(play, tokens=0)
    await report(play, tokens=2**63 - 1)

    async with play.refused(errors.InvalidInput, f"tokens: {2**63} in use would be more than {2**63 - 1}"):
        await report(play, tokens=1)


async def test_only_the_store_s_own_handle_reports(play: Play) -> None:
    await budget(play, tokens=10)
    held = await play.claimed()
    other = BackendTag.VALKEY
    foreign = Handle(other, HandleKind.FRESH, held.handle.opaque)

    async with play.refused(errors.HandleFromOtherBackend):
        await play.engine.report_usage(foreign, B, {"tokens": 1})
    async with play.refused(errors.InvalidInput, "handle: not a handle"):
        await play.engine.report_usage("handle", B, {"tokens": 1})  # type: ignore[arg-type]


async def test_a_lapsed_lease_does_not_keep_its_holder_from_reporting(play: Play) -> None:
    await budget(play, tokens=10)
    held = await play.claimed()
    await play.expired(held)

    assert await play.engine.report_usage(held.handle, B, {"tokens": 1}) == Ok()


async def test_the_note_of_a_breach_is_set_and_cleared_by_the_reconciler(play: Play) -> None:
    await report(play, tokens=7)
    await budget(play, tokens=5)
    await budget(play, B2, reset=1000, tokens=5)
    partition = (await play.everything())["ff_budget_policy"][0].partition

    assert await play.engine.reconcile_budget_counters(partition) == Reconciled(1, 0)
    async with play.untouched():
        assert await play.engine.reconcile_budget_counters(partition) == Reconciled(0, 0)
    assert "breached_at" not in await usage(play)

    await play.engine.reset_budget(B)
    assert await play.engine.reconcile_budget_counters(partition) == Reconciled(1, 0)
