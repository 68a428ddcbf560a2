"""Claimer: claims ready executions of one lane for a worker.

There are two paths. On the *fast* path the store claims the first rows of the queues that the worker covers, in one
round trip. *Guarded* rows need a decision: an expired or revoked lease has a cap and an attempt to end, or a budget or
quota may refuse. They are in queues of their own and are claimed by load, rule and commit.

If a lane has fast queues of only one fairness key, the store claims from them directly. Otherwise the first rows of all
queues are put in fair order (`rules.scheduling.fairness`), and both paths run concurrently.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from itertools import takewhile

import msgspec

from flowfabric import errors
from flowfabric.engine.claiming.fair_turns import FairTurns
from flowfabric.engine.claiming.fast_claims import FastClaims
from flowfabric.engine.claiming.guarded_claims import GuardedClaims, gather_claims
from flowfabric.engine.claiming.ready_queues import (
    ELIGIBLE,
    LANE_REFRESH_MS,
    MAX_KEYS_PER_CLAIM,
    ReadyQueues,
    in_namespaces,
    lookahead_rows,
    takes_turns,
)
from flowfabric.engine.claiming.worker_routes import LiveWorkers, WorkerRoutes
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import lane_topic, wait_for_wakeup
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.rules import validation
from flowfabric.rules.execution.operator import is_eligible
from flowfabric.rules.scheduling import capabilities, fairness

MAX_CLAIM_LIMIT = 10_000  # executions that one claim may ask for
MAX_TRIES = 2  # of one claim for a row: a refused row may be unblocked meanwhile, and its turn is not used up
MAX_ROUNDS = 8  # rounds of one claim in which blocked work has its turn
CHEAP_SCAN_S = 0.01  # a claim by namespace that takes longer and finds nothing delays the next one
PAUSE_FACTOR, MAX_PAUSE_S = 10, 1.0  # the delay, in durations of that claim


class Turn(msgspec.Struct, frozen=True):
    """The rows to claim next, and all rows that took part in the fair order: claimable and blocked ones."""

    picks: Sequence[Execution]
    after: dict[str, int]  # the credits if all of them are claimed
    present: Sequence[Execution]
    cut: Set[str]
    now: int


class Claimer:
    """Claims ready executions of one lane."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        turns: FairTurns,
        fast_claims: FastClaims,
        guarded_claims: GuardedClaims,
        routes: WorkerRoutes,
    ) -> None:
        self.runtime = runtime
        self.queues = queues
        self.routes = routes
        self.fast_claims = fast_claims
        self.turns = turns
        self.guarded_claims = guarded_claims
        self._next_lane = 0
        self._paused_until: dict[tuple[str, frozenset[str]], float] = {}
        self._routes_checked_at: dict[str, int] = {}

    async def poll_lane(self, order: ClaimOrder, limit: int, max_wait_ms: int) -> list[answers.Claimed]:
        """Claim until there is at least one or the wait is over."""
        validation.integer("limit", limit, least=1, most=MAX_CLAIM_LIMIT)
        validation.duration_ms("max_wait_ms", max_wait_ms, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        if not max_wait_ms:  # without a subscription, commits of this process need not wake it
            return await self.claim_available(order, limit)
        while True:
            wakeup = self.runtime.wakeups.subscribe(lane_topic(order.lane_id))
            try:
                claimed = await self.claim_available(order, limit)
                left = until - clock()
                if claimed or left <= 0:
                    return claimed
                await wait_for_wakeup(wakeup, min(left, self.runtime.poll_interval_s))
            finally:
                wakeup.cancel()

    async def claim_available(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim up to `limit` executions that are claimable now.

        A claim with admission that finds nothing blocks the work that no live worker can run.
        """
        if order.namespaces is None:
            claimed = await self._claim_any(order, limit)
        else:
            claimed = await self._claim_in_namespaces(order, limit)
        if order.admission and not claimed:
            await self._block_unserved(order)
        return claimed

    async def _claim_any(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim from all queues; refresh the lane if that is due, and before returning nothing."""
        lane_id = order.lane_id
        refreshed = not self.queues.is_lane_fresh(lane_id) or lane_id in self.runtime._takeover_lanes
        if refreshed:
            await self.queues.refresh_lane(lane_id)
        queues = await self.queues.covered_queues(lane_id, order.capabilities)
        if refreshed or not self.queues.is_fast(lane_id, queues):
            claimed = await self._claim_in_windows(order, queues, limit)
        else:
            claimed = await self.fast_claims.claim_fast([one for one in queues if not one.guarded], order, limit)
        if not claimed and not refreshed:
            await self.queues.refresh_lane(lane_id)
            queues = await self.queues.covered_queues(lane_id, order.capabilities)
            claimed = await self._claim_in_windows(order, queues, limit)
        return claimed

    async def _claim_in_windows(
        self, order: ClaimOrder, queues: Sequence[QueueKey], limit: int
    ) -> list[answers.Claimed]:
        """Claim in fair order; of more queues than can be compared, from the first window that has work."""
        for window in self.queues.rotating_windows(queues):
            if claimed := await self._claim_planned(order, window, limit):
                return claimed
        return []

    async def _claim_planned(self, order: ClaimOrder, queues: Sequence[QueueKey], limit: int) -> list[answers.Claimed]:
        """Claim from guarded and fast queues in fair order.

        Blocked keys that wait for the same limits take part in it. If it is the turn of one of them, it is unblocked if
        there is capacity; otherwise the rows that need that limit are blocked as well.
        """
        claimed: list[answers.Claimed] = []
        tries = Counter[str]()
        rounds = 0
        while len(claimed) < limit:
            tried = {name for name, count in tries.items() if count >= MAX_TRIES}
            wanted = limit - len(claimed)
            guarded = [queue for queue in queues if queue.guarded]
            fast = [queue for queue in queues if not queue.guarded]
            rows, cut = await self.queues.claim_candidates(order.lane_id, guarded, wanted, exclude=tried)
            if not rows:
                await self.queues.forget_guarded(order.lane_id)
                if not takes_turns(fast):
                    return claimed + await self.fast_claims.claim_fast(fast, order, wanted)
            more, more_cut = await self.queues.claim_candidates(order.lane_id, fast, wanted)
            turn = await self._next_turn(order, rows + more, cut | more_cut, wanted, yields=rounds < MAX_ROUNDS)
            if turn is None:
                rounds += 1
                continue
            picks = turn.picks
            if not guarded:
                self.turns.keep_turns(order.lane_id, turn.after)
            tries.update(row.execution_id for row in picks if _is_guarded(row))
            try:
                more_claimed = await self._claim_picks(picks, fast, order)
            except errors.StoreUnavailable:
                if claimed:
                    return claimed  # these are leased already; the next call may raise
                raise
            if guarded:
                self._charge(turn, order, more_claimed)
            claimed += more_claimed
            if not more_claimed and not any(map(_is_guarded, picks)):
                return claimed  # other workers claimed them
        return claimed

    async def _next_turn(
        self, order: ClaimOrder, rows: Sequence[Execution], cut: Set[str], wanted: int, *, yields: bool
    ) -> Turn | None:
        """Return which of these rows to claim now; None if blocked work had its turn, so they have to be read again."""
        blocked = self.turns.competitors(order, [row for row in rows if is_eligible(row)]) if order.admission else {}
        cut = cut | {fairness.fairness_key_of(one.row) for one in blocked.values()}
        for row in rows:
            blocked.pop(row.execution_id, None)
        present = [*rows, *(one.row for one in blocked.values())]
        now, turns = self.runtime.estimate.now(), self.turns.turns_of(order.lane_id)
        picks, after = fairness.fair_order(present, turns, now, wanted, truncated=cut)
        if blocked and picks:
            if yields and (first := blocked.get(picks[0].execution_id)):
                await self.guarded_claims.let_blocked_go_first(rows, first)
                return None
            picks = list(takewhile(lambda row: row.execution_id not in blocked, picks))
            picks = picks or fairness.fair_order(rows, turns, now, 1)[0]
        return Turn(picks, after, present, cut, now)

    def _charge(self, turn: Turn, order: ClaimOrder, claimed: Sequence[answers.Claimed]) -> None:
        """Charge the keys of what was claimed; a key that a limit refused keeps its turn."""
        if claimed:
            turns = self.turns.turns_of(order.lane_id)
            after = fairness.charge(turn.present, turns, turn.now, _rows_of(claimed, turn.picks), cut=turn.cut)
            self.turns.keep_turns(order.lane_id, fairness.keep_idle_credits(turns, after))

    async def _claim_picks(
        self, picks: Sequence[Execution], fast: Sequence[QueueKey], order: ClaimOrder
    ) -> list[answers.Claimed]:
        """Claim these rows; from the fast queues of each key as many rows as were picked, whichever are first now."""
        counts = Counter(fairness.fairness_key_of(row) for row in picks if not _is_guarded(row))
        if len(counts) > MAX_KEYS_PER_CLAIM:
            return await self.guarded_claims.claim_rows(picks, order)
        claims = [
            self.fast_claims.claim_fast([queue for queue in fast if queue.fairness_key == key], order, count)
            for key, count in counts.items()
        ]
        guarded = [row for row in picks if _is_guarded(row)]
        claimed = await gather_claims(self.guarded_claims.claim_rows(guarded, order), *claims)
        numbers = {row.execution_id: number for number, row in enumerate(picks)}
        return sorted(claimed, key=lambda one: numbers.get(one.execution_id, len(numbers)))

    async def _claim_in_namespaces(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim work of some namespaces only, at any position of the queues that the worker covers."""
        clock, filtered = asyncio.get_running_loop().time, (order.lane_id, order.namespaces or frozenset())
        await asyncio.sleep(max(0.0, self._paused_until.pop(filtered, 0.0) - clock()))
        began = clock()
        self.runtime._namespace_filtered_lanes.add(order.lane_id)
        await self.queues.refresh_lane(order.lane_id)
        claimed: list[answers.Claimed] = []
        try:
            queues = await self.queues.covered_queues(order.lane_id, order.capabilities)
            for window in self.queues.rotating_windows(queues):
                await self._claim_from_queues(window, order, limit, claimed)
        except errors.StoreUnavailable:
            if not claimed:  # otherwise return what is leased already; the next call may raise
                raise
        if not claimed and (elapsed_s := clock() - began) > CHEAP_SCAN_S:
            self._paused_until[filtered] = clock() + min(elapsed_s * PAUSE_FACTOR, MAX_PAUSE_S)
        return claimed

    async def _claim_from_queues(
        self, queues: Sequence[QueueKey], order: ClaimOrder, limit: int, claimed: list[answers.Claimed]
    ) -> None:
        """Claim from these queues until they are empty or enough is claimed."""
        own = in_namespaces(order.namespaces)
        tries, rounds = Counter[str](), 0
        while (wanted := limit - len(claimed)) > 0:
            tried = {name for name, count in tries.items() if count >= MAX_TRIES}
            rows, cut = await self.queues.claim_candidates(order.lane_id, queues, wanted, exclude=tried, where=own)
            if not rows:
                return
            turn = await self._next_turn(order, rows, cut, wanted, yields=rounds < MAX_ROUNDS)
            if turn is None:
                rounds += 1
                continue
            tries.update(row.execution_id for row in turn.picks)
            more = await self.guarded_claims.claim_rows(turn.picks, order)
            self._charge(turn, order, more)
            claimed += more

    async def _block_unserved(self, order: ClaimOrder) -> None:
        """Block the first rows of the queues that this worker does not cover if no live worker can run them."""
        now = self.runtime.estimate.now()
        if abs(now - self._routes_checked_at.get(order.lane_id, 0)) < LANE_REFRESH_MS:
            return
        self._routes_checked_at[order.lane_id] = now
        queues = await self.queues.lane_queues(order.lane_id)
        others = [queue for queue in queues if not capabilities.covers(queue.required, order.capabilities)]
        live: LiveWorkers = {}
        for row in await self.queues.queue_heads(others, lookahead_rows(others), where=ELIGIBLE):
            await self.routes.block_if_unserved(row, live)

    def next_lane_index(self, count: int) -> int:
        """Return which of `count` lanes is claimed from first; the next call returns the next one."""
        index, self._next_lane = self._next_lane % count, (self._next_lane + 1) % count
        return index


def _rows_of(claimed: Sequence[answers.Claimed], picks: Sequence[Execution]) -> list[Execution]:
    """Return the picks that were claimed; the store may have claimed another row of the same key instead of a pick."""
    by_id = {row.execution_id: row for row in picks}
    others = (row for row in picks if row.execution_id not in {one.execution_id for one in claimed})
    return [by_id.get(one.execution_id) or next(others) for one in claimed]


def _is_guarded(row: Execution) -> bool:
    return row.line is not None and row.line.guarded
