"""Invariants of budgets and quota policies: counters equal recounts.

    await check_limit_invariants(engine)        # raises InvariantBroken with every violation

Rows are read one after the other, so no operation may be in flight meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from flowfabric.engine.engine import Engine
from flowfabric.model.limits.budget import Budget, BudgetDimension, BudgetReservation, BudgetSpend
from flowfabric.model.limits.quota import QuotaPolicy, QuotaSlot
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.testing.invariants import InvariantBroken, scan_all


async def check_limit_invariants(engine: Engine) -> None:
    """Check every row of every budget and quota policy; raises `InvariantBroken`."""
    store = engine.store
    broken = [
        *_broken_policies(await scan_all(store, QuotaPolicy), await scan_all(store, QuotaSlot)),
        *_broken_dimensions(
            await scan_all(store, BudgetDimension),
            await scan_all(store, BudgetReservation),
            await scan_all(store, BudgetSpend),
        ),
        *_broken_budgets(await scan_all(store, Budget), await scan_all(store, BudgetReservation)),
    ]
    if broken:
        raise InvariantBroken("\n".join(broken))


def _broken_policies(policies: Sequence[QuotaPolicy], slots: Sequence[QuotaSlot]) -> Iterator[str]:
    counted = Counter(_policy(slot) for slot in slots if slot.counted)
    for policy in policies:
        name = _policy(policy)
        if policy.active != counted[name]:
            yield f"quota {name}: {policy.active} active, counted {counted[name]}"
    yield from (
        f"quota {name}: slots without a policy" for name in counted.keys() - {_policy(policy) for policy in policies}
    )


def _broken_dimensions(
    dimensions: Sequence[BudgetDimension], reservations: Sequence[BudgetReservation], spends: Sequence[BudgetSpend]
) -> Iterator[str]:
    reserved, spent = Counter[tuple[NamespacedId, str]](), Counter[tuple[NamespacedId, str]]()
    for reservation in reservations:
        reserved[_budget(reservation), reservation.dimension] += reservation.amount
    for spend in spends:
        spent[_budget(spend), spend.dimension] += spend.amount
    for row in dimensions:
        key = _budget(row), row.dimension
        if row.reserved != reserved[key]:
            yield f"budget {key[0]}: {row.dimension}: {row.reserved} reserved, counted {reserved[key]}"
        if (row.usage or 0) < spent[key]:
            yield f"budget {key[0]}: {row.dimension}: {row.usage} used, ledgers say {spent[key]}"


def _broken_budgets(budgets: Sequence[Budget], reservations: Sequence[BudgetReservation]) -> Iterator[str]:
    first_expiry: dict[NamespacedId, int] = {}
    for row in reservations:
        first_expiry[_budget(row)] = min(row.expires_at, first_expiry.get(_budget(row), row.expires_at))
    for budget in budgets:
        first = first_expiry.get(_budget(budget))
        if first is not None and (budget.lapse_at is None or budget.lapse_at > first):
            yield f"budget {_budget(budget)}: checked at {budget.lapse_at}, its first reservation expires at {first}"


def _budget(row: Budget | BudgetDimension | BudgetSpend | BudgetReservation) -> NamespacedId:
    return NamespacedId(row.namespace, row.budget_id)


def _policy(row: QuotaPolicy | QuotaSlot) -> NamespacedId:
    return NamespacedId(row.namespace, row.quota_policy_id)
