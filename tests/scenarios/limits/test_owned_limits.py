"""Budgets and quota policies belong to a namespace; equal ids in several namespaces are independent."""

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
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.condition import Single
from flowfabric.model.limits.budget import Budget, BudgetDimension
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.stores.queries import Read
from flowfabric.testing.limit_invariants import check_limit_invariants
from tests.scenarios.env import ACTIVE, LEASE_MS, RESUMABLE, WAITING, Env
from tests.scenarios.limits.test_budget_suspension import BUDGET_SUSPENDED
from tests.scenarios.limits.test_budgets import B
from tests.scenarios.limits.test_quotas import Q
from tests.scenarios.limits.test_reservations import R1, TTL
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, QUOTA_BLOCKED, claim_admitted
from tests.scenarios.scheduling.test_workers import register
from tests.scenarios.waits import Waits

SPENDS: dict[str, Any] = {"budget_ids": [B]}
LIMITED: dict[str, Any] = {"quota_policy_id": Q}


async def budget(env: Env, namespace: str, hard: int = 10, **options: Any) -> None:
    numbers: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [hard], "soft_limits": [0]}
    assert await env.engine.create_budget(B, **numbers, namespace=namespace, **options) == BudgetCreated(B)


async def policy(env: Env, namespace: str, cap: int = 1) -> None:
    numbers = {"window_seconds": 60, "max_requests_per_window": 0, "max_concurrent": cap}
    assert await env.engine.create_quota_policy(Q, **numbers, namespace=namespace) == QuotaPolicyCreated(Q)


async def report(env: Env, namespace: str, tokens: int) -> Any:
    return await env.engine.report_usage_admin(B, dimensions=["tokens"], deltas=[tokens], namespace=namespace)


async def usage_of(env: Env, namespace: str) -> dict[str, int]:
    return (await env.engine.get_budget_status(B, namespace=namespace)).usage


async def claim_in(env: Env, namespace: str) -> Claimed:
    """Create and claim an execution of a namespace."""
    await env.create(namespace=namespace)
    [claimed] = await env.engine.claim_from_lanes(
        ["default"], 1, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=LEASE_MS, namespaces=(namespace,)
    )
    return claimed


async def test_a_budget_id_names_a_different_budget_in_each_namespace(env: Env) -> None:
    await budget(env, "a", hard=10)
    await budget(env, "b", hard=20)
    numbers: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [99], "soft_limits": [0]}
    assert await env.engine.create_budget(B, **numbers, namespace="a") == BudgetExists(B)

    assert await report(env, "a", 7) == Ok()
    assert await report(env, "b", 20) == Ok()

    assert [await usage_of(env, name) for name in "ab"] == [{"tokens": 7}, {"tokens": 20}]
    assert await report(env, "a", 4) == HardBreach("tokens", 7, 10, namespace="a")
    with pytest.raises(errors.NotFound):
        await env.engine.get_budget_status(B)
    assert [await env.engine.list_budgets(namespace=name) for name in ("a", "b", "default")] == [[B], [B], []]
    await check_limit_invariants(env.engine)


async def test_a_usage_key_belongs_to_the_budget_of_its_namespace(env: Env) -> None:
    await budget(env, "a")
    await budget(env, "b")
    for name in "ab":
        numbers: dict[str, Any] = {"dimensions": ["tokens"], "deltas": [3], "dedup_key": "k"}
        assert await env.engine.report_usage_admin(B, **numbers, namespace=name) == Ok()
    assert [await usage_of(env, name) for name in "ab"] == [{"tokens": 3}, {"tokens": 3}]


async def test_resetting_or_changing_a_budget_does_not_affect_other_namespaces(env: Env) -> None:
    for name in ("a", "b", "default"):
        await budget(env, name)
        await report(env, name, 5)

    await env.engine.reset_budget(B, namespace="a")
    limits: dict[str, Any] = {"dimensions": ["tokens"], "hard_limits": [50], "soft_limits": [0]}
    await env.engine.change_budget_limits(B, **limits, namespace="b")

    assert [await usage_of(env, name) for name in ("a", "b", "default")] == [
        {"tokens": 0},
        {"tokens": 5},
        {"tokens": 5},
    ]
    status = [await env.engine.get_budget_status(B, namespace=name) for name in ("a", "b", "default")]
    assert [one.hard_limits["tokens"] for one in status] == [10, 50, 10]


