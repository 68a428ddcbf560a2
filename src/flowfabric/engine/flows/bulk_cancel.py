"""BulkCanceller: cancels the members of a flow, or the siblings that a join no longer needs.

Members are cancelled in batches, each in a change of its own. A member that was cancelled, had completed before or does
not exist any more is acknowledged afterwards. Cancelling is idempotent, so a crash in between costs a second load.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream, JoinResolver
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.commit_queue import CommitResult
from flowfabric.engine.runtime.read_set import One, ReadSet, load_each, load_many
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.event_loop import finish_tasks, start_background
from flowfabric.model.answers.flow import MemberCancelResult, SiblingDrain
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, Dependency, EdgeGroup, PendingMemberCancel, PendingSiblingCancel
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.text import pluralize
from flowfabric.rules.execution import cancel, fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import successors

logger = logging.getLogger("flowfabric.flows")

BACKGROUND_GRACE_S = 15.0  # how long closing waits for cancels in the background
MAX_BATCH_CANCELS = 250  # a commit has at most these; while one is in flight, the next one is decided
MIN_UNLOADED_CANCELS = 50  # most of fewer siblings run already when their join fires, so the attempt would fail

T = TypeVar("T")
Dispositions = dict[str, MemberCancelResult | errors.FabricError]


class PlannedCancel(NamedTuple):
    """A cancel to commit, and the rows it was decided on."""

    execution_id: str
    change: Change
    rows: Rows


class BulkCanceller:
    """Cancels many executions."""

    def __init__(self, runtime: Runtime, join_resolver: JoinResolver) -> None:
        self.runtime = runtime
        self.join_resolver = join_resolver
        self._background: set[asyncio.Task[None]] = set()

    async def cancel_many(
        self, execution_ids: Sequence[str], reason: str, *, backlog_flow_id: str | None = None
    ) -> Dispositions:
        """Cancel these executions and return the result of each. A failure is returned, not raised.

        `backlog_flow_id` names a flow: only members that are in its backlog when they are loaded are cancelled. A
        replay removes its member from the backlog in the same change, so no replayed member is cancelled again.
        """
        done: Dispositions = {}
        for batch in await asyncio.gather(
            *(self._cancel_batch(batch, reason, backlog_flow_id) for batch in _batches(execution_ids))
        ):
            done |= batch
        return done

    async def _cancel_batch(self, execution_ids: Sequence[str], reason: str, flow_id: str | None) -> Dispositions:
        done: Dispositions = {}
        left = list(execution_ids)
        while left:
            reads = ReadSet()
            rows = reads.each(Execution, [(execution_id,) for execution_id in left])
            listed = [] if flow_id is None else [(flow_id, execution_id) for execution_id in left]
            entries = reads.each(PendingMemberCancel, listed)
            try:
                loaded = (await self.runtime.store.load(reads)).rows
            except errors.StoreUnavailable as unavailable:
                return done | dict.fromkeys(left, unavailable)
            except errors.FabricError as unreadable:
                if len(left) == 1:
                    return done | {left[0]: unreadable}
                half = len(left) // 2  # until the unreadable row is alone
                for part in (left[:half], left[half:]):
                    done |= await self._cancel_batch(part, reason, flow_id)
                return done
            members = list(zip(left, rows(loaded), strict=True))
            if flow_id is not None:
                members = [member for member, entry in zip(members, entries(loaded), strict=True) if entry is not None]
            cancels: list[PlannedCancel] = []
            for execution_id, row in members:
                try:
                    decision = cancel.cancel(row, Fence(), fences.OPERATOR_OVERRIDE, reason)
                except errors.FabricError as unreadable:
                    done[execution_id] = unreadable
                    continue
                if decision.change is None:
                    done[execution_id] = _disposition(decision.answer)
                else:
                    cancels.append(PlannedCancel(execution_id, decision.change, [[row]]))
            left = await self._write(cancels, done)
        return done

    async def _write(self, cancels: Sequence[PlannedCancel], done: Dispositions) -> list[str]:
        """Commit cancels and add the result of each; return the executions whose cancel has to be decided again."""
        if not cancels:
            return []
        changes = [msgspec.structs.replace(planned.change, id=self.runtime.minter.change_id()) for planned in cancels]
        left, written = list[str](), dict[int, list[tuple[Change, Rows]]]()
        verdicts = await self._resolve_unknown(changes, await self.runtime.commit_queue.send_batch(changes))
        for (execution_id, _, rows), change, verdict in zip(cancels, changes, verdicts, strict=True):
            if isinstance(verdict, errors.FabricError):
                done[execution_id] = verdict
            elif verdict is None:
                left.append(execution_id)  # another writer was faster
            else:
                written.setdefault(verdict, []).append((change, rows))
                done[execution_id] = MemberCancelResult.CANCELLED
        for committed_at, commits in written.items():
            self.runtime.publish_commits(commits, committed_at)
        return left

    async def _resolve_unknown(self, changes: Sequence[Change], verdicts: list[CommitResult]) -> list[CommitResult]:
        """Load the rows of changes whose reply was lost: one with the change's id as revision was written."""
        unknown = [
            place
            for place, verdict in enumerate(verdicts)
            if isinstance(verdict, errors.StoreUnavailable) and verdict.in_doubt
        ]
        if not unknown:
            return verdicts
        reads = ReadSet()
        rows = reads.each(Execution, [changes[place].guards[0].key for place in unknown])
        try:
            loaded = await self.runtime.store.load(reads)
        except errors.FabricError:  # they are reported as failed, and a sweep tries again
            return verdicts
        for place, row in zip(unknown, rows(loaded.rows), strict=True):
            if row is not None and row.revision == changes[place].id:
                verdicts[place] = loaded.now
        return verdicts

    # -- members of a flow ------------------------------------------------------------------------------------------

    async def cancel_members(self, flow_id: str, execution_ids: Sequence[str], reason: str) -> list[str]:
        """Cancel members of a cancelled flow and acknowledge them; return those that failed and stay in the backlog."""
        done = await self.cancel_many(execution_ids, reason, backlog_flow_id=flow_id)
        cancelled = [member for member, result in done.items() if isinstance(result, MemberCancelResult)]
        await self.acknowledge(flow_id, cancelled)
        return [member for member in execution_ids if isinstance(done.get(member), errors.FabricError)]

    async def acknowledge(self, flow_id: str, execution_ids: Sequence[str]) -> int:
        """Remove members from the backlog of their flow; return how many were in it."""
        if not execution_ids:
            return 0
        reads = ReadSet()
        backlog = reads.one(CancelBacklog, flow_id)
        entries = reads.each(PendingMemberCancel, [(flow_id, execution_id) for execution_id in execution_ids])
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: flow_cancel.acknowledge_cancels(
                backlog(rows), [entry for entry in entries(rows) if entry is not None]
            ),
        )

    # -- siblings -----------------------------------------------------------------------------------------------------

    async def cancel_siblings(
        self, child: Downstream, flagged: flow_cancel.SiblingCancels | None = None
    ) -> Dispositions:
        """Cancel the remaining upstreams of a fired group and drain it; after a failure the group is not drained.

        `flagged` holds the siblings to cancel if the caller has just written them.
        """
        if flagged is None:
            reads, entry, group = _sibling_reads(child)
            rows = (await self.runtime.load(reads)).rows
            if (pending := entry(rows)) is None:  # another process has drained it
                return {}
            flagged = flow_cancel.sibling_cancels_of(pending, group(rows))
            done = await self.cancel_many(flagged.siblings, flagged.reason)
            await self.resolve_unrecorded_outcomes(child)
        else:
            unloaded = await self._cancel_without_load(flagged)
            others = [sibling for sibling in flagged.siblings if sibling not in unloaded]
            done = unloaded | await self.cancel_many(others, flagged.reason)
            await self._resolve(
                CompletedEdge(child, edge.edge_id, TerminalOutcome.CANCELLED, edge.revision)
                for edge in flagged.inbound
                if unloaded.get(edge.upstream_execution_id) is MemberCancelResult.CANCELLED
            )
        if flagged.reason:
            self._count(flagged.reason, done)
        if all(isinstance(result, MemberCancelResult) for result in done.values()):
            await self.drain(child, flagged.revision)
        return done

    async def _cancel_without_load(self, flagged: flow_cancel.SiblingCancels) -> Dispositions:
        """Cancel siblings that were presumably not changed since they were created; return the result of each."""
        edges, done = flow_cancel.presumably_unstarted(flagged), Dispositions()
        if len(edges) < MIN_UNLOADED_CANCELS:
            return done

        async def cancel_batch(batch: Sequence[Dependency]) -> None:
            cancels = flow_cancel.cancel_siblings_without_load(flagged, batch)
            await self._write([PlannedCancel(row.execution_id, change, [[row]]) for change, row in cancels], done)

        await asyncio.gather(*map(cancel_batch, _batches(edges)))
        return done

    async def resolve_unrecorded_outcomes(self, child: Downstream) -> None:
        """Resolve completed edges of this group whose outcome was not recorded before the canceller died."""
        inbound = await load_many(self.runtime, Dependency, child.execution_id)
        edges = [edge for edge in inbound if flow_cancel.has_no_outcome(edge)]
        upstreams = await load_readable(self.runtime, sorted({edge.upstream_execution_id for edge in edges}))
        await self._resolve(
            CompletedEdge(
                child,
                edge.edge_id,
                outcome,
                edge.revision,
                expected_upstream=_if_fan_out(upstreams[edge.upstream_execution_id]),
            )
            for edge in edges
            if (outcome := flow_cancel.unrecorded_outcome(upstreams.get(edge.upstream_execution_id))) is not None
        )

    async def _resolve(self, completed: Iterable[CompletedEdge]) -> None:
        """Resolve edges; raise if one cannot be resolved, because nothing resolves it once the group is drained."""
        for resolution in await self.join_resolver.resolve(completed):
            if resolution.refused is not None:
                raise resolution.refused

    def _count(self, reason: str, done: Dispositions) -> None:
        metrics = self.runtime.metrics
        metrics.count("ff_sibling_cancel_dispatched", len(done), reason=reason)
        dispositions = Counter(result.value for result in done.values() if isinstance(result, MemberCancelResult))
        for disposition, amount in dispositions.items():
            metrics.count("ff_sibling_cancel_disposition", amount, disposition=disposition)

    async def drain(self, child: Downstream, revision: int | None = None) -> SiblingDrain:
        """Delete the pending sibling cancel of a fired group; with `revision`, only one of that revision."""
        reads, entry, group = _sibling_reads(child)
        return await self.runtime.decide_and_commit(
            reads, lambda rows, _: flow_cancel.drain_siblings(entry(rows), group(rows), revision)
        )

    def finish_in_background(self, cancels: Awaitable[Sequence[object]]) -> None:
        """Finish cancels that no caller waits for; those that fail are left to the reconciler."""

        async def run() -> None:
            try:
                failed = await cancels
            except errors.FabricError as fault:
                logger.warning("cancelling members was left to the reconciler: %s", fault)
            else:
                if failed:
                    logger.warning("the cancel of %s was left to the reconciler", pluralize(len(failed), "member"))

        start_background(run(), self._background)

    async def close(self, grace_s: float = BACKGROUND_GRACE_S) -> int:
        """Wait for cancels in the background; return how many were stopped, which the reconciler finishes."""
        return await finish_tasks([*self._background], grace_s)


