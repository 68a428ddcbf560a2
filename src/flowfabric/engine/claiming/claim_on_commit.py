"""Commit-and-claim: a claim of this process is attached to the commit of its completions.

A chain of short steps then costs one round trip per step, not two. A worker registers a pending claim if the fast path
is enough for it. The first batch that enqueues work in one of its lanes carries the claim, if the store can see that a
claim would find this work first. A pending claim that was not attached, or that returned nothing, is followed by an
ordinary claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flowfabric import errors
from flowfabric.engine.claiming.fast_claims import FastClaims
from flowfabric.engine.claiming.ready_queues import MAX_QUEUES_PER_CLAIM, ReadyQueues
from flowfabric.engine.runtime.commit_queue import PendingClaim
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import lane_topic
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import QueueKey
from flowfabric.rules.scheduling import capabilities


class ClaimOnCommit:
    """Claims that are attached to the next commit of this process."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        fast_claims: FastClaims,
    ) -> None:
        self.runtime = runtime
        self.fast_claims = fast_claims
        self.queues = queues

    def register_pending_claim(self, orders: Sequence[ClaimOrder], limit: int) -> PendingClaim | None:
        """Attach a claim of up to `limit` executions to the next commit; None if no lane allows the fast path."""
        queues_by_order = {order: queues for order in orders if (queues := self._fast_queues(order))}
        if not queues_by_order:
            return None
        pending = PendingClaim(
            {
                lane_topic(order.lane_id): partial(self.fast_claims.claim_request, queues, limit, order)
                for order, queues in queues_by_order.items()
            }
        )
        self.runtime.commit_queue.add_pending_claim(pending)
        return pending

    def _fast_queues(self, order: ClaimOrder) -> tuple[QueueKey, ...]:
        """Return the queues that this order claims from on the fast path; none if it needs another path."""
        lane = order.lane_id
        if order.namespaces is not None or lane in self.runtime._takeover_lanes:
            return ()
        if not self.queues.is_lane_fresh(lane):  # otherwise expired leases of this lane would go unnoticed
            return ()
        known = sorted(self.runtime._queues.get(lane, ()))
        queues = [queue for queue in known if capabilities.covers(queue.required, order.capabilities)]
        if not self.queues.is_fast(lane, queues) or len(queues) > MAX_QUEUES_PER_CLAIM:
            return ()
        return tuple(queue for queue in queues if not queue.guarded)

    async def collect_pending_claim(self, pending: PendingClaim) -> list[answers.Claimed]:
        """Remove a pending claim and return what it claimed."""
        self.runtime.commit_queue.remove_pending_claim(pending)
        request = pending.attached
        if request is None:
            return []
        try:
            return self.fast_claims.accept_claimed(request, await pending.rows)
        except errors.StoreUnavailable as lost:
            if not lost.in_doubt:
                return []
            return await self.fast_claims.find_claimed([request]) or await self.fast_claims.send_claim(
                self.fast_claims.with_new_lease_ids(request), request
            )

    def abandon_pending_claim(self, pending: PendingClaim) -> None:
        """Stop waiting for a pending claim; executions that it still claims are released."""
        self.runtime.commit_queue.remove_pending_claim(pending)
        if pending.attached is not None and (not pending.rows.done() or pending.rows.cancelled()):
            self.fast_claims.late_claims.watch([pending.attached])
        pending.rows.cancel()
