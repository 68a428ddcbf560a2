"""Handing over: what the ends of this process set free goes to its own claims, in the commit that tells those ends.

A chain of short steps costs a trip a step then, not two. A claim that is nothing but a take says beforehand what it
would like; the first batch that puts work into its lane takes the wish along, if the store sees that a take would find
this work first. Everything else stays as it is: a wish that nobody took along, or that brought nothing, is a look.
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
        """A wish for up to so many executions of one of these lanes; None when a claim there is more than a take."""
        plain = {order: lines for order in orders if (lines := self._plain_lines(order))}
        if not plain:
            return None
        wish = PendingClaim(
            {
                lane_topic(order.lane_id): partial(self.fast_claims.claim_request, lines, limit, order)
                for order, lines in plain.items()
            }
        )
        self.runtime.commit_queue.add_pending_claim(wish)
        return wish

    def _plain_lines(self, order: ClaimOrder) -> tuple[QueueKey, ...]:
        """The lines that a claim of this order would take from, if it did no more than that."""
        lane = order.lane_id
        if order.namespaces is not None or lane in self.runtime._takeover_lanes:
            return ()
        if not self.queues.is_lane_fresh(lane):  # or nobody would notice what was lost in this lane
            return ()
        known = sorted(self.runtime._queues.get(lane, ()))
        lines = [line for line in known if capabilities.covers(line.required, order.capabilities)]
        if not self.queues.is_fast(lane, lines) or len(lines) > MAX_QUEUES_PER_CLAIM:
            return ()
        return tuple(line for line in lines if not line.guarded)

    async def collect_pending_claim(self, wish: PendingClaim) -> list[answers.Claimed]:
        """What came of a wish, which is over with this."""
        self.runtime.commit_queue.remove_pending_claim(wish)
        take = wish.attached
        if take is None:
            return []
        try:
            return self.fast_claims.accept_claimed(take, await wish.rows)
        except errors.StoreUnavailable as lost:
            if not lost.in_doubt:
                return []
            return await self.fast_claims.find_claimed([take]) or await self.fast_claims.send_claim(
                self.fast_claims.with_new_lease_ids(take), take
            )

    def abandon_pending_claim(self, wish: PendingClaim) -> None:
        """Wait for a wish no more; what it gets all the same is given back."""
        self.runtime.commit_queue.remove_pending_claim(wish)
        if wish.attached is not None and (not wish.rows.done() or wish.rows.cancelled()):
            self.fast_claims.late_claims.watch([wish.attached])
        wish.rows.cancel()