async def load_readable(runtime: Runtime, execution_ids: Sequence[str]) -> dict[str, Execution | None]:
    """Return these executions, None for one that does not exist; an unreadable one is logged and left out."""
    try:
        rows = await load_each(runtime, Execution, ((execution_id,) for execution_id in execution_ids))
    except errors.Corruption as fault:
        if len(execution_ids) == 1:
            logger.error("%s is skipped: %s", execution_ids[0], fault)
            return {}
        half = len(execution_ids) // 2  # until the unreadable row is alone
        return await load_readable(runtime, execution_ids[:half]) | await load_readable(runtime, execution_ids[half:])
    return dict(zip(execution_ids, rows, strict=True))


def _batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + MAX_BATCH_CANCELS] for start in range(0, len(items), MAX_BATCH_CANCELS)]


def _sibling_reads(child: Downstream) -> tuple[ReadSet, One[PendingSiblingCancel], One[EdgeGroup]]:
    reads = ReadSet()
    return reads, reads.one(PendingSiblingCancel, *child), reads.one(EdgeGroup, *child)


def _if_fan_out(upstream: Execution | None) -> Execution | None:
    """Return the upstream if it has many edges, which its replay does not write in its own change."""
    return upstream if successors.has_many(upstream) else None


def _disposition(answer: object) -> MemberCancelResult | errors.FabricError:
    if isinstance(answer, errors.NotFound):
        return MemberCancelResult.NOT_FOUND
    if isinstance(answer, errors.ExecutionNotActive):
        return MemberCancelResult.ALREADY_TERMINAL
    return answer if isinstance(answer, errors.FabricError) else MemberCancelResult.CANCELLED
