"""The grant scheduler: picks the execution that a worker is granted, within budgets and quotas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.claiming.admission import AdmissionContext, AdmissionControl
from flowfabric.engine.claiming.fair_turns import FairTurns
from flowfabric.engine.claiming.grants import sign_claim_grant, sign_reclaim_grant
from flowfabric.engine.claiming.guarded_claims import GuardedClaims
from flowfabric.engine.claiming.ready_queues import (
    ELIGIBLE,
    ReadyQueues,
    lookahead_rows,
)
from flowfabric.engine.claiming.worker_routes import WorkerRoutes
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.rules.execution import reclaim
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.scheduling import capabilities, fairness
from flowfabric.stores.queries import Where


class GrantScheduler:
    """Picks the execution that a worker is granted next."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        turns: FairTurns,
        guarded_claims: GuardedClaims,
        admission: AdmissionControl,
        routes: WorkerRoutes,
    ) -> None:
        self.runtime = runtime
        self.queues = queues
        self.turns = turns
        self.guarded_claims = guarded_claims
        self.admission = admission
        self.routes = routes

    async def best(
        self, order: GrantRequest, key: Any, own: tuple[Where, ...]
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """Grant the first row in fair order that nothing prevents; None if there is none.

        The heads of queues that this worker does not cover are read once, to block what no live worker can run.
        """
        seen = AdmissionContext()
        queues = await self.queues.lane_queues(order.lane_id)
        covered = [queue for queue in queues if capabilities.covers(queue.required, order.capabilities)]
        others = [queue for queue in queues if not capabilities.covers(queue.required, order.capabilities)]
        uncovered = await self.queues.queue_heads(others, lookahead_rows(others), where=ELIGIBLE + own)
        for window in self.queues.rotating_windows(covered) or [()]:
            if (granted := await self._best_of(window, uncovered, order, key, own, seen)) is not None:
                return granted
            uncovered = []
        return None

    async def _best_of(
        self,
        queues: Sequence[QueueKey],
        uncovered: list[Execution],
        order: GrantRequest,
        key: Any,
        own: tuple[Where, ...],
        seen: AdmissionContext,
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        tried, depth = set[str](), lookahead_rows(queues)
        while rows := await self.queues.queue_heads(queues, depth, exclude=tried, where=own) + uncovered:
            counts = Counter(row.line for row in rows)
            while rows:
                [row], after = fairness.fair_order(
                    rows, self.turns.turns_of(order.lane_id), self.runtime.estimate.now(), 1
                )
                rows.remove(row)
                tried.add(row.execution_id)
                refusals = seen.refusal_count
                granted = await self._offer(row, order, key, seen)
                if granted is not None:
                    self.turns.keep_turns(order.lane_id, after)
                    return granted
                if seen.refusal_count > refusals:
                    await self.guarded_claims.refuse_alike([row], queues, seen, own)
                    break
                if counts[row.line] >= depth and row not in uncovered and all(one.line != row.line for one in rows):
                    break  # the next rows of this queue may come before the rest
            uncovered = [row for row in uncovered if row.execution_id not in tried]
        return None

    async def _offer(
        self, row: Execution, order: GrantRequest, key: Any, seen: AdmissionContext
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """Grant this row, or block it for the reason that prevents it."""
        if capabilities.missing(row.required_capabilities, order.capabilities):
            await self.routes.block_if_unserved(row, seen.live_workers)
            return None
        if reclaim.is_reclaimable(row):
            return await self._reclaim_grant(row, order, key)
        admitted = await self.admission.admit([row], seen)
        if not admitted:
            return None
        order = msgspec.structs.replace(order, admitted=True)
        try:
            return await self.runtime.decide_execution(
                row.execution_id, lambda row, now: sign_claim_grant(row, order, key, now)
            )
        except errors.StoreUnavailable:
            raise
        except errors.CapabilityMismatch:
            await self.routes.block_if_unserved(row, seen.live_workers)
        except errors.FabricError:
            pass  # another worker got it; try the next row
        await self.admission.release_slots(admitted[0])
        return None

    async def _reclaim_grant(self, row: Execution, order: GrantRequest, key: Any) -> answers.ReclaimGrant | None:
        execution = ids.ExecutionId(row.execution_id)
        try:
            answer = await self.runtime.decide_execution(
                execution, lambda row, now: sign_reclaim_grant(row, order, key, now)
            )
            if isinstance(answer, answers.ReclaimCapExceeded):
                await self.runtime.decide_execution(execution, lambda row, _: reclaim.fail_if_at_cap(row))
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            return None  # granted to another worker
        return answer if isinstance(answer, answers.ReclaimGrant) else None
