"""Claim: give a worker a lease on an execution.

There are three ways. The ordinary claim (`claim_ready`) needs no grant. A scheduler may issue a grant first, which the
worker then redeems with `claim_execution` or, for an interrupted attempt, `claim_resumed_execution`. An operator grants
and claims in one step. A claim checks the state of the row before it checks the grant. Grants themselves are on the
page `grant`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.change import Change, Patch, lease_event, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import lease, operator
from flowfabric.rules.execution.grant import grant_for, has_live_grant, is_route_blocked, limit_to_grant
from flowfabric.rules.execution.lease import AcquiredLease, LeaseHolder
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import capabilities, queue
from flowfabric.rules.security.grant_key import GrantProof


def claim_execution(
    row: Execution | None,
    holder: LeaseHolder,
    now: int,
    *,
    attempt_timeout_ms: int | None = None,
    execution_deadline_at: int | None = None,
    proof: GrantProof | None = None,
) -> Decision[AcquiredLease]:
    """Redeem a grant and begin a new attempt. With `proof`, the proof must cover the grant."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := _not_leaseable_error(row):
        return refuse(refused)
    if row.attempt_state is AttemptState.RUNNING_ATTEMPT:
        return refuse(errors.ActiveAttemptExists(execution_id=row.execution_id))
    if row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return refuse(errors.UseClaimResumedExecution(execution_id=row.execution_id))
    grant = grant_for(row, holder, now, proof)
    if isinstance(grant, errors.FabricError):
        return refuse(grant)
    begun = begin_attempt(row, holder, attempt_timeout_ms=attempt_timeout_ms, deadline_at=execution_deadline_at)
    return limit_to_grant(begun, grant)


def claim_resumed_execution(
    row: Execution | None,
    holder: LeaseHolder,
    now: int,
    *,
    remaining_attempt_timeout_ms: int | None = None,
    proof: GrantProof | None = None,
) -> Decision[AcquiredLease]:
    """Redeem a grant and continue the interrupted attempt; its id and index stay. An expired grant is removed."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return refuse(errors.ExecutionNotLeaseable(execution_id=row.execution_id))
    if row.attempt_state is not AttemptState.ATTEMPT_INTERRUPTED:
        return refuse(errors.NotAResumedExecution(execution_id=row.execution_id))
    if refused := _not_leaseable_error(row):
        return refuse(refused)
    grant = grant_for(row, holder, now, proof)
    if isinstance(grant, errors.ClaimGrantExpired):
        fields = {"grant": None, "granted_until": None, "last_mutation_at": NOW}
        patch = Patch(Execution, (row.execution_id,), fields)
        return Decision(grant, Change(guards=(seen(row),), writes=(patch,)))
    if isinstance(grant, errors.FabricError):
        return refuse(grant)
    return limit_to_grant(continue_attempt(row, holder, lease.CLAIM_RESUMED, remaining_attempt_timeout_ms), grant)


def claim_ready(
    row: Execution, holder: LeaseHolder, offered: frozenset[str], now: int
) -> Decision[AcquiredLease | None]:
    """Claim a ready row without a grant; None if the row is not claimable by this worker.

    A live grant for any worker keeps the row from being claimed. Rows blocked by route are claimed as well, because
    this worker has the capabilities.
    """
    waits = operator.is_eligible(row) or is_route_blocked(row)
    if not waits or row.ownership_state is not OwnershipState.UNOWNED or has_live_grant(row, now):
        return Decision(None)
    if capabilities.missing(row.required_capabilities, offered):
        return Decision(None)
    if row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return continue_attempt(row, holder, lease.CLAIM_RESUMED, None)
    return begin_attempt(row, holder)


def issue_grant_and_claim(row: Execution | None, holder: LeaseHolder, now: int) -> Decision[AcquiredLease]:
    """Claim a row for an operator in one step. Capabilities, budgets and quotas are not checked."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    if row.ownership_state is not OwnershipState.UNOWNED:
        return refuse(errors.LeaseConflict(execution_id=row.execution_id))
    if row.terminal_outcome is not TerminalOutcome.NONE:
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    if row.attempt_state is AttemptState.RUNNING_ATTEMPT:
        return refuse(errors.ActiveAttemptExists(execution_id=row.execution_id))
    if has_live_grant(row, now):
        return refuse(errors.GrantAlreadyExists(execution_id=row.execution_id))
    if row.eligibility_state is not EligibilityState.ELIGIBLE_NOW:
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    if holder.lane_id != row.lane_id:
        return refuse(errors.ExecutionNotInEligibleSet(execution_id=row.execution_id))
    if row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return continue_attempt(row, holder, "issue_grant_and_claim_resumed", None)
    return begin_attempt(row, holder, reason="issue_grant_and_claim")


