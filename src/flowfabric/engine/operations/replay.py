"""Replay: give what has ended another life.

Of few edges the change that replays an execution takes back the notes that its end left. Many edges do not fit into
one change: their notes are taken back before, in bounded steps, while the execution is still ended. Whoever is about to
count one of these ends relies on the edge as it was, and is refused. If the execution changes meanwhile (another edge
was applied, another process replayed it), that begins again.
"""

from __future__ import annotations

from flowfabric import errors
from flowfabric.engine.operations.base import Operations
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, Dependency, Edge, EdgeGroup, PendingMemberCancel
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import replay
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import dependencies, successors
from flowfabric.stores.queries import Read, Scan, Where

MAX_EDGES_PER_STEP = 500  # edges of one step


class ReplayOperations(Operations):
    """How an execution is replayed."""

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Give a finished execution another life."""
        execution = validate.validate_execution_id(execution_id)
        while True:
            prepared = await self._prepared_for_replay(execution)
            answer = await self._replay(execution, prepared)
            if answer is not None:
                return answer

    async def _prepared_for_replay(self, execution_id: str) -> int | None:
        """Take back the end of an execution with many edges, some edges at a time; the revision that was prepared."""
        row = first((await self.runtime.load((Read(Execution, (execution_id,)),))).rows[0])
        if not successors.has_many(row) or isinstance(replay.replay(row).answer, errors.FabricError):
            return None
        revision: int | None = None
        where, order = (Where("upstream_execution_id", "=", execution_id),), ("upstream_execution_id", "edge_id")
        after: tuple[str, str] | None = None
        while True:
            edges: list[Edge] = await self.runtime.scan(Scan(Edge, where, order, after, MAX_EDGES_PER_STEP))
            seen = revision

            def decide(rows: Rows, _: int, edges: list[Edge] = edges, seen: int | None = seen) -> Decision[int | None]:
                return successors.retract_outcomes(first(rows[0]), edges, seen)

            revision = await self.runtime.decide_and_commit((Read(Execution, (execution_id,)),), decide)
            if revision is None or len(edges) < MAX_EDGES_PER_STEP:
                return revision
            after = (execution_id, edges[-1].edge_id)

    async def _replay(self, execution: str, prepared: int | None) -> answers.Replayed | None:
        """Replay an execution; None if it has many edges and is not of the revision that was prepared."""

        def decide(rows: Rows, _: int) -> Decision[answers.Replayed | None]:
            row = first(rows[0])
            if successors.has_many(row) and row.revision != prepared:
                refused = replay.replay(row)
                return refused if isinstance(refused.answer, errors.FabricError) else Decision(None)
            if row is None or len(rows) == 1:
                return replay.replay(row)
            if len(rows) == 3:
                decision = replay.replay(row)
            else:
                upstreams = {each[0].execution_id: each[0] for each in rows[5:] if each}
                decision = dependencies.replay_skipped_member(row, first(rows[3]), rows[4], upstreams)
            return flow_cancel.without_pending_cancel(decision, first(rows[1]), rows[2])

        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution,)),), decide, load_more=self._around_a_replay
        )

    async def _around_a_replay(self, rows: Rows) -> Rows:
        """Of a member: whether its flow is about to cancel it; if it was skipped, its join and its upstreams, too."""
        row = first(rows[0])
        if row is None or row.flow_id is None:
            return []
        wants: tuple[Read, ...] = (
            Read(CancelBacklog, (row.flow_id,)),
            Read(PendingMemberCancel, (row.flow_id, row.execution_id)),
        )
        if not dependencies.is_skipped_member(row):
            return (await self.runtime.load(wants)).rows
        wants += (Read(EdgeGroup, (row.flow_id, row.execution_id)), Read(Dependency, (row.execution_id,)))
        found = (await self.runtime.load(wants)).rows
        names = sorted({one.upstream_execution_id for one in found[3]})
        return [*found, *(await self.runtime.load([Read(Execution, (name,)) for name in names])).rows]
