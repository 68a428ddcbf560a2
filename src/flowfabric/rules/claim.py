"""Grants and claims: how a worker comes to hold an execution.

A grant offers one execution to one worker for a while; it reserves nothing, and the state checks of the claim come
before it. Only `worker_id` binds a grant: another instance of the same worker may redeem it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers import Granted
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, Grant
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.rules import capabilities, lease, operate, place, step
from flowfabric.rules.change import NOW, Change, Decision, Patch, refuse, seen
from flowfabric.rules.lease import Holder
from flowfabric.rules.policy import decode_terms
from flowfabric.rules.tokens import GrantProof


class Acquired(msgspec.Struct, frozen=True):
    """A lease that was just taken; the engine makes a handle of it."""

    execution_id: str
    lease_id: str
    lease_epoch: int
    attempt_index: int
    attempt_id: str
    attempt_type: AttemptType
    lease_expires_at: int
    lease_ttl_ms: int
    lane_id: str
    current_lane: str  # as the claim called it, which may be another one
    worker_instance_id: str
    reclaim_count: int = 0  # how often the execution has been reclaimed with this one; 0 when it was not now


class GrantOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for a grant, with what to show for it."""

    worker_id: str
    worker_instance_id: str
    lane_id: str
    capabilities: frozenset[str]
    grant_ttl_ms: int
    capability_hash: str | None = None
    route_snapshot_json: str | None = None
    admission_summary: str | None = None
    admitted: bool = False  # budgets and quotas have let the execution run


KeyMaker = Callable[[Execution, GrantOrder, int], str]  # signs a grant key for an expiry; returns the stored key id


def issue_claim_grant(
    row: Execution | None,
    order: GrantOrder,
    now: int,
    sign: KeyMaker | None = None,
    *,
    unblocking: bool = False,
) -> Decision[Granted]:
    """Offer a claimable execution to a worker; it stays claimable and in its place until the grant is used.

    `unblocking` also offers what is blocked by route, and unblocks it in the same step: here is a capable worker.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if not operate.is_eligible(row) and not (unblocking and _is_route_blocked(row)):
        return refuse(errors.ExecutionNotEligible(execution_id=row.execution_id))
    if live_grant(row, now):
        return refuse(errors.GrantAlreadyExists(execution_id=row.execution_id))
    if order.lane_id != row.lane_id:
        return refuse(errors.ExecutionNotInEligibleSet(execution_id=row.execution_id))
    if refused := capabilities.check_presented(",".join(order.capabilities)):
        return refuse(refused)
    if missing := capabilities.missing(row.required_capabilities, order.capabilities):
        return mismatch(row, errors.CapabilityMismatch(missing, execution_id=row.execution_id))
    return Decision(Granted(row.execution_id), granted(row, order, "claim", now, sign))


def mismatch(row: Execution, answer: Any) -> Decision[Any]:
    """Say no to a worker that lacks a capability, and note when that happened."""
    patch = Patch(Execution, (row.execution_id,), {"last_capability_mismatch_at": NOW, "last_mutation_at": NOW})
    return Decision(answer, Change(guards=(seen(row),), writes=(patch,)))


def granted(row: Execution, order: GrantOrder, kind: str, now: int, sign: KeyMaker | None) -> Change:
    """The change that puts a grant into the execution's one slot."""
    expires_at = now + order.grant_ttl_ms
    grant = Grant(
        kind=kind,
        worker_id=order.worker_id,
        worker_instance_id=order.worker_instance_id,
        lane_id=order.lane_id,
        created_at=now,
        expires_at=expires_at,
        key_id=sign(row, order, expires_at) if sign else "",
        capability_hash=order.capability_hash,
        route_snapshot_json=order.route_snapshot_json,
        admission_summary=order.admission_summary,
        admitted=order.admitted,
    )
    fields = {
        "grant": msgspec.json.encode(grant).decode(),
        "granted_until": expires_at,
        "last_mutation_at": NOW,
    }
    patch = Patch(Execution, (row.execution_id,), fields)
    if _is_route_blocked(row):
        patch = step.moved(row, operate.unblocked(row) | fields)
    return Change(guards=(seen(row),), writes=(patch,))