def begin_attempt(
    row: Execution,
    holder: LeaseHolder,
    *,
    reason: str | None = None,
    attempt_timeout_ms: int | None = None,
    deadline_at: int | None = None,
) -> Decision[AcquiredLease]:
    """Begin a new attempt under a new lease. Its type (initial, retry, replay) follows from the row's attempt state."""
    attempt_type = queue.NEXT_ATTEMPT_TYPE.get(row.attempt_state, AttemptType.INITIAL)
    policy_timeout = decode_terms(row.terms).attempt_timeout_ms
    timeout = policy_timeout if attempt_timeout_ms is None else attempt_timeout_ms
    fields = lease.acquire(row, holder, attempt_type, timeout)
    fields["lineage"] = lease.encode_lineage(lease.decode_lineage(row.lineage))  # an unreadable one is not claimed
    if deadline_at:
        fields["deadline_at"] = deadline_at
    return acquire_decision(row, holder, fields, lease.ACQUIRED, reason=reason)


def continue_attempt(
    row: Execution, holder: LeaseHolder, reason: str, timeout_ms: int | None
) -> Decision[AcquiredLease]:
    """Continue the interrupted attempt under a new lease, with its remaining time unless `timeout_ms` is given."""
    timeout = row.next_timeout_ms if timeout_ms is None else timeout_ms
    fields = lease.acquire(row, holder, None, timeout)
    return acquire_decision(row, holder, fields, lease.ACQUIRED, reason=reason)


def acquire_decision(
    row: Execution,
    holder: LeaseHolder,
    fields: dict[str, Any],
    event: str,
    *,
    reason: str | None = None,
    details: str | None = None,
    extra_writes: tuple[Any, ...] = (),
) -> Decision[AcquiredLease]:
    """Return the decision that writes `fields`, emits the lease event and answers with the new lease."""
    leased = replace(row, **fields)
    change = Change(
        guards=(seen(row),),
        writes=(Patch(Execution, (row.execution_id,), fields), *extra_writes),
        events=(lease_event(leased, event, reason=reason, details=details),),
    )

    def answer(now: int) -> AcquiredLease:
        return AcquiredLease(
            row.execution_id,
            holder.lease_id,
            leased.lease_epoch,
            leased.attempt_index or 0,
            leased.attempt_id or "",
            leased.attempt_type or AttemptType.INITIAL,
            now + holder.lease_ttl_ms,
            holder.lease_ttl_ms,
            row.lane_id,
            fields["current_lane"],
            holder.worker_instance_id,
            fields.get("lease_reclaim_count", 0),
            row.life or 0,
        )

    return Decision(answer, change)


def _not_leaseable_error(row: Execution) -> errors.FabricError | None:
    """Return why the row cannot be leased, None if it can."""
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return errors.ExecutionNotLeaseable(execution_id=row.execution_id)
    if row.ownership_state is not OwnershipState.UNOWNED:
        return errors.LeaseConflict(execution_id=row.execution_id)
    if row.eligibility_state is not EligibilityState.ELIGIBLE_NOW:
        return errors.ExecutionNotLeaseable(execution_id=row.execution_id)
    if row.terminal_outcome is not TerminalOutcome.NONE:
        return errors.ExecutionNotLeaseable(execution_id=row.execution_id)
    return None
