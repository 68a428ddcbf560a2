"""Which blocked executions budgets and quota policies have capacity for."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import Budget, BudgetDimension
from flowfabric.model.limits.quota import QuotaPolicy
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution.policy import Terms, encode_terms
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.capacity import Capacity
from flowfabric.rules.limits.quota import QuotaState
from tests.stores.sample_rows import loaded, queued

NOW = 1_700_000_000_000
POLICY = NamespacedId("default", "policy")
OTHER = NamespacedId("default", "other")
BUDGET = NamespacedId("default", "budget")


def waiting(name: str, *policies: str, budgets: tuple[str, ...] = (), **fields: Any) -> Execution:
    reason = BlockingReason.WAITING_FOR_BUDGET if budgets else BlockingReason.WAITING_FOR_QUOTA
    terms = encode_terms(Terms(quota_policy_ids=policies, budget_ids=budgets))
    return loaded(queued(name, terms=terms, blocking_reason=reason, **fields))


def policy(key: NamespacedId, cap: int, *holders: str) -> QuotaState:
    state = QuotaState(key.id, 3, namespace=key.namespace)
    _, state = quota.define_policy(state, limit_answers.QuotaLimits(1, 0, cap), NOW)
    for number, holder in enumerate(holders, start=1):
        request = quota.AdmissionRequest(
            execution_id=holder, window_ms=1000, rate_limit=0, concurrency_cap=cap, call_id=number
        )
        _, state = quota.admit(state, request, NOW)
    return state


def budget(key: NamespacedId, usage: int, limit: int = 5) -> BudgetState:
    root = Budget(key.id, 3, namespace=key.namespace, defined=True)
    return BudgetState(
        key.id,
        3,
        root,
        {"tokens": BudgetDimension(key.id, "tokens", hard_limit=limit, usage=usage, namespace=key.namespace)},
        namespace=key.namespace,
    )


def test_capacity_of_one_limit_is_counted_down_and_other_limits_are_ignored() -> None:
    capacity = Capacity(only=POLICY)
    rows = [waiting(name, "policy", "other") for name in "abc"]
    assert capacity.missing_policies(rows) == [POLICY]

    capacity.add_policies({POLICY: policy(POLICY, 3, "x")}, NOW)

    assert [capacity.admits(row) for row in rows] == [True, True, False]
    assert capacity.is_full(POLICY)
    assert capacity.is_list_full("quota:policy#digest.list")
    assert capacity.missing_policies(rows) == []


def test_without_one_limit_all_limits_need_capacity_and_nothing_is_counted_down() -> None:
    capacity = Capacity()
    free, refused = waiting("a", "policy"), waiting("b", "policy", "other")
    assert capacity.missing_policies([free, refused]) == [OTHER, POLICY]

    capacity.add_policies({POLICY: policy(POLICY, 1), OTHER: policy(OTHER, 1, "x")}, NOW)

    assert [capacity.admits(row) for row in (free, free, refused)] == [True, True, False]


def test_an_execution_that_has_a_slot_needs_no_capacity() -> None:
    capacity = Capacity(only=POLICY)
    capacity.add_policies({POLICY: policy(POLICY, 1, "a")}, NOW)

    assert capacity.admits(waiting("a", "policy"))
    assert not capacity.admits(waiting("a", "policy", replay_count=1)), "the slot is of an earlier run"
    assert not capacity.admits(waiting("b", "policy"))


def test_slots_are_checked_only_of_policies_that_are_full() -> None:
    capacity, rows = Capacity(), [waiting("a", "policy", "other"), waiting("b", "policy", "other")]
    full = policy(POLICY, 1, "a")
    capacity.add_policies({POLICY: replace(full, slots={}), OTHER: policy(OTHER, 1)}, NOW)
    assert capacity.slots_to_check(rows) == [(POLICY, "a"), (POLICY, "b")]

    capacity.add_slots(full.slots.values(), NOW)

    assert [capacity.admits(row) for row in rows] == [True, False]


def test_an_exhausted_or_corrupt_limit_admits_nothing() -> None:
    capacity = Capacity()
    row = waiting("a", budgets=("budget",))
    assert (capacity.missing_budgets([row]), capacity.missing_policies([row])) == ([BUDGET], [])

    for usage, admitted, corrupt in ((4, True, set()), (5, False, set()), (-1, False, {BUDGET})):
        capacity.add_budgets({BUDGET: budget(BUDGET, usage)})
        assert (capacity.admits(row), capacity.unreadable) == (admitted, corrupt)

    negative = QuotaPolicy("policy", 3, defined=True, active_concurrency_cap=-1)
    capacity.add_policies({POLICY: QuotaState("policy", 3, negative)}, NOW)
    assert not capacity.admits(waiting("b", "policy"))
    assert capacity.unreadable == {BUDGET, POLICY}


def test_a_namespace_with_its_own_limit_does_not_need_the_shared_one() -> None:
    own = NamespacedId("mine", "budget")
    row = waiting("a", budgets=("budget",), namespace="mine")
    capacity = Capacity()
    assert capacity.missing_budgets([row]) == [BUDGET, own]

    capacity.add_budgets({BUDGET: budget(BUDGET, 9), own: BudgetState("budget", 3, namespace="mine")})
    assert not capacity.admits(row)
    capacity.add_budgets({own: budget(own, 0)})
    assert capacity.admits(row)
