"""Dispatch: what the end of an execution means to those who wait for it, within milliseconds of the commit.

The change that ends an execution notes the end on its edges, or leaves a dispatch row when there are many. This page
takes it from there: it hears of every written change of its process and folds what was settled, batch by batch. While
one round is on its way the next one fills. Nothing here is needed for correctness: whatever a process leaves undone
when it dies is found by the sweeps.

A child that waits for one upstream only needs no fold: its part is written into the very change that ends the upstream
(`carry`), mostly without a look, which saves a load and a commit a step in a chain. When that change is refused, the
end is written without it.
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
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.change import Change, Insert, Patch, Upsert, Write, outcome_of
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import CompletionDispatch, Dependency, DependencyKind, Edge, EdgeGroup, PendingSiblingCancel
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import fan_out as fan_out_rules
from flowfabric.rules.flow import joins, successors
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome
from flowfabric.rules.flow.successors import Successor
from flowfabric.stores.queries import Read, Scan, UnreadableRow, Where

logger = logging.getLogger("flowfabric.dispatch")

CONCURRENT_ROUNDS = 4  # under way at once
MAX_EDGES_PER_ROUND = 1000
MAX_EDGES_PER_STEP = 500  # of a dispatch row, settled in one change
MAX_CASCADE_DEPTH = 50  # of a cascade in one call
PAGE_SIZE = 1000


class CompletionDispatcher:
    """Carries ends to those who wait for them."""

    def __init__(
        self,
        runtime: Runtime,
        folding: JoinResolver,
        cancel_siblings: Callable[[Downstream, flow_cancel.SiblingCancels | None], Awaitable[object]],
        *,
        enabled: bool,
    ) -> None:
        self.runtime = runtime
        self._folding = folding
        self._cancel_siblings = cancel_siblings
        self._enabled = enabled
        self._settled: dict[Downstream, set[str]] = {}
        self._folded_now: set[Downstream] = set()
        self._cancelled_now: set[Downstream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rounds = 0

    # -- hearing of ends ------------------------------------------------------------------------------------------

    def dispatch_written(self, change: Change, rows: Rows) -> None:
        """A change was written: take up what it leaves to be done."""
        if not self._enabled:
            return
        flow_id: str | None = None
        for write in change.writes:
            row: Any = write.row
            if type(write) is Patch and row is Dependency and write.fields.get("unfolded_at") is not None:
                flow_id = flow_id or (_flow_of(change, rows) if outcome_of(change) else None)
                if flow_id:
                    child, edge_id = write.key
                    self._settled.setdefault(Downstream(flow_id, child), set()).add(edge_id)
            elif type(write) is Upsert and type(row) is CompletionDispatch:
                self._start(partial(self.fan_out, row.execution_id))
            elif type(write) is Upsert and type(row) is PendingSiblingCancel:
                child = Downstream(row.flow_id, row.downstream_execution_id)
                flagged = flow_cancel.sibling_cancels_in(change, child, [one for found in rows for one in found])
                self._start(partial(self._end_siblings, child, flagged))
        if self._settled:
            self._start_round()

    async def wait_idle(self) -> None:
        """Wait until everything that this process took up is done, or left to the sweeps."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, grace_s: float = 15.0) -> int:
        """Take up nothing more, finish what is under way; how much had to be cut off."""
        self._enabled = False
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(self._tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    def _start(self, work: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.create_task(self._safely(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _safely(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except errors.FabricError as fault:
            logger.warning("left to the sweeps: %s", fault)
        except Exception:
            logger.exception("left to the sweeps")

    async def _end_siblings(self, child: Downstream, flagged: flow_cancel.SiblingCancels | None) -> None:
        """Cancel them first; counting how they ended is not urgent, and costs least when done for all together."""
        self._cancelled_now.add(child)
        try:
            await self._cancel_siblings(child, flagged)
        finally:
            self._cancelled_now.discard(child)
            self._start_round()

    def _start_round(self) -> None:
        if self._rounds < CONCURRENT_ROUNDS and self._settled.keys() - self._folded_now - self._cancelled_now:
            self._rounds += 1
            self._start(self._run_rounds)

    async def _run_rounds(self) -> None:
        try:
            await asyncio.sleep(0)  # whatever was written in the same batch is folded together
            while batch := self._next_round():
                children = {one.downstream for one in batch}
                self._folded_now |= children
                try:
                    await self._folding.resolve(batch)
                finally:
                    self._folded_now -= children
        finally:
            self._rounds -= 1

    def _next_round(self) -> list[CompletedEdge]:
        batch: list[CompletedEdge] = []
        for child in [*self._settled]:
            if child in self._folded_now or child in self._cancelled_now:
                continue  # its group is being written: these wait for the next round
            if batch and len(batch) + len(self._settled[child]) > MAX_EDGES_PER_ROUND:
                break
            batch += [CompletedEdge(child, edge_id) for edge_id in self._settled.pop(child)]
        return batch

    # -- many edges -----------------------------------------------------------------------------------------------

    async def fan_out(self, execution_id: str) -> FanOutResult:
        """Settle and fold the edges of an end that left a dispatch row, some at a time."""
        settled, skipped = 0, list[str]()
        while True:
            tries = 0

            def decide(rows: Rows, now: int) -> Decision[fan_out_rules.FanOutStep]:
                nonlocal tries
                tries += 1
                if not rows[0]:
                    return fan_out_rules.fan_out(None, (), is_last=True, inline=False)
                [owed], after, ahead = rows
                after_edge = first(after)
                return fan_out_rules.fan_out(
                    owed, ahead, is_last=after_edge is None, inline=tries < 3, after_edge=after_edge
                )

            step = await self.runtime.decide_and_commit(
                (Read(CompletionDispatch, (execution_id,)),), decide, load_more=self._edges_after
            )
            settled += step.edge_count
            folds = await self._folding.resolve(
                [
                    CompletedEdge(Downstream(one.flow_id, one.downstream_execution_id), one.edge_id, of_fan_out=True)
                    for one in step.unresolved
                ]
            )
            skipped += [fold.downstream.execution_id for fold in folds if fold.skipped]
            if step.is_last:
                return FanOutResult(settled, skipped)

    async def _edges_after(self, rows: Rows) -> Rows:
        """The edge that the step after this one begins after, and the edges of this one with what is behind them."""
        if not rows[0]:
            return []
        owed: CompletionDispatch = rows[0][0]
        where = (Where("upstream_execution_id", "=", owed.execution_id),)
        place = (owed.execution_id, owed.after_edge)
        order = ("upstream_execution_id", "edge_id")
        found = await self.runtime.scan(Scan(Edge, where, order, place, MAX_EDGES_PER_STEP + 1, tolerant=True))
        after = [_edge_id(found[MAX_EDGES_PER_STEP - 1])] if len(found) > MAX_EDGES_PER_STEP else []
        return [after, await self._ahead(_readable_edges(found[:MAX_EDGES_PER_STEP]))]

    async def _ahead(self, edges: Sequence[Edge]) -> list[fan_out_rules.FanOutEdge]:
        """For each edge the group, the child and what it knows of the edge, as far as these can be read."""
        wants: list[Read] = []
        for edge in edges:
            wants += (
                Read(EdgeGroup, (edge.flow_id, edge.downstream_execution_id)),
                Read(Execution, (edge.downstream_execution_id,)),
                Read(Dependency, (edge.downstream_execution_id, edge.edge_id)),
            )
        try:
            rows = (await self.runtime.load(wants)).rows
        except errors.Corruption as fault:
            if len(edges) > 1:  # halves, until the one that is wrong is alone
                half = len(edges) // 2
                return await self._ahead(edges[:half]) + await self._ahead(edges[half:])
            logger.error("what waits for edge %s cannot be read: %s", edges[0].edge_id, fault)
            return [fan_out_rules.FanOutEdge(edges[0], None, None, await self._dependency(edges[0]))]
        behind = (map(first, rows[3 * place : 3 * place + 3]) for place in range(len(edges)))
        return [fan_out_rules.FanOutEdge(edge, *found) for edge, found in zip(edges, behind, strict=True)]

    async def _dependency(self, edge: Edge) -> Dependency | None:
        """The edge as its downstream knows it; None if that cannot be read either."""
        try:
            found = (await self.runtime.load((Read(Dependency, (edge.downstream_execution_id, edge.edge_id)),))).rows
        except errors.Corruption:
            return None
        row: Dependency | None = first(found[0])
        return row

    # -- children that wait for one edge: written with the end itself ------------------------------------------------

    def try_inline_release(self, change: Change, row: Execution) -> Change | None:
        """The change that ends an execution, with the children that it alone was waited for by; None without a look."""
        alone = self._alone(row)
        if any(one.passes_result or not one.queue for one in alone):
            return None
        return _with(change, [(one, _unseen(row, one)) for one in alone])

    async def inline_release(self, change: Change, row: Execution) -> Change:
        """The same, after a look at those that need one; without them when what is found cannot be read."""
        if (known := self.try_inline_release(change, row)) is not None:
            return known
        try:
            return await self._carry_seen(change, row)
        except errors.Corruption as fault:
            logger.error("%s ends without those who wait for it: %s", row.execution_id, fault)
            return change

    async def _carry_seen(self, change: Change, row: Execution) -> Change:
        alone = self._alone(row)
        wants: list[Read] = []
        for one in alone:
            if not one.queue:
                wants += (Read(EdgeGroup, (row.flow_id, one.execution_id)), Read(Execution, (one.execution_id,)))
            if one.passes_result:
                wants.append(Read(Payload, (one.execution_id,)))
        found = iter((await self.runtime.load(wants)).rows)
        results = [write.row for write in change.writes if type(write) is Insert and type(write.row) is Result]
        folds: list[tuple[Successor, Change]] = []
        for one in alone:
            group, child = (None, None) if one.queue else (first(next(found)), first(next(found)))
            payload = first(next(found)) if one.passes_result else None
            handed = (payload, results[0]) if payload is not None and results else None
            if one.queue:
                folds.append((one, _unseen(row, one, handed)))
            elif group is not None and child is not None and (fold := _seen(row, one, group, child, handed)):
                folds.append((one, fold))
        return _with(change, folds)

    def _alone(self, row: Execution) -> list[Successor]:
        return [one for one in successors.named_successors(row) if one.is_sole] if self._enabled else []

    # -- cascades by request --------------------------------------------------------------------------------------

    async def cascade(self, ended: Sequence[str]) -> tuple[int, int]:
        """Resolve all edges of ended executions now, and of those that are skipped by it, to a bounded depth."""
        resolved = descended = 0
        level = [*ended]
        for depth in range(MAX_CASCADE_DEPTH + 1):
            folds = await self._folding.resolve(await self._edges_of(level))
            resolved += sum(fold.resolved for fold in folds)
            level = [fold.downstream.execution_id for fold in folds if fold.skipped]
            descended += len(level) if depth < MAX_CASCADE_DEPTH else 0
            if not level:
                break
        return resolved, descended

    async def _edges_of(self, ended: list[str]) -> list[CompletedEdge]:
        outcomes = {
            row.execution_id: row.terminal_outcome
            for row in (await load_readable(self.runtime, ended)).values()
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
    """The staged edges that lead away from these."""
    return await scan_edges(runtime, "upstream_execution_id", upstreams)


async def scan_edges(runtime: Runtime, end: str, names: Sequence[str], *, tolerant: bool = False) -> list[Any]:
    """The staged edges with one of these at one end, by that end and by id; see `Scan` for `tolerant`."""
    found: list[Any] = []
    place: tuple[Any, ...] | None = None
    while names:
        page = await runtime.scan(
            Scan(Edge, (Where(end, "in", names),), (end, "edge_id"), place, PAGE_SIZE, tolerant=tolerant)
        )
        found += page
        if len(page) < PAGE_SIZE:
            break
        last = page[-1]
        place = last.sort_key[:2] if isinstance(last, UnreadableRow) else (getattr(last, end), last.edge_id)
    return found


class FanOutResult(msgspec.Struct, frozen=True):
    """How many edges an end was told to, and whom that skipped."""

    resolved: int
    skipped: list[str]


def _edge_id(found: Edge | UnreadableRow) -> str:
    edge_id: str = found.sort_key[1] if isinstance(found, UnreadableRow) else found.edge_id
    return edge_id


def _readable_edges(found: Sequence[Edge | UnreadableRow]) -> list[Edge]:
    """Leave out the edges that cannot be read, and name each of them in the log."""
    for one in found:
        if isinstance(one, UnreadableRow):
            logger.error("edge %s cannot be read and is passed over: %s", _edge_id(one), one.error)
    return [one for one in found if not isinstance(one, UnreadableRow)]


def _flow_of(change: Change, rows: Rows) -> str | None:
    """The flow of the execution that a change has ended."""
    flow_id: str | None = change.events[0].flow_id if change.template is None else rows[0][0].flow_id
    return flow_id


def _unseen(row: Execution, one: Successor, handed: tuple[Payload, Result] | None = None) -> Change:
    line = successors.decode_queue(one.queue)
    return joins.inline_release_without_load(row.flow_id or "", one.edge_id, one.execution_id, line, handed)


def _seen(
    row: Execution, one: Successor, group: EdgeGroup, child: Execution, handed: tuple[Payload, Result] | None
) -> Change | None:
    # The only edge of a group that has counted nothing: what its dependency says is known without looking. One that
    # has nothing to hand on is like one that hands nothing on.
    ref = "…" if handed is not None else None
    dependency = Dependency(
        child.execution_id,
        one.edge_id,
        group.flow_id,
        row.execution_id,
        DependencyKind.SUCCESS_ONLY,
        data_passing_ref=ref,
    )
    around = JoinContext(passed_result=handed)
    return joins.inline_release(group, child, UpstreamOutcome(dependency, TerminalOutcome.SUCCESS), around)


def _with(change: Change, folds: Sequence[tuple[Successor, Change]]) -> Change:
    """A change with the folds of these successors in place of the notes on their edges."""
    noted = {(one.execution_id, one.edge_id) for one, _ in folds}
    guards, writes = [*change.guards], list[Write]()
    for write in change.writes:
        if not (type(write) is Patch and write.row is Dependency and write.key in noted):
            writes.append(write)
    for _, fold in folds:
        guards += fold.guards
        writes += fold.writes
    return msgspec.structs.replace(change, guards=tuple(guards), writes=tuple(writes))
