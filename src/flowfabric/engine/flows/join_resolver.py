"""Folding: the settled edges of many children, counted into their groups in a few trips.

One fold loads the groups, children and dependencies of a whole batch together, and then only what their tallies ask
for: the other upstreams when siblings are to be cancelled, a result when it is handed on, the flow when a child is
skipped. Each child is a change of its own; a change that came too late is decided again. A child whose rows make no
sense, or cannot be read, is told of and holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.runtime import Runtime, StoreBackoff
from flowfabric.model.change import Change, merge_changes
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import Dependency, EdgeGroup, Flow, GroupState, PendingMemberCancel
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.flow import joins
from flowfabric.rules.flow.joins import JoinContext, JoinCounts, JoinResolution, UpstreamOutcome, Verdict
from flowfabric.stores.queries import Read

logger = logging.getLogger("flowfabric.folding")

MAX_DOWNSTREAMS_PER_BATCH = 250  # folded together
MAX_EDGES_PER_BATCH = 2000  # looked at together


class Downstream(NamedTuple):
    """Whose group it is."""

    flow_id: str
    execution_id: str


class CompletedEdge(NamedTuple):
    """An edge whose upstream has ended; without an outcome it is folded as its dependency notes it, if it does.

    With a revision it is folded only while the dependency has that: whoever saw the end had seen it before. Of an
    upstream with many edges, whose replay writes them before it is written itself, an end is folded only while the
    dependency is as it is loaded (`of_many`); one that is noted nowhere only while the upstream is as it was `seen`.
    """

    downstream: Downstream
    edge_id: str
    outcome: TerminalOutcome | None = None
    revision: int | None = None
    of_fan_out: bool = False
    expected_upstream: Execution | None = None


class DownstreamResolution(msgspec.Struct, frozen=True):
    """What became of one child: a verdict by edge, and whether it was skipped. An edge never applied has no verdict."""

    downstream: Downstream
    verdicts: dict[str, Verdict]
    resolved: int = 0
    skipped: bool = False
    refused: errors.FabricError | None = None  # why nothing could be done for it


class _Case(msgspec.Struct):
    """One child under way."""

    child: Downstream
    group: EdgeGroup | None
    row: Execution | None
    tally: JoinCounts
    edges: tuple[str, ...]  # of the tally's verdicts
    around: JoinContext = JoinContext()
    beside: list[Any] = []  # further rows that were looked at: all its edges, and upstreams that have ended


class JoinResolver:
    """Counts what has been settled."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def load_join_group(self, rows: Rows) -> Rows:
        """Load the join group of a loaded execution, to be decided together with it."""
        row = first(rows[0])
        if row is None or row.flow_id is None:
            return [[]]
        return (await self.runtime.load((Read(EdgeGroup, (row.flow_id, row.execution_id)),))).rows

    async def resolve(self, settled: Iterable[CompletedEdge]) -> list[DownstreamResolution]:
        """Count these edges; answers when everything is written."""
        todo: dict[Downstream, list[CompletedEdge]] = {}
        for one in settled:
            todo.setdefault(one.downstream, []).append(one)
        done: list[DownstreamResolution] = []
        alone, misses, pause = False, 0, StoreBackoff()
        while todo:
            batch = _batch(todo)
            folds = await self._fold_batch(batch, pause, alone=alone)
            for fold in folds:
                todo[fold.downstream] = todo[fold.downstream][len(batch[fold.downstream]) :]
                if not todo[fold.downstream]:
                    del todo[fold.downstream]
            done += folds
            alone = len(folds) < len(batch)
            misses = misses + 1 if not folds else 0
            if alone:
                await asyncio.sleep(self.runtime.random() * min(0.05, 0.001 * 2**misses))
        return done

    async def _fold_batch(
        self, batch: dict[Downstream, list[CompletedEdge]], pause: StoreBackoff, *, alone: bool
    ) -> list[DownstreamResolution]:
        try:
            return await self._fold_once(batch, pause, alone=alone)
        except errors.StoreUnavailable:
            raise
        except errors.FabricError as fault:
            if len(batch) == 1:
                [child] = batch
                logger.error("the edges of %s cannot be counted: %s", child.execution_id, fault)
                return [DownstreamResolution(child, {}, refused=fault)]
        each = [*batch.items()]  # nothing was written: halves, until the one that is wrong is alone
        half = len(each) // 2
        return [
            fold
            for part in (each[:half], each[half:])
            for fold in await self._fold_batch(dict(part), pause, alone=alone)
        ]

    async def _fold_once(
        self, batch: dict[Downstream, list[CompletedEdge]], pause: StoreBackoff, *, alone: bool
    ) -> list[DownstreamResolution]:
        cases = await self._cases(batch)
        await self._look_around(cases)
        folds: list[DownstreamResolution] = []
        written: list[tuple[list[_Case], list[JoinResolution], Change]] = []
        together: dict[str, tuple[list[_Case], list[JoinResolution], list[Change]]] = {}
        for case in cases:
            if case.group is None:
                folds.append(DownstreamResolution(case.child, {}))
                continue
            decision = joins.resolve_join(case.group, case.row, case.tally, case.around)
            answer = decision.unwrap(0)
            if decision.change is None:
                folds.append(_told(case, answer))
            elif answer.skipped and not alone:
                # Skips rely on the flow, and a batch holds one change about a root: so they are one change.
                shared = together.setdefault(case.child.flow_id, ([], [], []))
                shared[0].append(case)
                shared[1].append(answer)
                shared[2].append(decision.change)
            else:
                written.append(([case], [answer], decision.change))
        written += [(cases, answers, merge_changes(*changes)) for cases, answers, changes in together.values()]
        changes = [msgspec.structs.replace(change, id=self.runtime.minter.change_id()) for _, _, change in written]
        times = await asyncio.gather(*(self._write(change, pause) for change in changes))
        for (members, answers, _), change, committed_at in zip(written, changes, times, strict=True):
            if committed_at is None:
                continue
            for case, answer in zip(members, answers, strict=True):
                folds.append(_told(case, answer))
            rows = [[case.row for case in members], *(case.beside for case in members if case.beside)]
            self.runtime.publish_commit(change, rows, committed_at)
        return folds

    async def _write(self, change: Change, pause: StoreBackoff) -> int | None:
        """The commit's time, or None when the change was not written and has to be decided again."""
        try:
            return await self.runtime.commit_queue.add(change)
        except errors.StoreUnavailable as lost:
            await pause.sleep_or_raise()
            if not lost.in_doubt:
                return None
        one = next(guard for guard in change.guards if guard.row is EdgeGroup)
        loaded = await self.runtime.load((Read(EdgeGroup, one.key),))
        group = first(loaded.rows[0])
        return loaded.now if group is not None and group.revision == change.id else None

    async def _cases(self, batch: dict[Downstream, list[CompletedEdge]]) -> list[_Case]:
        wants: list[Read] = []
        for child, settled in batch.items():
            wants += (Read(EdgeGroup, child), Read(Execution, (child.execution_id,)))
            wants += [Read(Dependency, (child.execution_id, one.edge_id)) for one in settled]
        found = iter((await self.runtime.load(wants)).rows)
        cases = []
        for child, settled in batch.items():
            group, row = first(next(found)), first(next(found))
            settlements = []
            for one in settled:
                dependency = first(next(found))
                if (settlement := _settlement(dependency, one)) is not None:
                    settlements.append(settlement)
            if group is None:
                settlements = []
            tally = joins.count_outcomes(group, settlements) if group is not None else _NOTHING
            edges = tuple(one.dependency.edge_id for one in sorted(settlements, key=joins.arrival_order))
            cases.append(_Case(child, group, row, tally, edges))
        return cases

    async def _look_around(self, cases: Sequence[_Case]) -> None:
        """Load what the tallies ask for, each kind for all cases at once."""
        flagging = [case for case in cases if case.group is not None and case.tally.cancels_siblings(case.group)]
        skipping = [case for case in cases if case.tally.skips(case.row)]
        if flagging or skipping:
            wants = [Read(Dependency, (case.child.execution_id,)) for case in flagging]
            for case in skipping:
                wants += (Read(Flow, (case.child.flow_id,)), Read(PendingMemberCancel, case.child))
            found = (await self.runtime.load(wants)).rows
            inbound, flows = found[: len(flagging)], iter(found[len(flagging) :])
            for case in skipping:
                flow, pending = first(next(flows)), bool(next(flows))
                case.around = msgspec.structs.replace(case.around, flow=flow, cancel_pending=pending)
            if flagging:
                await self._look_at_siblings(flagging, inbound)
        await self._look_for_results(cases)

    async def _look_at_siblings(self, flagging: Sequence[_Case], inbound: list[list[Any]]) -> None:
        """Who has not ended is seen from the edges; where an end came, the upstream may live again and is looked at."""
        told = [one.dependency for case in flagging for one in case.tally.counted]
        told += [one for edges in inbound for one in edges if one.outcome is not None]
        ended = sorted({one.upstream_execution_id for one in told})
        again: dict[str, Execution] = {}
        if ended:
            found = (await self.runtime.load([Read(Execution, (name,)) for name in ended])).rows
            again = {each[0].execution_id: each[0] for each in found if each}
        for case, edges in zip(flagging, inbound, strict=True):
            going = joins.running_siblings(edges, case.tally, again)
            case.around = msgspec.structs.replace(case.around, siblings=going)
            case.beside = [*edges, *again.values()]

    async def _look_for_results(self, cases: Sequence[_Case]) -> None:
        """The result of the last carrier that has one; usually the last one has."""
        open_cases = [
            (case, carriers)
            for case in cases
            if case.group is not None and (carriers := case.tally.result_edges(case.group, case.row))
        ]
        while open_cases:
            wants: list[Read] = []
            for case, carriers in open_cases:
                wants += (
                    Read(Payload, (case.child.execution_id,)),
                    Read(Result, (carriers.pop(0).upstream_execution_id,)),
                )
            found = iter((await self.runtime.load(wants)).rows)
            left = []
            for case, carriers in open_cases:
                payload, result = first(next(found)), first(next(found))
                if payload is not None and result is not None:
                    case.around = msgspec.structs.replace(case.around, passed_result=(payload, result))
                elif carriers:
                    left.append((case, carriers))
            open_cases = left


