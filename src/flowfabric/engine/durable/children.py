"""Operations of a parent on its children: spawn them under its lease."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric import errors
from flowfabric.engine.operations.create import defaults_of
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleFields
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.model.gate import StepMemo
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import spawn as spawn_rules
from flowfabric.rules.durable.spawn import SpawnAnswer, SpawnRows
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.fences import Fence

MAX_CHILDREN_PER_SPAWN = 200


class ChildSpawner:
    """Operations of the holder of a lease on its children."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def spawn(
        self, handle: Handle, asks: Sequence[CreateExecution], memos: Sequence[MemoArgs]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create children of the held execution, and record each under its memo in the change that creates it."""
        fields = self.runtime.handle_fields(handle)
        checked = [validate.validate_create(ask) for ask in validate.validate_iterable("asks", asks)]
        records = [validate_suspension.step_memo(fields, memo) for memo in validate.validate_iterable("memos", memos)]
        if len(checked) != len(records):
            raise errors.InvalidInput(f"memos: {len(records)} for {len(checked)} children")
        if len({(memo.name, memo.occurrence) for memo in records}) < len(records):
            raise errors.InvalidInput("memos: one of them twice")
        if len({ask.execution_id for ask in checked}) < len(checked):
            raise errors.InvalidInput("asks: one child twice")
        done: list[answers.Created | answers.Duplicate] = []
        for start in range(0, len(checked), MAX_CHILDREN_PER_SPAWN):
            end = start + MAX_CHILDREN_PER_SPAWN
            done += await self._spawn_batch(fields, checked[start:end], records[start:end])
        return done

    async def _spawn_batch(
        self, fields: HandleFields, asks: Sequence[CreateExecution], memos: Sequence[StepMemo]
    ) -> list[SpawnAnswer]:
        execution, reads = fields.execution_id, ReadSet()
        parent = reads.one(Execution, execution)
        children = reads.each(Execution, ((ask.execution_id,) for ask in asks))
        keys = reads.each(IdempotencyKey, ((ask.partition, ask.digest) for ask in asks if ask.idempotency_key))
        known = reads.each(StepMemo, ((execution, memo.name, memo.occurrence) for memo in memos))

        def decide(rows: Rows, now: int) -> Decision[list[SpawnAnswer]]:
            spawn_rows = SpawnRows(
                parent(rows),
                {found.execution_id: found for found in children(rows) if found is not None},
                {found.digest: found for found in keys(rows) if found is not None},
                {(found.name, found.occurrence): found for found in known(rows) if found is not None},
            )
            return spawn_rules.spawn(spawn_rows, asks, memos, Fence.of(fields), now, defaults=defaults_of(self.runtime))

        cached = self.runtime._lease_cache.get(execution)
        knows_lanes = all(self.runtime.knows_lane(ask.lane_id) for ask in asks)
        return await self.runtime.decide_and_commit(
            reads, decide, assumed_rows=reads.assume(parent, cached) if cached is not None and knows_lanes else None
        )
