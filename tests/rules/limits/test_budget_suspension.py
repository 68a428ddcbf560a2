"""Which suspended executions a budget has capacity for."""

from __future__ import annotations

from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.limits.budget_suspension import needs_with_capacity
from tests.rules.limits.test_capacity import BUDGET, OTHER, budget


def test_capacity_found_for_one_execution_is_not_offered_to_the_next() -> None:
    needs = [[BudgetNeed("budget", "tokens", amount)] for amount in (4, 3, 2, 1)]

    fitting = needs_with_capacity(needs, {BUDGET: budget(BUDGET, 0, 5)})

    assert [need.amount if need else None for need in fitting] == [4, None, None, 1]


def test_an_execution_is_resumed_for_the_first_need_that_fits() -> None:
    needs = [BudgetNeed("budget", "tokens", 9), BudgetNeed("other", "tokens", 1), BudgetNeed("other", "tokens", 2)]

    budgets = {BUDGET: budget(BUDGET, 0, 5), OTHER: budget(OTHER, 0, 5)}

    assert needs_with_capacity([needs], budgets) == [needs[1]]
    assert needs_with_capacity([needs], {}) == [None]


def test_a_corrupt_budget_resumes_nothing() -> None:
    assert needs_with_capacity([[BudgetNeed("budget", "tokens", 1)]], {BUDGET: budget(BUDGET, -1)}) == [None]
