"""Works off bulk operations in pages: search, pin, act on each execution, record.

Every step can be repeated. A process that dies after it pinned a page leaves the page; the next one acts on the same
lives and finds those that are done. Two processes at once do the same, and only one records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from flowfabric import errors
from flowfabric.engine.operations.search import search_of
from flowfabric.engine.runtime.read_set import decide_row, load_one
from flowfabric.model.bulk_operation import BulkOperation, BulkState, BulkVerb, PinnedExecution
from flowfabric.model.text import first_line
from flowfabric.rules import bulk_operation as bulk
from flowfabric.rules.decision import Decision

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

PAGE_SIZE = 100
PAGES_PER_PASS = 50
CONCURRENT_ACTS = 20


class BulkWorker:
    """Works off bulk operations."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runtime = engine.runtime

    async def work_off(self, found: BulkOperation) -> bool:
        """Work off some pages of an operation, or delete one that ended long ago; True if anything was done."""
        if found.state is not BulkState.RUNNING:
            return await self._decide(found.operation_id, bulk.delete_if_due)
        worked = False
        for _ in range(PAGES_PER_PASS):
            row = await load_one(self.runtime, BulkOperation, found.operation_id)
            if row is None or (row.state is not BulkState.RUNNING and row.page is None):
                break
            worked = await (self._pin(row) if row.page is None else self._work_page(row)) or worked
        return worked

    async def _pin(self, row: BulkOperation) -> bool:
        left = row.ceiling - row.changed - row.refused
        search = search_of(bulk.criteria_of(row), bulk.position_of(row), min(PAGE_SIZE, left))
        page = await self.runtime.search(search)
        pinned = [
            PinnedExecution(one.row.execution_id, one.row.replay_count)
            for one in page.found
            if bulk.is_open_to(row.verb, one.row)
        ]
        return await self._decide(row.operation_id, lambda current, _: bulk.pin_page(current, row, pinned, page.after))

    async def _work_page(self, row: BulkOperation) -> bool:
        slots = asyncio.Semaphore(CONCURRENT_ACTS)

        async def act(pinned: PinnedExecution) -> str | None:
            async with slots:
                return await self._act(row, pinned)

        refusals = await asyncio.gather(*(act(pinned) for pinned in bulk.page_of(row)))
        texts = [text for text in refusals if text is not None]
        return await self._decide(
            row.operation_id,
            lambda current, _: bulk.record_page(
                current, row, len(refusals) - len(texts), len(texts), texts[-1] if texts else None
            ),
        )

    async def _act(self, row: BulkOperation, pinned: PinnedExecution) -> str | None:
        """Apply the verb to one life of an execution; return why it was refused, None if it is done."""
        name, life = pinned.execution_id, pinned.life
        try:
            match row.verb:
                case BulkVerb.CANCEL:
                    await self.runtime.decide_execution(
                        name, lambda found, _: bulk.cancel_life(found, life, row.reason)
                    )
                case BulkVerb.REPLAY:
                    await self.engine.replay_life(name, life)
                case BulkVerb.PRIORITY:
                    await self.runtime.decide_execution(
                        name, lambda found, _: bulk.prioritise_life(found, life, row.priority or 0)
                    )
                case _:
                    assert_never(row.verb)
        except errors.StoreUnavailable:
            raise
        except errors.FabricError as refused:
            return f"{name}: {first_line(str(refused))}"[:500]
        return None

    async def _decide(self, operation_id: str, decide: Callable[[BulkOperation | None, int], Decision[bool]]) -> bool:
        return await decide_row(self.runtime, BulkOperation, (operation_id,), decide)
