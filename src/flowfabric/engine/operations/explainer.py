"""Explain: finds the concrete obstacle that keeps an execution from running.

Obstacles are checked in the order in which a claim would meet them: the state of the execution, capable workers,
budgets, quotas, the queue. Nothing is changed.
"""

from __future__ import annotations

from flowfabric import errors
from flowfabric.engine.claiming.ready_queues import ReadyQueues
from flowfabric.engine.claiming.worker_routes import WorkerRoutes
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.runtime.read_set import ReadSet, load_many, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model import obstacles
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency, DependencyState
from flowfabric.model.limits.quota import QuotaSlot
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.model.suspension import Suspension
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.scheduling import explain as explain_rules
from flowfabric.rules.scheduling import workers
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.stores.queries import Read, Scan, Where

MAX_COUNTED = 1000  # executions ahead in the queue, and running ones; a higher count is cut off


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
        """Return the obstacle that keeps an execution from running."""
        reads = ReadSet()
        execution_row = reads.one(Execution, execution_id)
        loaded = await self.runtime.load(reads)
        row = execution_row(loaded.rows)
        if row is None:
            raise errors.NotFound("execution")
        return obstacles.Explanation(row.execution_id, row.public_state, await self._obstacle(row, loaded.now))

    async def _obstacle(self, row: Execution, now: int) -> obstacles.Obstacle:
        obstacle = explain_rules.explain_row(row, now)
        if obstacle is None and row.lifecycle_phase is LifecyclePhase.SUSPENDED:
            obstacle = await self._suspension(row)
        if obstacle is not None:
            if not explain_rules.waits_for_worker(row, obstacle, now):
                return obstacle
            return explain_rules.explain_workers(row, await self.routes.list_live_workers(row.namespace)) or obstacle
        if row.eligibility_state is EligibilityState.BLOCKED_BY_DEPENDENCIES:
            return await self._dependencies(row)
        live = await self.routes.list_live_workers(row.namespace)
        return (
            explain_rules.explain_workers(row, live)
            or await self._blocking_budget(row)
            or await self._blocking_quota(row)
            or await self._queue(row, live)
        )

    async def _suspension(self, row: Execution) -> obstacles.Obstacle:
        suspension = await load_one(self.runtime, Suspension, row.execution_id)
        needs = suspend_rules.budget_needs(row, suspension)
        need = next((need for need in needs if explain_rules.may_show_budget(row, need)), None)
        if need is None:
            return explain_rules.explain_suspension(row, suspension)
        _, budgets = await self.aggregates.budgets.load([need.budget])
        return explain_rules.explain_budget_need(budgets[need.budget], need)

    async def _dependencies(self, row: Execution) -> obstacles.Dependencies:
        edges = await load_many(self.runtime, Dependency, row.execution_id)
        unmet = {edge.upstream_execution_id for edge in edges if edge.state is DependencyState.UNSATISFIED}
        return obstacles.Dependencies(tuple(sorted(unmet)))

    async def _blocking_budget(self, row: Execution) -> obstacles.Obstacle | None:
        names = decode_terms(row.terms).budget_ids
        if not names:
            return None
        _, budgets = await self.aggregates.budgets.load(owner_rules.candidates(row.namespace, names))
        roots = {key: budget.root for key, budget in budgets.items()}
        return explain_rules.explain_budgets(
            [budgets[owner_rules.resolve_owner(row.namespace, name, roots)] for name in names]
        )

    async def _blocking_quota(self, row: Execution) -> obstacles.Obstacle | None:
        names = decode_terms(row.terms).quota_policy_ids
        if not names:
            return None
        policies = owner_rules.candidates(row.namespace, names)
        slots = {policy: [Read(QuotaSlot, (*policy, row.execution_id))] for policy in policies}
        now, quotas = await self.aggregates.quotas.load(policies, slots)
        roots = {key: quota.root for key, quota in quotas.items()}
        return explain_rules.explain_quotas(
            row, [quotas[owner_rules.resolve_owner(row.namespace, name, roots)] for name in names], now
        )

    async def _queue(self, row: Execution, live: list[RegisteredWorker]) -> obstacles.Queued:
        capable = tuple(
            worker.worker_instance_id
            for worker in live
            if workers.serves(worker, row.lane_id, row.required_capabilities)
        )
        rows: list[Execution] = []
        if queues := tuple(await self.queues.lane_queues(row.lane_id)):
            before = (Where("line", "in", queues), Where("rank", "<=", row.rank))
            rows = await self.runtime.scan(Scan(Execution, before, ("rank",), limit=MAX_COUNTED, limit_by="line"))
        ahead = sum((other.rank, other.execution_id) < (row.rank, row.execution_id) for other in rows)
        leased = (Where("lease_expires_at", "set"), Where("worker_instance_id", "in", capable))
        running = len(await self.runtime.scan(Scan(Execution, leased, limit=MAX_COUNTED)))
        return obstacles.Queued(min(ahead, MAX_COUNTED), capable, running)
