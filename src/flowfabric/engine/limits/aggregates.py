"""Budgets and quota policies as aggregates: the rows that a decision needs are loaded and decided on together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from flowfabric import ids
from flowfabric.engine.runtime.aggregate_repository import AggregateRepository
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers.limits import QuotaLimits
from flowfabric.model.change import Change, Upsert
from flowfabric.model.limits.budget import Budget, BudgetDimension, BudgetReservation, UsageKey
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import quota, reservation
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.stores.queries import Read, Scan, Where

COMMIT_MARKER_TTL_MS = 2 * 60 * 1000  # how long a change of a budget can be found after its reply was lost


class BudgetAdapter:
    """Builds the state of a budget from its rows."""

    def __init__(self, partitions: ids.PartitionCounts) -> None:
        self._partitions = partitions

    def reads(self, key: NamespacedId) -> tuple[Read, ...]:
        return Read(Budget, key), Read(BudgetDimension, key)

    def further_reads(self, state: BudgetState, now: int) -> tuple[Read, ...]:
        return (Read(BudgetReservation, state.key),) if reservation.may_have_expired(state, now) else ()

    def display_scan(self, state: BudgetState, now: int) -> Scan | None:
        return None

    def build_state(self, key: NamespacedId, rows: Iterable[Any]) -> BudgetState:
        partition = ids.budget_partition(ids.BudgetId(key.id), self._partitions)
        return budget_rules.budget_state(key.id, partition, rows, key.namespace)

    def change_between(self, before: BudgetState, after: BudgetState, change_id: int) -> Change | None:
        change = budget_rules.change_between(before, after)
        if change is None:
            return None
        # A report without a key must not be applied twice. After a lost reply the revision proves nothing, because
        # another process may have changed it since, so each change writes a marker.
        until = after.root_or_new().last_updated_at + COMMIT_MARKER_TTL_MS
        marker = UsageKey(before.budget_id, _marker(change_id), until, before.namespace)
        return msgspec.structs.replace(change, writes=(*change.writes, Upsert(marker)))

    def commit_marker(self, key: NamespacedId, change_id: int) -> Read:
        return Read(UsageKey, (*key, _marker(change_id)))

    def confirms(self, row: Any, change_id: int) -> bool:
        return True


class QuotaAdapter:
    """Builds the state of a quota policy from its rows. Admission and release are idempotent."""

    def __init__(self, partitions: ids.PartitionCounts) -> None:
        self._partitions = partitions

    def reads(self, key: NamespacedId) -> tuple[Read, ...]:
        return (Read(QuotaPolicy, key),)

    def further_reads(self, state: QuotaState, now: int) -> tuple[Read, ...]:
        return ()

    def display_scan(self, state: QuotaState, now: int) -> Scan | None:
        limits = quota.limits_of(state.root)
        if not isinstance(limits, QuotaLimits) or not limits.max_requests_per_window:
            return None
        start = now - quota.window_ms(limits)
        return window_scan(state.key, quota.DEFAULT_DIMENSION, start, limits.max_requests_per_window)

    def build_state(self, key: NamespacedId, rows: Iterable[Any]) -> QuotaState:
        partition = ids.quota_partition(ids.QuotaPolicyId(key.id), self._partitions)
        return quota.quota_state(key.id, partition, rows, key.namespace)

    def change_between(self, before: QuotaState, after: QuotaState, change_id: int) -> Change | None:
        return quota.change_between(before, after)

    def commit_marker(self, key: NamespacedId, change_id: int) -> Read:
        return Read(QuotaPolicy, key)

    def confirms(self, row: Any, change_id: int) -> bool:
        return bool(row.revision == change_id)


class LimitAggregates:
    """The repositories of budgets and quota policies."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    # Built on first use: the number of partitions is known once the store is open.

    @cached_property
    def budgets(self) -> AggregateRepository[BudgetState]:
        """The budgets that this process decides on."""
        return AggregateRepository(self.runtime, BudgetAdapter(self.runtime.partitions))

    @cached_property
    def quotas(self) -> AggregateRepository[QuotaState]:
        """The quota policies that this process decides on."""
        return AggregateRepository(self.runtime, QuotaAdapter(self.runtime.partitions))


def window_scan(policy: NamespacedId, dimension: str, start: int, rate_limit: int) -> Scan:
    """Return the scan for the requests of a window, oldest first, as many as the limit allows."""
    where = (
        Where("quota_policy_id", "=", policy.id),
        Where("namespace", "=", policy.namespace),
        Where("dimension", "=", dimension),
        Where("admitted_at", ">", start),
    )
    return Scan(QuotaRequest, where, ("admitted_at", "execution_id"), limit=rate_limit)


def _marker(change_id: int) -> str:
    return f"change:{change_id}"
