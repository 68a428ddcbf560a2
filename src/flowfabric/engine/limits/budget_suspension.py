"""Budget suspension: the hard action `suspend` suspends an execution until the budget has capacity for its need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.runtime.read_set import ReadSet, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.suspension import Suspension
from flowfabric.rules.limits import budget_suspension
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.suspension import suspend as suspend_rules


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
        """Suspend the execution of this handle until its need fits; False if that is not possible."""
        holder = self.runtime.handle_fields(handle)
        minted = budget_suspension.BudgetSuspensionIds(self.runtime.minter.uuid(), self.runtime.minter.uuid())
        reads = ReadSet()
        row = reads.one(Execution, holder.execution_id)
        suspension = reads.one(Suspension, holder.execution_id)
        keys = reads.many(SigningKey, 0)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: budget_suspension.suspend_for_budget(
                row(rows),
                suspension(rows),
                self.signing_keys.unseal_loaded_keys(keys(rows)),
                need,
                minted,
                holder,
                now,
            ),
        )

    async def resume_budget_suspended(self, rows: Sequence[Execution]) -> int:
        """Resume those of the suspended executions whose need fits now; return how many."""
        suspensions = await load_each(self.runtime, Suspension, ((row.execution_id,) for row in rows))
        needs = [suspend_rules.budget_needs(row, suspension) for row, suspension in zip(rows, suspensions, strict=True)]
        _, budgets = await self.aggregates.budgets.load(sorted({need.budget for own in needs for need in own}))
        fitting = budget_suspension.needs_with_capacity(needs, budgets)
        return sum(
            await asyncio.gather(
                *(
                    self._resume(row.execution_id, need)
                    for row, need in zip(rows, fitting, strict=True)
                    if need is not None
                )
            )
        )

    async def _resume(self, execution_id: str, need: BudgetNeed) -> bool:
        message_id = self.runtime.minter.uuid()
        reads = ReadSet()
        row = reads.one(Execution, execution_id)
        suspension = reads.one(Suspension, execution_id)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: budget_suspension.resume_from_budget(row(rows), suspension(rows), need, message_id, now),
        )
