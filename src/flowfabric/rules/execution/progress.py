"""Progress: what the lease holder reports about running work; it changes no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import ProgressNoted
from flowfabric.model.change import Change, Patch, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence


def update_progress(
    row: Execution | None,
    fence: Fence,
    pct: int | None,
    message: str | None,
    now: int,
    counts: Mapping[str, int] | None = None,
) -> Decision[ProgressNoted]:
    """Overwrite the given parts and keep the others. An expired lease is refused but not marked as expired."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return refuse(fences.not_active_error(row))
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
    if fences.has_expired(row, now):
        return refuse(errors.LeaseExpired(execution_id=row.execution_id))
    if (fence.lease_id, fence.lease_epoch) != (row.lease_id, row.lease_epoch):
        return refuse(fences.stale_lease_error(row))
    fields: dict[str, Any] = {"progress_updated_at": NOW, "last_mutation_at": NOW}
    if pct is not None:
        fields["progress_pct"] = pct
    if message:
        fields["progress_message"] = message
    if counts is not None:
        fields["progress_counts"] = msgspec.json.encode(counts).decode()
    change = Change(guards=(seen(row, live(row)),), writes=(Patch(Execution, (row.execution_id,), fields),))
    return Decision(ProgressNoted(row.execution_id), change)


def decode_counts(row: Execution) -> dict[str, int]:
    """Return how often each branch of a durable function has reported; a plain task counts within an attempt."""
    if row.progress_counts is None or not (row.has_steps or row.has_waits):
        return {}
    return msgspec.json.decode(row.progress_counts, type=dict[str, int])
