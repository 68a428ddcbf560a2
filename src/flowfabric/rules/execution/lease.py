"""Leases: who may write, and how a lease is acquired, released and expires.

Every lease-bound operation checks in the same order (execution.md 4.0): is the execution active, was the lease revoked,
has it expired, does the caller hold it. Expiry comes before staleness: a stale caller gets `lease_expired` if the
current lease has expired as well, and the same decision marks the expiry.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import (
    ColumnRef,
    Condition,
    IfSet,
    Insert,
    Parameter,
    Plus,
    RowTemplate,
    lease_event,
    template_fields,
)
from flowfabric.model.execution import Attempt, Execution, Lineage
from flowfabric.model.instant import NOW
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.fences import Fence, check_fence, stale_lease_error

INTERRUPTED_LEASE = frozenset({OwnershipState.LEASE_EXPIRED_RECLAIMABLE, OwnershipState.LEASE_REVOKED})


CLAIMED_FIELDS: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.ACTIVE,
    "ownership_state": OwnershipState.LEASED,
    "eligibility_state": EligibilityState.NOT_APPLICABLE,
    "blocking_reason": BlockingReason.NONE,
    "attempt_state": AttemptState.RUNNING_ATTEMPT,
    "public_state": PublicState.ACTIVE,
    "blocking_text": None,
    "line": None,
    "granted_until": None,
    "grant": None,
    "delay_until": None,
    "blocked_on": None,
    "blocked_at": None,
    "attempt_suspended_at": None,
    "attempt_suspension": None,
    "lease_expired_at": None,
    "lease_revoked_at": None,
    "lease_revoke_reason": None,
}


ACQUIRED, CLAIM_RESUMED = "acquired", "claim_resumed"  # the event of a claim; its reason if it continues an attempt

COLUMNS: dict[str, Any] = {name: ColumnRef(name) for name in Execution.__struct_fields__}


def _if_begins(then: Any, otherwise: Any) -> IfSet:
    """Return a value that depends on whether the claim begins an attempt or continues one."""
    return IfSet("next_type", then, otherwise)


# A claim of a ready row by the store. `acquire` is the same for all other ways to acquire a lease.
CLAIM = RowTemplate(
    Execution,
    fields={
        **CLAIMED_FIELDS,
        "lease_id": Parameter("lease_id"),
        "lease_epoch": Plus(ColumnRef("lease_epoch"), 1),
        "worker_id": Parameter("worker_id"),
        "worker_instance_id": Parameter("worker_instance_id"),
        "current_lane": ColumnRef("lane_id"),
        "lease_acquired_at": NOW,
        "lease_renewed_at": NOW,
        "lease_expires_at": Plus(NOW, Parameter("lease_ttl_ms")),
        "attempt_timeout_at": Plus(NOW, ColumnRef("next_timeout_ms")),
        "last_transition_at": NOW,
        "last_mutation_at": NOW,
        "started_at": IfSet("started_at", ColumnRef("started_at"), NOW),
        "attempt_id": _if_begins(Parameter("attempt_id"), ColumnRef("attempt_id")),
        "attempt_index": _if_begins(ColumnRef("total_attempt_count"), ColumnRef("attempt_index")),
        "attempt_type": _if_begins(ColumnRef("next_type"), ColumnRef("attempt_type")),
        "attempt_started_at": _if_begins(NOW, ColumnRef("attempt_started_at")),
        "attempt_resumed_at": _if_begins(None, NOW),
        "total_attempt_count": _if_begins(Plus(ColumnRef("total_attempt_count"), 1), ColumnRef("total_attempt_count")),
    },
    event={
        **asdict(lease_event(Execution(**COLUMNS), ACQUIRED)),
        "reason": IfSet("attempt_resumed_at", CLAIM_RESUMED, None),
    },
)

# A renewal of a lease by the store. `check_renewal` says why a lease does not meet the condition.
RENEWAL = RowTemplate(
    Execution,
    fields={"lease_expires_at": Plus(NOW, Parameter("lease_ttl_ms")), "lease_renewed_at": NOW},
    event=asdict(lease_event(Execution(**COLUMNS), "renewed")),
    condition=Condition(
        equal={
            "attempt_index": Parameter("attempt_index"),
            "attempt_id": Parameter("attempt_id"),
            "lease_id": Parameter("lease_id"),
            "lease_epoch": Parameter("lease_epoch"),
            "lease_expired_at": None,
        },
        future=("lease_expires_at",),
    ),
)


class LeaseHolder(msgspec.Struct, frozen=True, gc=False):
    """The worker that acquires a lease, with the new ids and the lease duration."""

    worker_id: str
    worker_instance_id: str
    lane_id: str
    lease_id: str
    attempt_id: str
    lease_ttl_ms: int


def acquire(
    row: Execution, holder: LeaseHolder, attempt_type: AttemptType | None, timeout_ms: int | None
) -> dict[str, Any]:
    """Return the columns of a newly leased row; `attempt_type` begins an attempt, None continues the current one."""
    claimed = replace(
        row, lane_id=holder.lane_id or row.lane_id, next_type=attempt_type, next_timeout_ms=timeout_ms or None
    )
    return template_fields(CLAIM, claimed, asdict(holder))


def handle_fields(row: Execution, lease_ttl_ms: int) -> HandleFields:
    """Return the content of a handle of the row's current lease."""
    return HandleFields(
        row.execution_id,  # type: ignore[arg-type]
        row.attempt_index or 0,
        row.attempt_id,  # type: ignore[arg-type]
        row.lease_id,  # type: ignore[arg-type]
        row.lease_epoch,
        lease_ttl_ms,
        row.current_lane or row.lane_id,  # type: ignore[arg-type]
        row.worker_instance_id,  # type: ignore[arg-type]
    )


