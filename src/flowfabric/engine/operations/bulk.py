"""Bulk operations: preview, start, follow and cancel. The sweeps of servers and workers execute them."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.operations.search import SEARCH_BUDGET, search_of
from flowfabric.engine.runtime.read_set import decide_row, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution_filter import validate_filter
from flowfabric.model.bulk_operation import BulkOperation, BulkVerb
from flowfabric.model.execution_filter import ExecutionFilter
from flowfabric.rules import bulk_operation as bulk
from flowfabric.rules import validation
from flowfabric.rules.bulk_operation import BulkRequest, BulkStatus
from flowfabric.rules.execution import views
from flowfabric.stores.queries import Scan

MAX_CEILING = 1_000_000
DEFAULT_CEILING = 10_000
MAX_REASON_BYTES = 4096
SAMPLE = 10
PREVIEW_STEPS = 5  # searches of a preview; each reads at most SEARCH_BUDGET rows
MAX_PAGE = 1000


class BulkPreview(msgspec.Struct, frozen=True):
    """What a bulk operation would find now: counts, and the newest executions that it would act on.

    `refused` match the filter, but the verb cannot be applied to them. `complete` is False if there may be more.
    """

    count: int
    refused: int
    complete: bool
    sample: list[views.ExecutionListing]


class BulkPage(msgspec.Struct, frozen=True):
    """Bulk operations, newest first, and the cursor of the next page."""

    operations: list[BulkStatus]
    next_cursor: str | None = None


class BulkOperator:
    """Operations on many executions at once."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def preview_operation(self, verb: BulkVerb | str, criteria: dict[str, Any]) -> BulkPreview:
        """Count what a bulk operation would act on, and show some of it; nothing is changed."""
        wanted, chosen = _criteria(criteria), validation.choice(BulkVerb, "verb", verb)
        count, refused, after = 0, 0, None
        sample: list[views.ExecutionListing] = []
        for _ in range(PREVIEW_STEPS):
            page = await self.runtime.search(search_of(wanted, after, SEARCH_BUDGET))
            for found in page.found:
                if not bulk.is_open_to(chosen, found.row):
                    refused += 1
                    continue
                count += 1
                if len(sample) < SAMPLE:
                    sample.append(views.execution_listing(found.row, found.kind))
            after = page.after
            if after is None:
                break
        return BulkPreview(count, refused, after is None, sample)

    async def start_operation(
        self,
        verb: BulkVerb | str,
        criteria: dict[str, Any],
        *,
        reason: str,
        ceiling: int = DEFAULT_CEILING,
        priority: int | None = None,
        requested_by: str = "",
        operation_id: str | None = None,
    ) -> BulkStatus:
        """Start a bulk operation on the executions that a filter finds; the same request again changes nothing."""
        chosen = validation.choice(BulkVerb, "verb", verb)
        number = None if priority is None else validation.integer("priority", priority)
        if (number is None) == (chosen is BulkVerb.PRIORITY):
            raise errors.InvalidInput("priority: needed by the verb priority, and only by it")
        wanted = _criteria(criteria)
        if wanted == ExecutionFilter():
            raise errors.InvalidInput("criteria: empty; a bulk operation needs at least one filter")
        why = validation.text("reason", reason, limit=MAX_REASON_BYTES)
        if not why.strip():
            raise errors.InvalidInput("reason: empty")
        ask = BulkRequest(
            operation_id=self.runtime.minter.uuid()
            if operation_id is None
            else validate.parse_uuid("operation_id", operation_id),
            verb=chosen,
            criteria=wanted,
            ceiling=validation.integer("ceiling", ceiling, least=1, most=MAX_CEILING),
            reason=why,
            requested_by=validation.name("requested_by", requested_by),
            priority=number,
        )
        await decide_row(self.runtime, BulkOperation, (ask.operation_id,), lambda row, _: bulk.start(row, ask))
        return await self.read_operation(ask.operation_id)

    async def read_operation(self, operation_id: str) -> BulkStatus:
        """Return a bulk operation and its progress."""
        row = await load_one(self.runtime, BulkOperation, _operation_id(operation_id))
        if row is None:
            raise errors.NotFound("operation")
        return bulk.status(row)

    async def list_operations(self, *, cursor: str | None = None, limit: int = 50) -> BulkPage:
        """List bulk operations, newest first, after the cursor."""
        size = validation.integer("limit", limit, least=1, most=MAX_PAGE)
        after: tuple[int, str] | None = None
        if cursor is not None:
            created_at, operation = validate.parse_cursor(cursor, "bulk operations")
            after = created_at, _operation_id(operation)
        rows: list[BulkOperation] = await self.runtime.scan(
            Scan(BulkOperation, (), ("created_at", "operation_id"), after, size + 1, descending=True)
        )
        last = rows[size - 1] if len(rows) > size else None
        return BulkPage(
            [bulk.status(row) for row in rows[:size]],
            None if last is None else f"{last.created_at}/{last.operation_id}",
        )

    async def cancel_operation(self, operation_id: str) -> BulkStatus:
        """Cancel a bulk operation: what was done stays done, and no further page is begun. Idempotent."""
        operation = _operation_id(operation_id)
        await decide_row(self.runtime, BulkOperation, (operation,), lambda row, _: bulk.stop(row))
        return await self.read_operation(operation_id)


def _operation_id(text: object) -> str:
    return validate.parse_uuid("operation_id", text)


def _criteria(given: object) -> ExecutionFilter:
    if not isinstance(given, dict):
        raise errors.InvalidInput("criteria: not an object")
    try:
        return validate_filter(**given)
    except TypeError:
        unknown = sorted(str(name) for name in given)
        raise errors.InvalidInput(f"criteria: an unknown filter among {', '.join(unknown)}") from None