def claim_execution(
    row: Execution | None,
    holder: Holder,
    now: int,
    *,
    attempt_timeout_ms: int | None = None,
    execution_deadline_at: int | None = None,
    proof: GrantProof | None = None,
) -> Decision[Acquired]:
    """Redeem a grant by beginning a new attempt; with `proof`, only if it covers the grant."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := _leaseable(row):
        return refuse(refused)
    if row.attempt_state is AttemptState.RUNNING_ATTEMPT:
        return refuse(errors.ActiveAttemptExists(execution_id=row.execution_id))
    if row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return refuse(errors.UseClaimResumedExecution(execution_id=row.execution_id))
    grant = _grant_for(row, holder, now, proof)
    if isinstance(grant, errors.FabricError):
        return refuse(grant)
    begun = begin_attempt(row, holder, attempt_timeout_ms=attempt_timeout_ms, deadline_at=execution_deadline_at)
    return while_granted(begun, grant)


def claim_resumed_execution(
    row: Execution | None,
    holder: Holder,
    now: int,
    *,
    remaining_attempt_timeout_ms: int | None = None,
    proof: GrantProof | None = None,
) -> Decision[Acquired]:
    """Redeem a grant by going on with the interrupted attempt; its id and index stay."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return refuse(errors.ExecutionNotLeaseable(execution_id=row.execution_id))
    if row.attempt_state is not AttemptState.ATTEMPT_INTERRUPTED:
        return refuse(errors.NotAResumedExecution(execution_id=row.execution_id))
    if refused := _leaseable(row):
        return refuse(refused)
    grant = _grant_for(row, holder, now, proof)
    if isinstance(grant, errors.ClaimGrantExpired):
        fields = {"grant": None, "granted_until": None, "last_mutation_at": NOW}
        patch = Patch(Execution, (row.execution_id,), fields)
        return Decision(grant, Change(guards=(seen(row),), writes=(patch,)))
    if isinstance(grant, errors.FabricError):
        return refuse(grant)
    return while_granted(continue_attempt(row, holder, "claim_resumed", remaining_attempt_timeout_ms), grant)


def claim_waiting(row: Execution, holder: Holder, offered: frozenset[str], now: int) -> Decision[Acquired | None]:
    """The ordinary claim's form: no grant is needed, but one in force for somebody is respected.

    What waits for a capable worker only is claimed as well: here is one.
    """
    waits = operate.is_eligible(row) or _is_route_blocked(row)
    if not waits or row.ownership_state is not OwnershipState.UNOWNED or live_grant(row, now):
        return Decision(None)
    if capabilities.missing(row.required_capabilities, offered):
        return Decision(None)
    if row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return continue_attempt(row, holder, "claim_resumed", None)
    return begin_attempt(row, holder)


def issue_grant_and_claim(row: Execution | None, holder: Holder, now: int) -> Decision[Acquired]:
    """The operator's one-step claim: no capability, budget or quota is asked for, and no grant remains."""
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
    if live_grant(row, now):
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
    holder: Holder,
    *,
    reason: str | None = None,
    attempt_timeout_ms: int | None = None,
    deadline_at: int | None = None,
) -> Decision[Acquired]:
    """A new attempt under a new lease; of the type that the row has been waiting for."""
    attempt_type = place.NEXT_TYPE.get(row.attempt_state, AttemptType.INITIAL)
    policy_timeout = decode_terms(row.terms).attempt_timeout_ms
    timeout = policy_timeout if attempt_timeout_ms is None else attempt_timeout_ms
    fields = lease.acquire(row, holder, attempt_type, lease.decode_lineage(row.lineage), timeout)
    if deadline_at:
        fields["deadline_at"] = deadline_at
    return acquired(row, holder, fields, "acquired", reason=reason, attempt_type=attempt_type)


def continue_attempt(row: Execution, holder: Holder, reason: str, timeout_ms: int | None) -> Decision[Acquired]:
    """The interrupted attempt under a new lease, with the time it had left unless the claim names another."""
    timeout = row.next_timeout_ms if timeout_ms is None else timeout_ms
    fields = lease.acquire(row, holder, None, None, timeout)
    return acquired(row, holder, fields, "acquired", reason=reason, attempt_type=row.attempt_type)


