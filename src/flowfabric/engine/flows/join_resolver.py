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
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.runtime import Core, Pause
from flowfabric.model.change import Change, joined
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import Dependency, EdgeGroup, Flow, GroupState, PendingCancel
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.flow import joins
from flowfabric.rules.flow.joins import Folded, Settlement, Surroundings, Tally, Verdict
from flowfabric.stores.queries import Want

logger = logging.getLogger("flowfabric.folding")

CHILDREN = 250  # folded together
EDGES = 2000  # looked at together


class Child(NamedTuple):
    """Whose group it is."""

    flow_id: str
    execution_id: str


class Settled(NamedTuple):
    """An edge whose upstream has ended; without an outcome it is folded as its dependency notes it, if it does.

    With a revision it is folded only while the dependency has that: whoever saw the end had seen it before. Of an
    upstream with many edges, whose replay writes them before it is written itself, an end is folded only while the
    dependency is as it is loaded (`of_many`); one that is noted nowhere only while the upstream is as it was `seen`.
    """

    child: Child
    edge_id: str
    outcome: TerminalOutcome | None = None
    revision: int | None = None
    of_many: bool = False
    seen: Execution | None = None


class Fold(msgspec.Struct, frozen=True):
    """What became of one child: a verdict by edge, and whether it was skipped. An edge never applied has no verdict."""

    child: Child
    verdicts: dict[str, Verdict]
    resolved: int = 0
    skipped: bool = False
    refused: errors.FabricError | None = None  # why nothing could be done for it


class _Case(msgspec.Struct):
    """One child under way."""

    child: Child
    group: EdgeGroup | None
    row: Execution | None
    tally: Tally
    edges: tuple[str, ...]  # of the tally's verdicts
    around: Surroundings = Surroundings()
    beside: list[Any] = []  # further rows that were looked at: all its edges, and upstreams that have ended


