"""Spawn: a durable function creates children and records each in the same change.

So a child that was created is remembered even if the parent dies next: a replay finds it by its memo and input, also
after it was purged, and makes no second one. The change is fenced by the parent's lease, so that no child appears after
its parent was cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.change import Change, Insert, Write, live, merge_changes, seen
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.model.gate import StepMemo
from flowfabric.model.instant import NOW
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable.steps import mark_has_steps
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.create import NO_DEFAULTS, CreateExecution, PolicyDefaults, create
from flowfabric.rules.execution.fences import Fence

SpawnAnswer = Created | Duplicate


class SpawnRows(msgspec.Struct, frozen=True):
    """The rows that a spawn is decided on: by child id, by digest of a key, and by name and occurrence of a memo."""

    parent: Execution | None
    children: Mapping[str, Execution] = {}
    keys: Mapping[str, IdempotencyKey] = {}
    memos: Mapping[tuple[str, int], StepMemo] = {}


def spawn(
    rows: SpawnRows,
    asks: Sequence[CreateExecution],
    memos: Sequence[StepMemo],
    fence: Fence,
    now: int,
    *,
    defaults: PolicyDefaults = NO_DEFAULTS,
) -> Decision[list[SpawnAnswer]]:
    """Create children and record them, all or none. A child that is recorded, or exists, is the answer as it is."""
    parent = rows.parent
    if parent is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(parent, fence, now):
        return refused
    answers: list[SpawnAnswer] = []
    changes: list[Change] = []
    writes: tuple[Write, ...] = ()
    for ask, memo in zip(asks, memos, strict=True):
        if (known := rows.memos.get((memo.name, memo.occurrence))) is not None:
            answers.append(Duplicate(child_of(known)))
            continue
        if ask.parent_id != parent.execution_id:
            return refuse(errors.InvalidInput("parent_id: not the execution of this lease"))
        key = rows.keys.get(ask.digest) if ask.idempotency_key else None
        decision = create(rows.children.get(ask.execution_id), key, ask, now, defaults=defaults)
        if isinstance(decision.answer, errors.FabricError):
            return refuse(decision.answer)
        answer = decision.unwrap(now)
        answers.append(answer)
        if decision.change is not None:
            changes.append(decision.change)
        child = msgspec.json.encode(answer.execution_id)
        writes += (Insert(msgspec.structs.replace(memo, recorded_at=NOW, result=child)),)
    if not writes:
        return Decision(answers)
    held = Change(guards=(seen(parent, live(parent)),))
    own = Change(guards=(), writes=(*writes, *mark_has_steps(parent)))
    return Decision(answers, merge_changes(held, *changes, own))


def child_of(memo: StepMemo) -> str:
    """Return the id of the child that a memo records."""
    return msgspec.json.decode(memo.result, type=str)