@pytest.mark.parametrize("known", [True, False], ids=("namespace_given", "namespace_loaded"))
async def test_an_execution_spends_from_its_own_budget_before_the_shared_one(env: Env, known: bool) -> None:
    mine, theirs = [await env.create(namespace=name) for name in "ab"]
    namespace_args: dict[str, dict[str, Any]] = {one: {"namespace": one} if known else {} for one in "ab"}
    await budget(env, "default")
    assert await env.engine.record_spend(B, mine, {"tokens": 4}, **namespace_args["a"]) == Ok()
    assert await usage_of(env, "default") == {"tokens": 4}, "the shared budget applies"

    await budget(env, "a")
    assert await env.engine.record_spend(B, mine, {"tokens": 9}, **namespace_args["a"]) == Ok()
    breach = await env.engine.record_spend(B, theirs, {"tokens": 9}, **namespace_args["b"])

    assert breach == HardBreach("tokens", 4, 10), "the shared budget is exhausted"
    assert [await usage_of(env, name) for name in ("a", "default")] == [{"tokens": 9}, {"tokens": 4}]
    assert await env.engine.release_budget(B, mine, **namespace_args["a"]) == BudgetReleased(B, {"tokens": 9})


async def test_without_sharing_an_execution_spends_from_its_own_namespace_only(env: Env) -> None:
    mine = await env.create(namespace="a")
    await budget(env, "default", hard=1)

    assert await env.engine.record_spend(B, mine, {"tokens": 9}, shared=False) == Ok()

    assert await usage_of(env, "default") == {}
    await budget(env, "a")
    assert await usage_of(env, "a") == {"tokens": 9}, "usage before the definition counts"


async def test_usage_of_an_undefined_budget_does_not_hide_the_shared_one(env: Env) -> None:
    mine = await env.create(namespace="a")
    assert await env.engine.record_spend(B, mine, {"tokens": 2}) == Ok()

    await budget(env, "default")

    assert await usage_of(env, "default") == {}
    assert await env.engine.record_spend(B, mine, {"tokens": 3}) == Ok()
    assert await usage_of(env, "default") == {"tokens": 3}
    await check_limit_invariants(env.engine)


async def test_reservations_belong_to_the_namespace_of_the_budget(env: Env) -> None:
    mine = await env.create(namespace="a")
    await budget(env, "a")
    await budget(env, "b")
    kept = await env.engine.reserve_budget(B, mine, {"tokens": 6}, ttl_ms=TTL, reservation_id=R1)
    assert kept == Reserved(R1, env.now + TTL)

    for elsewhere in ("b", "default"):
        assert await env.engine.refund_budget(B, R1, namespace=elsewhere) == Refunded(R1, {})
        assert await env.engine.reservation_owner(B, R1, namespace=elsewhere) is None
    assert (await env.engine.get_budget_status(B, namespace="a")).reserved == {"tokens": 6}
    assert await env.engine.reservation_owner(B, R1, namespace="a") == mine
    assert await env.engine.settle_budget(B, mine, R1, {"tokens": 5}) == Ok()

    status = await env.engine.get_budget_status(B, namespace="a")
    assert (status.usage, status.reserved) == ({"tokens": 5}, {})


async def test_a_reservation_of_a_namespace_expires(env: Env) -> None:
    mine = await env.create(namespace="a")
    await budget(env, "a")
    await env.engine.reserve_budget(B, mine, {"tokens": 6}, ttl_ms=TTL, reservation_id=R1)

    assert await env.sweep("budget_reservations", after_ms=TTL) == 1

    assert (await env.engine.get_budget_status(B, namespace="a")).reserved == {}


async def test_the_reset_sweep_covers_every_namespace(env: Env) -> None:
    for name in ("a", "default"):
        await budget(env, name, reset_interval_ms=1000)
        await report(env, name, 5)

    assert await env.sweep("budget_reset", after_ms=1000) == 2

    assert [await usage_of(env, name) for name in ("a", "default")] == [{"tokens": 0}, {"tokens": 0}]


async def test_an_exhausted_budget_blocks_executions_of_its_own_namespace(env: Env) -> None:
    for name in "ab":
        await budget(env, name)
        await register(env, namespace=name)
    await report(env, "a", 10)
    mine, theirs = [await env.create(namespace=name, policy=SPENDS) for name in "ab"]

    assert await claim_admitted(env, limit=2) == [theirs]

    assert [await env.vector(one) for one in (mine, theirs)] == [BUDGET_BLOCKED, ACTIVE]
    assert (await env.engine.explain(mine)).obstacle == obstacles.BudgetExhausted(B, "tokens", 10, 0, 10, None)
    await env.engine.reset_budget(B, namespace="b")
    assert await env.vector(mine) == BUDGET_BLOCKED, "another namespace's capacity does not count"
    await env.engine.reset_budget(B, namespace="a")
    assert await env.vector(mine) == WAITING


