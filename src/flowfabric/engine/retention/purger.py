"""Purger: deletes executions and flows whose retention is over.

Purging a member of a flow checks whether it was the last one, and then purges the flow. If a crash comes in between,
the sweep finds the flow by its `purge_check_at`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_each, load_many
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.event_loop import start_task
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, Flow, FlowMember
from flowfabric.model.stream import Stream
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules import retention
from flowfabric.rules.decision import Decision
from flowfabric.stores.catalog import TABLE, key_of
from flowfabric.stores.queries import Scan, Where

EDGES_PAGE = 500
MEMBERS_PAGE = 200
MAX_REMEMBERED_MEMBERS = 1000
logger = logging.getLogger("flowfabric.retention")


class Purger:
    """Deletes ended executions and flows with everything that belongs to them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._members_left: dict[str, str] = {}  # the member that the last check of a flow found
        self._flow_checks: dict[str, asyncio.Task[bool]] = {}  # concurrent purges of a flow share its check

    async def purge_execution(self, execution_id: str, default_retention_ms: int | None) -> bool:
        """Purge an ended execution whose retention is over, with everything it owns; True if it was purged.

        Its flow is purged as well if no other member is left; the answer does not say so.
        """
        flows: set[str] = set()
        while True:
            purged = await self._purge_rows(execution_id, default_retention_ms, flows)
            if isinstance(purged, bool):
                break
        if purged:
            for flow_id in flows:
                await self._check_flow(flow_id)
        return purged

    async def purge_flow(self, flow_id: str) -> bool:
        """Purge a flow without remaining members, with its member list, edges, joins and summary."""
        reads = ReadSet()
        flow, remaining = reads.one(Flow, flow_id), reads.more_many(retention.RemainingMember)
        owned = reads.more_many(retention.OwnedRow)
        checked: int | None = None  # the revision of the flow when it had no member left; adding one changes it

        async def load_remaining(rows: Rows) -> Rows:
            nonlocal checked
            found = flow(rows)
            if found is None:
                return [[], []]
            if found.revision != checked:
                if (member := await self._find_remaining(flow_id)) is not None:
                    return [[member], []]
                checked = found.revision
            tables = retention.FLOW_PAGED if self.runtime.store.deletes_in_pages else ()
            return [[], await self._name_rows(tables, flow_id)]

        def decide(rows: Rows, now: int) -> Decision[bool | retention.RowsRemain]:
            member = next(iter(remaining(rows)), None)
            return retention.purge_flow(flow(rows), member, now, owned(rows))

        while True:
            purged = await self.runtime.decide_and_commit(reads, decide, load_more=load_remaining)
            if isinstance(purged, bool):
                return purged

    async def _find_remaining(self, flow_id: str) -> retention.RemainingMember | None:
        """Return a member that still exists. The one that the last check found usually does."""
        remembered = self._members_left.pop(flow_id, None)
        if remembered is not None and (found := await self._first_remaining(flow_id, [remembered])):
            return found
        after = None
        while True:
            where = (Where("flow_id", "=", flow_id),)
            page = await self.runtime.scan(Scan(FlowMember, where, ("flow_id", "execution_id"), after, MEMBERS_PAGE))
            if found := await self._first_remaining(flow_id, [member.execution_id for member in page]):
                return found
            if len(page) < MEMBERS_PAGE:
                return None
            after = (flow_id, page[-1].execution_id)

    async def _first_remaining(self, flow_id: str, names: list[str]) -> retention.RemainingMember | None:
        rows = await load_readable(self.runtime, names)
        for name in names:
            # A member that cannot be decoded still exists.
            found = retention.remaining_member(flow_id, rows[name]) if name in rows else retention.RemainingMember()
            if found is not None:
                if len(self._members_left) < MAX_REMEMBERED_MEMBERS:
                    self._members_left[flow_id] = name
                return found
        return None

    async def _check_flow(self, flow_id: str) -> None:
        """Purge the flow of a purged member if no other is left; after a failure, the sweep does it."""
        check = self._flow_checks.get(flow_id)
        if check is None:
            check = self._flow_checks[flow_id] = start_task(self._purge_checked_flow(flow_id))
        try:
            await asyncio.shield(check)
        except errors.FabricError as fault:
            logger.warning("flow %s is left to the sweep: %s", flow_id, fault)

    async def _purge_checked_flow(self, flow_id: str) -> bool:
        await asyncio.sleep(0)  # members that are purged in one batch share a check
        del self._flow_checks[flow_id]
        return await self.purge_flow(flow_id)

    async def _purge_rows(
        self, execution_id: str, default_ms: int | None, flows: set[str]
    ) -> bool | retention.RowsRemain:
        """Purge an execution, or the first of its rows; `flows` collects the flow that it was a member of."""
        reads = ReadSet()
        execution = reads.one(Execution, execution_id)
        others, streams = reads.more_many(Execution), reads.more_many(Stream)
        owned = reads.more_many(retention.OwnedRow)

        def decide(rows: Rows, now: int) -> Decision[bool | retention.RowsRemain]:
            row = execution(rows)
            if row is not None and row.flow_id is not None:
                flows.add(row.flow_id)
            return retention.purge(row, now, default_ms, others(rows), streams(rows), owned(rows))

        async def load_others(rows: Rows) -> Rows:
            row = execution(rows)
            if row is None:
                return [[], [], []]
            streams = [] if row.stream_index is None else await load_many(self.runtime, Stream, execution_id)
            tables = retention.tables_to_name(row, self.runtime.store.deletes_in_pages)
            return [
                await self._load_retaining(row),
                streams,
                await self._name_rows(tables, execution_id),
            ]

        return await self.runtime.decide_and_commit(reads, decide, load_more=load_others)

    async def _name_rows(self, tables: Iterable[type[msgspec.Struct]], owner_id: str) -> list[retention.OwnedRow]:
        """Name rows of these tables, one more than a change deletes if there are that many."""
        named: list[retention.OwnedRow] = []
        for table in tables:
            limit = retention.MAX_PURGED_ROWS + 1 - len(named)
            owner = "execution_id" if table is Waitpoint else TABLE[table].key[0]
            rows = await self.runtime.scan(Scan(table, (Where(owner, "=", owner_id),), (owner,), limit=limit))
            named += [retention.OwnedRow(table, key_of(row)) for row in rows]
            if len(named) > retention.MAX_PURGED_ROWS:
                break
        return named

    async def _load_retaining(self, row: Execution) -> list[Execution]:
        """Load the executions that may still need this one; of very many, only until one is found that does."""
        named = await self._load_executions(retention.retained_for(row))
        if not retention.is_retained_for_many(row) or any(retention.may_still_need(one, row) for one in named):
            return named
        after = None
        where = (Where("upstream_execution_id", "=", row.execution_id),)
        while True:
            edges = await self.runtime.scan(Scan(Edge, where, ("upstream_execution_id", "edge_id"), after, EDGES_PAGE))
            found = await self._load_executions([edge.downstream_execution_id for edge in edges])
            needing = [one for one in found if retention.may_still_need(one, row)]
            if needing or len(edges) < EDGES_PAGE:
                return needing
            after = (row.execution_id, edges[-1].edge_id)

    async def _load_executions(self, names: Iterable[str]) -> list[Execution]:
        found = await load_each(self.runtime, Execution, ((name,) for name in names))
        return [row for row in found if row is not None]
