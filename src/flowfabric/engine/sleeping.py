"""Sleeping on a budget: what the hard action `suspend` does, and how room in the budget wakes the sleeper.

The execution is suspended on a waitpoint whose key says what it needs, or, as a durable function, parked on a mailbox
of that name. Either lets it be found by the budget. It is woken once there is room for what it asked for, not before:
otherwise it would ask again, be refused again and never rest.
"""

from __future__ import annotations

import logging

from flowfabric import errors
from flowfabric.engine.budgets import Budgets
from flowfabric.engine.gates import Gates
from flowfabric.engine.suspensions import Suspensions
from flowfabric.handles import Handle
from flowfabric.model.condition import Single
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import Suspension
from flowfabric.rules import budgets, shelving
from flowfabric.rules.budgets import Need
from flowfabric.rules.mailbox import MailArgs
from flowfabric.rules.suspend_args import Fresh, SuspendArgs
from flowfabric.stores.base import Want

logger = logging.getLogger("flowfabric.sleeping")

REASON = "paused_by_budget"


class Sleeping(Budgets, Suspensions, Gates):
    """Puts executions to sleep for a budget, and wakes them."""

    async def sleep_for_budget(self, handle: Handle, need: Need) -> bool:
        args = SuspendArgs(
            suspension_id=self.minter.uuid(),
            waitpoints=(Fresh(self.minter.uuid(), need.key),),
            resume_condition=Single(need.key),
            reason_code=REASON,
            now=self.estimate.now(),
        )
        try:
            await self.suspend(handle, args)
        except errors.StoreUnavailable:
            raise
        except (
            errors.FabricError
        ) as refused:  # the lease is gone, or no key is there to sign with: the reporter is told
            logger.warning("an execution that met a hard limit goes on: %s", refused)
            return False
        return True

    async def wake_sleeper(self, row: Execution) -> bool:
        loaded = await self.load((Want(Suspension, (row.execution_id,)),))
        root: Suspension | None = loaded.rows[0][0] if loaded.rows[0] else None
        need = shelving.sleeps_on(root)
        if root is None or need is None:
            return False
        _, sheets = await self.budget_chains.look([need.budget_id])
        if budgets.corruption(sheets[need.budget_id]) or not budgets.meets(sheets[need.budget_id], need):
            return False
        try:
            if root.waits_on is None:
                await self.resume_execution(row.execution_id, trigger_type="operator")
            else:
                await self.send_message(
                    MailArgs(
                        execution_id=row.execution_id,
                        mailbox=need.key,
                        message_id=self.minter.uuid(),
                        payload=b"null",
                        sender=need.budget_id,
                    )
                )
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            return False  # it is awake, or over, by now
        return True