async def test_a_shared_budget_blocks_namespaces_without_their_own(env: Env) -> None:
    await budget(env, "default")
    await budget(env, "b")
    await report(env, "default", 10)
    mine, theirs = [await env.create(namespace=name, policy=SPENDS) for name in "ab"]

    assert await claim_admitted(env, limit=2) == [theirs]
    assert await env.vector(mine) == BUDGET_BLOCKED
    assert await env.sweep("unblock") == 0

    await env.engine.reset_budget(B)
    assert await env.vector(mine) == WAITING


async def test_defining_own_limits_unblocks_executions_of_the_shared_ones(env: Env) -> None:
    await budget(env, "default")
    await policy(env, "default")
    await report(env, "default", 10)
    holder, spends, limited = [
        await env.create(namespace="a", policy=options, priority=9 - n)
        for n, options in enumerate((LIMITED, SPENDS, LIMITED))
    ]
    assert await claim_admitted(env, limit=3) == [holder]
    assert [await env.vector(one) for one in (spends, limited)] == [BUDGET_BLOCKED, QUOTA_BLOCKED]

    await budget(env, "b")
    assert await env.vector(spends) == BUDGET_BLOCKED
    await budget(env, "a")
    await policy(env, "a")

    assert [await env.vector(one) for one in (spends, limited)] == [WAITING, WAITING]
    assert sorted(await claim_admitted(env, limit=2)) == sorted((spends, limited))


async def test_quota_slots_belong_to_the_policy_of_the_namespace(env: Env) -> None:
    for name in "ab":
        await policy(env, name)
        await register(env, namespace=name)
    assert await env.engine.read_quota_policy_limits(Q) is None
    numbers = {"window_seconds": 1, "max_requests_per_window": 0, "max_concurrent": 9}
    assert await env.engine.create_quota_policy(Q, **numbers, namespace="a") == QuotaPolicyExists(Q)
    mine, more, theirs = [await env.create(namespace=name, policy=LIMITED) for name in "aab"]

    assert sorted(await claim_admitted(env, limit=3)) == sorted((mine, theirs))

    assert await env.vector(more) == QUOTA_BLOCKED
    assert (await env.engine.explain(more)).obstacle == obstacles.QuotaFull(Q, "concurrency", 1, 1)
    await env.cancel_and_deliver(theirs)
    assert await env.vector(more) == QUOTA_BLOCKED, "another namespace's slot does not count"
    await env.cancel_and_deliver(mine)
    assert await env.vector(more) == WAITING
    await check_limit_invariants(env.engine)


async def test_a_terminal_execution_releases_a_shared_slot(env: Env) -> None:
    await policy(env, "default")
    mine, theirs = [await env.create(namespace=name, policy=LIMITED) for name in "ab"]
    assert await claim_admitted(env, limit=2) == [mine]
    assert await env.vector(theirs) == QUOTA_BLOCKED

    await env.cancel_and_deliver(mine)

    assert await env.vector(theirs) == WAITING


async def test_a_shared_slot_is_released_after_the_namespace_defined_its_own_policy(
    env: Env,
) -> None:
    await policy(env, "default")
    mine, theirs = [await env.create(namespace=name, policy=LIMITED) for name in "ab"]
    assert await claim_admitted(env) == [mine]
    await policy(env, "a")

    await env.cancel_and_deliver(mine)

    assert await claim_admitted(env) == [theirs]
    await check_limit_invariants(env.engine)


async def test_slots_of_every_namespace_are_recounted(env: Env) -> None:
    await policy(env, "a")
    mine = await env.create(namespace="a", policy=LIMITED)
    assert await claim_admitted(env) == [mine]
    await env.engine.release_admission(Q, mine)
    after = await env.create(namespace="a", policy=LIMITED)
    assert await claim_admitted(env) == [after]
    assert (await env.engine.sweep_once("quota_reconciler")).errors == 0
    await check_limit_invariants(env.engine)


