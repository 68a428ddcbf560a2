"""Grants: offer one execution to one worker for a limited time.

A grant sits in the execution's single grant slot. While it is live, ordinary claims skip the row. It reserves no
capacity and does not move the row in its queue. It is bound to `worker_id` only: another instance of the same worker
may redeem it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Granted
from flowfabric.model.change import Change, Patch, seen
from flowfabric.model.execution import Execution, Grant
from flowfabric.model.instant import NOW
from flowfabric.model.states import EligibilityState
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import operator, transitions
from flowfabric.rules.execution.lease import AcquiredLease, LeaseHolder
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import capabilities
from flowfabric.rules.security.grant_key import GrantProof


class GrantRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that requests a grant and what it presents."""

    worker_id: str
    worker_instance_id: str
    lane_id: str
    capabilities: frozenset[str]
    grant_ttl_ms: int
    capability_hash: str | None = None
    route_snapshot_json: str | None = None
    admission_summary: str | None = None
    admitted: bool = False  # budgets and quotas admitted the execution


# Signs a grant key for an expiry and returns the stored key id.
GrantSigner = Callable[[Execution, GrantRequest, int], str]


def issue_claim_grant(
    row: Execution | None,
    order: GrantRequest,
    now: int,
    sign: GrantSigner | None = None,
    *,
    include_route_blocked: bool = False,
) -> Decision[Granted]:
    """Offer a claimable execution to a worker. The row stays claimable and keeps its queue position.

    `include_route_blocked` also offers rows blocked by route, and unblocks them in the same change, because this worker
    has the capabilities.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if not operator.is_eligible(row) and not (include_route_blocked and is_route_blocked(row)):
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    if has_live_grant(row, now):
        return refuse(errors.GrantAlreadyExists(execution_id=row.execution_id))
    if order.lane_id != row.lane_id:
        return refuse(errors.ExecutionNotInEligibleSet(execution_id=row.execution_id))
    if refused := capabilities.check_presented(",".join(order.capabilities)):
        return refuse(refused)
    if missing := capabilities.missing(row.required_capabilities, order.capabilities):
        return refuse_incapable(row, errors.CapabilityMismatch(missing, execution_id=row.execution_id))
    return Decision(Granted(row.execution_id), grant_change(row, order, "claim", now, sign))


def refuse_incapable(row: Execution, answer: Any) -> Decision[Any]:
    """Refuse a worker that lacks a capability and record when that happened."""
    patch = Patch(Execution, (row.execution_id,), {"last_capability_mismatch_at": NOW, "last_mutation_at": NOW})
    return Decision(answer, Change(guards=(seen(row),), writes=(patch,)))


def grant_change(row: Execution, order: GrantRequest, kind: str, now: int, sign: GrantSigner | None) -> Change:
    """Return the change that stores a grant in the row's slot; a row blocked by route is unblocked."""
    expires_at = now + order.grant_ttl_ms
    key_id = sign(row, order, expires_at) if sign else ""
    grant = view_of(Grant, order, kind=kind, created_at=now, expires_at=expires_at, key_id=key_id)
    fields = {
        "grant": msgspec.json.encode(grant).decode(),
        "granted_until": expires_at,
        "last_mutation_at": NOW,
    }
    patch = Patch(Execution, (row.execution_id,), fields)
    if is_route_blocked(row):
        patch = transitions.transition(row, operator.unblock_fields(row) | fields)
    return Change(guards=(seen(row),), writes=(patch,))


def limit_to_grant(decision: Decision[AcquiredLease], grant: Grant) -> Decision[AcquiredLease]:
    """Return the decision, restricted to be written only before the redeemed grant expires."""
    assert decision.change is not None
    return Decision(decision.answer, msgspec.structs.replace(decision.change, not_after=grant.expires_at - 1))


def has_live_grant(row: Execution, now: int) -> bool:
    """True if the grant slot is in use. A grant is expired at its last millisecond."""
    return row.granted_until is not None and row.granted_until > now


def holds_admitted_grant(row: Execution | None) -> bool:
    """True if the row has quotas and was granted after they had admitted it.

    A quota slot may expire before the grant does, so redeeming the grant requests the slot again.
    """
    if row is None or not decode_terms(row.terms).quota_policy_ids:
        return False
    grant = stored_grant(row)
    return grant is not None and grant.admitted


def stored_grant(row: Execution) -> Grant | None:
    """Return the grant in the slot, live or expired. Raises `Corruption` if the stored text is not a grant."""
    try:
        return None if row.grant is None else msgspec.json.decode(row.grant, type=Grant)
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: grant: {fault}") from fault


def is_route_blocked(row: Execution) -> bool:
    """True if the row waits for a worker with its capabilities."""
    return row.eligibility_state is EligibilityState.BLOCKED_BY_ROUTE


def grant_for(row: Execution, holder: LeaseHolder, now: int, proof: GrantProof | None) -> Grant | errors.FabricError:
    """Return the grant that this holder may redeem, or why it may not."""
    grant = stored_grant(row)
    if grant is None or grant.worker_id != holder.worker_id:
        return errors.InvalidClaimGrant(execution_id=row.execution_id)
    if grant.expires_at <= now:
        return errors.ClaimGrantExpired(execution_id=row.execution_id)
    if proof is not None and not proof.covers(grant, now):
        return errors.InvalidClaimGrant("key does not match the grant", execution_id=row.execution_id)
    return grant
