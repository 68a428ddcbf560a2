"""Retention: a finished execution goes, with everything it owns, when its time is over."""

from __future__ import annotations

import msgspec

from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.states import LifecyclePhase
from flowfabric.rules.change import Change, Decision, Delete, seen
from flowfabric.rules.policy import decode_terms

OWNED: tuple[type[msgspec.Struct], ...] = (Attempt, Result, Payload)


def purge(row: Execution | None, now: int, default_ms: int | None = None) -> Decision[bool]:
    """Delete a finished execution that has been kept long enough; True when it went.

    How long that is was settled when it ended; `default_ms` stands in for the default of that time.
    """
    if row is None or row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return Decision(False)
    over_at = kept_until(row, default_ms)
    if over_at is None or over_at > now:
        return Decision(False)
    key = (row.execution_id,)
    writes = (*(Delete(owned, key) for owned in OWNED), Delete(Execution, key))
    return Decision(True, Change(guards=(seen(row),), writes=writes, not_before=over_at))


def kept_until(row: Execution, default_ms: int | None) -> int | None:
    """When a finished execution may go."""
    if default_ms is None or row.completed_at is None or decode_terms(row.terms).retention_ttl_ms is not None:
        return row.purge_at
    return row.completed_at + default_ms
