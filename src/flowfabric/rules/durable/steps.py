"""Durable steps: the result of a step is recorded once, by the holder of the lease."""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo
from flowfabric.model.instant import NOW
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence


def record_step(
    row: Execution | None, known: StepMemo | None, memo: StepMemo, fence: Fence, now: int
) -> Decision[StepMemo]:
    """Record a step's result. If a result was recorded before, it stays and is the answer."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if known is not None:
        return Decision(known)
    insert = Insert(msgspec.structs.replace(memo, recorded_at=NOW))
    marks = () if row.has_steps else (Patch(Execution, (row.execution_id,), {"has_steps": True}),)
    change = Change(guards=(seen(row, live(row)),), writes=(insert, *marks))
    return Decision(lambda now: msgspec.structs.replace(memo, recorded_at=now), change)
