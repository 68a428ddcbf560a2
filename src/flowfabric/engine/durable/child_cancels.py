"""Child cancels: the children of a parent that was cancelled or has expired are cancelled with it.

The change that ends the parent says so in a row. The process that wrote it cancels the children right away, a hundred
in a change; the sweep does it if that process dies. The cancel of a child that is a parent itself writes one too.
`rules.execution.cancel.cancel_abandoned` decides which children are cancelled: detached ones are left alone.
"""

from __future__ import annotations

from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.model.change import Change, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCancel
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel
from flowfabric.stores.queries import Scan, Where

MAX_CHILDREN_PER_CHANGE = 100


class ChildCancels:
    """Cancels the children of parents that were cancelled or have expired."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._cancels = KeyedBatcher[str, None, None](self._cancel_batch, max_items=1)

    def cancel_written(self, change: Change, _: object) -> None:
        """Cancel the children of parents that a change has just ended; the sweep does if this process cannot."""
        for write in change.writes:
            if type(write) is Upsert and type(write.row) is ChildCancel:
                pending = self._cancels.add(write.row.parent_id, None)
                pending.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def cancel_children_of(self, parent_id: str) -> int:
        """Cancel the children of a parent for which that is pending; return how many."""
        parent_key = validate.validate_execution_id(parent_id)
        cancelled, after = 0, None
        while True:
            where, order = (Where("parent_id", "=", parent_key),), ("parent_id", "created_at", "execution_id")
            page = await self.runtime.scan(Scan(Execution, where, order, after, MAX_CHILDREN_PER_CHANGE))
            cancelled += await self._cancel_page(parent_key, page)
            if len(page) < MAX_CHILDREN_PER_CHANGE:
                return cancelled
            after = (parent_key, page[-1].created_at, page[-1].execution_id)

    async def _cancel_page(self, parent_id: str, page: list[Execution]) -> int:
        reads = ReadSet()
        parent, pending = reads.one(Execution, parent_id), reads.one(ChildCancel, parent_id)
        children = reads.each(Execution, ((child.execution_id,) for child in page))
        more = len(page) == MAX_CHILDREN_PER_CHANGE

        def decide(rows: Rows, _: int) -> Decision[int]:
            found = [child for child in children(rows) if child is not None]
            return cancel.cancel_abandoned(parent(rows), pending(rows), found, more=more)

        return await self.runtime.decide_and_commit(reads, decide)

    async def drain(self) -> None:
        """Wait until no cancel is in flight."""
        await self._cancels.drain()

    async def _cancel_batch(self, parent_id: str, written: list[None]) -> list[None]:
        await self.cancel_children_of(parent_id)
        return written