class Folding:
    """Counts what has been settled."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def fold(self, settled: Iterable[Settled]) -> list[Fold]:
        """Count these edges; answers when everything is written."""
        todo: dict[Child, list[Settled]] = {}
        for one in settled:
            todo.setdefault(one.child, []).append(one)
        done: list[Fold] = []
        alone, misses, pause = False, 0, Pause()
        while todo:
            batch = _batch(todo)
            folds = await self._fold_batch(batch, pause, alone=alone)
            for fold in folds:
                todo[fold.child] = todo[fold.child][len(batch[fold.child]) :]
                if not todo[fold.child]:
                    del todo[fold.child]
            done += folds
            alone = len(folds) < len(batch)
            misses = misses + 1 if not folds else 0
            if alone:
                await asyncio.sleep(self._core.chance() * min(0.05, 0.001 * 2**misses))
        return done

    async def _fold_batch(self, batch: dict[Child, list[Settled]], pause: Pause, *, alone: bool) -> list[Fold]:
        try:
            return await self._fold_once(batch, pause, alone=alone)
        except errors.StoreUnavailable:
            raise
        except errors.FabricError as fault:
            if len(batch) == 1:
                [child] = batch
                logger.error("the edges of %s cannot be counted: %s", child.execution_id, fault)
                return [Fold(child, {}, refused=fault)]
        each = [*batch.items()]  # nothing was written: halves, until the one that is wrong is alone
        half = len(each) // 2
        return [
            fold
            for part in (each[:half], each[half:])
            for fold in await self._fold_batch(dict(part), pause, alone=alone)
        ]

    async def _fold_once(self, batch: dict[Child, list[Settled]], pause: Pause, *, alone: bool) -> list[Fold]:
        cases = await self._cases(batch)
        await self._look_around(cases)
        folds: list[Fold] = []
        written: list[tuple[list[_Case], list[Folded], Change]] = []
        together: dict[str, tuple[list[_Case], list[Folded], list[Change]]] = {}
        for case in cases:
            if case.group is None:
                folds.append(Fold(case.child, {}))
                continue
            decision = joins.fold(case.group, case.row, case.tally, case.around)
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
        written += [(cases, answers, joined(*changes)) for cases, answers, changes in together.values()]
        changes = [msgspec.structs.replace(change, id=self._core.minter.change_id()) for _, _, change in written]
        times = await asyncio.gather(*(self._write(change, pause) for change in changes))
        for (members, answers, _), change, committed_at in zip(written, changes, times, strict=True):
            if committed_at is None:
                continue
            for case, answer in zip(members, answers, strict=True):
                folds.append(_told(case, answer))
            rows = [[case.row for case in members], *(case.beside for case in members if case.beside)]
            self._core.note(change, rows, committed_at)
        return folds

    async def _write(self, change: Change, pause: Pause) -> int | None:
        """The commit's time, or None when the change was not written and has to be decided again."""
        try:
            return await self._core.commits.add(change)
        except errors.StoreUnavailable as lost:
            await pause.or_raise()
            if not lost.in_doubt:
                return None
        one = next(guard for guard in change.guards if guard.row is EdgeGroup)
        loaded = await self._core.load((Want(EdgeGroup, one.key),))
        group = first(loaded.rows[0])
        return loaded.now if group is not None and group.revision == change.id else None

    async def _cases(self, batch: dict[Child, list[Settled]]) -> list[_Case]:
        wants: list[Want] = []
        for child, settled in batch.items():
            wants += (Want(EdgeGroup, child), Want(Execution, (child.execution_id,)))
            wants += [Want(Dependency, (child.execution_id, one.edge_id)) for one in settled]
        found = iter((await self._core.load(wants)).rows)
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
            tally = joins.tally(group, settlements) if group is not None else _NOTHING
            edges = tuple(one.dependency.edge_id for one in sorted(settlements, key=joins.arrival))
            cases.append(_Case(child, group, row, tally, edges))
        return cases

    async def _look_around(self, cases: Sequence[_Case]) -> None:
        """Load what the tallies ask for, each kind for all cases at once."""
        flagging = [case for case in cases if case.group is not None and case.tally.flags_siblings(case.group)]
        skipping = [case for case in cases if case.tally.skips(case.row)]
        if flagging or skipping:
            wants = [Want(Dependency, (case.child.execution_id,)) for case in flagging]
            for case in skipping:
                wants += (Want(Flow, (case.child.flow_id,)), Want(PendingCancel, case.child))
            found = (await self._core.load(wants)).rows
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
            found = (await self._core.load([Want(Execution, (name,)) for name in ended])).rows
            again = {each[0].execution_id: each[0] for each in found if each}
        for case, edges in zip(flagging, inbound, strict=True):
            going = joins.siblings(edges, case.tally, again)
            case.around = msgspec.structs.replace(case.around, siblings=going)
            case.beside = [*edges, *again.values()]

    async def _look_for_results(self, cases: Sequence[_Case]) -> None:
        """The result of the last carrier that has one; usually the last one has."""
        open_cases = [
            (case, carriers)
            for case in cases
            if case.group is not None and (carriers := case.tally.carriers(case.group, case.row))
        ]
        while open_cases:
            wants: list[Want] = []
            for case, carriers in open_cases:
                wants += (
                    Want(Payload, (case.child.execution_id,)),
                    Want(Result, (carriers.pop(0).upstream_execution_id,)),
                )
            found = iter((await self._core.load(wants)).rows)
            left = []
            for case, carriers in open_cases:
                payload, result = first(next(found)), first(next(found))
                if payload is not None and result is not None:
                    case.around = msgspec.structs.replace(case.around, carried=(payload, result))
                elif carriers:
                    left.append((case, carriers))
            open_cases = left


_NOTHING = Tally(0, 0, 0, GroupState.PENDING, (), ())


def _settlement(dependency: Dependency | None, one: Settled) -> Settlement | None:
    if dependency is None or dependency.flow_id != one.child.flow_id:
        return None
    if one.outcome is not None and one.revision is not None:
        if dependency.revision != one.revision:
            return None
        return Settlement(dependency, one.outcome, is_noted=False, upstream=one.seen)
    outcome = one.outcome
    if outcome is None and dependency.unfolded_at is not None:
        outcome = dependency.outcome
    return None if outcome is None else Settlement(dependency, outcome, is_noted=not one.of_many)


def _told(case: _Case, answer: Folded) -> Fold:
    verdicts = dict(zip(case.edges, answer.verdicts, strict=True))
    return Fold(case.child, verdicts, answer.resolved, answer.skipped)


def _batch(todo: dict[Child, list[Settled]]) -> dict[Child, list[Settled]]:
    batch: dict[Child, list[Settled]] = {}
    edges = 0
    for child, settled in todo.items():
        if batch and (len(batch) == CHILDREN or edges + len(settled) > EDGES):
            break
        batch[child] = settled[:EDGES]
        edges += len(settled)
    return batch
