"""Fences: only the holder of the live lease may act.

A caller presents a lease id, an epoch and an attempt id. A caller whose lease expired, was revoked or was replaced is
refused; an expiry that is found here is marked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import (
    Change,
    Patch,
    expired,
    lease_event,
    seen,
)
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    LifecyclePhase,
    OwnershipState,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import cleanup
from flowfabric.rules.scheduling import queue

OPERATOR_OVERRIDE = "operator_override"

# Hot path: a module constant is found faster than an enum member.
_ACTIVE, _REVOKED = LifecyclePhase.ACTIVE, OwnershipState.LEASE_REVOKED
_EXPIRED = OwnershipState.LEASE_EXPIRED_RECLAIMABLE


class Fence(msgspec.Struct, frozen=True, gc=False):
    """The lease identity that a caller presents; parts may be missing."""

    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None

    @classmethod
    def of(cls, fields: HandleFields) -> Fence:
        """Return the lease identity in a handle."""
        return cls(fields.lease_id, fields.lease_epoch, fields.attempt_id)


def resolve_fence(row: Execution, fence: Fence, source: str | None) -> Fence | errors.FabricError:
    """Return the full triple to compare: the caller's, or the current one for an operator override."""
    missing = (fence.lease_id, fence.lease_epoch, fence.attempt_id).count(None)
    if not missing:
        return fence
    if missing < 3:
        return errors.InvalidInput("partial_fence_triple")
    if source == OPERATOR_OVERRIDE:
        return Fence(row.lease_id, row.lease_epoch, row.attempt_id)
    return errors.InvalidInput("fence_required")


def not_active_error(row: Execution) -> errors.FabricError:
    """Return the refusal for a row that is not active. Its facts let a caller recognise its own lost reply."""
    return errors.ExecutionNotActive(
        terminal_outcome=row.terminal_outcome,
        lease_epoch=row.lease_epoch,
        lifecycle_phase=row.lifecycle_phase,
        attempt_id=row.attempt_id or "",
        execution_id=row.execution_id,
    )


def stale_lease_error(row: Execution) -> errors.FabricError:
    """Return the refusal for a caller whose lease was replaced by a newer one."""
    return errors.StaleLease(execution_id=row.execution_id, lease_epoch=row.lease_epoch)


def check_lease(row: Execution, fence: Fence, now: int) -> Decision[Any] | None:
    """Return the refusal for a fence that does not hold the live lease, None if it does. An expiry found here is
    marked."""
    if row.lifecycle_phase is not _ACTIVE:
        return refuse(not_active_error(row))
    if row.ownership_state is _REVOKED:
        return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
    if has_expired(row, now):
        return Decision(errors.LeaseExpired(execution_id=row.execution_id), mark_expired(row))
    if (fence.lease_id, fence.lease_epoch, fence.attempt_id) != (row.lease_id, row.lease_epoch, row.attempt_id):
        return refuse(stale_lease_error(row))
    return None


def check_fence(row: Execution, fence: Fence, source: str | None, now: int) -> Decision[Any] | None:
    """Resolve the fence, then check it against the live lease; None if it holds."""
    resolved = resolve_fence(row, fence, source)
    return refuse(resolved) if isinstance(resolved, errors.FabricError) else check_lease(row, resolved, now)


def has_expired(row: Execution, now: int) -> bool:
    """True if the lease was marked as expired or its time is up. A lease is dead at its last millisecond."""
    if row.ownership_state is _EXPIRED:
        return True
    return row.lease_expires_at is not None and row.lease_expires_at <= now


def mark_expired(row: Execution) -> Change | None:
    """Return the change that marks the lease as expired and makes the row reclaimable; None if it is marked already."""
    if row.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
        return None
    fields = {
        "ownership_state": OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
        "blocking_reason": BlockingReason.WAITING_FOR_WORKER,
        "blocking_text": "lease expired, awaiting reclaim",
        "attempt_state": AttemptState.ATTEMPT_INTERRUPTED,
        "lease_expired_at": NOW,
        "last_mutation_at": NOW,
        "line": queue.takeover_queue(row),
    }
    return Change(
        guards=(seen(row, expired(row)),),
        writes=(Patch(Execution, (row.execution_id,), fields), *cleanup.close_stream(row, cleanup.LEASE_EXPIRED)),
        events=(lease_event(row, "expired"),),
    )
