"""Budget suspension: a hard limit with the action `suspend` suspends an execution until the budget has capacity.

The execution waits on a waitpoint whose key encodes its need or, as a durable function, on a mailbox of that name. It
is resumed for that need only: by the time the message arrives it may be running, finished, or waiting for something
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.condition import Single
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits.budget import BudgetNeed, BudgetState
from flowfabric.rules.security import keystore
from flowfabric.rules.suspension import resume
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs

BUDGET_REASON_CODE = "paused_by_budget"


class BudgetSuspensionIds(msgspec.Struct, frozen=True):
    """The ids minted beforehand for such a suspension."""

    suspension_id: str
    waitpoint_id: str


def suspend_for_budget(
    row: Execution | None,
    suspension: Suspension | None,
    keys: Sequence[SigningKey],
    need: BudgetNeed,
    minted: BudgetSuspensionIds,
    holder: HandleFields,
    now: int,
) -> Decision[bool]:
    """Suspend the holder's work until its need fits. True if it is suspended, by this call or an earlier one.

    Nothing is suspended for a caller that does not hold the lease. Without a signing key nobody can signal the
    waitpoint, but capacity in the budget or an operator still resumes the execution.
    """
    if row is None:
        return Decision(False)
    if row.lifecycle_phase is LifecyclePhase.SUSPENDED and need in suspend_rules.budget_needs(row, suspension):
        return Decision((row.attempt_id, row.lease_epoch) == (holder.attempt_id, holder.lease_epoch))
    refused = fences.check_lease(row, Fence(holder.lease_id, holder.lease_epoch, holder.attempt_id), now)
    if refused is not None:
        return Decision(False, refused.change)
    args = SuspendArgs(
        suspension_id=minted.suspension_id,
        waitpoints=(FreshWaitpoint(minted.waitpoint_id, need.key),),
        resume_condition=Single(need.key),
        reason_code=BUDGET_REASON_CODE,
        now=now,
    )
    signer = keystore.waitpoint_signer(keys)
    waitpoint = waitpoint_rules.new_waitpoint(
        row,
        None if isinstance(signer, errors.FabricError) else signer,
        minted.waitpoint_id,
        need.key,
        suspension_id=minted.suspension_id,
        activated_at=NOW,
    )
    rows = suspend_rules.SuspendRows(row, suspension, remembered=None, waitpoints={}, buffered=(), keys=keys)
    return Decision(True, suspend_rules.suspend_on(rows, row, args, holder, [waitpoint], {}, [], now).change)


def needs_with_capacity(
    needs: Iterable[Sequence[BudgetNeed]], budgets: Mapping[NamespacedId, BudgetState]
) -> list[BudgetNeed | None]:
    """Return for each suspended execution the first of its needs that fits; None if none does.

    Capacity found for one execution is not offered to the next. Without enough capacity an execution stays suspended:
    it would only request again and be refused again.
    """
    left = {key: state for key, state in budgets.items() if not budget_rules.find_corruption(state)}
    fitting: list[BudgetNeed | None] = []
    for own in needs:
        fits = (need for need in own if need.budget in left and budget_rules.has_capacity_for(left[need.budget], need))
        need = next(fits, None)
        if need is not None:
            left[need.budget] = budget_rules.with_reserved(left[need.budget], need)
        fitting.append(need)
    return fitting


def resume_from_budget(
    row: Execution | None, suspension: Suspension | None, need: BudgetNeed, message_id: str, now: int
) -> Decision[bool]:
    """Resume an execution that is suspended on this need; otherwise change nothing."""
    if (
        row is None
        or row.lifecycle_phase is not LifecyclePhase.SUSPENDED
        or need not in suspend_rules.budget_needs(row, suspension)
    ):
        return Decision(False)
    if suspension is not None and suspension.waits_on is not None:
        gates = (gate for gate in wait_state.open_gates(suspension).values() if gate.mailbox == need.key)
        if all(wait_state.is_gate_expired(gate, now) for gate in gates):  # the timeout resumes it
            return Decision(False)
        message = MessageArgs(
            execution_id=row.execution_id,
            mailbox=need.key,
            message_id=message_id,
            payload=b"null",
            sender=need.budget_id,
        )
        return Decision(True, mailbox.send_message(row, suspension, None, message, now, is_internal=True).change)
    return Decision(True, resume.resume_execution(row, suspension, 0).change)
