"""Budgets and quota policies belong to a namespace: those of one id in several namespaces have nothing in common."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model import obstacles
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.answers.limits import (
    BudgetCreated,
    BudgetExists,
    BudgetReleased,
    HardBreach,
    Ok,
    QuotaPolicyCreated,
    QuotaPolicyExists,
    Refunded,
    Reserved,
)
from flowfabric.model.budget import Budget, BudgetDimension
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.condition import Single
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.stores.queries import Read
from flowfabric.testing.limit_invariants import check_limit_invariants
from tests.scenarios.limits.test_budget_suspension import ASLEEP
from tests.scenarios.limits.test_budgets import B
from tests.scenarios.limits.test_quotas import Q
from tests.scenarios.limits.test_reservations import R1, TTL
from tests.scenarios.play import ACTIVE, LEASE_MS, RESUMABLE, WAITING, Play
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, QUOTA_BLOCKED, pull
from tests.scenarios.scheduling.test_workers import register
from tests.scenarios.waits import Waits

SPENDS: dict[str, Any] = {"budget_ids": [B]}
LIMITED: dict[str, Any] = {"quota_policy_id": Q}


async def budget(play: Play, namespace: str, hard: int = 10, **given: Any) -> None:
    numbers: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [hard], "soft_limits": [0]}
    assert await play.engine.create_budget(B, **numbers, namespace=namespace, **given) == BudgetCreated(B)


async def policy(play: Play, namespace: str, cap: int = 1) -> None:
    numbers = {"window_seconds": 60, "max_requests_per_window": 0, "max_concurrent": cap}
    assert await play.engine.create_quota_policy(Q, **numbers, namespace=namespace) == QuotaPolicyCreated(Q)


async def report(play: Play, namespace: str, tokens: int) -> Any:
    return await play.engine.report_usage_admin(B, dimensions=["tokens"], deltas=[tokens], namespace=namespace)


async def used(play: Play, namespace: str) -> dict[str, int]:
    return (await play.engine.get_budget_status(B, namespace=namespace)).usage


async def held(play: Play, namespace: str) -> Claimed:
    """An execution of a namespace that somebody works on."""
    await play.create(namespace=namespace)
    [claimed] = await play.engine.claim_from_lanes(
        ["default"], 1, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=LEASE_MS, namespaces=(namespace,)
    )
    return claimed


async def test_one_id_is_another_budget_in_each_namespace(play: Play) -> None:
    await budget(play, "a", hard=10)
    await budget(play, "b", hard=20)
    numbers: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [99], "soft_limits": [0]}
    assert await play.engine.create_budget(B, **numbers, namespace="a") == BudgetExists(B)

    assert await report(play, "a", 7) == Ok()
    assert await report(play, "b", 20) == Ok()

    assert [await used(play, name) for name in "ab"] == [{"tokens": 7}, {"tokens": 20}]
    assert await report(play, "a", 4) == HardBreach("tokens", 7, 10, namespace="a")
    with pytest.raises(errors.NotFound):
        await play.engine.get_budget_status(B)
    assert [await play.engine.list_budgets(namespace=name) for name in ("a", "b", "default")] == [[B], [B], []]
    await check_limit_invariants(play.engine)


async def test_a_key_of_a_report_is_remembered_for_its_own_budget_only(play: Play) -> None:
    await budget(play, "a")
    await budget(play, "b")
    for name in "ab":
        numbers: dict[str, Any] = {"dimensions": ["tokens"], "deltas": [3], "dedup_key": "k"}
        assert await play.engine.report_usage_admin(B, **numbers, namespace=name) == Ok()
    assert [await used(play, name) for name in "ab"] == [{"tokens": 3}, {"tokens": 3}]


async def test_resetting_or_changing_a_budget_leaves_its_namesakes_alone(play: Play) -> None:
    for name in ("a", "b", "default"):
        await budget(play, name)
        await report(play, name, 5)

    await play.engine.reset_budget(B, namespace="a")
    limits: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [50], "soft_limits": [0]}
    await play.engine.change_budget_limits(B, **limits, namespace="b")

    assert [await used(play, name) for name in ("a", "b", "default")] == [{"tokens": 0}, {"tokens": 5}, {"tokens": 5}]
    status = [await play.engine.get_budget_status(B, namespace=name) for name in ("a", "b", "default")]
    assert [one.hard_limits["tokens"] for one in status] == [10, 50, 10]


@pytest.mark.parametrize("known", [True, False], ids=("namespace_given", "namespace_loaded"))
async def test_an_execution_spends_in_its_own_namespace_then_in_the_shared_one(play: Play, known: bool) -> None:
    mine, theirs = [await play.create(namespace=name) for name in "ab"]
    whose: dict[str, dict[str, Any]] = {one: {"namespace": one} if known else {} for one in "ab"}
    await budget(play, "default")
    assert await play.engine.record_spend(B, mine, {"tokens": 4}, **whose["a"]) == Ok()
    assert await used(play, "default") == {"tokens": 4}, "the shared one stands in"

    await budget(play, "a")
    assert await play.engine.record_spend(B, mine, {"tokens": 9}, **whose["a"]) == Ok()
    breach = await play.engine.record_spend(B, theirs, {"tokens": 9}, **whose["b"])

    assert breach == HardBreach("tokens", 4, 10), "it is the shared one that has no room"
    assert [await used(play, name) for name in ("a", "default")] == [{"tokens": 9}, {"tokens": 4}]
    assert await play.engine.release_budget(B, mine, **whose["a"]) == BudgetReleased(B, {"tokens": 9})


async def test_without_sharing_an_execution_spends_in_its_own_namespace_only(play: Play) -> None:
    mine = await play.create(namespace="a")
    await budget(play, "default", hard=1)

    assert await play.engine.record_spend(B, mine, {"tokens": 9}, shared=False) == Ok()

    assert await used(play, "default") == {}
    await budget(play, "a")
    assert await used(play, "a") == {"tokens": 9}, "what was used before it was defined counts"


async def test_usage_of_an_unknown_budget_belongs_to_the_caller_and_hides_no_shared_one(play: Play) -> None:
    mine = await play.create(namespace="a")
    assert await play.engine.record_spend(B, mine, {"tokens": 2}) == Ok()

    await budget(play, "default")

    assert await used(play, "default") == {}
    assert await play.engine.record_spend(B, mine, {"tokens": 3}) == Ok()
    assert await used(play, "default") == {"tokens": 3}
    await check_limit_invariants(play.engine)


async def test_reservations_are_kept_settled_and_refunded_where_the_budget_is(play: Play) -> None:
    mine = await play.create(namespace="a")
    await budget(play, "a")
    await budget(play, "b")
    kept = await play.engine.reserve_budget(B, mine, {"tokens": 6}, ttl_ms=TTL, reservation_id=R1)
    assert kept == Reserved(R1, play.now + TTL)

    for elsewhere in ("b", "default"):
        assert await play.engine.refund_budget(B, R1, namespace=elsewhere) == Refunded(R1, {})
        assert await play.engine.reservation_owner(B, R1, namespace=elsewhere) is None
    assert (await play.engine.get_budget_status(B, namespace="a")).reserved == {"tokens": 6}
    assert await play.engine.reservation_owner(B, R1, namespace="a") == mine
    assert await play.engine.settle_budget(B, mine, R1, {"tokens": 5}) == Ok()

    status = await play.engine.get_budget_status(B, namespace="a")
    assert (status.usage, status.reserved) == ({"tokens": 5}, {})


async def test_a_reservation_of_a_namespace_is_over_when_its_time_is(play: Play) -> None:
    mine = await play.create(namespace="a")
    await budget(play, "a")
    await play.engine.reserve_budget(B, mine, {"tokens": 6}, ttl_ms=TTL, reservation_id=R1)

    play.clock.advance_ms(TTL)
    assert (await play.engine.sweep_once("budget_reservations")).processed == 1

    assert (await play.engine.get_budget_status(B, namespace="a")).reserved == {}


async def test_a_budget_of_a_namespace_begins_anew_by_itself(play: Play) -> None:
    for name in ("a", "default"):
        await budget(play, name, reset_interval_ms=1000)
        await report(play, name, 5)

    play.clock.advance_ms(1000)
    assert (await play.engine.sweep_once("budget_reset")).processed == 2

    assert [await used(play, name) for name in ("a", "default")] == [{"tokens": 0}, {"tokens": 0}]


async def test_a_spent_budget_blocks_the_work_of_its_own_namespace(play: Play) -> None:
    for name in "ab":
        await budget(play, name)
        await register(play, namespace=name)
    await report(play, "a", 10)
    mine, theirs = [await play.create(namespace=name, policy=SPENDS) for name in "ab"]

    assert await pull(play, limit=2) == [theirs]

    assert [await play.vector(one) for one in (mine, theirs)] == [BUDGET_BLOCKED, ACTIVE]
    assert (await play.engine.explain(mine)).obstacle == obstacles.BudgetExhausted(B, "tokens", 10, 0, 10, None)
    await play.engine.reset_budget(B, namespace="b")
    assert await play.vector(mine) == BUDGET_BLOCKED, "room in the budget of others is none"
    await play.engine.reset_budget(B, namespace="a")
    assert await play.vector(mine) == WAITING


async def test_a_shared_budget_blocks_whoever_has_none_of_that_id(play: Play) -> None:
    await budget(play, "default")
    await budget(play, "b")
    await report(play, "default", 10)
    mine, theirs = [await play.create(namespace=name, policy=SPENDS) for name in "ab"]

    assert await pull(play, limit=2) == [theirs]
    assert await play.vector(mine) == BUDGET_BLOCKED
    assert (await play.engine.sweep_once("unblock")).processed == 0

    await play.engine.reset_budget(B)
    assert await play.vector(mine) == WAITING


async def test_defining_an_id_of_ones_own_sets_free_what_the_shared_one_held_up(play: Play) -> None:
    await budget(play, "default")
    await policy(play, "default")
    await report(play, "default", 10)
    holder, spends, limited = [
        await play.create(namespace="a", policy=given, priority=9 - n)
        for n, given in enumerate((LIMITED, SPENDS, LIMITED))
    ]
    assert await pull(play, limit=3) == [holder]
    assert [await play.vector(one) for one in (spends, limited)] == [BUDGET_BLOCKED, QUOTA_BLOCKED]

    await budget(play, "b")
    assert await play.vector(spends) == BUDGET_BLOCKED
    await budget(play, "a")
    await policy(play, "a")

    assert [await play.vector(one) for one in (spends, limited)] == [WAITING, WAITING]
    assert sorted(await pull(play, limit=2)) == sorted((spends, limited))


async def test_slots_are_those_of_the_policy_of_the_namespace(play: Play) -> None:
    for name in "ab":
        await policy(play, name)
        await register(play, namespace=name)
    assert await play.engine.read_quota_policy_limits(Q) is None
    numbers = {"window_seconds": 1, "max_requests_per_window": 0, "max_concurrent": 9}
    assert await play.engine.create_quota_policy(Q, **numbers, namespace="a") == QuotaPolicyExists(Q)
    mine, more, theirs = [await play.create(namespace=name, policy=LIMITED) for name in "aab"]

    assert sorted(await pull(play, limit=3)) == sorted((mine, theirs))

    assert await play.vector(more) == QUOTA_BLOCKED
    assert (await play.engine.explain(more)).obstacle == obstacles.QuotaFull(Q, "concurrency", 1, 1)
    await play.engine.cancel_execution(theirs)
    await play.engine.outbox.wait_for_deliveries()
    assert await play.vector(more) == QUOTA_BLOCKED, "a slot of others is none"
    await play.engine.cancel_execution(mine)
    await play.engine.outbox.wait_for_deliveries()
    assert await play.vector(more) == WAITING
    await check_limit_invariants(play.engine)


async def test_the_end_of_a_life_gives_a_shared_slot_back(play: Play) -> None:
    await policy(play, "default")
    mine, theirs = [await play.create(namespace=name, policy=LIMITED) for name in "ab"]
    assert await pull(play, limit=2) == [mine]
    assert await play.vector(theirs) == QUOTA_BLOCKED

    await play.engine.cancel_execution(mine)
    await play.engine.outbox.wait_for_deliveries()

    assert await play.vector(theirs) == WAITING


async def test_a_slot_got_in_the_shared_policy_is_given_back_though_its_namespace_has_its_own_by_now(
    play: Play,
) -> None:
    await policy(play, "default")
    mine, theirs = [await play.create(namespace=name, policy=LIMITED) for name in "ab"]
    assert await pull(play) == [mine]
    await policy(play, "a")

    await play.engine.cancel_execution(mine)
    await play.engine.outbox.wait_for_deliveries()

    assert await pull(play) == [theirs]
    await check_limit_invariants(play.engine)


async def test_slots_of_every_namespace_are_recounted(play: Play) -> None:
    await policy(play, "a")
    mine = await play.create(namespace="a", policy=LIMITED)
    assert await pull(play) == [mine]
    await play.engine.release_admission(Q, mine)
    after = await play.create(namespace="a", policy=LIMITED)
    assert await pull(play) == [after]
    assert (await play.engine.sweep_once("quota_reconciler")).errors == 0
    await check_limit_invariants(play.engine)


async def test_a_breach_puts_to_sleep_until_the_budget_of_the_namespace_has_room(play: Play) -> None:
    for name in ("a", "b", "default"):
        await budget(play, name, on_hard_limit="suspend")
        await report(play, name, 10)
    one = await held(play, "a")
    breach = await play.engine.report_usage(one.handle, B, {"tokens": 5})
    assert breach == HardBreach("tokens", 10, 10, action="suspend", parked=True, namespace="a")
    assert await play.vector(one.execution_id) == ASLEEP
    assert (await play.engine.explain(one.execution_id)).obstacle.budget_id == B  # type: ignore[attr-defined]

    for elsewhere in ("b", "default"):
        await play.engine.reset_budget(B, namespace=elsewhere)
        assert await play.vector(one.execution_id) == ASLEEP
    assert (await play.engine.sweep_once("unblock")).processed == 0
    await play.engine.reset_budget(B, namespace="a")
    assert await play.vector(one.execution_id) == RESUMABLE


async def test_no_waitpoint_key_names_the_budget_of_another_namespace(play: Play, waits: Waits) -> None:
    await budget(play, "b")
    await report(play, "b", 10)
    spy = await held(play, "a")
    key = BudgetNeed(B, "tokens", 1, "b").key
    await waits.suspend(spy, Single(key), FreshWaitpoint(play.engine.minter.uuid(), key))

    told = (await play.engine.explain(spy.execution_id)).obstacle

    assert isinstance(told, obstacles.BudgetExhausted)
    assert (told.usage, told.hard_limit) == (0, 0), "it is its own budget of that id, of which there is none"


async def test_a_waitpoint_key_shows_no_figures_of_a_shared_budget_that_the_policy_does_not_name(
    play: Play, waits: Waits
) -> None:
    await budget(play, "default")
    await report(play, "default", 7)
    spy = await held(play, "a")
    key = BudgetNeed(B, "tokens", 1).key
    await waits.suspend(spy, Single(key), FreshWaitpoint(play.engine.minter.uuid(), key))

    assert isinstance((await play.engine.explain(spy.execution_id)).obstacle, obstacles.SuspendedObstacle)


async def test_a_shared_budget_that_cannot_be_read_holds_up_nobody_who_has_an_own_one(play: Play) -> None:
    for name in ("a", "default"):
        await budget(play, name)
    [row] = (await play.engine.runtime.load((Read(Budget, ("default", B)),))).rows[0]
    patch = Patch(BudgetDimension, ("default", B, "tokens"), {"hard_limit": -1})
    change = Change(guards=(Guard(Budget, ("default", B), row.revision),), writes=(patch,), id=row.revision + 1)
    assert await play.engine.store.commit([change]) != [None]
    mine = await play.create(namespace="a", policy=SPENDS)

    assert await pull(play) == [mine]
    await play.create(namespace="b", policy=SPENDS)
    with pytest.raises(errors.Corruption):
        await pull(play)


async def test_a_spend_costs_as_many_round_trips_in_a_namespace_as_in_the_default_one(play: Play) -> None:
    costs = []
    for name in ("default", "a"):
        mine = await play.create(namespace=name)
        await budget(play, name)
        await play.engine.record_spend(B, mine, {"tokens": 1}, namespace=name)
        before = play.store.calls.copy()
        await play.engine.record_spend(B, mine, {"tokens": 1}, namespace=name)
        costs.append(play.store.calls - before)
    assert costs[0] == costs[1]


async def test_a_claim_with_admission_costs_as_many_round_trips_in_a_namespace_as_in_the_default_one(
    play: Play,
) -> None:
    costs = []
    for name in ("default", "a"):
        await budget(play, name)
        await policy(play, name, cap=5)
        first = await play.create(namespace=name, policy=SPENDS | LIMITED)
        assert await pull(play) == [first]
        mine = await play.create(namespace=name, policy=SPENDS | LIMITED)
        before = play.store.calls.copy()
        assert await pull(play) == [mine]
        costs.append(play.store.calls - before)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("namespace", [None, 7, "x" * 5000, "nul\x00"])
async def test_a_namespace_that_is_none_is_refused(play: Play, namespace: Any) -> None:
    numbers: dict[str, Any] = {"dimensions": [], "hard_limits": [], "soft_limits": []}
    with pytest.raises(errors.InvalidInput, match="namespace"):
        await play.engine.create_budget(B, **numbers, namespace=namespace)
    with pytest.raises(errors.InvalidInput, match="namespace"):
        await play.engine.read_quota_policy_limits(Q, namespace=namespace)
