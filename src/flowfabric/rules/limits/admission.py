"""Admission: whether the budgets and quota policies of an execution let it run now, and which one refuses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.answers.limits import QuotaLimitKind, QuotaLimits
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import Budget, BudgetDimension
from flowfabric.model.limits.quota import QuotaPolicy
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.model.text import pluralize
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.quota import AdmissionRequest, QuotaState


class AdmissionRefusal(msgspec.Struct, frozen=True):
    """The limit that refuses an execution."""

    reason: BlockingReason
    limit: NamespacedId  # the budget or the quota policy
    detail: str
    dimension: str = ""  # which one of the budget
    hit: QuotaLimitKind | None = None  # which limit of the quota
    wait_ms: int | None = None


class KnownLimits:
    """The budgets and quota policies that one call has loaded."""

    def __init__(self) -> None:
        self._exhausted: dict[NamespacedId, BudgetDimension | None] = {}  # the first such dimension, by budget
        self._budgets: dict[NamespacedId, Budget | None] = {}
        self._limits: dict[NamespacedId, QuotaLimits | None] = {}  # None is unlimited
        self._policies: dict[NamespacedId, QuotaPolicy | None] = {}
        self._corrupt: dict[NamespacedId, errors.FabricError] = {}

    def missing_budgets(self, rows: Iterable[Execution]) -> list[NamespacedId]:
        """Return the budgets that have to be added before these rows are decided on."""
        named = (owner_rules.candidates(row.namespace, decode_terms(row.terms).budget_ids) for row in rows)
        return sorted({one for some in named for one in some} - self._exhausted.keys())

    def missing_policies(self, rows: Iterable[Execution]) -> list[NamespacedId]:
        """Return the quota policies that have to be added before these rows are decided on."""
        named = (owner_rules.candidates(row.namespace, decode_terms(row.terms).quota_policy_ids) for row in rows)
        return sorted({one for some in named for one in some} - self._limits.keys())

    def add_budget(self, key: NamespacedId, state: BudgetState) -> None:
        """Add a loaded budget."""
        if corrupt := budget_rules.find_corruption(state):
            self._corrupt[key] = corrupt
        self._budgets[key] = state.root
        self._exhausted[key] = budget_rules.first_exhausted(state.dimensions.values())

    def add_policy(self, key: NamespacedId, root: QuotaPolicy | None) -> None:
        """Add a loaded quota policy."""
        limits = quota.limits_of(root)
        if isinstance(limits, errors.FabricError):
            self._corrupt[key], limits = limits, None
        self._policies[key] = root
        self._limits[key] = None if limits is None or limits.unlimited else limits

    def find_corruption(self, rows: Iterable[Execution]) -> errors.FabricError | None:
        """Return what is wrong with the stored numbers of a limit of these rows; None if all are valid."""
        if not self._corrupt:
            return None
        named = (key for row in rows for key in (*self._budgets_of(row), *self.policies_of(row)))
        return next((self._corrupt[key] for key in named if key in self._corrupt), None)

    def policies_of(self, row: Execution) -> list[NamespacedId]:
        """Return the quota policies of a row."""
        ids = decode_terms(row.terms).quota_policy_ids
        return [owner_rules.resolve_owner(row.namespace, one, self._policies) for one in ids]

    def limited_policies(self, row: Execution) -> list[tuple[NamespacedId, QuotaLimits]]:
        """Return the quota policies of a row that have limits, with these."""
        return [(key, limits) for key in self.policies_of(row) if (limits := self._limits.get(key)) is not None]

    def budget_refusal(self, row: Execution) -> AdmissionRefusal | None:
        """Return the refusal of the first exhausted budget of a row."""
        for key in self._budgets_of(row):
            if full := self._exhausted.get(key):
                detail = f"budget {key.id}: {full.dimension} {budget_rules.used_and_reserved(full)}/{full.hard_limit}"
                return AdmissionRefusal(BlockingReason.WAITING_FOR_BUDGET, key, detail, full.dimension)
        return None

    def refusal(
        self, row: Execution, states: Mapping[NamespacedId, QuotaState], now: int, *, call_id: int, chance: float
    ) -> AdmissionRefusal | None:
        """Return the refusal by a budget of the row or by one of these policies; admit nothing."""
        if refused := self.budget_refusal(row):
            return refused
        for key, limits in self.limited_policies(row):
            if key in states:
                request = request_for(row, limits, call_id=call_id, chance=chance)
                verdict, _ = quota.admit(states[key], request, now)
                if refused := quota_refusal(key, limits, verdict):
                    return refused
        return None

    def _budgets_of(self, row: Execution) -> list[NamespacedId]:
        ids = decode_terms(row.terms).budget_ids
        return [owner_rules.resolve_owner(row.namespace, one, self._budgets) for one in ids]


def request_for(
    row: Execution, limits: QuotaLimits, *, call_id: int, chance: float, provisional: bool = False
) -> AdmissionRequest:
    """Return the request to admit a row under these limits."""
    return AdmissionRequest(
        execution_id=row.execution_id,
        window_ms=quota.window_ms(limits),
        rate_limit=limits.max_requests_per_window,
        concurrency_cap=limits.active_concurrency_cap,
        jitter_ms=limits.jitter_ms,
        life=row.replay_count,
        call_id=call_id,
        takes_over_slot=True,
        provisional=provisional,
        chance=chance,
    )


def quota_refusal(
    policy: NamespacedId, limits: QuotaLimits, verdict: limit_answers.AdmissionResult | errors.FabricError
) -> AdmissionRefusal | None:
    """Return the refusal in the verdict of a quota policy; None if it admitted the execution."""
    reason = BlockingReason.WAITING_FOR_QUOTA
    match verdict:
        case limit_answers.RateExceeded(retry_after_ms=wait_ms):
            detail = f"quota {policy.id}: {pluralize(limits.max_requests_per_window, 'start')} per window, all used"
            return AdmissionRefusal(reason, policy, detail, hit=QuotaLimitKind.RATE, wait_ms=wait_ms)
        case limit_answers.ConcurrencyExceeded():
            detail = f"quota {policy.id}: {pluralize(limits.active_concurrency_cap, 'slot')}, all taken"
            return AdmissionRefusal(reason, policy, detail, hit=QuotaLimitKind.CONCURRENCY)
        case _:
            return None
