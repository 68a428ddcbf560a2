"""JoinResolver: counts completed edges of many downstream executions into their join groups in a few round trips.

A batch loads the groups, downstreams and dependencies together, and then only the rows that their counts require: the
other upstreams if siblings have to be cancelled, a result that is passed on, the flow if a downstream is skipped. Each
downstream gets a change of its own; after a conflict it is decided again. A downstream whose rows are unreadable or
inconsistent is logged and does not block the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import Rows, first_row
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.engine.runtime.read_set import Each, Many, One, ReadSet, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.change import Change, merge_changes
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import Dependency, EdgeGroup, Flow, GroupState, PendingMemberCancel
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.flow import joins
from flowfabric.rules.flow.joins import JoinContext, JoinCounts, JoinResolution, UpstreamOutcome, Verdict

logger = logging.getLogger("flowfabric.flows")

MAX_DOWNSTREAMS_PER_BATCH = 250
MAX_EDGES_PER_BATCH = 2000


class Downstream(NamedTuple):
    """The execution whose join group is resolved."""

    flow_id: str
    execution_id: str


class CompletedEdge(NamedTuple):
    """An edge whose upstream has completed; without an outcome it counts with the one its dependency records, if any.

    With a revision it counts only while the dependency still has that revision. An upstream with many edges is replayed
    after its edges are written; so its outcome counts only while the dependency is as loaded (`of_fan_out`), and one
    that no edge records only while the upstream is the `expected_upstream`.
    """

    downstream: Downstream
    edge_id: str
    outcome: TerminalOutcome | None = None
    revision: int | None = None
    of_fan_out: bool = False
    expected_upstream: Execution | None = None


class DownstreamResolution(msgspec.Struct, frozen=True):
    """The result for one downstream: a verdict for each applied edge, and whether it was skipped."""

    downstream: Downstream
    verdicts: dict[str, Verdict]
    resolved: int = 0
    skipped: bool = False
    refused: errors.FabricError | None = None  # why it could not be resolved


class _Join(msgspec.Struct):
    """The join of one downstream while it is resolved."""

    downstream: Downstream
    group: EdgeGroup | None
    row: Execution | None
    counts: JoinCounts
    edges: tuple[str, ...]  # each belongs to the verdict at its place
    context: JoinContext = JoinContext()
    other_rows: list[Any] = []  # its dependencies and completed upstreams, if they were loaded


class JoinResolver:
    """Counts completed edges into join groups."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def load_join_group(self, rows: Rows) -> Rows:
        """Load the join group of a loaded execution, to be decided together with it."""
        row: Execution | None = first_row(rows)
        if row is None or row.flow_id is None:
            return [[]]
        reads = ReadSet()
        reads.one(EdgeGroup, row.flow_id, row.execution_id)
        return (await self.runtime.load(reads)).rows

    async def resolve(self, completed: Iterable[CompletedEdge]) -> list[DownstreamResolution]:
        """Resolve these edges; return when everything is committed."""
        todo: dict[Downstream, list[CompletedEdge]] = {}
        for edge in completed:
            todo.setdefault(edge.downstream, []).append(edge)
        done: list[DownstreamResolution] = []
        alone, conflicts, backoff = False, 0, StoreBackoff()
        while todo:
            batch = _next_batch(todo)
            resolutions = await self._resolve_batch(batch, backoff, alone=alone)
            for resolution in resolutions:
                downstream = resolution.downstream
                todo[downstream] = todo[downstream][len(batch[downstream]) :]
                if not todo[downstream]:
                    del todo[downstream]
            done += resolutions
            alone = len(resolutions) < len(batch)
            conflicts = conflicts + 1 if not resolutions else 0
            if alone:
                await asyncio.sleep(self.runtime.random() * min(0.05, 0.001 * 2**conflicts))
        return done

    async def _resolve_batch(
        self, batch: dict[Downstream, list[CompletedEdge]], backoff: StoreBackoff, *, alone: bool
    ) -> list[DownstreamResolution]:
        try:
            return await self._resolve_once(batch, backoff, alone=alone)
        except errors.StoreUnavailable:
            raise
        except errors.FabricError as fault:
            if len(batch) == 1:
                [downstream] = batch
                logger.error("the edges of %s cannot be counted: %s", downstream.execution_id, fault)
                return [DownstreamResolution(downstream, {}, refused=fault)]
        items = [*batch.items()]  # nothing was written: halve the batch until the faulty downstream is alone
        half = len(items) // 2
        return [
            resolution
            for part in (items[:half], items[half:])
            for resolution in await self._resolve_batch(dict(part), backoff, alone=alone)
        ]

    async def _resolve_once(
        self, batch: dict[Downstream, list[CompletedEdge]], backoff: StoreBackoff, *, alone: bool
    ) -> list[DownstreamResolution]:
        """Resolve a batch; a downstream with a conflict is missing from the result."""
        joins_loaded = await self._load_joins(batch)
        await self._load_context(joins_loaded)
        resolutions: list[DownstreamResolution] = []
        decided: list[tuple[list[_Join], list[JoinResolution], Change]] = []
        skips: dict[str, tuple[list[_Join], list[JoinResolution], list[Change]]] = {}
        for join in joins_loaded:
            if join.group is None:
                resolutions.append(DownstreamResolution(join.downstream, {}))
                continue
            decision = joins.resolve_join(join.group, join.row, join.counts, join.context)
            answer = decision.unwrap(0)
            if decision.change is None:
                resolutions.append(_resolution(join, answer))
            elif answer.skipped and not alone:
                # Skips guard the flow, and a batch holds one change per root: so the skips of a flow are one change.
                members, answers, changes = skips.setdefault(join.downstream.flow_id, ([], [], []))
                members.append(join)
                answers.append(answer)
                changes.append(decision.change)
            else:
                decided.append(([join], [answer], decision.change))
        decided += [(members, answers, merge_changes(*changes)) for members, answers, changes in skips.values()]
        to_commit = [msgspec.structs.replace(change, id=self.runtime.minter.change_id()) for _, _, change in decided]
        times = await asyncio.gather(*(self._commit(change, backoff) for change in to_commit))
        for (members, answers, _), change, committed_at in zip(decided, to_commit, times, strict=True):
            if committed_at is None:
                continue
            for join, answer in zip(members, answers, strict=True):
                resolutions.append(_resolution(join, answer))
            rows = [[join.row for join in members], *(join.other_rows for join in members if join.other_rows)]
            self.runtime.publish_commit(change, rows, committed_at)
        return resolutions

    async def _commit(self, change: Change, backoff: StoreBackoff) -> int | None:
        """Return the commit's time; None if the change was not written and has to be decided again."""
        try:
            return await self.runtime.commit_queue.add(change)
        except errors.StoreUnavailable as lost:
            await backoff.sleep_or_raise()
            if not lost.in_doubt:
                return None
        reads = ReadSet()
        group = reads.one(EdgeGroup, *next(guard.key for guard in change.guards if guard.row is EdgeGroup))
        loaded = await self.runtime.load(reads)
        row = group(loaded.rows)
        return loaded.now if row is not None and row.revision == change.id else None

    async def _load_joins(self, batch: dict[Downstream, list[CompletedEdge]]) -> list[_Join]:
        reads = ReadSet()
        accessors: list[tuple[One[EdgeGroup], One[Execution], Each[Dependency]]] = [
            (
                reads.one(EdgeGroup, *downstream),
                reads.one(Execution, downstream.execution_id),
                reads.each(Dependency, [(downstream.execution_id, edge.edge_id) for edge in completed]),
            )
            for downstream, completed in batch.items()
        ]
        rows = (await self.runtime.load(reads)).rows
        found = []
        for (downstream, completed), (group_of, row_of, dependencies_of) in zip(batch.items(), accessors, strict=True):
            group, outcomes = group_of(rows), list[UpstreamOutcome]()
            if group is not None:
                pairs = zip(dependencies_of(rows), completed, strict=True)
                outcomes = [outcome for pair in pairs if (outcome := _upstream_outcome(*pair)) is not None]
            counts = joins.count_outcomes(group, outcomes) if group is not None else _NO_COUNTS
            edges = tuple(outcome.dependency.edge_id for outcome in sorted(outcomes, key=joins.arrival_order))
            found.append(_Join(downstream, group, row_of(rows), counts, edges))
        return found

    async def _load_context(self, batch: Sequence[_Join]) -> None:
        """Load the rows that the counts require, each kind for all joins at once."""
        cancelling = [join for join in batch if join.group is not None and join.counts.cancels_siblings(join.group)]
        skipping = [join for join in batch if join.counts.skips(join.row)]
        if cancelling or skipping:
            reads = ReadSet()
            inbound: list[Many[Dependency]] = [
                reads.many(Dependency, join.downstream.execution_id) for join in cancelling
            ]
            flows: list[tuple[One[Flow], One[PendingMemberCancel]]] = [
                (reads.one(Flow, join.downstream.flow_id), reads.one(PendingMemberCancel, *join.downstream))
                for join in skipping
            ]
            rows = (await self.runtime.load(reads)).rows
            for join, (flow, pending) in zip(skipping, flows, strict=True):
                join.context = msgspec.structs.replace(
                    join.context, flow=flow(rows), cancel_pending=pending(rows) is not None
                )
            if cancelling:
                await self._load_siblings(cancelling, [edges(rows) for edges in inbound])
        await self._load_results(batch)

    async def _load_siblings(self, cancelling: Sequence[_Join], inbound: list[list[Dependency]]) -> None:
        """Find the running siblings by their edges; load the completed upstreams, which may have been replayed."""
        recorded = [outcome.dependency for join in cancelling for outcome in join.counts.counted]
        recorded += [edge for edges in inbound for edge in edges if edge.outcome is not None]
        completed = sorted({edge.upstream_execution_id for edge in recorded})
        rows = await load_each(self.runtime, Execution, ((execution_id,) for execution_id in completed))
        upstreams = {row.execution_id: row for row in rows if row is not None}
        for join, edges in zip(cancelling, inbound, strict=True):
            running = joins.running_siblings(edges, join.counts, upstreams)
            join.context = msgspec.structs.replace(join.context, siblings=running)
            join.other_rows = [*edges, *upstreams.values()]

    async def _load_results(self, batch: Sequence[_Join]) -> None:
        """Load the result to pass on: that of the last edge that has one, which usually is the last edge."""
        unresolved = [
            (join, edges)
            for join in batch
            if join.group is not None and (edges := join.counts.result_edges(join.group, join.row))
        ]
        while unresolved:
            reads = ReadSet()
            accessors: list[tuple[One[Payload], One[Result]]] = [
                (
                    reads.one(Payload, join.downstream.execution_id),
                    reads.one(Result, edges.pop(0).upstream_execution_id),
                )
                for join, edges in unresolved
            ]
            rows = (await self.runtime.load(reads)).rows
            left = []
            for (join, edges), (payload_of, result_of) in zip(unresolved, accessors, strict=True):
                payload, result = payload_of(rows), result_of(rows)
                if payload is not None and result is not None and not result.is_failure:
                    join.context = msgspec.structs.replace(join.context, passed_result=(payload, result))
                elif edges:
                    left.append((join, edges))
            unresolved = left