def acquired(
    row: Execution,
    holder: Holder,
    fields: dict[str, Any],
    event: str,
    *,
    attempt_type: AttemptType | None,
    reason: str | None = None,
    details: str | None = None,
    also: tuple[Any, ...] = (),
) -> Decision[Acquired]:
    """The decision that gives the row these fields and tells of the new lease."""
    epoch = row.lease_epoch + 1
    index = fields.get("attempt_index", row.attempt_index) or 0
    attempt_id = fields.get("attempt_id", row.attempt_id) or ""
    told = Event(
        execution_id=row.execution_id,
        namespace=row.namespace,
        tags=row.tags,
        flow_id=row.flow_id,
        lease=event,
        lease_id=holder.lease_id,
        lease_epoch=epoch,
        attempt_id=attempt_id,
        attempt_index=index,
        worker_id=holder.worker_id,
        worker_instance_id=holder.worker_instance_id,
        reason=reason,
        details=details,
    )
    change = Change(guards=(seen(row),), writes=(Patch(Execution, (row.execution_id,), fields), *also), events=(told,))
    kind = attempt_type or AttemptType.INITIAL

    def answer(now: int) -> Acquired:
        return Acquired(
            row.execution_id,
            holder.lease_id,
            epoch,
            index,
            attempt_id,
            kind,
            now + holder.lease_ttl_ms,
            holder.lease_ttl_ms,
            row.lane_id,
            fields["current_lane"],
            holder.worker_instance_id,
            fields.get("lease_reclaim_count", 0),
        )

    return Decision(answer, change)


def while_granted(decision: Decision[Acquired], grant: Grant) -> Decision[Acquired]:
    """The same decision, to be written only while the grant that it redeems is good."""
    assert decision.change is not None
    return Decision(decision.answer, msgspec.structs.replace(decision.change, not_after=grant.expires_at - 1))


def live_grant(row: Execution, now: int) -> bool:
    """Whether the execution's grant slot is taken; a grant dies at its last millisecond."""
    return row.granted_until is not None and row.granted_until > now


def holds_admitted_grant(row: Execution | None) -> bool:
    """True if an execution with quotas was granted after these had admitted it.

    A slot may lapse before the grant does. So the slot is asked for again when the grant is redeemed.
    """
    if row is None or not decode_terms(row.terms).quota_policy_ids:
        return False
    grant = stored_grant(row)
    return grant is not None and grant.admitted


def stored_grant(row: Execution) -> Grant | None:
    """The grant in the slot, in force or lapsed; `Corruption` when what is kept is none."""
    try:
        return None if row.grant is None else msgspec.json.decode(row.grant, type=Grant)
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: grant: {fault}") from fault


def _is_route_blocked(row: Execution) -> bool:
    return row.eligibility_state is EligibilityState.BLOCKED_BY_ROUTE


def _leaseable(row: Execution) -> errors.FabricError | None:
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return errors.ExecutionNotLeaseable(execution_id=row.execution_id)
    if row.ownership_state is not OwnershipState.UNOWNED:
        return errors.LeaseConflict(execution_id=row.execution_id)
    if row.eligibility_state is not EligibilityState.ELIGIBLE_NOW:
        return errors.ExecutionNotLeaseable(execution_id=row.execution_id)
    if row.terminal_outcome is not TerminalOutcome.NONE:
        return errors.ExecutionNotLeaseable(execution_id=row.execution_id)
    return None


def _grant_for(row: Execution, holder: Holder, now: int, proof: GrantProof | None) -> Grant | errors.FabricError:
    grant = stored_grant(row)
    if grant is None or grant.worker_id != holder.worker_id:
        return errors.InvalidClaimGrant(execution_id=row.execution_id)
    if grant.expires_at <= now:
        return errors.ClaimGrantExpired(execution_id=row.execution_id)
    if proof is not None and not proof.covers(grant, now):
        return errors.InvalidClaimGrant("not its key", execution_id=row.execution_id)
    return grant
