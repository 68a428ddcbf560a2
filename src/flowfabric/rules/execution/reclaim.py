"""Reclaim: work whose lease expired or was revoked goes to another worker, a bounded number of times."""

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
WARNED_EVERY = 100  # reclaims of one execution that are worth a word in the log


def issue_reclaim_grant(
    row: Execution | None, order: GrantRequest, now: int, sign: GrantSigner | None = None
) -> Decision[Granted | NotReclaimable | ReclaimCapExceeded]:
    """Offer interrupted work to a worker. A lapsed lease must have been marked before (the engine does so)."""
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
    """Redeem a reclaim grant; at the cap the execution ends as failed, with or without one.

    With `proof`, a grant that it does not cover counts as not found.
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
    """The ordinary claim's form: no grant is needed, but one in force for somebody is respected."""
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
    """The ordinary claim of a row in a decided line: take over what lost its lease, or claim what waits."""
    if row is None or is_reclaimable(row):
        return take_over(row, holder, offered, now)
    return claim_ready(row, holder, offered, now)


def fail_if_at_cap(row: Execution | None) -> Decision[ReclaimCapExceeded | None]:
    """End interrupted work that has been reclaimed as often as it may; otherwise change nothing."""
    if row is None or not is_reclaimable(row):
        return Decision(None)
    cap = reclaim_cap(row, None)
    return fail_at_cap(row, cap) if row.lease_reclaim_count >= cap else Decision(None)


def is_reclaimable(row: Execution) -> bool:
    """Active, and the lease is gone."""
    return row.lifecycle_phase is LifecyclePhase.ACTIVE and row.ownership_state in lease.INTERRUPTED_LEASE


def reclaim_cap(row: Execution, asked: int | None) -> int:
    """How many reclaims this execution may have in its life: its policy's word, else the caller's, else the default."""
    own = decode_terms(row.terms).max_reclaim_count
    if own is not None:
        return own
    return DEFAULT_RECLAIM_CAP if asked is None else asked


def begin_reclaimed_attempt(row: Execution, holder: LeaseHolder) -> Decision[AcquiredLease]:
    """End the interrupted attempt and begin the next one under a new lease."""
    why = _why_gone(row)
    lineage = Lineage(previous_attempt_index=row.attempt_index, reclaim_reason=why)
    fields = lease.acquire(row, holder, AttemptType.RECLAIM, lineage, whole_timeout_ms(row))
    fields["lease_reclaim_count"] = row.lease_reclaim_count + 1
    details = {"old_lease_epoch": row.lease_epoch}
    return acquire_decision(
        row,
        holder,
        fields,
        "reclaimed",
        attempt_type=AttemptType.RECLAIM,
        details=msgspec.json.encode(details).decode(),
        extra_writes=(
            lease.attempt_record(row, AttemptRecordState.INTERRUPTED_RECLAIMED, reason=why),
            *cleanup.close_stream(row, cleanup.RECLAIMED),
        ),
    )


def whole_timeout_ms(row: Execution) -> int | None:
    """The time that the interrupted attempt began with, be it the policy's or the claim's; None for no timer.

    Of an attempt that was resumed in between, only the policy knows what it began with; without one, what it had left
    when it was resumed is the best there is.
    """
    own, armed_at = decode_terms(row.terms).attempt_timeout_ms, row.lease_acquired_at
    resumed = row.attempt_resumed_at is not None
    if row.attempt_timeout_at is None or armed_at is None or (resumed and own is not None):
        return own
    return row.attempt_timeout_at - armed_at


def fail_at_cap(row: Execution, cap: int) -> Decision[ReclaimCapExceeded]:
    """End work that was interrupted too often."""
    change = transitions.terminate(
        row,
        TerminalOutcome.FAILED,
        attempt=AttemptRecordState.INTERRUPTED_RECLAIMED,
        attempt_reason=_why_gone(row),
        release_reason=CAP_REASON,
        stream_reason=cleanup.RECLAIMED,
        failure_reason=CAP_REASON,
    )
    return Decision(ReclaimCapExceeded(cap), change)


def _why_gone(row: Execution) -> str:
    """What became of the lease, as attempts and lineages tell it."""
    return "lease_revoked" if row.ownership_state is OwnershipState.LEASE_REVOKED else "lease_expired"
