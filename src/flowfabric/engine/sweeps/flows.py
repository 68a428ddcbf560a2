"""The sweeps of flows: they finish what a process left undone when it died.

Each pass reads a bounded page. A page without progress is not read again before the pages behind it. An unreadable row
is logged and counted as an error; the pass continues with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream
from flowfabric.engine.runtime.read_set import ReadSet, decide_row, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.sweeps.sweeper import SweepFilter, SweepResult
from flowfabric.model.answers.flow import MemberCancelResult, SiblingReconcile
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    CancelBacklog,
    CompletionDispatch,
    Dependency,
    EdgeGroup,
    Flow,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import joins, successors
from flowfabric.stores.queries import Scan, UnreadableRow, Where

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

logger = logging.getLogger("flowfabric.sweeper")

MAX_GROUPS = 50
MAX_EDGES_PER_GROUP = 20  # a pass resolves at most these of one waiting group
MAX_SCANNED_EDGES = 500  # a pass inspects at most these of one waiting group, the next pass the next ones
MAX_UNREADABLE_GROUP_EDGES = 100_000  # this many of one group are inspected, if one of them is unreadable
FLOWS_PAGE_SIZE = 100
MAX_FLOW_PAGES = 5  # projected in one pass, which takes a few seconds; the next one continues behind them
MAX_BACKLOGS = 50
MAX_MEMBERS_PER_BACKLOG = 500  # cancelled in one pass
PERMANENT_ERRORS = (errors.ValidationError, errors.BugError)


class ReadablePage(NamedTuple):
    """Rows of a table, and the sort keys of those that could not be read."""

    rows: list[Any]
    unread_keys: tuple[Any, ...] = ()

    @property
    def unread_count(self) -> int:
        """Return how many rows could not be read."""
        return len(self.unread_keys)


class RotatingScan:
    """Reads due rows of a table page by page, and begins again at the end."""

    def __init__(self, row: type[msgspec.Struct], column: str, key: tuple[str, ...]) -> None:
        self._row = row
        self._order = (column, *key)
        self._after: tuple[Any, ...] | None = None

    async def page(self, runtime: Runtime, limit: int, *where: Where) -> ReadablePage:
        """Return the next rows that are due, earliest first."""
        now = await runtime.store.ping()
        runtime.estimate.update(now)
        due = (Where(self._order[0], "<=", now), *where)
        rows = await runtime.store.scan(Scan(self._row, due, self._order, self._after, limit, tolerant=True))
        if not rows and self._after is not None:
            self._after = None
            rows = await runtime.store.scan(Scan(self._row, due, self._order, None, limit, tolerant=True))
        self._after = self._sort_key(rows[-1]) if len(rows) == limit else None
        return readable_page(rows)

    def _sort_key(self, row: Any) -> tuple[Any, ...]:
        if isinstance(row, UnreadableRow):
            return row.sort_key[: len(self._order)]
        return tuple(getattr(row, name) for name in self._order)

    def rewind(self) -> None:
        """Begin again with the first page."""
        self._after = None


def readable_page(found: Sequence[Any]) -> ReadablePage:
    """Leave out the unreadable rows of a tolerant scan, and log each of them."""
    unread = tuple(row for row in found if isinstance(row, UnreadableRow))
    for row in unread:
        logger.error("%s cannot be read and is skipped: %s", row.sort_key, row.error)
    rows = [row for row in found if not isinstance(row, UnreadableRow)] if unread else [*found]
    return ReadablePage(rows, tuple(row.sort_key for row in unread))


class FlowSweeps:
    """The passes of the flow sweeps, and where the next pass of each begins."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting = RotatingScan(EdgeGroup, "waiting_since", ("flow_id", "downstream_execution_id"))
        self._flows = RotatingScan(Flow, "project_at", ("flow_id",))
        self._backlogs = RotatingScan(CancelBacklog, "due_at", ("flow_id",))
        key = ("flow_id", "downstream_execution_id")
        self._flagged = RotatingScan(PendingSiblingCancel, "flagged_at", key)
        self._reconciled = RotatingScan(PendingSiblingCancel, "flagged_at", key)
        edge = ("downstream_execution_id", "edge_id")
        self._recorded = RotatingScan(Dependency, "unfolded_at", edge)
        self._reconciled_edges = RotatingScan(Dependency, "unfolded_at", edge)
        self._dispatches = RotatingScan(CompletionDispatch, "due_at", ("execution_id",))
        self._pass_count = 0

    # -- completions ----------------------------------------------------------------------------------------------

    async def dispatch_completions(self, batch: int) -> SweepResult:
        """Resolve completions that a process committed and did not dispatch before it died."""
        fanned_out = await self._fan_out(batch)
        recorded = await self._recorded.page(self._engine.runtime, batch)
        completed, unread = await self._completed(recorded.rows)
        resolved = await self._resolve(completed)
        faults = fanned_out.errors + recorded.unread_count + unread + resolved.errors
        return SweepResult(fanned_out.processed + resolved.processed, faults)

    async def reconcile_dependencies(self, choice: SweepFilter) -> SweepResult:
        """Resolve edges whose upstream has completed, recorded or not, and cascade the skips."""
        recorded = await self._reconciled_edges.page(self._engine.runtime, MAX_GROUPS * MAX_EDGES_PER_GROUP)
        completed, unread = await self._completed(recorded.rows)
        # A fan-out reaches all its downstreams, so it runs only without filters.
        fanned_out = await self._fan_out(MAX_GROUPS) if not choice.filters else SweepResult(0, 0)
        waiting = await self._waiting.page(self._engine.runtime, MAX_GROUPS)
        unrecorded, unread_upstreams = await self._unrecorded(waiting.rows)
        accepted, unread_downstreams = await self._accepted(completed + unrecorded, choice)
        resolved = await self._resolve(accepted)
        faults = recorded.unread_count + unread + waiting.unread_count + unread_upstreams + unread_downstreams
        faults += fanned_out.errors + resolved.errors
        return SweepResult(fanned_out.processed + resolved.processed, faults)

    async def _fan_out(self, limit: int) -> SweepResult:
        """Continue fan-outs and cascade their skips; the result counts edges."""
        page = await self._dispatches.page(self._engine.runtime, limit)
        processed, faults = 0, page.unread_count
        for row in page.rows:
            try:
                done = await self._engine.dispatcher.fan_out(row.execution_id)
                processed += done.resolved + await self._cascade(done.skipped)
            except errors.StoreUnavailable:
                raise
            except errors.FabricError:
                logger.exception("the completion of %s was left for the next pass", row.execution_id)
                faults += 1
        return SweepResult(processed, faults)

    async def _unrecorded(self, groups: Sequence[EdgeGroup]) -> tuple[list[CompletedEdge], int]:
        """Return edges of waiting groups with a terminal upstream and no outcome, and how many rows are unreadable."""
        if not groups:
            return [], 0
        inbound, unread_edges = await self._inbound([group.downstream_execution_id for group in groups])
        self._pass_count += 1
        open_edges: list[Dependency] = []
        for edges in inbound:
            open_edges += _portion([edge for edge in edges if edge.outcome is None], self._pass_count)
        by_downstream: dict[Downstream, list[CompletedEdge]] = {}
        completed, unread = await self._completed(open_edges)
        for edge in completed:
            by_downstream.setdefault(edge.downstream, []).append(edge)
        bounded = [edge for edges in by_downstream.values() for edge in edges[:MAX_EDGES_PER_GROUP]]
        return bounded, unread + unread_edges

    async def _inbound(self, execution_ids: Sequence[str]) -> tuple[list[list[Dependency]], int]:
        """Return the applied edges into each of these executions, and how many are unreadable."""
        reads = ReadSet()
        inbound = [reads.many(Dependency, execution_id) for execution_id in execution_ids]
        try:
            rows = (await self._engine.runtime.load(reads)).rows
            return [edges(rows) for edges in inbound], 0
        except errors.Corruption:
            scans = map(_inbound_scan, execution_ids)
            pages = [readable_page(await self._engine.runtime.scan(scan)) for scan in scans]
            return [page.rows for page in pages], sum(page.unread_count for page in pages)

    async def _completed(self, edges: Sequence[Dependency]) -> tuple[list[CompletedEdge], int]:
        """Return the edges whose upstream has completed and was not replayed, and how many upstreams are unreadable."""
        upstream_ids = sorted({edge.upstream_execution_id for edge in edges})
        upstreams = await load_readable(self._engine.runtime, upstream_ids)
        completed = []
        for edge in edges:
            if edge.upstream_execution_id not in upstreams:
                continue
            upstream = upstreams[edge.upstream_execution_id]
            outcome = joins.current_outcome(edge, upstream)
            if outcome is not None:
                downstream = Downstream(edge.flow_id, edge.downstream_execution_id)
                many = upstream if successors.has_many(upstream) else None
                if edge.unfolded_at is not None and edge.outcome is outcome:  # it counts while it is still recorded
                    completed.append(CompletedEdge(downstream, edge.edge_id, of_fan_out=many is not None))
                else:
                    completed.append(
                        CompletedEdge(downstream, edge.edge_id, outcome, edge.revision, expected_upstream=many)
                    )
        return completed, len(upstream_ids) - len(upstreams)

    async def _accepted(self, completed: list[CompletedEdge], choice: SweepFilter) -> tuple[list[CompletedEdge], int]:
        """Return the edges whose downstream the filters accept, and how many downstreams are unreadable."""
        if not choice.filters:
            return completed, 0
        execution_ids = sorted({edge.downstream.execution_id for edge in completed})
        rows = await load_readable(self._engine.runtime, execution_ids)
        accepted = {execution_id for execution_id, row in rows.items() if choice.accepts(row)}
        return [edge for edge in completed if edge.downstream.execution_id in accepted], len(execution_ids) - len(rows)

    async def _resolve(self, completed: list[CompletedEdge]) -> SweepResult:
        resolutions = await self._engine.join_resolver.resolve(completed)
        cascaded = await self._cascade([each.downstream.execution_id for each in resolutions if each.skipped])
        refused = sum(resolution.refused is not None for resolution in resolutions)
        return SweepResult(sum(resolution.resolved for resolution in resolutions) + cascaded, refused)

    async def _cascade(self, skipped: list[str]) -> int:
        """Resolve the edges of skipped executions; return how many."""
        return (await self._engine.dispatcher.cascade(skipped))[0] if skipped else 0

    # -- summaries ------------------------------------------------------------------------------------------------

    async def project_flows(self, batch: int) -> SweepResult:
        """Write the summary of each unfinished flow once, page by page."""
        processed = faults = 0
        seen: set[Any] = set()
        for _ in range(MAX_FLOW_PAGES):
            page = await self._flows.page(self._engine.runtime, FLOWS_PAGE_SIZE)
            rows = [row for row in page.rows if row.flow_id not in seen]
            unread = [key for key in page.unread_keys if key not in seen]
            faults += len(unread)
            if not rows and not unread:  # the scan has begun again
                self._flows.rewind()
                break
            seen.update(unread, (row.flow_id for row in rows))
            done = await self._each(ReadablePage(rows), lambda row: self._engine.project_flow_summary(row.flow_id))
            processed, faults = processed + done.processed, faults + done.errors
        return SweepResult(processed, faults)

    # -- cancels --------------------------------------------------------------------------------------------------

    async def reconcile_cancels(self, choice: SweepFilter) -> SweepResult:
        """Cancel the members in the backlogs of cancelled flows, after the grace period."""
        backlogs = await self._backlogs.page(self._engine.runtime, MAX_BACKLOGS)
        processed, faults = 0, backlogs.unread_count
        for backlog in backlogs.rows:
            try:
                done, failed = await self._reconcile_backlog(backlog, choice)
            except errors.StoreUnavailable:
                raise
            except errors.FabricError:
                logger.exception("cancel_reconciler: flow %s was left for the next pass", backlog.flow_id)
                done, failed = 0, 1
            processed, faults = processed + done, faults + failed
        return SweepResult(processed, faults)

    async def _reconcile_backlog(self, backlog: CancelBacklog, choice: SweepFilter) -> tuple[int, int]:
        flow_id = backlog.flow_id
        reads = ReadSet()
        flow_of, pending_of = reads.one(Flow, flow_id), reads.many(PendingMemberCancel, flow_id)
        loaded = (await self._engine.runtime.load(reads)).rows
        flow, pending = flow_of(loaded), pending_of(loaded)
        if flow is None or not pending:
            await self._drop(flow_id)
            return 1, 0 if _is_uuid(flow_id) else 1
        invalid = [entry.execution_id for entry in pending if not _is_execution_id(entry.execution_id)]
        members = [entry.execution_id for entry in pending if entry.execution_id not in invalid]
        if choice.filters and members:
            found = await load_each(self._engine.runtime, Execution, ((member,) for member in members))
            members = [member for member, row in zip(members, found, strict=True) if choice.accepts(row)]
        done = await self._engine.bulk_canceller.cancel_many(
            members[:MAX_MEMBERS_PER_BACKLOG], flow_cancel.member_reason(flow), backlog_flow_id=flow_id
        )
        acknowledged = list(invalid)
        faults = len(invalid)
        for member, result in done.items():
            if isinstance(result, MemberCancelResult):
                acknowledged.append(member)
            elif isinstance(result, PERMANENT_ERRORS):
                logger.error("cancel_reconciler: %s cannot be cancelled and is given up: %s", member, result)
                acknowledged.append(member)
                faults += 1
            else:
                faults += 1
        return await self._engine.bulk_canceller.acknowledge(flow_id, acknowledged), faults

    async def _drop(self, flow_id: str) -> bool:
        return await decide_row(
            self._engine.runtime, CancelBacklog, (flow_id,), lambda backlog, _: flow_cancel.drop_backlog(backlog)
        )

    async def dispatch_sibling_cancels(self, batch: int) -> SweepResult:
        """Cancel the remaining upstreams of fired groups."""

        async def cancel(row: PendingSiblingCancel) -> bool | None:
            done = await self._engine.bulk_canceller.cancel_siblings(
                Downstream(row.flow_id, row.downstream_execution_id)
            )
            return True if all(isinstance(result, MemberCancelResult) for result in done.values()) else None

        return await self._each(await self._flagged.page(self._engine.runtime, MAX_GROUPS), cancel)

    async def reconcile_sibling_cancels(self, batch: int) -> SweepResult:
        """Finish drains that a crash interrupted."""

        async def reconcile(row: PendingSiblingCancel) -> bool:
            done = await self._engine.reconcile_sibling_cancel_group(row.flow_id, row.downstream_execution_id)
            self._engine.runtime.metrics.count("ff_sibling_cancel_reconcile", action=done.value)
            return done is not SiblingReconcile.NO_OP

        return await self._each(await self._reconciled.page(self._engine.runtime, MAX_GROUPS), reconcile)

    async def _each(self, page: ReadablePage, act: Callable[[Any], Awaitable[bool | None]]) -> SweepResult:
        processed, faults = 0, page.unread_count
        for row in page.rows:
            try:
                did = await act(row)
            except errors.StoreUnavailable:
                raise
            except errors.FabricError:
                logger.exception("a row was left for the next pass: %r", row)
                did = None
            processed, faults = processed + (did is True), faults + (did is None)
        return SweepResult(processed, faults)


def _portion(edges: list[Dependency], pass_count: int) -> list[Dependency]:
    """Return the edges to inspect in this pass; later passes inspect the others."""
    portions = max(1, -(-len(edges) // MAX_SCANNED_EDGES))
    start = pass_count % portions * MAX_SCANNED_EDGES
    return edges[start : start + MAX_SCANNED_EDGES]


def _inbound_scan(execution_id: str) -> Scan:
    """Return a scan of the applied edges into one execution that tolerates unreadable ones."""
    key = ("downstream_execution_id", "edge_id")
    return Scan(Dependency, (Where(key[0], "=", execution_id),), key, limit=MAX_UNREADABLE_GROUP_EDGES, tolerant=True)


def _is_uuid(text: str) -> bool:
    try:
        ids.parse_uuid(text)
    except errors.InvalidInput:
        return False
    return True


def _is_execution_id(text: str) -> bool:
    try:
        ids.parse_execution_id(text)
    except errors.InvalidInput:
        return False
    return True