_NO_COUNTS = JoinCounts(0, 0, 0, GroupState.PENDING, (), ())


def _upstream_outcome(dependency: Dependency | None, edge: CompletedEdge) -> UpstreamOutcome | None:
    """Return the outcome that counts for an edge; None if it does not count."""
    if dependency is None or dependency.flow_id != edge.downstream.flow_id:
        return None
    if edge.outcome is not None and edge.revision is not None:
        if dependency.revision != edge.revision:
            return None
        return UpstreamOutcome(dependency, edge.outcome, is_recorded=False, upstream=edge.expected_upstream)
    outcome = edge.outcome
    if outcome is None and dependency.unfolded_at is not None:
        outcome = dependency.outcome
    return None if outcome is None else UpstreamOutcome(dependency, outcome, is_recorded=not edge.of_fan_out)


def _resolution(join: _Join, answer: JoinResolution) -> DownstreamResolution:
    verdicts = dict(zip(join.edges, answer.verdicts, strict=True))
    return DownstreamResolution(join.downstream, verdicts, answer.resolved, answer.skipped)


def _next_batch(todo: dict[Downstream, list[CompletedEdge]]) -> dict[Downstream, list[CompletedEdge]]:
    batch: dict[Downstream, list[CompletedEdge]] = {}
    count = 0
    for downstream, completed in todo.items():
        if batch and (len(batch) == MAX_DOWNSTREAMS_PER_BATCH or count + len(completed) > MAX_EDGES_PER_BATCH):
            break
        batch[downstream] = completed[:MAX_EDGES_PER_BATCH]
        count += len(completed)
    return batch
