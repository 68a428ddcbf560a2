"""Child completions: delivers the completion of a child to the gate that its parent waits on."""

from __future__ import annotations

from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.model.change import Change, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.stores.queries import Scan, Where

MAX_CHILD_COMPLETIONS = 1000  # completions that one change delivers to a parent


class ChildCompletions:
    """Delivers completions of children to the gates of their parents, one batch at a time for each parent."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._deliveries = KeyedBatcher[str, None, None](self._deliver_batch, max_items=MAX_CHILD_COMPLETIONS)

    def deliver_written(self, change: Change, _: object) -> None:
        """Deliver the completions that a change has just written; the sweep delivers them if this process cannot."""
        for write in change.writes:
            if type(write) is Upsert and type(write.row) is ChildCompletion and write.row.due_at is not None:
                delivery = self._deliveries.add(write.row.parent_id, None)
                delivery.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def deliver(self, parent_id: str) -> int:
        """Deliver the completions that wait for a parent; return how many there were."""
        parent = validate.validate_execution_id(parent_id)
        where = (Where("parent_id", "=", parent), Where("due_at", "set"))
        completions = await self.runtime.scan(
            Scan(ChildCompletion, where, ("parent_id", "child_id", "life"), limit=MAX_CHILD_COMPLETIONS)
        )
        if not completions:
            return 0
        reads = ReadSet()
        row, suspension = reads.one(Execution, parent), reads.one(Suspension, parent)
        written = reads.each(ChildCompletion, ((parent, found.child_id, found.life) for found in completions))

        def decide(rows: Rows, now: int) -> Decision[int]:
            undelivered = [completion for completion in written(rows) if completion is not None]
            return gate_rules.deliver_child_completions(row(rows), suspension(rows), undelivered, now)

        return await self.runtime.decide_and_commit(reads, decide)

    async def drain(self) -> None:
        """Wait until no delivery is in flight."""
        await self._deliveries.drain()

    async def _deliver_batch(self, parent_id: str, written: list[None]) -> list[None]:
        await self.deliver(parent_id)
        return written