async def test_a_breach_suspends_until_the_budget_of_the_namespace_has_capacity(env: Env) -> None:
    for name in ("a", "b", "default"):
        await budget(env, name, on_hard_limit="suspend")
        await report(env, name, 10)
    one = await claim_in(env, "a")
    breach = await env.engine.report_usage(one.handle, B, {"tokens": 5})
    assert breach == HardBreach("tokens", 10, 10, action="suspend", parked=True, namespace="a")
    assert await env.vector(one.execution_id) == BUDGET_SUSPENDED
    assert (await env.engine.explain(one.execution_id)).obstacle.budget_id == B  # type: ignore[attr-defined]

    for elsewhere in ("b", "default"):
        await env.engine.reset_budget(B, namespace=elsewhere)
        assert await env.vector(one.execution_id) == BUDGET_SUSPENDED
    assert await env.sweep("unblock") == 0
    await env.engine.reset_budget(B, namespace="a")
    assert await env.vector(one.execution_id) == RESUMABLE


async def test_a_waitpoint_key_cannot_name_the_budget_of_another_namespace(env: Env, waits: Waits) -> None:
    await budget(env, "b")
    await report(env, "b", 10)
    claim = await claim_in(env, "a")
    key = BudgetNeed(B, "tokens", 1, "b").key
    await waits.suspend(claim, Single(key), FreshWaitpoint(env.engine.minter.uuid(), key))

    obstacle = (await env.engine.explain(claim.execution_id)).obstacle

    assert isinstance(obstacle, obstacles.BudgetExhausted)
    assert (obstacle.usage, obstacle.hard_limit) == (0, 0), "its own budget of that id is undefined"


async def test_a_waitpoint_key_reveals_no_shared_budget_outside_the_policy(env: Env, waits: Waits) -> None:
    await budget(env, "default")
    await report(env, "default", 7)
    claim = await claim_in(env, "a")
    key = BudgetNeed(B, "tokens", 1).key
    await waits.suspend(claim, Single(key), FreshWaitpoint(env.engine.minter.uuid(), key))

    assert isinstance((await env.engine.explain(claim.execution_id)).obstacle, obstacles.SuspendedObstacle)


async def test_an_unreadable_shared_budget_does_not_block_namespaces_with_their_own(env: Env) -> None:
    for name in ("a", "default"):
        await budget(env, name)
    [row] = (await env.engine.runtime.load((Read(Budget, ("default", B)),))).rows[0]
    patch = Patch(BudgetDimension, ("default", B, "tokens"), {"hard_limit": -1})
    change = Change(guards=(Guard(Budget, ("default", B), row.revision),), writes=(patch,), id=row.revision + 1)
    assert await env.engine.store.commit([change]) != [None]
    mine = await env.create(namespace="a", policy=SPENDS)

    assert await claim_admitted(env) == [mine]
    await env.create(namespace="b", policy=SPENDS)
    with pytest.raises(errors.Corruption):
        await claim_admitted(env)


async def test_a_spend_costs_the_same_round_trips_in_every_namespace(env: Env) -> None:
    costs = []
    for name in ("default", "a"):
        mine = await env.create(namespace=name)
        await budget(env, name)
        await env.engine.record_spend(B, mine, {"tokens": 1}, namespace=name)
        before = env.store.calls.copy()
        await env.engine.record_spend(B, mine, {"tokens": 1}, namespace=name)
        costs.append(env.store.calls - before)
    assert costs[0] == costs[1]


async def test_an_admitted_claim_costs_the_same_round_trips_in_every_namespace(
    env: Env,
) -> None:
    costs = []
    for name in ("default", "a"):
        await budget(env, name)
        await policy(env, name, cap=5)
        first = await env.create(namespace=name, policy=SPENDS | LIMITED)
        assert await claim_admitted(env) == [first]
        mine = await env.create(namespace=name, policy=SPENDS | LIMITED)
        before = env.store.calls.copy()
        assert await claim_admitted(env) == [mine]
        costs.append(env.store.calls - before)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("namespace", [None, 7, "x" * 5000, "nul\x00"])
async def test_an_invalid_namespace_is_refused(env: Env, namespace: Any) -> None:
    numbers: dict[str, Any] = {"dimensions": [], "hard_limits": [], "soft_limits": []}
    with pytest.raises(errors.InvalidInput, match="namespace"):
        await env.engine.create_budget(B, **numbers, namespace=namespace)
    with pytest.raises(errors.InvalidInput, match="namespace"):
        await env.engine.read_quota_policy_limits(Q, namespace=namespace)
