"""Explain: why an execution is not running, in one typed answer with the concrete obstacle.

The questions are asked in the order in which a claim would meet the obstacles: its own state, somebody who could run
it, budgets, quotas, the queue. Nothing is changed.
"""

from __future__ import annotations

from flowfabric import errors
from flowfabric.engine.claiming.ready_queues import ReadyQueues
from flowfabric.engine.claiming.worker_routes import WorkerRoutes
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model import obstacles
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency, DependencyState
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.model.suspension import Suspension
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.scheduling import explain as explain_rules
from flowfabric.rules.scheduling import workers
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.stores.queries import Read, Scan, Where

MAX_COUNTED = 1000


class Explainer:
    """Explains why an execution is not running."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        aggregates: LimitAggregates,
        routes: WorkerRoutes,
    ) -> None:
        self.runtime = runtime
        self.routes = routes
        self.aggregates = aggregates
        self.queues = queues

    async def explain(self, execution_id: str) -> obstacles.Explanation:
        """Why an execution is not running."""
        loaded = await self.runtime.load((Read(Execution, (execution_id,)),))
        if not loaded.rows[0]:
            raise errors.NotFound("execution")
        row: Execution = loaded.rows[0][0]
        return obstacles.Explanation(row.execution_id, row.public_state, await self._obstacle(row, loaded.now))

    async def _obstacle(self, row: Execution, now: int) -> obstacles.Obstacle:
        if found := explain_rules.explain_row(row, now):
            return found
        if row.lifecycle_phase is LifecyclePhase.SUSPENDED:
            return await self._suspension(row)
        if row.eligibility_state is EligibilityState.BLOCKED_BY_DEPENDENCIES:
            return await self._dependencies(row)
        live = await self.routes.list_live_workers(row.namespace)
        return (
            explain_rules.explain_workers(row, live)
            or await self._budget_in_the_way(row)
            or await self._quota_in_the_way(row)
            or await self._queue(row, live)
        )

    async def _suspension(self, row: Execution) -> obstacles.Obstacle:
        loaded = await self.runtime.load((Read(Suspension, (row.execution_id,)),))
        root = loaded.rows[0][0] if loaded.rows[0] else None
        needs = [need for need in suspend_rules.budget_needs(row, root) if explain_rules.may_show_budget(row, need)]
        if not needs:
            return explain_rules.explain_suspension(row, root)
        _, sheets = await self.aggregates.budgets.load([needs[0].budget])
        return explain_rules.explain_budget_need(sheets[needs[0].budget], needs[0])

    async def _dependencies(self, row: Execution) -> obstacles.Dependencies:
        loaded = await self.runtime.load((Read(Dependency, (row.execution_id,)),))
        open_ones = {one.upstream_execution_id for one in loaded.rows[0] if one.state is DependencyState.UNSATISFIED}
        return obstacles.Dependencies(tuple(sorted(open_ones)))

    async def _budget_in_the_way(self, row: Execution) -> obstacles.Obstacle | None:
        names = decode_terms(row.terms).budget_ids
        if not names:
            return None
        _, sheets = await self.aggregates.budgets.load(owner_rules.candidates(row.namespace, names))
        roots = {key: sheet.root for key, sheet in sheets.items()}
        return explain_rules.explain_budgets(
            [sheets[owner_rules.resolve_owner(row.namespace, name, roots)] for name in names]
        )

    async def _quota_in_the_way(self, row: Execution) -> obstacles.Obstacle | None:
        names = decode_terms(row.terms).quota_policy_ids
        if not names:
            return None
        now, sheets = await self.aggregates.quotas.load(owner_rules.candidates(row.namespace, names))
        roots = {key: sheet.root for key, sheet in sheets.items()}
        return explain_rules.explain_quotas(
            row, [sheets[owner_rules.resolve_owner(row.namespace, name, roots)] for name in names], now
        )

    async def _queue(self, row: Execution, live: list[RegisteredWorker]) -> obstacles.Queued:
        capable = tuple(
            worker.worker_instance_id
            for worker in live
            if workers.serves(worker, row.lane_id, row.required_capabilities)
        )
        lines = tuple(await self.queues.lane_queues(row.lane_id))
        before = (Where("line", "in", lines), Where("rank", "<=", row.rank))
        rows = (
            await self.runtime.scan(Scan(Execution, before, ("rank",), limit=MAX_COUNTED, limit_by="line"))
            if lines
            else []
        )
        ahead = sum((one.rank, one.execution_id) < (row.rank, row.execution_id) for one in rows)
        held = (Where("lease_expires_at", "set"), Where("worker_instance_id", "in", capable))
        running = len(await self.runtime.scan(Scan(Execution, held, limit=MAX_COUNTED)))
        return obstacles.Queued(min(ahead, MAX_COUNTED), capable, running)
