"""Reclaim: hand work whose lease expired or was revoked to another worker, up to a limit.

An execution that has been reclaimed as often as its cap allows ends as failed instead.
"""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Granted, GrantNotFound, NotReclaimable, ReclaimCapExceeded
from flowfabric.model.execution import Execution, Lineage
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptType,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import cleanup, lease, transitions
from flowfabric.rules.execution.claim import acquire_decision, claim_ready
from flowfabric.rules.execution.grant import (
    GrantRequest,
    GrantSigner,
    grant_change,
    has_live_grant,
    limit_to_grant,
    refuse_incapable,
    stored_grant,
)
from flowfabric.rules.execution.lease import AcquiredLease, LeaseHolder
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import capabilities
from flowfabric.rules.security.grant_key import GrantProof

DEFAULT_RECLAIM_CAP = 1000
CAP_REASON = "max_reclaims_exceeded"
WARNED_EVERY = 100  # every so many reclaims of one execution are logged as a warning


def issue_reclaim_grant(
    row: Execution | None, order: GrantRequest, now: int, sign: GrantSigner | None = None
) -> Decision[Granted | NotReclaimable | ReclaimCapExceeded]:
    """Offer interrupted work to a worker. An expired lease must have been marked before; the engine does so."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if not is_reclaimable(row):
        return Decision(NotReclaimable())
    cap = reclaim_cap(row, None)
    if row.lease_reclaim_count >= cap:
        return Decision(ReclaimCapExceeded(cap))
    if has_live_grant(row, now):
        return refuse(errors.GrantAlreadyExists(execution_id=row.execution_id))
    if refused := capabilities.check_presented(",".join(order.capabilities)):
        return refuse(refused)
    if missing := capabilities.missing(row.required_capabilities, order.capabilities):
        return refuse_incapable(row, NotReclaimable(f"capability_mismatch: {missing}"))
    return Decision(Granted(row.execution_id), grant_change(row, order, "reclaim", now, sign))


def reclaim_execution(
    row: Execution | None,
    holder: LeaseHolder,
    max_reclaim_count: int | None,
    now: int,
    proof: GrantProof | None = None,
) -> Decision[AcquiredLease | NotReclaimable | ReclaimCapExceeded | GrantNotFound]:
    """Redeem a reclaim grant. At the cap the execution ends as failed, with or without a grant.

    With `proof`, a grant that the proof does not cover counts as not found.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if not is_reclaimable(row):
        return Decision(NotReclaimable())
    cap = reclaim_cap(row, max_reclaim_count)
    if row.lease_reclaim_count >= cap:
        return fail_at_cap(row, cap)
    grant = stored_grant(row)
    if grant is None or grant.expires_at <= now or grant.worker_id != holder.worker_id:
        return Decision(GrantNotFound(row.execution_id))
    if proof is not None and not proof.covers(grant, now):
        return Decision(GrantNotFound(row.execution_id))
    return limit_to_grant(begin_reclaimed_attempt(row, holder), grant)


def take_over(
    row: Execution | None, holder: LeaseHolder, offered: frozenset[str], now: int
) -> Decision[AcquiredLease | NotReclaimable | ReclaimCapExceeded]:
    """Reclaim without a grant, as part of an ordinary claim. A live grant for any worker is respected."""
    if row is None or not is_reclaimable(row) or has_live_grant(row, now):
        return Decision(NotReclaimable())
    if missing := capabilities.missing(row.required_capabilities, offered):
        return Decision(NotReclaimable(f"capability_mismatch: {missing}"))
    cap = reclaim_cap(row, None)
    if row.lease_reclaim_count >= cap:
        return fail_at_cap(row, cap)
    return begin_reclaimed_attempt(row, holder)


def claim_guarded(
    row: Execution | None, holder: LeaseHolder, offered: frozenset[str], now: int
) -> Decision[AcquiredLease | NotReclaimable | ReclaimCapExceeded | None]:
    """Claim a row on the guarded path: take over an interrupted row, or claim a ready one."""
    if row is None or is_reclaimable(row):
        return take_over(row, holder, offered, now)
    return claim_ready(row, holder, offered, now)


def fail_if_at_cap(row: Execution | None) -> Decision[ReclaimCapExceeded | None]:
    """Fail interrupted work that has reached its reclaim cap; otherwise change nothing."""
    if row is None or not is_reclaimable(row):
        return Decision(None)
    cap = reclaim_cap(row, None)
    return fail_at_cap(row, cap) if row.lease_reclaim_count >= cap else Decision(None)


def is_reclaimable(row: Execution) -> bool:
    """True if the execution is active and its lease expired or was revoked."""
    return row.lifecycle_phase is LifecyclePhase.ACTIVE and row.ownership_state in lease.INTERRUPTED_LEASE


def reclaim_cap(row: Execution, requested: int | None) -> int:
    """Return how often the execution may be reclaimed: by its policy, else by the caller, else by default."""
    policy_cap = decode_terms(row.terms).max_reclaim_count
    if policy_cap is not None:
        return policy_cap
    return DEFAULT_RECLAIM_CAP if requested is None else requested


def begin_reclaimed_attempt(row: Execution, holder: LeaseHolder) -> Decision[AcquiredLease]:
    """End the interrupted attempt and begin the next one under a new lease."""
    reason = _loss_reason(row)
    lineage = Lineage(previous_attempt_index=row.attempt_index, reclaim_reason=reason)
    fields = lease.acquire(row, holder, AttemptType.RECLAIM, _full_timeout_ms(row))
    fields["lineage"] = lease.encode_lineage(lineage)
    fields["lease_reclaim_count"] = row.lease_reclaim_count + 1
    details = {"old_lease_epoch": row.lease_epoch}
    return acquire_decision(
        row,
        holder,
        fields,
        "reclaimed",
        details=msgspec.json.encode(details).decode(),
        extra_writes=(
            lease.attempt_record(row, AttemptRecordState.INTERRUPTED_RECLAIMED, reason=reason),
            *cleanup.close_stream(row, cleanup.RECLAIMED),
        ),
    )


def _full_timeout_ms(row: Execution) -> int | None:
    """Return the timeout that the interrupted attempt began with; None for no timer.

    If the attempt was resumed in between, only the policy knows its full timeout. Without a policy timeout, the time
    left at the last resume is used.
    """
    policy_timeout_ms, armed_at = decode_terms(row.terms).attempt_timeout_ms, row.lease_acquired_at
    resumed = row.attempt_resumed_at is not None
    if row.attempt_timeout_at is None or armed_at is None or (resumed and policy_timeout_ms is not None):
        return policy_timeout_ms
    return row.attempt_timeout_at - armed_at


def fail_at_cap(row: Execution, cap: int) -> Decision[ReclaimCapExceeded]:
    """End the execution as failed because it was interrupted too often."""
    change = transitions.terminate(
        row,
        TerminalOutcome.FAILED,
        attempt=AttemptRecordState.INTERRUPTED_RECLAIMED,
        attempt_reason=_loss_reason(row),
        release_reason=CAP_REASON,
        stream_reason=cleanup.RECLAIMED,
        failure_reason=CAP_REASON,
    )
    return Decision(ReclaimCapExceeded(cap), change)


def _loss_reason(row: Execution) -> str:
    """Return how the lease was lost, as stored in attempts and lineages."""
    return "lease_revoked" if row.ownership_state is OwnershipState.LEASE_REVOKED else "lease_expired"
