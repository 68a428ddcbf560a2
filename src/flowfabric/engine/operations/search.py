"""Search operations: lists of executions, newest first, and executions by the beginning of their id.

A search reads executions by their creation instant, and checks the other conditions row by row. One call reads at most
`SEARCH_BUDGET` rows. So a page may be incomplete: it has a cursor although it is not full; the next call continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowfabric import ids
from flowfabric.engine.operations.pages import ExecutionListPage, IdMatches
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.model.execution import Execution
from flowfabric.model.execution_filter import ExecutionFilter
from flowfabric.rules import validation
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution import views
from flowfabric.stores.queries import Scan, Search, SearchPosition, Where

MAX_PAGE = 1000
MAX_MATCHES = 100
MAX_CHILDREN = 1000
SEARCH_BUDGET = 2000  # rows that one call reads; about 50 ms on a slow machine with a million rows


class ExecutionSearch:
    """Operations that list executions."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def search(self, wanted: ExecutionFilter, cursor: str | None, limit: int) -> ExecutionListPage:
        """List executions of all partitions that match a filter, newest first, after the cursor."""
        after = None if cursor is None else parse_search_cursor(cursor)
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        if not size:
            return ExecutionListPage([])
        page = await self.runtime.search(search_of(wanted, after, size + 1))
        more = page.found[size - 1].position if len(page.found) > size else page.after
        return ExecutionListPage(
            [views.execution_listing(found.row, found.kind) for found in page.found[:size]],
            None if more is None else format_search_cursor(more),
            more is not None and len(page.found) < size,
        )

    async def list_children(
        self, execution_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> ExecutionListPage:
        """List the executions whose parent this is, oldest first, after the cursor."""
        parent = validate.validate_execution_id(execution_id)
        after = None if cursor is None else parse_search_cursor(cursor)
        size = min(validation.integer("limit", limit, least=0), MAX_CHILDREN)
        if not size:
            return ExecutionListPage([])
        where = (Where("parent_id", "=", parent),)
        rows = await self.runtime.scan(Scan(Execution, where, ("created_at", "execution_id"), after, size + 1))
        kinds = await self.runtime.kinds([row.execution_id for row in rows[:size]])
        children = [views.execution_listing(row, kinds.get(row.execution_id, "")) for row in rows[:size]]
        last = rows[size - 1] if len(rows) > size else None
        return ExecutionListPage(
            children, None if last is None else format_search_cursor((last.created_at, last.execution_id))
        )

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        """Return the kinds of these executions in one round trip; a missing execution is left out."""
        executions = [
            validate.validate_execution_id(execution)
            for execution in validate.validate_iterable("execution_ids", execution_ids)
        ]
        return await self.runtime.kinds(executions)

    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches:
        """Find executions by a prefix of their id, in some namespaces or in all."""
        size = validation.integer("limit", limit, least=1, most=MAX_MATCHES)
        prefixes = tuple(ids.id_prefixes(validation.text("prefix", prefix), self.runtime.partitions))
        where: tuple[Where, ...] = (Where("execution_id", "starts", prefixes),)
        if namespaces is not None:
            names = validate.validate_iterable("namespaces", namespaces)
            where += (Where("namespace", "in", tuple(validation.text("namespaces", name) for name in names)),)
        rows = await self.runtime.scan(
            Scan(Execution, where, ("execution_id",), limit=size + 1, limit_by="execution_id")
        )
        found = [row.execution_id for row in rows]
        return IdMatches(found[:size], len(found) > size)


def search_of(wanted: ExecutionFilter, after: SearchPosition | None, limit: int) -> Search:
    """Return the search of a store for a filter."""
    where: list[Where] = []
    if wanted.namespaces is not None:
        where.append(Where("namespace", "in", wanted.namespaces))
    if wanted.states:
        where.append(Where("public_state", "in", wanted.states))
    equal = {
        "lane_id": wanted.lane_id,
        "flow_id": wanted.flow_id,
        "parent_id": wanted.parent_id,
        "worker_instance_id": wanted.worker_instance_id,
    }
    where += [Where(column, "=", value) for column, value in equal.items() if value is not None]
    if wanted.tag is not None:
        where.append(Where("tags", "contains", tag_rules.stored_fragment(*wanted.tag)))
    if wanted.error is not None:
        where.append(Where("failure_reason", "contains", wanted.error))
    if wanted.created_from is not None:
        where.append(Where("created_at", ">=", wanted.created_from))
    if wanted.created_before is not None:
        where.append(Where("created_at", "<", wanted.created_before))
    # Without conditions every row that is read is found: reading more of them than the page holds would be waste.
    is_filtered = wanted.kind is not None or any(condition.column != "created_at" for condition in where)
    return Search(tuple(where), wanted.kind, after, limit, SEARCH_BUDGET if is_filtered else limit)


def format_search_cursor(position: SearchPosition) -> str:
    """Return the cursor of a position: the creation instant and the id."""
    return f"{position[0]}/{position[1]}"


def parse_search_cursor(cursor: object) -> SearchPosition:
    """Return the position of a cursor, or raise `InvalidInput`."""
    instant, execution_id = validate.parse_cursor(cursor, "executions")
    return validation.instant_ms("cursor", instant), validate.validate_execution_id(execution_id)
