"""Bulk operations in three steps: preview, confirm with a reason and a ceiling, follow.

The filter is frozen by the preview: runs that are created later do not belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flowfabric import errors
from flowfabric.console.pages import PAGE_SIZE, Ui, View, action, page, parse_integer
from flowfabric.console.runs import FILTER_NAMES, Filters, RunRow, read_filters, run_row, search_arguments
from flowfabric.engine.types import BulkStatus
from flowfabric.model.bulk_operation import BulkState, BulkVerb
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.view import view_of
from flowfabric.server.errors import bad_request
from flowfabric.server.request import path_uuid

DEFAULT_CEILING = 10_000
FROZEN = ("created_from", "created_before")


class PreviewPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "bulk_new.html"
    verb: str
    filters: Filters
    frozen: dict[str, int]
    count: int
    refused: int
    complete: bool
    sample: list[RunRow]
    operation_id: str
    ceiling: int


class BulkListPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "bulk.html"
    operations: list[BulkStatus]
    next_cursor: str | None


class BulkOnePage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "bulk_one.html"
    operation: BulkStatus
    criteria: list[tuple[str, str]]
    is_running: bool


@page("/bulk/new", scope=ApiScope.OPERATE)
async def preview_bulk(ui: Ui) -> PreviewPage:
    """Show what a bulk operation would act on; nothing is changed."""
    verb, filters = _verb(ui.request.query_param("verb") or ""), read_filters(ui)
    criteria = await search_arguments(ui, filters)
    criteria["created_before"] = await ui.engine.ping() + 1
    frozen = {name: criteria[name] for name in FROZEN if criteria.get(name) is not None}
    found = await ui.engine.preview_operation(verb, _given(criteria))
    return view_of(
        PreviewPage,
        found,
        title={"cancel": "Cancel runs", "replay": "Replay runs", "priority": "Re-prioritise runs"}[verb],
        verb=verb,
        filters=filters,
        frozen=frozen,
        sample=[run_row(run) for run in found.sample],
        operation_id=ui.new_id(),
        ceiling=max(1, min(found.count, DEFAULT_CEILING)) if found.complete else DEFAULT_CEILING,
    )


def _verb(text: str) -> BulkVerb:
    try:
        return BulkVerb(text)
    except ValueError:
        raise bad_request(f"verb: none of {', '.join(BulkVerb)}") from None


def _given(criteria: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in criteria.items() if value is not None}


@action("/bulk", scope=ApiScope.OPERATE)
async def start_bulk(ui: Ui, fields: Mapping[str, str]) -> str:
    """Start the operation that was previewed; the same form sent twice is one operation."""
    verb = _verb(fields.get("verb", ""))
    filters = Filters(**{name: fields.get(name, "") for name in FILTER_NAMES if name != "since"})
    if filters.namespace:
        ui.request.require_namespace(filters.namespace)
    criteria = await search_arguments(ui, filters)
    criteria |= {name: parse_integer(name, fields[name]) for name in FROZEN if fields.get(name)}
    started = await ui.engine.start_operation(
        verb,
        _given(criteria),
        reason=fields.get("reason", ""),
        ceiling=parse_integer("ceiling", fields.get("ceiling", "")),
        priority=parse_integer("priority", fields.get("priority", "")) if verb is BulkVerb.PRIORITY else None,
        requested_by=ui.principal.name if not ui.is_open else ui.name,
        operation_id=fields.get("operation_id") or None,
    )
    return ui.url(f"/bulk/{started.operation_id}")


@page("/bulk", rows="operations")
async def show_bulk_operations(ui: Ui) -> BulkListPage:
    """List bulk operations, newest first."""
    found = await ui.engine.list_operations(cursor=ui.request.cursor, limit=PAGE_SIZE)
    visible = [operation for operation in found.operations if ui.principal.can_see_all(operation.criteria.namespaces)]
    return BulkListPage(title="Bulk operations", about="bulk", operations=visible, next_cursor=found.next_cursor)


async def _operation(ui: Ui) -> BulkStatus:
    operation_id = path_uuid("operation_id", ui.request.path_params[0].removesuffix(".json"))
    operation = await ui.engine.read_operation(operation_id)
    if not ui.principal.can_see_all(operation.criteria.namespaces):
        raise errors.NotFound("operation")
    return operation


@page("/bulk/{id}")
async def show_bulk_operation(ui: Ui) -> BulkOnePage:
    """Show a bulk operation and its progress."""
    operation = await _operation(ui)
    facts = ((name, getattr(operation.criteria, name)) for name in operation.criteria.__struct_fields__)
    criteria = [(name.replace("_", " "), _words(value)) for name, value in facts if value]
    running = operation.state is BulkState.RUNNING
    return BulkOnePage(
        title="Bulk operation",
        about="bulk" if running else "",
        operation=operation,
        criteria=criteria,
        is_running=running,
    )


def _words(value: object) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


@action("/bulk/{id}/stop", scope=ApiScope.OPERATE)
async def stop_bulk(ui: Ui, fields: Mapping[str, str]) -> str:
    """Stop a bulk operation: what was done stays done."""
    operation = await _operation(ui)
    await ui.engine.cancel_operation(operation.operation_id)
    return ui.url(f"/bulk/{operation.operation_id}", done="stopped")
