"""Sleeping: how a hard limit whose action is `suspend` puts an execution to sleep, and how room in the budget wakes it.

The sleeper waits on a waitpoint whose key says what it needs or, as a durable function, on a mailbox of that name. It
is woken for that need only: by the time the word arrives it may be awake, over, or waiting for something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import from_now
from flowfabric.model.condition import Single
from flowfabric.model.execution import Execution
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.limits.budget import BudgetNeed
from flowfabric.rules.security import keystore
from flowfabric.rules.suspension import resume
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs

BUDGET_REASON_CODE = "paused_by_budget"


class BudgetSuspensionIds(msgspec.Struct, frozen=True):
    """What is minted for a sleep beforehand."""

    suspension_id: str
    waitpoint_id: str


def suspend_for_budget(
    row: Execution | None,
    root: Suspension | None,
    keys: Sequence[SigningKey],
    need: BudgetNeed,
    bed: BudgetSuspensionIds,
    holder: HandleFields,
    now: int,
) -> Decision[bool]:
    """Put the holder's work away until there is room for its need. True when it sleeps, by this call or an earlier one.

    Whoever does not hold the lease puts nobody to sleep. Where no key is there to sign with, nobody can signal the
    waitpoint; room in the budget, or an operator, wakes the sleeper all the same.
    """
    if row is None:
        return Decision(False)
    if row.lifecycle_phase is LifecyclePhase.SUSPENDED and need in suspend_rules.budget_needs(row, root):
        return Decision((row.attempt_id, row.lease_epoch) == (holder.attempt_id, holder.lease_epoch))
    refused = lease.check_lease(row, Fence(holder.lease_id, holder.lease_epoch, holder.attempt_id), now)
    if refused is not None:
        return Decision(False, refused.change)
    args = SuspendArgs(
        suspension_id=bed.suspension_id,
        waitpoints=(FreshWaitpoint(bed.waitpoint_id, need.key),),
        resume_condition=Single(need.key),
        reason_code=BUDGET_REASON_CODE,
        now=now,
    )
    signer = keystore.waitpoint_signer(keys)
    waitpoint = waitpoint_rules.new_waitpoint(
        row,
        None if isinstance(signer, errors.FabricError) else signer,
        bed.waitpoint_id,
        need.key,
        suspension_id=bed.suspension_id,
        activated_at=from_now(0),
    )
    scene = suspend_rules.SuspendRows(row, root, remembered=None, waitpoints={}, buffered=(), keys=keys)
    return Decision(True, suspend_rules.suspend_on(scene, row, args, holder, [waitpoint], {}, [], now).change)


def resume_from_budget(
    row: Execution | None, root: Suspension | None, need: BudgetNeed, message_id: str, now: int
) -> Decision[bool]:
    """Let an execution that sleeps on this need go on; nothing when it does not, or not any more."""
    if (
        row is None
        or row.lifecycle_phase is not LifecyclePhase.SUSPENDED
        or need not in suspend_rules.budget_needs(row, root)
    ):
        return Decision(False)
    if root is not None and root.waits_on is not None:
        waiting = (gate for gate in wait_state.open_gates(root).values() if gate.mailbox == need.key)
        if all(wait_state.is_gate_expired(gate, now) for gate in waiting):  # its timeout wakes it
            return Decision(False)
        room = MessageArgs(
            execution_id=row.execution_id,
            mailbox=need.key,
            message_id=message_id,
            payload=b"null",
            sender=need.budget_id,
        )
        return Decision(True, mailbox.send_message(row, root, None, room, now).change)
    return Decision(True, resume.resume_execution(row, root, 0).change)
