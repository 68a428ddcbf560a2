"""Facts: operations that set and read what runs show."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import completion_topic, fact_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Fact, StepMemo
from flowfabric.model.states import LifecyclePhase
from flowfabric.rules import validation
from flowfabric.rules.durable import facts
from flowfabric.rules.durable.facts import FactArgs
from flowfabric.rules.execution.fences import Fence


class FactReading(msgspec.Struct, frozen=True):
    """A fact, if it is newer than what the reader has seen, and whether its run has ended."""

    fact: Fact | None
    has_ended: bool


class Facts:
    """Sets and reads the facts of executions."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def set_fact(self, handle: Handle, args: FactArgs) -> Fact:
        """Set a fact as the holder of the lease; a set that was counted before changes nothing."""
        fields, ask = self.runtime.handle_fields(handle), validate_suspension.validate_fact(args)
        execution, reads = fields.execution_id, ReadSet()
        row, fact = reads.one(Execution, execution), reads.one(Fact, execution, ask.name)
        counted = reads.one(StepMemo, execution, ask.memo_name, 0)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: facts.set_fact(row(rows), fact(rows), counted(rows), ask, Fence.of(fields), now),
        )

    async def read_fact(self, execution_id: str, name: str, *, after: int = 0, max_wait_ms: int = 0) -> FactReading:
        """Return a fact whose number is greater than `after`; wait for it, or for the end, up to `max_wait_ms`."""
        execution = validate.validate_execution_id(execution_id)
        fact_name = validate_suspension.validate_name("name", name)
        seen = validation.integer("after", after, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + validation.duration_ms("max_wait_ms", max_wait_ms, least=0) / 1000
        reads = ReadSet()
        row, fact = reads.one(Execution, execution), reads.one(Fact, execution, fact_name)
        while True:
            hint = self.runtime.wakeups.subscribe(fact_topic(execution), completion_topic(execution))
            try:
                rows = (await self.runtime.load(reads)).rows
                found, value = row(rows), fact(rows)
                if found is None:
                    raise errors.NotFound("execution", execution_id=execution)
                has_ended = found.lifecycle_phase is LifecyclePhase.TERMINAL
                is_new = value is not None and value.number > seen
                left = until - clock()
                if is_new or has_ended or left <= 0:
                    return FactReading(value if is_new else None, has_ended)
                await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
            finally:
                hint.cancel()

    async def list_facts(self, execution_id: str) -> list[Fact]:
        """Return the facts of an execution by name."""
        execution, reads = validate.validate_execution_id(execution_id), ReadSet()
        row, found = reads.one(Execution, execution), reads.many(Fact, execution)
        rows = (await self.runtime.load(reads)).rows
        if row(rows) is None:
            raise errors.NotFound("execution", execution_id=execution)
        return found(rows)
