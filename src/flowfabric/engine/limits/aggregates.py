"""The roots that are decided on as one sheet, and their chains: budgets and quota policies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from flowfabric import ids
from flowfabric.engine.runtime.root_queue import Chains
from flowfabric.engine.runtime.runtime import Core
from flowfabric.model.budget import Budget, BudgetDimension, Reservation, UsageKey
from flowfabric.model.change import Change, Put
from flowfabric.model.owned_id import OwnedId
from flowfabric.model.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetSheet
from flowfabric.rules.limits.quota import QuotaSheet
from flowfabric.stores.queries import Want

TRACE_LIFE_MS = 2 * 60 * 1000  # how long a change of a budget can be asked for after its answer got lost


class BudgetBook:
    """The rows of a budget as one sheet."""

    def __init__(self, partitions: ids.PartitionCounts) -> None:
        self._partitions = partitions

    def wants(self, key: OwnedId) -> tuple[Want, ...]:
        return Want(Budget, key), Want(BudgetDimension, key), Want(Reservation, key)

    def sheet(self, key: OwnedId, rows: Iterable[Any]) -> BudgetSheet:
        place = ids.budget_partition(ids.BudgetId(key.id), self._partitions)
        return budget_rules.sheet_of(key.id, place, rows, key.namespace)

    def written(self, before: BudgetSheet, after: BudgetSheet, change_id: int) -> Change | None:
        change = budget_rules.written(before, after)
        if change is None:
            return None
        # A report without a key must not be applied twice, and by the time we ask after a lost answer another process
        # may have moved the revision on: so each change leaves a trace of its own.
        until = after.row().last_updated_at + TRACE_LIFE_MS
        trace = UsageKey(before.budget_id, _trace(change_id), until, before.namespace)
        return msgspec.structs.replace(change, writes=(*change.writes, Put(trace)))

    def trace(self, key: OwnedId, change_id: int) -> Want:
        return Want(UsageKey, (*key, _trace(change_id)))

    def shows(self, row: Any, change_id: int) -> bool:
        return True


class QuotaBook:
    """The rows of a quota policy as one sheet. Admitting and releasing twice is the same as once."""

    def __init__(self, partitions: ids.PartitionCounts) -> None:
        self._partitions = partitions

    def wants(self, key: OwnedId) -> tuple[Want, ...]:
        return Want(QuotaPolicy, key), Want(QuotaSlot, key), Want(QuotaRequest, key)

    def sheet(self, key: OwnedId, rows: Iterable[Any]) -> QuotaSheet:
        place = ids.quota_partition(ids.QuotaPolicyId(key.id), self._partitions)
        return quota.sheet_of(key.id, place, rows, key.namespace)

    def written(self, before: QuotaSheet, after: QuotaSheet, change_id: int) -> Change | None:
        return quota.written(before, after)

    def trace(self, key: OwnedId, change_id: int) -> Want:
        return Want(QuotaPolicy, key)

    def shows(self, row: Any, change_id: int) -> bool:
        return bool(row.revision == change_id)


class Books(Core):
    """Everything that decides on budgets or quotas stands on these."""

    @cached_property
    def budget_chains(self) -> Chains[BudgetSheet]:
        """The decisions of this process about budgets."""
        return Chains(self, BudgetBook(self.partitions))

    @cached_property
    def quota_chains(self) -> Chains[QuotaSheet]:
        """The decisions of this process about quota policies."""
        return Chains(self, QuotaBook(self.partitions))


def _trace(change_id: int) -> str:
    return f"change:{change_id}"
