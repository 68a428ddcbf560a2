"""Durable steps: the result or failure of a step is recorded once, by the holder of the lease.

A result is stored under the step's name, a failure under `failed:<step>`. The first of them is the answer to every
later record of the step, so that no step has both. Counted tries and the start of a step (`tries:`, `began:`) are
replaced by their next record.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo, StepState
from flowfabric.model.instant import NOW
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence


class MemoArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a durable function records once, by name and occurrence."""

    name: str
    occurrence: int = 0
    result: bytes = b"null"
    encoding: str | None = None
    digest: str | None = None
    number: int | None = None
    started_at: int | None = None


def record_step(
    row: Execution | None,
    done: StepMemo | None,
    failed: StepMemo | None,
    memo: StepMemo,
    fence: Fence,
    now: int,
) -> Decision[StepMemo]:
    """Record a step's result, failure, tries or start. A result or failure recorded before stays and is the answer."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if (known := done or failed) is not None:
        return Decision(known)
    draft = msgspec.structs.replace(memo, recorded_at=NOW)
    writes: tuple[Write, ...]
    match memo.state:
        case StepState.DONE | StepState.LEFT | StepState.FACT:
            writes = (Insert(draft), *mark_has_steps(row))
        case StepState.FAILED:
            # Writing the row makes a result conflict that another process records on its cached copy of the row.
            mark = Patch(Execution, (row.execution_id,), {"has_steps": True, "last_mutation_at": NOW})
            writes = (Insert(draft), mark)
        case StepState.TRIES | StepState.BEGAN:
            writes = (Upsert(draft), *mark_has_steps(row))
    change = Change(guards=(seen(row, live(row)),), writes=writes)
    return Decision(lambda now: msgspec.structs.replace(memo, recorded_at=now), change)


def in_order(memos: Iterable[StepMemo]) -> list[StepMemo]:
    """Sort memos by the time at which their steps began; without one, by the time of the record."""
    return sorted(
        memos,
        key=lambda memo: (
            memo.recorded_at if memo.started_at is None else memo.started_at,
            memo.number or 0,
            memo.name,
            memo.occurrence,
        ),
    )


def mark_has_steps(row: Execution) -> tuple[Write, ...]:
    """Return the write that marks the execution as having step memos, for the change that writes the first."""
    return () if row.has_steps else (Patch(Execution, (row.execution_id,), {"has_steps": True}),)
