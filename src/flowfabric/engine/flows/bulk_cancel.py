"""Cancelling many executions: the members of a flow, or the siblings that a join no longer needs.

Members are cancelled in batches, each member a change of its own; who was cancelled, had ended, or is gone is
acknowledged afterwards. A cancel may be repeated at will, so a crash in between costs a second look, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream, JoinResolver
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.commit_queue import CommitResult
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers.flow import MemberCancelResult, SiblingDrain
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, Dependency, EdgeGroup, PendingMemberCancel, PendingSiblingCancel
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.text import pluralize
from flowfabric.rules.execution import cancel, lease
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import successors
from flowfabric.stores.queries import Read

logger = logging.getLogger("flowfabric.flows")

BACKGROUND_GRACE_S = 15.0  # how long closing waits for cancels in the background
MAX_BATCH_CANCELS = 250  # of one commit; while one is on its way, the next one is decided
MIN_UNSEEN_CANCELS = 50  # siblings: of fewer most are running when their join fires, and would be tried in vain

Dispositions = dict[str, MemberCancelResult | errors.FabricError]


class PlannedCancel(NamedTuple):
    """One that is to be written, and the rows that it was decided on."""

    execution_id: str
    change: Change
    rows: Rows


class BulkCanceller:
    """Ends executions that nobody needs any more."""

    def __init__(self, runtime: Runtime, join_resolver: JoinResolver) -> None:
        self.runtime = runtime
        self.join_resolver = join_resolver
        self._background: set[asyncio.Task[None]] = set()

    async def cancel_many(
        self, names: Sequence[str], reason: str, *, backlog_flow_id: str | None = None
    ) -> Dispositions:
        """Cancel these; what became of each. A failure is told, not raised.

        `listed_by` names a flow: of its members only those are cancelled that stand in its backlog when they are looked
        at. A replay takes a member off in the change that revives it, so none that was replayed is cancelled again.
        """
        parts = [names[start : start + MAX_BATCH_CANCELS] for start in range(0, len(names), MAX_BATCH_CANCELS)]
        done: Dispositions = {}
        for part in await asyncio.gather(*(self._cancel_part(part, reason, backlog_flow_id) for part in parts)):
            done |= part
        return done

    async def _cancel_part(self, names: Sequence[str], reason: str, listed_by: str | None) -> Dispositions:
        done: Dispositions = {}
        left = list(names)
        while left:
            wants = [Read(Execution, (name,)) for name in left]
            if listed_by is not None:
                wants += [Read(PendingMemberCancel, (listed_by, name)) for name in left]
            try:
                found = (await self.runtime.store.load(wants)).rows
            except errors.StoreUnavailable as away:
                return done | dict.fromkeys(left, away)
            except errors.FabricError as unreadable:
                if len(left) == 1:
                    return done | {left[0]: unreadable}
                half = len(left) // 2  # until the one that cannot be read is alone
                for part in (left[:half], left[half:]):
                    done |= await self._cancel_part(part, reason, listed_by)
                return done
            looked_at = list(zip(left, found[: len(left)], strict=True))
            if listed_by is not None:
                looked_at = [one for one, entry in zip(looked_at, found[len(left) :], strict=True) if entry]
            cancels: list[PlannedCancel] = []
            for name, rows in looked_at:
                try:
                    decision = cancel.cancel(first(rows), Fence(), lease.OPERATOR_OVERRIDE, reason)
                except errors.FabricError as unreadable:
                    done[name] = unreadable
                    continue
                if decision.change is None:
                    done[name] = _disposition(decision.answer)
                else:
                    cancels.append(PlannedCancel(name, decision.change, [rows]))
            left = await self._write(cancels, done)
        return done

    async def _write(self, cancels: Sequence[PlannedCancel], done: Dispositions) -> list[str]:
        """Write these and add what became of each; those that are not as they were thought to be are the answer."""
        if not cancels:
            return []
        changes = [msgspec.structs.replace(one.change, id=self.runtime.minter.change_id()) for one in cancels]
        left, written = list[str](), dict[int, list[tuple[Change, Rows]]]()
        verdicts = await self._resolved(changes, await self.runtime.commit_queue.send_batch(changes))
        for (name, _, rows), change, verdict in zip(cancels, changes, verdicts, strict=True):
            if isinstance(verdict, errors.FabricError):
                done[name] = verdict
            elif verdict is None:
                left.append(name)  # it moved meanwhile: look again
            else:
                written.setdefault(verdict, []).append((change, rows))
                done[name] = MemberCancelResult.CANCELLED
        for committed_at, together in written.items():
            self.runtime.publish_commits(together, committed_at)
        return left

    async def _resolved(self, changes: Sequence[Change], verdicts: list[CommitResult]) -> list[CommitResult]:
        """The verdicts, with one look at those whose answer got lost: what bears the change's mark was written."""
        doubtful = [
            place
            for place, verdict in enumerate(verdicts)
            if isinstance(verdict, errors.StoreUnavailable) and verdict.in_doubt
        ]
        if not doubtful:
            return verdicts
        try:
            loaded = await self.runtime.store.load(
                [Read(Execution, changes[place].guards[0].key) for place in doubtful]
            )
        except errors.FabricError:  # then they are told as failed, and a sweep looks again
            return verdicts
        for place, rows in zip(doubtful, loaded.rows, strict=True):
            if rows and rows[0].revision == changes[place].id:
                verdicts[place] = loaded.now
        return verdicts

    # -- members of a flow ------------------------------------------------------------------------------------------

    async def cancel_members(self, flow_id: str, names: Sequence[str], reason: str) -> list[str]:
        """Cancel members of a cancelled flow and acknowledge them; those that failed stay in the backlog."""
        done = await self.cancel_many(names, reason, backlog_flow_id=flow_id)
        await self.acknowledge(flow_id, [name for name, one in done.items() if isinstance(one, MemberCancelResult)])
        return [name for name in names if isinstance(done.get(name), errors.FabricError)]

    async def acknowledge(self, flow_id: str, names: Sequence[str]) -> int:
        """Strike members off the backlog of their flow; how many stood there."""
        if not names:
            return 0
        wants = [Read(CancelBacklog, (flow_id,)), *(Read(PendingMemberCancel, (flow_id, name)) for name in names)]
        return await self.runtime.decide_and_commit(
            wants,
            lambda rows, _: flow_cancel.acknowledge_cancels(
                first(rows[0]), [row for found in rows[1:] for row in found]
            ),
        )

    # -- siblings -----------------------------------------------------------------------------------------------------

    async def cancel_siblings(
        self, child: Downstream, flagged: flow_cancel.SiblingCancels | None = None
    ) -> Dispositions:
        """Cancel the remaining upstreams of a fired group and drain it; a group with a failure keeps everything.

        `flagged` is what the group says of them, when the caller has just written that.
        """
        if flagged is None:
            entry, group = (await self.runtime.load((Read(PendingSiblingCancel, child), Read(EdgeGroup, child)))).rows
            if not entry:  # somebody else has drained it
                return {}
            flagged = flow_cancel.sibling_cancels_of(entry[0], first(group))
            done = await self.cancel_many(flagged.siblings, flagged.reason)
            await self.resolve_unrecorded_outcomes(child)
        else:
            unseen = await self._cancel_unseen(flagged)
            seen = [name for name in flagged.siblings if name not in unseen]
            done = unseen | await self.cancel_many(seen, flagged.reason)
            await self._fold(
                CompletedEdge(child, edge.edge_id, TerminalOutcome.CANCELLED, edge.revision)
                for edge in flagged.inbound
                if unseen.get(edge.upstream_execution_id) is MemberCancelResult.CANCELLED
            )
        if flagged.reason:
            self._count(flagged.reason, done)
        if all(isinstance(one, MemberCancelResult) for one in done.values()):
            await self.drain(child, flagged.revision)
        return done

    async def _cancel_unseen(self, flagged: flow_cancel.SiblingCancels) -> Dispositions:
        """Cancel without a look those that nobody has touched since they were created; what became of these."""
        edges, done = flow_cancel.presumably_unstarted(flagged), Dispositions()
        if len(edges) < MIN_UNSEEN_CANCELS:
            return done

        async def part(some: Sequence[Dependency]) -> None:
            cancels = flow_cancel.cancel_siblings_without_load(flagged, some)
            await self._write([PlannedCancel(row.execution_id, change, [[row]]) for change, row in cancels], done)

        await asyncio.gather(
            *(part(edges[start : start + MAX_BATCH_CANCELS]) for start in range(0, len(edges), MAX_BATCH_CANCELS))
        )
        return done

    async def resolve_unrecorded_outcomes(self, child: Downstream) -> None:
        """Count the ends that are noted on no edge of this group: whoever was to count them may have died."""
        inbound: list[Dependency] = (await self.runtime.load((Read(Dependency, (child.execution_id,)),))).rows[0]
        edges = [edge for edge in inbound if flow_cancel.has_no_outcome(edge)]
        upstreams = await load_readable(self.runtime, sorted({edge.upstream_execution_id for edge in edges}))
        await self._fold(
            CompletedEdge(
                child,
                edge.edge_id,
                end,
                edge.revision,
                expected_upstream=_with_many(upstreams[edge.upstream_execution_id]),
            )
            for edge in edges
            if (end := flow_cancel.unrecorded_outcome(upstreams.get(edge.upstream_execution_id))) is not None
        )

    async def _fold(self, settled: Iterable[CompletedEdge]) -> None:
        """Count these; raises when that cannot be: once the group is drained, nobody looks for them any more."""
        for fold in await self.join_resolver.resolve(settled):
            if fold.refused is not None:
                raise fold.refused

    def _count(self, reason: str, done: Dispositions) -> None:
        meters = self.runtime.metrics
        meters.count("ff_sibling_cancel_dispatched", len(done), reason=reason)
        dispositions = Counter(one.value for one in done.values() if isinstance(one, MemberCancelResult))
        for disposition, amount in dispositions.items():
            meters.count("ff_sibling_cancel_disposition", amount, disposition=disposition)

    async def drain(self, child: Downstream, revision: int | None = None) -> SiblingDrain:
        """Clear what a fired group had flagged; what it flagged in an entry of this revision, if one is given."""
        return await self.runtime.decide_and_commit(
            (Read(PendingSiblingCancel, child), Read(EdgeGroup, child)),
            lambda rows, _: flow_cancel.drain_siblings(first(rows[0]), first(rows[1]), revision),
        )

    def finish_in_background(self, cancels: Awaitable[Sequence[object]]) -> None:
        """Finish cancels that their caller does not wait for; those that fail are left to the reconciler."""

        async def run() -> None:
            try:
                failed = await cancels
            except errors.FabricError as fault:
                logger.warning("cancelling members was left to the reconciler: %s", fault)
            else:
                if failed:
                    logger.warning("the cancel of %s was left to the reconciler", pluralize(len(failed), "member"))

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, grace_s: float = BACKGROUND_GRACE_S) -> int:
        """Wait for cancels in the background; return how many were stopped, which the reconciler finishes."""
        if not self._background:
            return 0
        _, late = await asyncio.wait(self._background, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)


async def load_readable(runtime: Runtime, names: Sequence[str]) -> dict[str, Execution | None]:
    """These executions, None for one that is gone; one that cannot be read is told of and left out."""
    if not names:
        return {}
    try:
        rows = (await runtime.load([Read(Execution, (name,)) for name in names])).rows
    except errors.Corruption as fault:
        if len(names) == 1:
            logger.error("%s is passed over: %s", names[0], fault)
            return {}
        half = len(names) // 2  # until the one that cannot be read is alone
        return await load_readable(runtime, names[:half]) | await load_readable(runtime, names[half:])
    return {name: first(row) for name, row in zip(names, rows, strict=True)}


def _with_many(upstream: Execution | None) -> Execution | None:
    """The upstream if it has many edges, which its replay does not write in its own change."""
    return upstream if successors.has_many(upstream) else None


def _disposition(answer: object) -> MemberCancelResult | errors.FabricError:
    if isinstance(answer, errors.NotFound):
        return MemberCancelResult.NOT_FOUND
    if isinstance(answer, errors.ExecutionNotActive):
        return MemberCancelResult.ALREADY_TERMINAL
    return answer if isinstance(answer, errors.FabricError) else MemberCancelResult.CANCELLED
