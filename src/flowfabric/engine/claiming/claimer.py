"""Taking work: the pull of a worker.

Two roads lead to a claim. *Uniform* rows are taken by the store in one trip: the first rows of the lines that the
worker covers. *Decided* rows need a decision at the claim: an expired or revoked lease has a cap to respect and an
attempt to end, a budget or a quota has a say. They stand in lines of their own, claimed by load, rule and commit.

A lane with uniform work of one fairness key only is taken from directly. Otherwise the first rows of all lines are
planned (`rules.fairness`), and both roads are taken at once.
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
MAX_TRIES = 2  # of one claim for a row: what a limit refused may be unblocked meanwhile, and it is still its turn
MAX_ROUNDS = 8  # of one claim in which blocked work whose turn it is goes first
CHEAP_SCAN_S = 0.01  # what a look may take to be repeated at will
PAUSE_FACTOR, MAX_PAUSE_S = 10, 1.0  # how much longer than that the next one is waited for


class Turn(msgspec.Struct, frozen=True):
    """What to claim next, and who takes part in the turns: claimable rows and the first blocked ones."""

    picks: Sequence[Execution]
    after: dict[str, int]  # the turns if all of them are claimed
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
        self._resting: dict[tuple[str, frozenset[str]], float] = {}
        self._routes_checked_at: dict[str, int] = {}

    async def poll_lane(self, order: ClaimOrder, limit: int, max_wait_ms: int) -> list[answers.Claimed]:
        """Claim until there is at least one or the wait is over."""
        validation.integer("limit", limit, least=1, most=MAX_CLAIM_LIMIT)
        validation.duration_ms("max_wait_ms", max_wait_ms, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        if not max_wait_ms:  # nobody has to be woken then, and none of this process's writes looks for whom to wake
            return await self.claim_available(order, limit)
        while True:
            hint = self.runtime.wakeups.subscribe(lane_topic(order.lane_id))
            try:
                claimed = await self.claim_available(order, limit)
                left = until - clock()
                if claimed or left <= 0:
                    return claimed
                await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
            finally:
                hint.cancel()

    async def claim_available(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim up to `limit` executions that are claimable now.

        A claim with admission that finds nothing marks the work that no live worker can run.
        """
        if order.namespaces is None:
            claimed = await self._claim_any(order, limit)
        else:
            claimed = await self._claim_in_namespaces(order, limit)
        if order.admission and not claimed:
            await self._block_unserved(order)
        return claimed

    async def _claim_any(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim what is there, after a look around when the last one is old, and with one before finding nothing."""
        looked = not self.queues.is_lane_fresh(order.lane_id) or order.lane_id in self.runtime._takeover_lanes
        if looked:
            await self.queues.refresh_lane(order.lane_id)
        lines = await self.queues.covered_queues(order.lane_id, order.capabilities)
        if looked or not self.queues.is_fast(order.lane_id, lines):
            claimed = await self._claim_by_plan(order, lines, limit)
        else:
            claimed = await self.fast_claims.claim_fast([line for line in lines if not line.guarded], order, limit)
        if not claimed and not looked:
            await self.queues.refresh_lane(order.lane_id)
            lines = await self.queues.covered_queues(order.lane_id, order.capabilities)
            claimed = await self._claim_by_plan(order, lines, limit)
        return claimed

    async def _claim_by_plan(self, order: ClaimOrder, lines: Sequence[QueueKey], limit: int) -> list[answers.Claimed]:
        """By plan; of more lines than can be compared, of the first portion that has something."""
        for portion in self.queues.rotating_windows(lines):
            if claimed := await self._claim_planned(order, portion, limit):
                return claimed
        return []

    async def _claim_planned(self, order: ClaimOrder, lines: Sequence[QueueKey], limit: int) -> list[answers.Claimed]:
        """Claim from both kinds of lines in the order that fairness plans.

        Blocked keys that wait for the same limits take part in the turns. If it is the turn of one of them, it is
        unblocked if there is capacity; otherwise what needs that limit waits with it.
        """
        claimed: list[answers.Claimed] = []
        tries = Counter[str]()
        rounds = 0
        while len(claimed) < limit:
            tried = {name for name, count in tries.items() if count >= MAX_TRIES}
            wanted = limit - len(claimed)
            decided = [line for line in lines if line.guarded]
            uniform = [line for line in lines if not line.guarded]
            waiting, cut = await self.queues.claim_candidates(order.lane_id, decided, wanted, exclude=tried)
            if not waiting:
                await self.queues.forget_guarded(order.lane_id)
                if not takes_turns(uniform):
                    return claimed + await self.fast_claims.claim_fast(uniform, order, wanted)
            more, cut_too = await self.queues.claim_candidates(order.lane_id, uniform, wanted)
            turn = await self._next_turn(order, waiting + more, cut | cut_too, wanted, yields=rounds < MAX_ROUNDS)
            if turn is None:
                rounds += 1
                continue
            picks = turn.picks
            if not decided:
                self.turns.keep_turns(order.lane_id, turn.after)
            tries.update(row.execution_id for row in picks if _is_decided(row))
            try:
                taken = await self._claim_picks(picks, uniform, order)
            except errors.StoreUnavailable:
                if claimed:
                    return claimed  # these are held already: the next call may meet the error
                raise
            if decided:
                self._use_up(turn, order, taken)
            claimed += taken
            if not taken and not any(map(_is_decided, picks)):
                return claimed  # others were faster
        return claimed

    async def _next_turn(
        self, order: ClaimOrder, rows: Sequence[Execution], cut: Set[str], wanted: int, *, yields: bool
    ) -> Turn | None:
        """Which of these rows to claim now; None if blocked work came first, so that they have to be read again."""
        rivals = self.turns.rivals(order, [row for row in rows if is_eligible(row)]) if order.admission else {}
        cut = cut | {fairness.fairness_key_of(rival.row) for rival in rivals.values()}
        for row in rows:
            rivals.pop(row.execution_id, None)
        present = [*rows, *(rival.row for rival in rivals.values())]
        now, turns = self.runtime.estimate.now(), self.turns.turns_of(order.lane_id)
        picks, after = fairness.fair_order(present, turns, now, wanted, truncated=cut)
        if rivals and picks:
            if yields and (rival := rivals.get(picks[0].execution_id)):
                await self.guarded_claims.let_blocked_go_first(rows, rival)
                return None
            picks = list(takewhile(lambda row: row.execution_id not in rivals, picks))
            picks = picks or fairness.fair_order(rows, turns, now, 1)[0]
        return Turn(picks, after, present, cut, now)

    def _use_up(self, turn: Turn, order: ClaimOrder, taken: Sequence[answers.Claimed]) -> None:
        """Use up the turns of what was claimed; what a limit refused keeps its turn."""
        if taken:
            turns = self.turns.turns_of(order.lane_id)
            after = fairness.charge(turn.present, turns, turn.now, _rows_of(taken, turn.picks), cut=turn.cut)
            self.turns.keep_turns(order.lane_id, fairness.keep_idle_credits(turns, after))

    async def _claim_picks(
        self, picks: Sequence[Execution], uniform: Sequence[QueueKey], order: ClaimOrder
    ) -> list[answers.Claimed]:
        """Claim these rows; of the uniform ones of few keys, as many of each, whichever are first by now."""
        counts = Counter(fairness.fairness_key_of(row) for row in picks if not _is_decided(row))
        if len(counts) > MAX_KEYS_PER_CLAIM:
            return await self.guarded_claims.claim_rows(picks, order)
        takes = [
            self.fast_claims.claim_fast([line for line in uniform if line.fairness_key == key], order, count)
            for key, count in counts.items()
        ]
        decided = [row for row in picks if _is_decided(row)]
        claimed = await gather_claims(self.guarded_claims.claim_rows(decided, order), *takes)
        places = {row.execution_id: place for place, row in enumerate(picks)}
        return sorted(claimed, key=lambda one: places.get(one.execution_id, len(places)))

    async def _claim_in_namespaces(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim work of some namespaces only, wherever it stands in the lines that the worker covers."""
        clock, asked = asyncio.get_running_loop().time, (order.lane_id, order.namespaces or frozenset())
        await asyncio.sleep(max(0.0, self._resting.pop(asked, 0.0) - clock()))
        began = clock()
        self.runtime._namespace_filtered_lanes.add(order.lane_id)
        await self.queues.refresh_lane(order.lane_id)
        claimed: list[answers.Claimed] = []
        try:
            for portion in self.queues.rotating_windows(
                await self.queues.covered_queues(order.lane_id, order.capabilities)
            ):
                await self._claim_from_queues(portion, order, limit, claimed)
        except errors.StoreUnavailable:
            if not claimed:  # those are held already: the next call may meet the error
                raise
        if not claimed and (took := clock() - began) > CHEAP_SCAN_S:
            self._resting[asked] = clock() + min(took * PAUSE_FACTOR, MAX_PAUSE_S)
        return claimed

    async def _claim_from_queues(
        self, lines: Sequence[QueueKey], order: ClaimOrder, limit: int, claimed: list[answers.Claimed]
    ) -> None:
        """Claim from these lines as long as something is there, and less was claimed than is wanted."""
        own = in_namespaces(order.namespaces)
        tries, rounds = Counter[str](), 0
        while (wanted := limit - len(claimed)) > 0:
            tried = {name for name, count in tries.items() if count >= MAX_TRIES}
            rows, cut = await self.queues.claim_candidates(order.lane_id, lines, wanted, exclude=tried, where=own)
            if not rows:
                return
            turn = await self._next_turn(order, rows, cut, wanted, yields=rounds < MAX_ROUNDS)
            if turn is None:
                rounds += 1
                continue
            tries.update(row.execution_id for row in turn.picks)
            taken = await self.guarded_claims.claim_rows(turn.picks, order)
            self._use_up(turn, order, taken)
            claimed += taken

    async def _block_unserved(self, order: ClaimOrder) -> None:
        """When there is nothing to do, say of what stands in other lines that nobody can do it, if that is so."""
        now = self.runtime.estimate.now()
        if abs(now - self._routes_checked_at.get(order.lane_id, 0)) < LANE_REFRESH_MS:
            return
        self._routes_checked_at[order.lane_id] = now
        lines = await self.queues.lane_queues(order.lane_id)
        others = [line for line in lines if not capabilities.covers(line.required, order.capabilities)]
        live: LiveWorkers = {}
        for row in await self.queues.queue_heads(others, lookahead_rows(others), where=ELIGIBLE):
            await self.routes.block_if_unserved(row, live)

    def next_lane_index(self, count: int) -> int:
        """Which of so many lanes is looked at first this time."""
        turn, self._next_lane = self._next_lane % count, (self._next_lane + 1) % count
        return turn


def _rows_of(taken: Sequence[answers.Claimed], picks: Sequence[Execution]) -> list[Execution]:
    """The rows of what was claimed; a store may have taken another row of the same key than the one that was picked."""
    by_id = {row.execution_id: row for row in picks}
    others = (row for row in picks if row.execution_id not in {one.execution_id for one in taken})
    return [by_id.get(one.execution_id) or next(others) for one in taken]


def _is_decided(row: Execution) -> bool:
    return row.line is not None and row.line.guarded
