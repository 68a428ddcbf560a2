"""CompletionDispatcher: resolves the joins behind a completed execution within milliseconds of its commit.

The change that completes an execution records the outcome on its edges, or inserts a dispatch row if there are many.
The dispatcher is called for every commit of its process and resolves the completed edges in rounds: while one round is
in flight, the next one fills. Correctness does not depend on it: the sweeps find everything that a process leaves
undone when it dies.

A downstream with a single upstream needs no round: its release is written in the change that completes the upstream
(`inline_release`), mostly without a load. This saves a load and a commit per step of a chain. If that change is
refused, the completion is committed without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream, JoinResolver
from flowfabric.engine.runtime.after_commit import Rows, first_row
from flowfabric.engine.runtime.read_set import One, ReadSet, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.event_loop import finish_tasks, start_background
from flowfabric.model.change import Change, Insert, Patch, Upsert, Write, outcome_of
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import CompletionDispatch, Dependency, DependencyKind, Edge, EdgeGroup, PendingSiblingCancel
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import fan_out as fan_out_rules
from flowfabric.rules.flow import inline_release, successors
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome
from flowfabric.rules.flow.successors import Successor
from flowfabric.stores.queries import Scan, UnreadableRow, Where

logger = logging.getLogger("flowfabric.dispatch")

CONCURRENT_ROUNDS = 4
MAX_EDGES_PER_ROUND = 1000
MAX_EDGES_PER_STEP = 250  # a change resolves at most these of one dispatch row
MAX_CASCADE_DEPTH = 50  # one call follows a cascade of completions this deep
PAGE_SIZE = 1000


class CompletionDispatcher:
    """Resolves the joins of executions that this process completes."""

    def __init__(
        self,
        runtime: Runtime,
        join_resolver: JoinResolver,
        cancel_siblings: Callable[[Downstream, flow_cancel.SiblingCancels | None], Awaitable[object]],
        *,
        enabled: bool,
    ) -> None:
        self.runtime = runtime
        self._join_resolver = join_resolver
        self._cancel_siblings = cancel_siblings
        self._enabled = enabled
        self._completed: dict[Downstream, set[str]] = {}  # edges that wait for a round
        self._in_round: set[Downstream] = set()
        self._cancelling: set[Downstream] = set()  # their siblings are being cancelled
        self._tasks: set[asyncio.Task[None]] = set()
        self._rounds = 0

    # -- commits of this process ----------------------------------------------------------------------------------

    def dispatch_written(self, change: Change, rows: Rows) -> None:
        """Start the work that a committed change leaves to do."""
        if not self._enabled:
            return
        flow_id: str | None = None
        for write in change.writes:
            row: Any = write.row
            if type(write) is Patch and row is Dependency and write.fields.get("unfolded_at") is not None:
                flow_id = flow_id or (_flow_of(change, rows) if outcome_of(change) else None)
                if flow_id:
                    execution_id, edge_id = write.key
                    self._completed.setdefault(Downstream(flow_id, execution_id), set()).add(edge_id)
            elif type(write) is Upsert and type(row) is CompletionDispatch:
                self._start(partial(self.fan_out, row.execution_id))
            elif type(write) is Upsert and type(row) is PendingSiblingCancel:
                downstream = Downstream(row.flow_id, row.downstream_execution_id)
                flagged = flow_cancel.sibling_cancels_in(change, downstream, [row for found in rows for row in found])
                self._start(partial(self._cancel_then_resolve, downstream, flagged))
        if self._completed:
            self._start_round()

    async def wait_idle(self) -> None:
        """Wait until everything that was started is done or left to the sweeps."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, grace_s: float = 15.0) -> int:
        """Start nothing more and wait for what is running; return how many tasks were stopped after the grace."""
        self._enabled = False
        return await finish_tasks([*self._tasks], grace_s)

    def _start(self, work: Callable[[], Awaitable[object]]) -> None:
        start_background(self._safely(work), self._tasks)

    async def _safely(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except errors.FabricError as fault:
            logger.warning("left to the sweeps: %s", fault)
        except Exception:
            logger.exception("left to the sweeps")

    async def _cancel_then_resolve(self, downstream: Downstream, flagged: flow_cancel.SiblingCancels | None) -> None:
        """Cancel siblings first: counting their outcomes is not urgent, and cheapest for all of them at once."""
        self._cancelling.add(downstream)
        try:
            await self._cancel_siblings(downstream, flagged)
        finally:
            self._cancelling.discard(downstream)
            self._start_round()

    def _start_round(self) -> None:
        if self._rounds < CONCURRENT_ROUNDS and self._completed.keys() - self._in_round - self._cancelling:
            self._rounds += 1
            self._start(self._run_rounds)

    async def _run_rounds(self) -> None:
        try:
            await asyncio.sleep(0)  # changes of one commit are resolved in one round
            while batch := self._next_round():
                downstreams = {edge.downstream for edge in batch}
                self._in_round |= downstreams
                try:
                    await self._join_resolver.resolve(batch)
                finally:
                    self._in_round -= downstreams
        finally:
            self._rounds -= 1

    def _next_round(self) -> list[CompletedEdge]:
        batch: list[CompletedEdge] = []
        for downstream in [*self._completed]:
            if downstream in self._in_round or downstream in self._cancelling:
                continue  # its group is being written: its edges wait for the next round
            if batch and len(batch) + len(self._completed[downstream]) > MAX_EDGES_PER_ROUND:
                break
            batch += [CompletedEdge(downstream, edge_id) for edge_id in self._completed.pop(downstream)]
        return batch

    # -- many edges -----------------------------------------------------------------------------------------------

    async def fan_out(self, execution_id: str) -> FanOutResult:
        """Resolve the edges of a completion that left a dispatch row, a bounded number at a time."""
        reads = ReadSet()
        dispatch, page = reads.one(CompletionDispatch, execution_id), reads.more_one(_FanOutPage)
        resolved, skipped = 0, list[str]()
        while True:
            attempts = 0

            def decide(rows: Rows, now: int) -> Decision[fan_out_rules.FanOutStep]:
                nonlocal attempts
                attempts += 1
                row, found = dispatch(rows), page(rows)
                if row is None or found is None:
                    return fan_out_rules.fan_out(None, (), is_last=True, inline=False)
                after = found.after_edge
                return fan_out_rules.fan_out(
                    row, found.edges, is_last=after is None, inline=attempts < 3, after_edge=after
                )

            async def load_page(rows: Rows) -> Rows:
                row = dispatch(rows)
                return [] if row is None else [[await self._load_page(row)]]

            step = await self.runtime.decide_and_commit(reads, decide, load_more=load_page)
            resolved += step.edge_count
            resolutions = await self._join_resolver.resolve(
                CompletedEdge(Downstream(edge.flow_id, edge.downstream_execution_id), edge.edge_id, of_fan_out=True)
                for edge in step.unresolved
            )
            skipped += [resolution.downstream.execution_id for resolution in resolutions if resolution.skipped]
            if step.is_last:
                return FanOutResult(resolved, skipped)

    async def _load_page(self, row: CompletionDispatch) -> _FanOutPage:
        """Load the edges of the next step."""
        where = (Where("upstream_execution_id", "=", row.execution_id),)
        after = (row.execution_id, row.after_edge)
        order = ("upstream_execution_id", "edge_id")
        found = await self.runtime.scan(Scan(Edge, where, order, after, MAX_EDGES_PER_STEP + 1, tolerant=True))
        after_edge = _edge_id(found[MAX_EDGES_PER_STEP - 1]) if len(found) > MAX_EDGES_PER_STEP else None
        return _FanOutPage(await self._load_fan_out(_readable_edges(found[:MAX_EDGES_PER_STEP])), after_edge)

    async def _load_fan_out(self, edges: Sequence[Edge]) -> list[fan_out_rules.FanOutEdge]:
        """Load the group, the downstream and the dependency of each edge; what is unreadable is None."""
        reads = ReadSet()
        accessors: list[tuple[One[EdgeGroup], One[Execution], One[Dependency]]] = [
            (
                reads.one(EdgeGroup, edge.flow_id, edge.downstream_execution_id),
                reads.one(Execution, edge.downstream_execution_id),
                reads.one(Dependency, edge.downstream_execution_id, edge.edge_id),
            )
            for edge in edges
        ]
        try:
            rows = (await self.runtime.load(reads)).rows
        except errors.Corruption as fault:
            if len(edges) > 1:  # halves, until the unreadable row is alone
                half = len(edges) // 2
                return await self._load_fan_out(edges[:half]) + await self._load_fan_out(edges[half:])
            logger.error("the downstream of edge %s cannot be read: %s", edges[0].edge_id, fault)
            return [fan_out_rules.FanOutEdge(edges[0], None, None, await self._load_dependency(edges[0]))]
        return [
            fan_out_rules.FanOutEdge(edge, group(rows), downstream(rows), dependency(rows))
            for edge, (group, downstream, dependency) in zip(edges, accessors, strict=True)
        ]

    async def _load_dependency(self, edge: Edge) -> Dependency | None:
        """Return the edge's dependency; None if it is unreadable, too."""
        try:
            return await load_one(self.runtime, Dependency, edge.downstream_execution_id, edge.edge_id)
        except errors.Corruption:
            return None

    # -- downstreams with one upstream: released by the change that completes it -----------------------------------

    def try_inline_release(self, change: Change, row: Execution) -> Change | None:
        """Return a completion with the release of sole downstreams; None if rows have to be loaded first."""
        sole = self._sole_successors(row)
        if any(successor.passes_result or not successor.queue for successor in sole):
            return None
        return _with_releases(change, [(successor, _release_without_load(row, successor)) for successor in sole])

    async def inline_release(self, change: Change, row: Execution) -> Change:
        """Return a completion with the release of sole downstreams, without it if their rows are unreadable."""
        if (extended := self.try_inline_release(change, row)) is not None:
            return extended
        try:
            return await self._load_and_release(change, row)
        except errors.Corruption as fault:
            logger.error("%s completes without the release of its successors: %s", row.execution_id, fault)
            return change

    async def _load_and_release(self, change: Change, row: Execution) -> Change:
        sole = self._sole_successors(row)
        reads = ReadSet()
        groups: dict[str, One[EdgeGroup]] = {}
        downstreams: dict[str, One[Execution]] = {}
        payloads: dict[str, One[Payload]] = {}
        for successor in sole:
            execution_id = successor.execution_id
            if not successor.queue:
                groups[execution_id] = reads.one(EdgeGroup, row.flow_id, execution_id)
                downstreams[execution_id] = reads.one(Execution, execution_id)
            if successor.passes_result:
                payloads[execution_id] = reads.one(Payload, execution_id)
        rows = (await self.runtime.load(reads)).rows
        inserted = [write.row for write in change.writes if type(write) is Insert]
        results = [row for row in inserted if type(row) is Result and not row.is_failure]
        releases: list[tuple[Successor, Change]] = []
        for successor in sole:
            execution_id = successor.execution_id
            payload = payloads[execution_id](rows) if successor.passes_result else None
            passed = (payload, results[0]) if payload is not None and results else None
            if successor.queue:
                releases.append((successor, _release_without_load(row, successor, passed)))
                continue
            group, downstream = groups[execution_id](rows), downstreams[execution_id](rows)
            if group is not None and downstream is not None:
                release = _release_loaded(row, successor, group, downstream, passed)
                if release is not None:
                    releases.append((successor, release))
        return _with_releases(change, releases)

    def _sole_successors(self, row: Execution) -> list[Successor]:
        """Return the successors that wait for nothing else."""
        return [one for one in successors.named_successors(row) if one.is_sole] if self._enabled else []

    # -- cascades by request --------------------------------------------------------------------------------------

    async def cascade(self, completed: Sequence[str]) -> tuple[int, int]:
        """Resolve all edges of completed executions now, and of those that are skipped by it, to a bounded depth.

        Return how many edges were resolved and how many executions were descended into.
        """
        resolved = descended = 0
        level = [*completed]
        for depth in range(MAX_CASCADE_DEPTH + 1):
            resolutions = await self._join_resolver.resolve(await self._completed_edges(level))
            resolved += sum(resolution.resolved for resolution in resolutions)
            level = [resolution.downstream.execution_id for resolution in resolutions if resolution.skipped]
            descended += len(level) if depth < MAX_CASCADE_DEPTH else 0
            if not level:
                break
        return resolved, descended

    async def _completed_edges(self, execution_ids: list[str]) -> list[CompletedEdge]:
        outcomes = {
            row.execution_id: row.terminal_outcome
            for row in (await load_readable(self.runtime, execution_ids)).values()
            if row is not None and row.lifecycle_phase is LifecyclePhase.TERMINAL and row.flow_id is not None
        }
        return [
            CompletedEdge(
                Downstream(edge.flow_id, edge.downstream_execution_id),
                edge.edge_id,
                outcomes[edge.upstream_execution_id],
            )
            for edge in _readable_edges(
                await scan_edges(self.runtime, "upstream_execution_id", [*outcomes], tolerant=True)
            )
        ]


async def outgoing_edges(runtime: Runtime, upstreams: Sequence[str]) -> list[Edge]:
    """Return the staged edges that start at these executions."""
    return await scan_edges(runtime, "upstream_execution_id", upstreams)


async def scan_edges(
    runtime: Runtime, column: str, execution_ids: Sequence[str], *, tolerant: bool = False
) -> list[Any]:
    """Return the staged edges with one of these in a column, by that column and edge id; see `Scan` for `tolerant`."""
    found: list[Any] = []
    after: tuple[Any, ...] | None = None
    while execution_ids:
        where = (Where(column, "in", execution_ids),)
        page = await runtime.scan(Scan(Edge, where, (column, "edge_id"), after, PAGE_SIZE, tolerant=tolerant))
        found += page
        if len(page) < PAGE_SIZE:
            break
        last = page[-1]
        after = last.sort_key[:2] if isinstance(last, UnreadableRow) else (getattr(last, column), last.edge_id)
    return found


class _FanOutPage(msgspec.Struct, frozen=True):
    """The edges of one step, and the edge after which the next step begins; None if this is the last one."""

    edges: list[fan_out_rules.FanOutEdge]
    after_edge: str | None


class FanOutResult(msgspec.Struct, frozen=True):
    """How many edges a fan-out resolved, and which downstreams were skipped by it."""

    resolved: int
    skipped: list[str]


def _edge_id(found: Edge | UnreadableRow) -> str:
    edge_id: str = found.sort_key[1] if isinstance(found, UnreadableRow) else found.edge_id
    return edge_id


def _readable_edges(found: Sequence[Edge | UnreadableRow]) -> list[Edge]:
    """Leave out the edges that cannot be read, and log each of them."""
    for edge in found:
        if isinstance(edge, UnreadableRow):
            logger.error("edge %s cannot be read and is skipped: %s", _edge_id(edge), edge.error)
    return [edge for edge in found if not isinstance(edge, UnreadableRow)]


def _flow_of(change: Change, rows: Rows) -> str | None:
    """Return the flow of the execution that a change completes."""
    flow_id: str | None = change.events[0].flow_id if change.template is None else first_row(rows).flow_id
    return flow_id


def _release_without_load(
    row: Execution, successor: Successor, passed_result: tuple[Payload, Result] | None = None
) -> Change:
    queue = successors.decode_queue(successor.queue)
    return inline_release.inline_release_without_load(
        row.flow_id or "", successor.edge_id, successor.execution_id, queue, passed_result
    )


def _release_loaded(
    row: Execution,
    successor: Successor,
    group: EdgeGroup,
    downstream: Execution,
    passed_result: tuple[Payload, Result] | None,
) -> Change | None:
    # The only edge of a group without counts: its dependency is known without a load. If there is no result to pass,
    # it is treated like an edge that passes none.
    dependency = Dependency(
        downstream.execution_id,
        successor.edge_id,
        group.flow_id,
        row.execution_id,
        DependencyKind.SUCCESS_ONLY,
        data_passing_ref="…" if passed_result is not None else None,
    )
    context = JoinContext(passed_result=passed_result)
    return inline_release.inline_release(
        group, downstream, UpstreamOutcome(dependency, TerminalOutcome.SUCCESS), context
    )


def _with_releases(change: Change, releases: Sequence[tuple[Successor, Change]]) -> Change:
    """Return a change with the releases of these successors in place of the outcomes recorded on their edges."""
    released = {(successor.execution_id, successor.edge_id) for successor, _ in releases}
    guards, writes = [*change.guards], list[Write]()
    for write in change.writes:
        if not (type(write) is Patch and write.row is Dependency and write.key in released):
            writes.append(write)
    for _, release in releases:
        guards += release.guards
        writes += release.writes
    return msgspec.structs.replace(change, guards=tuple(guards), writes=tuple(writes))
