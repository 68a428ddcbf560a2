"""Sleeping on a budget: what the hard action `suspend` does, and how room in the budget wakes the sleepers.

A sleeper is woken once there is room for what it asked for, not before: otherwise it would ask again, be refused again
and never rest. Room that one is woken for is not offered to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import KEYSTORE, SigningKeys
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import Suspension
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import budget_suspension
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.stores.queries import Read


class BudgetSuspender:
    """Suspends executions on an exhausted budget and resumes them."""

    def __init__(
        self,
        runtime: Runtime,
        aggregates: LimitAggregates,
        signing_keys: SigningKeys,
    ) -> None:
        self.runtime = runtime
        self.signing_keys = signing_keys
        self.aggregates = aggregates

    async def suspend_for_budget(self, handle: Handle, need: BudgetNeed) -> bool:
        holder = self.runtime.handle_fields(handle)
        bed = budget_suspension.BudgetSuspensionIds(self.runtime.minter.uuid(), self.runtime.minter.uuid())
        return await self.runtime.decide_and_commit(
            (*_wants(holder.execution_id), *KEYSTORE),
            lambda rows, now: budget_suspension.suspend_for_budget(
                first(rows[0]), first(rows[1]), self.signing_keys.unseal_loaded_keys(rows[3]), need, bed, holder, now
            ),
        )

    async def resume_budget_suspended(self, rows: Sequence[Execution]) -> int:
        loaded = await self.runtime.load([Read(Suspension, (row.execution_id,)) for row in rows])
        needs = [suspend_rules.budget_needs(row, first(found)) for row, found in zip(rows, loaded.rows, strict=True)]
        names = sorted({need.budget for some in needs for need in some})
        _, sheets = await self.aggregates.budgets.load(names)
        sheets = {name: sheet for name, sheet in sheets.items() if not budget_rules.find_corruption(sheet)}
        waking = []
        for row, some in zip(rows, needs, strict=True):
            for need in some:
                if need.budget in sheets and budget_rules.has_capacity_for(sheets[need.budget], need):
                    sheets[need.budget] = budget_rules.with_reserved(sheets[need.budget], need)
                    waking.append(self._wake_for(row.execution_id, need))
                    break
        return sum(await asyncio.gather(*waking))

    async def _wake_for(self, execution_id: str, need: BudgetNeed) -> bool:
        message_id = self.runtime.minter.uuid()
        return await self.runtime.decide_and_commit(
            _wants(execution_id),
            lambda rows, now: budget_suspension.resume_from_budget(
                first(rows[0]), first(rows[1]), need, message_id, now
            ),
        )


def _wants(execution_id: str) -> tuple[Read, ...]:
    return Read(Execution, (execution_id,)), Read(Suspension, (execution_id,))
