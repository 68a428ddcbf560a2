"""Child completions: delivers the completion of a child to the gate that its parent waits on, or to its schedule."""

from __future__ import annotations

import asyncio

from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.schedules.scheduler import Scheduler
from flowfabric.engine.validation import execution as validate
from flowfabric.model.change import Change, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import child_results
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.schedules.identity import is_schedule_id
from flowfabric.stores.queries import Read, Scan, Where

MAX_CHILD_COMPLETIONS = 1000  # completions that one change delivers to a parent


class ChildCompletions:
    """Delivers completions of children to the gates of their parents, one batch at a time for each parent."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self.runtime = runtime
        self.scheduler = scheduler
        self._deliveries = KeyedBatcher[str, None, int](self._deliver_batch, max_items=MAX_CHILD_COMPLETIONS)

    def deliver_written(self, change: Change, _: object) -> None:
        """Deliver the completions that a change has just written; the sweep delivers them if this process cannot."""
        for write in change.writes:
            if type(write) is Upsert and type(write.row) is ChildCompletion and write.row.due_at is not None:
                delivery = self.deliver_soon(write.row.parent_id)
                delivery.add_done_callback(lambda done: done.cancelled() or done.exception())

    def deliver_soon(self, parent_id: str) -> asyncio.Future[int]:
        """Deliver like `deliver`; calls for a parent that come meanwhile share the next delivery."""
        return self._deliveries.add(parent_id, None)

    async def deliver(self, parent_id: str) -> int:
        """Deliver the completions that wait for a parent; return how many there were."""
        parent = validate.validate_execution_id(parent_id)
        where = (Where("parent_id", "=", parent), Where("due_at", "set"))
        completions = await self.runtime.scan(
            Scan(ChildCompletion, where, ("parent_id", "child_id", "life"), limit=MAX_CHILD_COMPLETIONS)
        )
        if not completions:
            return 0
        if is_schedule_id(parent) and await self._is_for_schedule(parent):
            return await self.scheduler.end_runs(parent, completions)
        reads = ReadSet()
        row, suspension = reads.one(Execution, parent), reads.one(Suspension, parent)
        written = reads.each(ChildCompletion, ((parent, found.child_id, found.life) for found in completions))
        earlier = reads.more_rows(ChildCompletion)

        def undelivered(rows: Rows) -> list[ChildCompletion]:
            return [completion for completion in written(rows) if completion is not None]

        async def load_earlier(rows: Rows) -> Rows:
            now = self.runtime.estimate.now()
            children = child_results.delivered_before(suspension(rows), undelivered(rows), now)
            found = [Read(ChildCompletion, (parent, child)) for child in children]
            return (await self.runtime.load(found)).rows if found else []

        def decide(rows: Rows, now: int) -> Decision[int]:
            return gate_rules.deliver_child_completions(
                row(rows), suspension(rows), undelivered(rows), now, earlier=earlier(rows)
            )

        return await self.runtime.decide_and_commit(reads, decide, load_more=load_earlier)

    async def _is_for_schedule(self, parent: str) -> bool:
        """True unless only an execution has this id; one that took the id of a schedule hides no ends from it."""
        if await load_one(self.runtime, Schedule, parent) is not None:
            return True
        return await load_one(self.runtime, Execution, parent) is None

    async def drain(self) -> None:
        """Wait until no delivery is in flight."""
        await self._deliveries.drain()

    async def _deliver_batch(self, parent_id: str, calls: list[None]) -> list[int]:
        return [await self.deliver(parent_id)] * len(calls)