_NOTHING = JoinCounts(0, 0, 0, GroupState.PENDING, (), ())


def _settlement(dependency: Dependency | None, one: CompletedEdge) -> UpstreamOutcome | None:
    if dependency is None or dependency.flow_id != one.downstream.flow_id:
        return None
    if one.outcome is not None and one.revision is not None:
        if dependency.revision != one.revision:
            return None
        return UpstreamOutcome(dependency, one.outcome, is_recorded=False, upstream=one.expected_upstream)
    outcome = one.outcome
    if outcome is None and dependency.unfolded_at is not None:
        outcome = dependency.outcome
    return None if outcome is None else UpstreamOutcome(dependency, outcome, is_recorded=not one.of_fan_out)


def _told(case: _Case, answer: JoinResolution) -> DownstreamResolution:
    verdicts = dict(zip(case.edges, answer.verdicts, strict=True))
    return DownstreamResolution(case.child, verdicts, answer.resolved, answer.skipped)


def _batch(todo: dict[Downstream, list[CompletedEdge]]) -> dict[Downstream, list[CompletedEdge]]:
    batch: dict[Downstream, list[CompletedEdge]] = {}
    edges = 0
    for child, settled in todo.items():
        if batch and (len(batch) == MAX_DOWNSTREAMS_PER_BATCH or edges + len(settled) > MAX_EDGES_PER_BATCH):
            break
        batch[child] = settled[:MAX_EDGES_PER_BATCH]
        edges += len(settled)
    return batch