def release(row: Execution) -> dict[str, Any]:
    """Return the columns of a row whose lease ended. Ids, epoch and index stay as the record of the last lease."""
    return {**RELEASED_FIELDS, **LEASE_FIELDS.clear(row)}


class ClearableFields:
    """A group of nullable columns that are reset together."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._values = attrgetter(*names)
        self._none = (None,) * len(names)

    def clear(self, row: Execution) -> dict[str, None]:
        """Return `None` for the columns that are set, so that a change writes no column needlessly."""
        values = self._values(row)
        if values == self._none:
            return {}
        return {name: None for name, value in zip(self.names, values, strict=True) if value is not None}


RELEASED_FIELDS: dict[str, Any] = {"ownership_state": OwnershipState.UNOWNED, "lease_expires_at": None}
LEASE_FIELDS = ClearableFields(
    "attempt_timeout_at", "line", "lease_expired_at", "lease_revoked_at", "lease_revoke_reason"
)


def has_open_attempt(row: Execution) -> bool:
    """True if the current attempt has not ended."""
    return row.attempt_state in (AttemptState.RUNNING_ATTEMPT, AttemptState.ATTEMPT_INTERRUPTED)


def holds_successful_attempt(row: Execution) -> bool:
    """True if the current attempt ended this execution successfully. Such an attempt has no row of its own."""
    return row.terminal_outcome is TerminalOutcome.SUCCESS and row.attempt_index is not None


def attempt_record(
    row: Execution,
    state: AttemptRecordState,
    *,
    reason: str | None = None,
    category: str | None = None,
    failure: str | None = None,
    ended_at: int | None = None,
) -> Insert:
    """Return the insert that turns the current attempt into a row, when it ends or a new attempt replaces it."""
    return Insert(
        Attempt(
            execution_id=row.execution_id,
            attempt_index=row.attempt_index or 0,
            attempt_id=row.attempt_id or "",
            attempt_type=row.attempt_type or AttemptType.INITIAL,
            attempt_state=state,
            started_at=row.attempt_started_at or 0,
            lease_id=row.lease_id or "",
            lease_epoch=row.lease_epoch,
            worker_id=row.worker_id or "",
            worker_instance_id=row.worker_instance_id or "",
            lineage=row.lineage,
            suspended_at=row.attempt_suspended_at,
            suspension_id=row.attempt_suspension,
            resumed_at=row.attempt_resumed_at,
            ended_at=NOW if ended_at is None else ended_at,
            failure_reason=reason,
            failure_category=category,
            failure=failure,
        )
    )


def encode_lineage(lineage: Lineage | None) -> str | None:
    """Encode lineage as stored text; an empty lineage is None."""
    return None if lineage in (None, Lineage()) else msgspec.json.encode(lineage).decode()


def decode_lineage(text: str | None) -> Lineage:
    """Decode stored lineage. Raises `Corruption` if the text is not a lineage."""
    try:
        return Lineage() if text is None else msgspec.json.decode(text, type=Lineage)
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: lineage: {fault}") from fault


def check_renewal(row: Execution | None, attempt_index: int, fence: Fence, now: int) -> Decision[None]:
    """Refuse a renewal with the reason, or accept it. The store renews by itself if the condition of `RENEWAL` holds.

    An operator override does not count: only the lease holder may renew.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := check_fence(row, fence, None, now):
        return refused
    return Decision(None) if attempt_index == row.attempt_index else refuse(stale_lease_error(row))


class AcquiredLease(msgspec.Struct, frozen=True):
    """A lease that was just acquired; the engine makes a handle of it."""

    execution_id: str
    lease_id: str
    lease_epoch: int
    attempt_index: int
    attempt_id: str
    attempt_type: AttemptType
    lease_expires_at: int
    lease_ttl_ms: int
    lane_id: str
    current_lane: str  # the lane named by the claim, which may differ from `lane_id`
    worker_instance_id: str
    reclaim_count: int = 0  # reclaims including this one; 0 if this claim was no reclaim
    life: int = 0
