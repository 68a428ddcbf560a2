"""Notes on an execution that change no state: progress and tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers import ProgressNoted
from flowfabric.model.execution import Execution
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.rules import lease
from flowfabric.rules.change import NOW, Change, Decision, LeaseCheck, Patch, live, refuse, seen
from flowfabric.rules.lease import Fence
from flowfabric.rules.tags import check_tags_size


def progress(
    row: Execution | None, fence: Fence, pct: int | None, message: str | None, now: int
) -> Decision[ProgressNoted]:
    """Overwrite what is given and keep the rest; a lapsed lease is refused without being marked."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return refuse(lease.not_active(row))
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return refuse(errors.LeaseRevoked(execution_id=row.execution_id))
    if lease.has_lapsed(row, now):
        return refuse(errors.LeaseExpired(execution_id=row.execution_id))
    if (fence.lease_id, fence.lease_epoch) != (row.lease_id, row.lease_epoch):
        return refuse(lease.stale(row))
    fields: dict[str, Any] = {"progress_updated_at": NOW, "last_mutation_at": NOW}
    if pct is not None:
        fields["progress_pct"] = pct
    if message:
        fields["progress_message"] = message
    change = Change(guards=(seen(row, live(row)),), writes=(Patch(Execution, (row.execution_id,), fields),))
    return Decision(ProgressNoted(row.execution_id), change)


def set_tags(row: Execution | None, tags: Mapping[str, str], held: LeaseCheck | None = None) -> Decision[int]:
    """Upsert tags; events from now on carry them. `held` is a lease that has to run when they are written."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    merged = read_tags(row.tags) | dict(tags)
    if too_large := check_tags_size(merged):
        return refuse(too_large)
    fields = {"tags": write_tags(merged), "last_mutation_at": NOW}
    change = Change(guards=(seen(row, held),), writes=(Patch(Execution, (row.execution_id,), fields),))
    return Decision(len(tags), change)


def read_tags(text: str | None) -> dict[str, str]:
    """Tags as a mapping, in key order; `Corruption` when what is kept are none."""
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"exec_core: tags: {fault}") from fault


def write_tags(tags: Mapping[str, str]) -> str | None:
    """Tags as the text that the sheet and its events keep; no tags are no text."""
    return msgspec.json.encode(dict(sorted(tags.items()))).decode() if tags else None
