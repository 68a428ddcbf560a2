"""Capacity: which blocked executions the loaded budgets and quota policies have capacity for.

With `only`, other limits of an execution are ignored: it is unblocked when there is capacity in this one, and the next
claim blocks it on another if necessary. The capacity is then counted down, so that no more executions are unblocked
than can run. Without `only` nothing is counted down: the first executions may be for workers that do not exist, and
must not keep others blocked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowfabric import errors
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import Budget
from flowfabric.model.limits.quota import QuotaPolicy, QuotaSlot
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.rules.scheduling import queue


class Capacity:
    """The capacity of the budgets and quota policies that were added."""

    def __init__(self, only: NamespacedId | None = None) -> None:
        self._only = only
        self._exhausted: dict[NamespacedId, bool] = {}
        self._free: dict[NamespacedId, int | None] = {}  # None is unlimited
        self._holders: dict[NamespacedId, set[tuple[str, int]]] = {}
        self._budgets: dict[NamespacedId, Budget | None] = {}
        self._policies: dict[NamespacedId, QuotaPolicy | None] = {}
        self.unreadable: set[NamespacedId] = set()  # limits with corrupt numbers; they have no capacity

    def missing_budgets(self, rows: Iterable[Execution]) -> list[NamespacedId]:
        """Return the budgets that have to be added before these rows are decided on."""
        return sorted({one for row in rows for one in self._candidates(row, _budget_ids(row))} - self._exhausted.keys())

    def missing_policies(self, rows: Iterable[Execution]) -> list[NamespacedId]:
        """Return the quota policies that have to be added before these rows are decided on."""
        return sorted({one for row in rows for one in self._candidates(row, _policy_ids(row))} - self._free.keys())

    def add_budgets(self, states: Mapping[NamespacedId, BudgetState]) -> None:
        """Add loaded budgets."""
        for key, state in states.items():
            is_corrupt = budget_rules.find_corruption(state) is not None
            self._budgets[key] = state.root
            self._exhausted[key] = is_corrupt or budget_rules.first_exhausted(state.dimensions.values()) is not None
            if is_corrupt:
                self.unreadable.add(key)

    def add_policies(self, states: Mapping[NamespacedId, QuotaState], now: int) -> None:
        """Add loaded quota policies."""
        for key, state in states.items():
            is_corrupt = isinstance(quota.limits_of(state.root), errors.FabricError)
            self._policies[key] = state.root
            self._free[key] = 0 if is_corrupt else quota.free_capacity(state, now)
            self._holders[key] = {*quota.slot_holders(state.slots.values(), now)}
            if is_corrupt:
                self.unreadable.add(key)

    def slots_to_check(self, rows: Iterable[Execution]) -> list[tuple[NamespacedId, str]]:
        """Return the slots, as policy and execution, that may admit these rows although their policies are full."""
        candidates = ((one, row.execution_id) for row in rows for one in self._candidates(row, _policy_ids(row)))
        return [(policy, execution_id) for policy, execution_id in candidates if self._free.get(policy) == 0]

    def add_slots(self, slots: Iterable[QuotaSlot], now: int) -> None:
        """Add loaded slots of policies that were added."""
        for slot in slots:
            self._holders[NamespacedId(slot.namespace, slot.quota_policy_id)] |= quota.slot_holders([slot], now)

    def is_full(self, limit: NamespacedId) -> bool:
        """True if the limit was added and has no capacity."""
        return self._exhausted.get(limit, False) or self._free.get(limit) == 0

    def is_list_full(self, blocked_on: str) -> bool:
        """True if the limit of a list of blocked executions has no capacity, so that the rest of it can be skipped."""
        return self.is_full(queue.parse_blocking_limit(blocked_on))

    def admits(self, row: Execution) -> bool:
        """True if the limits that block this row have capacity. With `only`, the row uses some of it."""
        if any(self._exhausted[budget] for budget in self._owners(row, _budget_ids(row), self._budgets)):
            return False
        # A row that already has a slot, acquired by a concurrent call, needs no capacity.
        holder = (row.execution_id, row.replay_count)
        owners = self._owners(row, _policy_ids(row), self._policies)
        policies = [policy for policy in owners if holder not in self._holders[policy]]
        if any(self._free[policy] == 0 for policy in policies):
            return False
        for policy in policies if self._only else ():
            free = self._free[policy]
            self._free[policy] = None if free is None else free - 1
        return True

    def _owners(
        self, row: Execution, names: Sequence[str], roots: Mapping[NamespacedId, owner_rules.LimitRoot | None]
    ) -> list[NamespacedId]:
        """Return the limits that these ids refer to; with `only`, that limit if one of them may refer to it."""
        if self._only is not None:
            return self._candidates(row, names)
        return [owner_rules.resolve_owner(row.namespace, name, roots) for name in names]

    def _candidates(self, row: Execution, names: Sequence[str]) -> list[NamespacedId]:
        return [one for one in owner_rules.candidates(row.namespace, names) if self._only in (None, one)]


def _budget_ids(row: Execution) -> Sequence[str]:
    return decode_terms(row.terms).budget_ids if row.blocking_reason is BlockingReason.WAITING_FOR_BUDGET else ()


def _policy_ids(row: Execution) -> Sequence[str]:
    return decode_terms(row.terms).quota_policy_ids if row.blocking_reason is BlockingReason.WAITING_FOR_QUOTA else ()
