"""LanePoller: long-polls several lanes for one worker.

A claim that returns fewer executions than requested has drained its lane. The lane is then skipped until a wakeup
arrives, subscribed to before that claim so that none is lost, or until the poll interval has passed. An idle worker
sends no queries, and work in one lane does not cause claims of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.claiming.claim_on_commit import ClaimOnCommit
from flowfabric.engine.claiming.claimer import MAX_CLAIM_LIMIT, Claimer
from flowfabric.engine.runtime.commit_queue import PendingClaim
from flowfabric.engine.runtime.wakeups import lane_topic, wait_for_wakeup
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.model.answers.execution import Claimed
from flowfabric.rules import validation

LARGE_CLAIM = 16  # executions from which on the work of the store is worth overlapping with that of the handlers
YIELD_TURNS = 2  # turns of the event loop in which a worker hands its completions to the commit queue


class DrainedLane(msgspec.Struct, frozen=True):
    """A lane whose last claim found nothing more."""

    wakeup: asyncio.Future[None]  # done when there may be work again
    poll_again_at: float  # when to claim again without a wakeup


class LanePoller:
    """Claims from several lanes in turn, for one worker."""

    def __init__(self, claimer: Claimer, claim_on_commit: ClaimOnCommit, orders: Sequence[ClaimOrder]) -> None:
        self.runtime = claimer.runtime
        self.claimer = claimer
        self.claim_on_commit = claim_on_commit
        self._orders = orders
        self._drained: dict[str, DrainedLane] = {}
        self._found_many = False  # the last claim was large and got all it asked for

    def max_claim(self, slots: int) -> int:
        """Return how many executions a worker of so many slots should claim at once, at most.

        On some stores this is half of them: while the handlers of one half run, the store claims the other one.
        """
        size = -(-slots // self.runtime.store.claim_parts)
        return size if size >= LARGE_CLAIM else slots

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = lambda: True
    ) -> list[Claimed]:
        """Claim up to `limit` executions, lane by lane, as soon as there is at least one.

        Returns early when `go_on`, called after each wakeup, is false: cancelling the call could lose a claim.
        """
        validation.integer("limit", limit, least=1, most=MAX_CLAIM_LIMIT)
        validation.duration_ms("max_wait_ms", max_wait_ms, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        while True:
            orders: Sequence[ClaimOrder] = self._orders_to_claim(clock())
            unblocks = self._follows_own_commits()
            pending = self._register_pending_claim(orders, limit) if unblocks else None
            drained = None if pending is None or not orders else self._subscribe(orders[0].lane_id)
            try:
                if orders:
                    await self._yield_to_own_commits(orders, unblocks=unblocks)
                else:
                    next_poll_at = min(lane.poll_again_at for lane in self._drained.values())
                    await self._wait_for_wakeup(min(until, next_poll_at) - clock(), pending)
                if pending is not None and (claimed := await self.claim_on_commit.collect_pending_claim(pending)):
                    return claimed
            finally:
                if pending is not None:
                    self.claim_on_commit.abandon_pending_claim(pending)
                if pending is not None and drained is not None:
                    self._keep(orders[0].lane_id, drained, is_drained=pending.drained)
            if not orders:
                if not go_on():
                    return []
                orders = self._orders_to_claim(clock()) or self._orders  # without a wakeup, all of them
            claimed = await self._claim_lanes(orders, limit)
            self._found_many = len(claimed) == limit >= LARGE_CLAIM
            if claimed or until <= clock() or not go_on():
                return claimed

    def close(self) -> None:
        """Cancel the subscriptions."""
        for lane in self._drained.values():
            lane.wakeup.cancel()

    def _follows_own_commits(self) -> bool:
        """True if the next claim should be sent after the completions of this process, which may enqueue work for it.

        It always is if the store executes in order, because both are one commit there. Only in a lane with a backlog it
        goes first where a worker claims in parts: the store executes it while the handlers of the other part run.
        """
        store = self.runtime.store
        if store.executes_in_order and not (store.claim_parts > 1 and self._found_many):
            return True
        return self.runtime.may_unblock_others()

    def _register_pending_claim(self, orders: Sequence[ClaimOrder], limit: int) -> PendingClaim | None:
        """Attach a claim to the next commit; not where several lanes may have work, which take turns."""
        if self.runtime.store.executes_in_order or len(orders) > 1:
            return None
        return self.claim_on_commit.register_pending_claim(orders or self._orders, limit)

    async def _yield_to_own_commits(self, orders: Sequence[ClaimOrder], *, unblocks: bool) -> None:
        """Let completions of this process be committed before the claim, which then finds the work that they unblock.

        A store that executes in order only needs to receive the claim after them, and both share one commit. Without
        `unblocks` the claim goes first: the server is busy with it while this process encodes the completions.
        """
        if unblocks:
            for _ in range(YIELD_TURNS):
                await asyncio.sleep(0)
        if not self.runtime.store.executes_in_order:
            await self.runtime.commit_queue.wait_for_lanes([lane_topic(order.lane_id) for order in orders])

    def _orders_to_claim(self, now: float) -> list[ClaimOrder]:
        """Return the orders of lanes that are not drained, were woken, or are due for a poll."""
        drained = self._drained
        return [
            order
            for order in self._orders
            if (lane := drained.get(order.lane_id)) is None or lane.wakeup.done() or lane.poll_again_at <= now
        ]

    async def _wait_for_wakeup(self, timeout_s: float, pending: PendingClaim | None) -> None:
        """Wait for a wakeup of any lane, or for the rows of the pending claim."""
        wakeups: list[asyncio.Future[Any]] = [lane.wakeup for lane in self._drained.values()]
        if pending is not None:
            wakeups.append(pending.rows)
        if len(wakeups) == 1:
            await wait_for_wakeup(wakeups[0], timeout_s)
        else:
            await asyncio.wait(wakeups, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _claim_lanes(self, orders: Sequence[ClaimOrder], limit: int) -> list[Claimed]:
        claimed: list[Claimed] = []
        first = self.claimer.next_lane_index(len(orders))
        for order in [*orders[first:], *orders[:first]]:
            try:
                claimed += await self._claim_lane(order, limit - len(claimed))
            except errors.StoreUnavailable:
                if not claimed:  # otherwise return what is leased already
                    raise
                break
            if len(claimed) >= limit:
                break
        return claimed

    async def _claim_lane(self, order: ClaimOrder, limit: int) -> list[Claimed]:
        lane_id = order.lane_id
        if (before := self._drained.pop(lane_id, None)) is not None:
            before.wakeup.cancel()
        drained, is_drained = self._subscribe(lane_id), False
        try:
            claimed = await self.claimer.claim_available(order, limit)
            is_drained = not claimed or (len(claimed) < limit and self.claimer.queues.fits_one_round_trip(lane_id))
        finally:
            self._keep(lane_id, drained, is_drained=is_drained)
        return claimed

    def _subscribe(self, lane_id: str) -> DrainedLane:
        """Subscribe to a lane before a claim that may drain it."""
        return DrainedLane(
            self.runtime.wakeups.subscribe(lane_topic(lane_id)),
            asyncio.get_running_loop().time() + self.runtime.poll_interval_s,
        )

    def _keep(self, lane_id: str, drained: DrainedLane, *, is_drained: bool) -> None:
        if is_drained:
            self._drained[lane_id] = drained
        else:
            drained.wakeup.cancel()
