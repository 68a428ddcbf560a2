"""The sweeps of flows: what a process left undone when it died, and what nobody is told about.

Each pass takes a bounded page. A page that brought nothing forward is not taken again before the others had their turn.
A row that cannot be read is named in the log and counted as an error; the pass goes on with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.sweeps.sweeper import Sweep, SweepFilter, SweepResult
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
from flowfabric.rules.feed import Filter
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import joins, successors
from flowfabric.stores.queries import Read, Scan, UnreadableRow, Where

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine

logger = logging.getLogger("flowfabric.sweeper")

MAX_GROUPS = 50
MAX_EDGES_PER_GROUP = 20  # of one group that waits, resolved in one pass
MAX_SCANNED_EDGES = 500  # of its edges, to find those; the next pass looks at the next ones
MAX_UNREADABLE_GROUP_EDGES = 100_000  # of one group, when one of them cannot be read
FLOWS_PAGE_SIZE = 100
MAX_FLOW_PAGES = 5  # projected in one pass, which takes a few seconds; the next one goes on with what is left
MAX_BACKLOGS = 50
MAX_MEMBERS_PER_BACKLOG = 500  # of one backlog, cancelled in one pass
PERMANENT_ERRORS = (errors.ValidationError, errors.BugError)


class ReadablePage(NamedTuple):
    """Rows of a table, and the places of those that could not be read."""

    rows: list[Any]
    unread_keys: tuple[Any, ...] = ()

    @property
    def unread_count(self) -> int:
        """How many could not be read."""
        return len(self.unread_keys)


class RotatingScan:
    """Pages of a table by an instant, going round: the next page begins after one that could not be moved."""

    def __init__(self, row: type[msgspec.Struct], column: str, key: tuple[str, ...]) -> None:
        self._row = row
        self._order = (column, *key)
        self._after: tuple[Any, ...] | None = None

    async def page(self, runtime: Runtime, limit: int, *where: Where) -> ReadablePage:
        """The next rows whose instant has come, earliest first."""
        now = await runtime.store.ping()
        runtime.estimate.update(now)
        due = (Where(self._order[0], "<=", now), *where)
        rows = await runtime.store.scan(Scan(self._row, due, self._order, self._after, limit, tolerant=True))
        if not rows and self._after is not None:
            self._after = None
            rows = await runtime.store.scan(Scan(self._row, due, self._order, None, limit, tolerant=True))
        self._after = self._place(rows[-1]) if len(rows) == limit else None
        return readable_page(rows)

    def _place(self, row: Any) -> tuple[Any, ...]:
        if isinstance(row, UnreadableRow):
            return row.sort_key[: len(self._order)]
        return tuple(getattr(row, name) for name in self._order)

    def rewind(self) -> None:
        """Let the next page be the first one."""
        self._after = None


def readable_page(found: Sequence[Any]) -> ReadablePage:
    """Leave out the rows of a tolerant list that cannot be read, and name each of them in the log."""
    unread = tuple(row for row in found if isinstance(row, UnreadableRow))
    for row in unread:
        logger.error("%s cannot be read and is passed over: %s", row.sort_key, row.error)
    rows = [row for row in found if not isinstance(row, UnreadableRow)] if unread else [*found]
    return ReadablePage(rows, tuple(row.sort_key for row in unread))


class FlowSweeps:
    """One pass of each sweep of flows; the places where the next pass goes on are kept here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting = RotatingScan(EdgeGroup, "waiting_since", ("flow_id", "downstream_execution_id"))
        self._flows = RotatingScan(Flow, "project_at", ("flow_id",))
        self._backlogs = RotatingScan(CancelBacklog, "due_at", ("flow_id",))
        key = ("flow_id", "downstream_execution_id")
        self._flagged = RotatingScan(PendingSiblingCancel, "flagged_at", key)
        self._reconciled = RotatingScan(PendingSiblingCancel, "flagged_at", key)
        edge = ("downstream_execution_id", "edge_id")
        self._noted = RotatingScan(Dependency, "unfolded_at", edge)
        self._renoted = RotatingScan(Dependency, "unfolded_at", edge)
        self._owed = RotatingScan(CompletionDispatch, "due_at", ("execution_id",))
        self._looks = 0

    def sweeps(self, chosen: Filter | None = None) -> tuple[Sweep, ...]:
        """The sweeps by their names; `chosen` restricts those that act on single executions."""
        choice = SweepFilter.of(self._engine.runtime.settings.sweeps, chosen)

        def filtered(run: Callable[[SweepFilter], Awaitable[SweepResult]]) -> Callable[[int], Awaitable[SweepResult]]:
            return lambda _: run(choice)

        return (
            Sweep("completion_dispatch", run_pass=self.dispatch_completions),
            Sweep("dependency_reconciler", run_pass=filtered(self.reconcile_dependencies)),
            Sweep("flow_projector", run_pass=self.project_flows, cyclic=True),
            Sweep("flow_retention", "purge_check_at", lambda row: self._engine.purge_flow(row.flow_id), row=Flow),
            Sweep("cancel_reconciler", run_pass=filtered(self.reconcile_cancels)),
            Sweep("edge_cancel_dispatcher", run_pass=self.dispatch_sibling_cancels),
            Sweep("edge_cancel_reconciler", run_pass=self.reconcile_sibling_cancels),
        )

    # -- ends -----------------------------------------------------------------------------------------------------

    async def dispatch_completions(self, batch: int) -> SweepResult:
        """Carry on with ends that a process wrote and did not live to follow up."""
        delivered = await self._deliver(batch)
        noted = await self._noted.page(self._engine.runtime, batch)
        settled, unread = await self._ended(noted.rows)
        folded = await self._fold(settled)
        faults = delivered.errors + noted.unread_count + unread + folded.errors
        return SweepResult(delivered.processed + folded.processed, faults)

    async def reconcile_dependencies(self, choice: SweepFilter) -> SweepResult:
        """Resolve edges whose upstream has ended, whether or not anybody noted it, and cascade the skips."""
        noted = await self._renoted.page(self._engine.runtime, MAX_GROUPS * MAX_EDGES_PER_GROUP)
        settled, unread = await self._ended(noted.rows)
        # An end with many edges goes to all of them, whoever may be chosen.
        delivered = await self._deliver(MAX_GROUPS) if not choice.filters else SweepResult(0, 0)
        waiting = await self._waiting.page(self._engine.runtime, MAX_GROUPS)
        more, unread_too = await self._unnoticed(waiting.rows)
        accepted, unread_children = await self._accepted(settled + more, choice)
        folded = await self._fold(accepted)
        faults = noted.unread_count + unread + waiting.unread_count + unread_too + unread_children
        faults += delivered.errors + folded.errors
        return SweepResult(delivered.processed + folded.processed, faults)

    async def _deliver(self, limit: int) -> SweepResult:
        """Go on with the ends that have many edges, and cascade the skips; what is processed are edges."""
        owed = await self._owed.page(self._engine.runtime, limit)
        processed, faults = 0, owed.unread_count
        for row in owed.rows:
            try:
                done = await self._engine.dispatcher.fan_out(row.execution_id)
                processed += done.resolved + await self._cascade(done.skipped)
            except errors.StoreUnavailable:
                raise
            except errors.FabricError:
                logger.exception("the end of %s was left for the next pass", row.execution_id)
                faults += 1
        return SweepResult(processed, faults)

    async def _unnoticed(self, groups: Sequence[EdgeGroup]) -> tuple[list[CompletedEdge], int]:
        """Unresolved edges of waiting groups whose upstream is terminal, and how many upstreams cannot be read."""
        if not groups:
            return [], 0
        found, unread_edges = await self._inbound([group.downstream_execution_id for group in groups])
        self._looks += 1
        open_edges = [one for each in found for one in _some([one for one in each if one.outcome is None], self._looks)]
        ended: dict[Downstream, list[CompletedEdge]] = {}
        settled, unread = await self._ended(open_edges)
        for one in settled:
            ended.setdefault(one.downstream, []).append(one)
        return [one for each in ended.values() for one in each[:MAX_EDGES_PER_GROUP]], unread + unread_edges

    async def _inbound(self, names: Sequence[str]) -> tuple[list[list[Dependency]], int]:
        """The applied edges of each of these, and how many cannot be read."""
        try:
            return await self._load([Read(Dependency, (name,)) for name in names]), 0
        except errors.Corruption:
            pages = [readable_page(await self._engine.runtime.scan(_edges_of(name))) for name in names]
            return [page.rows for page in pages], sum(page.unread_count for page in pages)

    async def _ended(self, edges: Sequence[Dependency]) -> tuple[list[CompletedEdge], int]:
        """Those of these edges whose upstream has ended, and does not live again by now; how many cannot be read."""
        names = sorted({one.upstream_execution_id for one in edges})
        upstreams = await load_readable(self._engine.runtime, names)
        settled = []
        for one in edges:
            if one.upstream_execution_id not in upstreams:
                continue
            upstream = upstreams[one.upstream_execution_id]
            outcome = joins.current_outcome(one, upstream)
            if outcome is not None:
                noted = one.unfolded_at is not None and one.outcome is outcome  # and counted only while it still is
                child = Downstream(one.flow_id, one.downstream_execution_id)
                many = upstream if successors.has_many(upstream) else None
                if noted:
                    settled.append(CompletedEdge(child, one.edge_id, of_fan_out=many is not None))
                else:
                    settled.append(CompletedEdge(child, one.edge_id, outcome, one.revision, expected_upstream=many))
        return settled, len(names) - len(upstreams)

    async def _accepted(self, settled: list[CompletedEdge], choice: SweepFilter) -> tuple[list[CompletedEdge], int]:
        """Those of these edges whose child may be touched; how many children cannot be read."""
        if not choice.filters:
            return settled, 0
        names = sorted({one.downstream.execution_id for one in settled})
        rows = await load_readable(self._engine.runtime, names)
        chosen = {name for name, row in rows.items() if choice.accepts(row)}
        return [one for one in settled if one.downstream.execution_id in chosen], len(names) - len(rows)

    async def _fold(self, settled: list[CompletedEdge]) -> SweepResult:
        folds = await self._engine.join_resolver.resolve(settled)
        more = await self._cascade([fold.downstream.execution_id for fold in folds if fold.skipped])
        return SweepResult(sum(fold.resolved for fold in folds) + more, sum(fold.refused is not None for fold in folds))

    async def _cascade(self, skipped: list[str]) -> int:
        """Tell those who waited for these; how many edges that resolved."""
        return (await self._engine.dispatcher.cascade(skipped))[0] if skipped else 0

    # -- summaries ------------------------------------------------------------------------------------------------

    async def project_flows(self, batch: int) -> SweepResult:
        """Write the summaries of flows that are still going on, of each once, a page after the other."""
        processed = faults = 0
        seen: set[Any] = set()
        for _ in range(MAX_FLOW_PAGES):
            page = await self._flows.page(self._engine.runtime, FLOWS_PAGE_SIZE)
            rows = [row for row in page.rows if row.flow_id not in seen]
            unread = [place for place in page.unread_keys if place not in seen]
            faults += len(unread)
            if not rows and not unread:  # those it begins with are up again
                self._flows.rewind()
                break
            seen.update(unread, (row.flow_id for row in rows))
            done = await self._each(ReadablePage(rows), lambda row: self._engine.project_flow_summary(row.flow_id))
            processed, faults = processed + done.processed, faults + done.errors
        return SweepResult(processed, faults)

    # -- cancels --------------------------------------------------------------------------------------------------

    async def reconcile_cancels(self, choice: SweepFilter) -> SweepResult:
        """Cancel what the backlog of cancelled flows lists, after the grace."""
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
        wants = (Read(Flow, (flow_id,)), Read(PendingMemberCancel, (flow_id,)))
        flows, pending = await self._load(wants)
        if not flows or not pending:
            await self._drop(flow_id)
            return 1, 0 if _is_uuid(flow_id) else 1
        broken = [one.execution_id for one in pending if not _is_execution_id(one.execution_id)]
        names = [one.execution_id for one in pending if one.execution_id not in broken]
        if choice.filters:
            rows = await self._load([Read(Execution, (name,)) for name in names])
            names = [name for name, row in zip(names, rows, strict=True) if choice.accepts(first(row))]
        reason = flow_cancel.member_reason(first(flows))
        done = await self._engine.bulk_canceller.cancel_many(
            names[:MAX_MEMBERS_PER_BACKLOG], reason, backlog_flow_id=flow_id
        )
        gone = list(broken)
        faults = len(broken)
        for name, one in done.items():
            if isinstance(one, MemberCancelResult):
                gone.append(name)
            elif isinstance(one, PERMANENT_ERRORS):
                logger.error("cancel_reconciler: %s cannot be cancelled and is given up: %s", name, one)
                gone.append(name)
                faults += 1
            else:
                faults += 1
        struck = await self._engine.bulk_canceller.acknowledge(flow_id, gone)
        return struck, faults

    async def _drop(self, flow_id: str) -> bool:
        return await self._engine.runtime.decide_and_commit(
            (Read(CancelBacklog, (flow_id,)),), lambda rows, _: flow_cancel.drop_backlog(first(rows[0]))
        )

    async def dispatch_sibling_cancels(self, batch: int) -> SweepResult:
        """Cancel the remaining upstreams of fired groups."""

        async def cancel(row: PendingSiblingCancel) -> bool | None:
            done = await self._engine.bulk_canceller.cancel_siblings(
                Downstream(row.flow_id, row.downstream_execution_id)
            )
            return True if all(isinstance(one, MemberCancelResult) for one in done.values()) else None

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

    async def _load(self, wants: Sequence[Read]) -> list[list[Any]]:
        return (await self._engine.runtime.load(wants)).rows if wants else []


def _some(edges: list[Dependency], turn: int) -> list[Dependency]:
    """As many edges as are looked at in one turn, other ones in the next turn if there are more."""
    turns = max(1, -(-len(edges) // MAX_SCANNED_EDGES))
    start = turn % turns * MAX_SCANNED_EDGES
    return edges[start : start + MAX_SCANNED_EDGES]


def _edges_of(name: str) -> Scan:
    """The applied edges of one execution, whether or not all of them can be read."""
    key = ("downstream_execution_id", "edge_id")
    return Scan(Dependency, (Where(key[0], "=", name),), key, limit=MAX_UNREADABLE_GROUP_EDGES, tolerant=True)


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
