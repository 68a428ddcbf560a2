"""Retention: a finished execution goes, with everything it owns, when its time is over."""

from __future__ import annotations

import msgspec

from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.flow import Dependency
from flowfabric.model.states import LifecyclePhase
from flowfabric.rules.change import Change, Decision, Delete, seen

OWNED: tuple[type[msgspec.Struct], ...] = (Attempt, Result, Payload, Dependency)


def purge(row: Execution | None, now: int) -> Decision[bool]:
    """Delete a finished execution that has been kept long enough; True when it went."""
    if row is None or row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return Decision(False)
    if row.purge_at is None or row.purge_at > now:
        return Decision(False)
    key = (row.execution_id,)
    writes = (*(Delete(owned, key) for owned in OWNED), Delete(Execution, key))
    return Decision(True, Change(guards=(seen(row),), writes=writes, not_before=row.purge_at))
