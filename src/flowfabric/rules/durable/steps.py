"""Durable steps: what a step returned is remembered once, by whoever held the lease then."""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, from_now, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.lease import Fence


def record_step(
    row: Execution | None, known: StepMemo | None, memo: StepMemo, fence: Fence, now: int
) -> Decision[StepMemo]:
    """Remember a step's result; one that is remembered already stands, and is the answer."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := lease.check_lease(row, fence, now):
        return refused
    if known is not None:
        return Decision(known)
    kept = Insert(msgspec.structs.replace(memo, recorded_at=from_now(0)))
    mark = () if row.has_steps else (Patch(Execution, (row.execution_id,), {"has_steps": True}),)
    change = Change(guards=(seen(row, live(row)),), writes=(kept, *mark))
    return Decision(lambda now: msgspec.structs.replace(memo, recorded_at=now), change)
