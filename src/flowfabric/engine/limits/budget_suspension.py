"""Sleeping on a budget: what the hard action `suspend` does, and how room in the budget wakes the sleepers.

A sleeper is woken once there is room for what it asked for, not before: otherwise it would ask again, be refused again
and never rest. Room that one is woken for is not offered to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.engine.operations.budgets import Budgets
from flowfabric.engine.operations.durable import Gates
from flowfabric.engine.operations.signing_keys import KEYSTORE
from flowfabric.engine.operations.suspensions import Suspensions
from flowfabric.engine.runtime.after_commit import first
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import Suspension
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import budget_suspension
from flowfabric.rules.limits.budget import Need
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.stores.queries import Want


class Sleeping(Budgets, Suspensions, Gates):
    """Puts executions to sleep for a budget, and wakes them."""

    async def sleep_for_budget(self, handle: Handle, need: Need) -> bool:
        holder = self.opened(handle)
        bed = budget_suspension.Bed(self.minter.uuid(), self.minter.uuid())
        return await self.settle(
            (*_wants(holder.execution_id), *KEYSTORE),
            lambda rows, now: budget_suspension.sleep(
                first(rows[0]), first(rows[1]), self.keys_in(rows[3]), need, bed, holder, now
            ),
        )

    async def wake_sleepers(self, rows: Sequence[Execution]) -> int:
        loaded = await self.load([Want(Suspension, (row.execution_id,)) for row in rows])
        needs = [suspend_rules.needs(row, first(found)) for row, found in zip(rows, loaded.rows, strict=True)]
        names = sorted({need.budget for some in needs for need in some})
        _, sheets = await self.budget_chains.look(names)
        sheets = {name: sheet for name, sheet in sheets.items() if not budget_rules.corruption(sheet)}
        waking = []
        for row, some in zip(rows, needs, strict=True):
            for need in some:
                if need.budget in sheets and budget_rules.meets(sheets[need.budget], need):
                    sheets[need.budget] = budget_rules.promised(sheets[need.budget], need)
                    waking.append(self._wake_for(row.execution_id, need))
                    break
        return sum(await asyncio.gather(*waking))

    async def _wake_for(self, execution_id: str, need: Need) -> bool:
        message_id = self.minter.uuid()
        return await self.settle(
            _wants(execution_id),
            lambda rows, now: budget_suspension.wake(first(rows[0]), first(rows[1]), need, message_id, now),
        )


def _wants(execution_id: str) -> tuple[Want, ...]:
    return Want(Execution, (execution_id,)), Want(Suspension, (execution_id,))
