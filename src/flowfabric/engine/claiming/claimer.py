"""Taking work: the pull of a worker.

Two roads lead to a claim. *Uniform* rows are taken by the store in one trip: the first rows of the lines that the
worker covers. *Decided* rows need a decision at the claim: an expired or revoked lease has a cap to respect and an
attempt to end, a budget or a quota has a say. They stand in lines of their own, claimed by load, rule and commit.

A lane with uniform work of one fairness key only is taken from directly. Otherwise the first rows of all lines are
planned (`rules.fairness`), and both roads are taken at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence, Set
from itertools import takewhile
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.claiming.fair_turns import Rival
from flowfabric.engine.claiming.late_claims import LateClaims
from flowfabric.engine.claiming.ready_queues import MAX_KEYS_PER_CLAIM, ReadyQueues, claim_limit
from flowfabric.engine.runtime.runtime import StoreBackoff
from flowfabric.engine.runtime.wakeups import FEED_TOPIC, lane_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.states import AttemptType
from flowfabric.model.text import pluralize
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import lease, reclaim
from flowfabric.rules.execution.lease import AcquiredLease, LeaseHolder
from flowfabric.rules.execution.operator import is_eligible
from flowfabric.rules.scheduling import fairness
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.queries import Read, Scan, Where

logger = logging.getLogger("flowfabric.taking")

# Asked of every claim. To find a member in its class takes ten times as long as to find a name here.
_FRESH, _INITIAL, _RECLAIM = HandleKind.FRESH, AttemptType.INITIAL, AttemptType.RECLAIM

MAX_CLAIM_LIMIT = 10_000  # executions that one claim may ask for
MAX_TRIES = 2  # of one claim for a row: what a limit refused may be unblocked meanwhile, and it is still its turn
MOST_ROUNDS = 8  # of one claim in which blocked work whose turn it is goes first
MIN_PREMINTED_IDS = 16  # identities that it is worth making beforehand


class Turn(msgspec.Struct, frozen=True):
    """What to claim next, and who takes part in the turns: claimable rows and the first blocked ones."""

    picks: Sequence[Execution]
    after: dict[str, int]  # the turns if all of them are claimed
    present: Sequence[Execution]
    cut: Set[str]
    now: int


class Claimer(ReadyQueues):
    """What a worker does to get work."""

    late_claims: LateClaims
    _spare: tuple[LeaseIds, ...] = ()
    _found_enough = False  # the last take, which the next one may well do, too

    async def claim(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> answers.Claimed | None:
        """The best claimable execution of the lane, fresh, resumed or taken over; None when there is none in time."""
        claimed = await self.claim_many(
            lane_id,
            1,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            max_wait_ms=max_wait_ms,
        )
        return claimed[0] if claimed else None

    async def claim_many(
        self,
        lane_id: str,
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> list[answers.Claimed]:
        """Up to `limit` executions in claim order, as soon as there is at least one; limits are not asked."""
        order = validate.build_claim_order(lane_id, worker_id, worker_instance_id, capabilities, lease_ttl_ms)
        return await self.poll_lane(order, limit, max_wait_ms)

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
        """Claim what is there, after a look around when the last one is old, and with one before finding nothing."""
        looked = not self.is_lane_fresh(order.lane_id) or order.lane_id in self.runtime._takeover_lanes
        if looked:
            await self.refresh_lane(order.lane_id)
        lines = await self.covered_queues(order.lane_id, order.capabilities)
        if looked or not self._is_fast(order.lane_id, lines):
            claimed = await self._claim_by_plan(order, lines, limit)
        else:
            claimed = await self._claim_fast([line for line in lines if not line.guarded], order, limit)
        if not claimed and not looked:
            await self.refresh_lane(order.lane_id)
            lines = await self.covered_queues(order.lane_id, order.capabilities)
            claimed = await self._claim_by_plan(order, lines, limit)
        return claimed

    def _is_fast(self, lane_id: str, lines: Sequence[QueueKey]) -> bool:
        """Whether nothing but uniform work of one key is expected in these lines of a lane."""
        return lane_id not in self.runtime._guarded_lanes and not _take_turns(lines)

    # -- by plan --------------------------------------------------------------------------------------------------

    async def _claim_by_plan(self, order: ClaimOrder, lines: Sequence[QueueKey], limit: int) -> list[answers.Claimed]:
        """By plan; of more lines than can be compared, of the first portion that has something."""
        for portion in self.rotating_windows(lines):
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
            waiting, cut = await self.claim_candidates(order.lane_id, decided, wanted, exclude=tried)
            if not waiting:
                await self.forget_guarded(order.lane_id)
                if not _take_turns(uniform):
                    return claimed + await self._claim_fast(uniform, order, wanted)
            more, cut_too = await self.claim_candidates(order.lane_id, uniform, wanted)
            turn = await self._next_turn(order, waiting + more, cut | cut_too, wanted, yields=rounds < MOST_ROUNDS)
            if turn is None:
                rounds += 1
                continue
            picks = turn.picks
            if not decided:
                self.keep_turns(order.lane_id, turn.after)
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
        rivals = self.rivals(order, [row for row in rows if is_eligible(row)]) if order.admission else {}
        cut = cut | {fairness.fairness_key_of(rival.row) for rival in rivals.values()}
        for row in rows:
            rivals.pop(row.execution_id, None)
        present = [*rows, *(rival.row for rival in rivals.values())]
        now, turns = self.runtime.estimate.now(), self.turns_of(order.lane_id)
        picks, after = fairness.fair_order(present, turns, now, wanted, truncated=cut)
        if rivals and picks:
            if yields and (rival := rivals.get(picks[0].execution_id)):
                await self._let_blocked_go_first(rows, rival)
                return None
            picks = list(takewhile(lambda row: row.execution_id not in rivals, picks))
            picks = picks or fairness.fair_order(rows, turns, now, 1)[0]
        return Turn(picks, after, present, cut, now)

    def _use_up(self, turn: Turn, order: ClaimOrder, taken: Sequence[answers.Claimed]) -> None:
        """Use up the turns of what was claimed; what a limit refused keeps its turn."""
        if taken:
            turns = self.turns_of(order.lane_id)
            after = fairness.charge(turn.present, turns, turn.now, _rows_of(taken, turn.picks), cut=turn.cut)
            self.keep_turns(order.lane_id, fairness.keep_idle_credits(turns, after))

    async def _let_blocked_go_first(self, rows: Sequence[Execution], rival: Rival) -> None:
        """It is the turn of blocked work: unblock it, or let those of the rows that need its limit wait, too."""
        raise NotImplementedError

    async def _claim_picks(
        self, picks: Sequence[Execution], uniform: Sequence[QueueKey], order: ClaimOrder
    ) -> list[answers.Claimed]:
        """Claim these rows; of the uniform ones of few keys, as many of each, whichever are first by now."""
        counts = Counter(fairness.fairness_key_of(row) for row in picks if not _is_decided(row))
        if len(counts) > MAX_KEYS_PER_CLAIM:
            return await self._claim_guarded(picks, order)
        takes = [
            self._claim_fast([line for line in uniform if line.fairness_key == key], order, count)
            for key, count in counts.items()
        ]
        decided = [row for row in picks if _is_decided(row)]
        claimed = await gather_claims(self._claim_guarded(decided, order), *takes)
        places = {row.execution_id: place for place, row in enumerate(picks)}
        return sorted(claimed, key=lambda one: places.get(one.execution_id, len(places)))

    # -- the decided road -----------------------------------------------------------------------------------------

    async def _claim_guarded(self, rows: Sequence[Execution], order: ClaimOrder) -> list[answers.Claimed]:
        """Claim rows that need a decision; those that others got, or that ended at their cap, are left out."""
        return await gather_claims(*(self._claim_row(row, order) for row in rows))

    async def _claim_row(self, row: Execution, order: ClaimOrder) -> answers.Claimed | None:
        holder = self._holder(order)
        wants = (Read(Execution, (row.execution_id,)), Read(Payload, (row.execution_id,)))
        payload: list[Payload] = []

        def decide(rows: list[list[Any]], now: int) -> Decision[Any]:
            payload[:] = rows[1]
            return reclaim.claim_guarded(rows[0][0] if rows[0] else None, holder, order.capabilities, now)

        try:
            answer = await self.runtime.decide_and_commit(wants, decide)
        except errors.Corruption as fault:
            self.skip_unreadable(row.execution_id, fault)
            return None
        if not isinstance(answer, AcquiredLease):
            return None
        kind = HandleKind.RECLAIMED if answer.attempt_type is AttemptType.RECLAIM else HandleKind.FRESH
        if answer.attempt_id != holder.attempt_id:
            kind = HandleKind.RESUMED
        return self._claimed_by_rule(answer, kind, payload[0] if payload else None, row.namespace)

    def _claimed_by_rule(
        self, acquired: AcquiredLease, kind: HandleKind, payload: Payload | None = None, namespace: str | None = None
    ) -> answers.Claimed:
        self.runtime.track_lease_expiry(acquired.lane_id, acquired.lease_expires_at)
        if (count := acquired.reclaim_count) and count % reclaim.WARNED_EVERY == 0:
            logger.warning(
                "%s has been reclaimed %s: its workers keep losing it", acquired.execution_id, pluralize(count, "time")
            )
        fields = HandleFields(
            acquired.execution_id,  # type: ignore[arg-type]
            acquired.attempt_index,
            acquired.attempt_id,  # type: ignore[arg-type]
            acquired.lease_id,  # type: ignore[arg-type]
            acquired.lease_epoch,
            acquired.lease_ttl_ms,
            acquired.current_lane,  # type: ignore[arg-type]
            acquired.worker_instance_id,  # type: ignore[arg-type]
        )
        return answers.Claimed(
            acquired.execution_id,
            acquired.lease_id,
            acquired.lease_epoch,
            acquired.attempt_index,
            acquired.attempt_id,
            acquired.attempt_type,
            acquired.lease_expires_at,
            Handle.mint(self.runtime.store.tag, kind, fields),
            payload,
            namespace,
        )

    def _holder(self, order: ClaimOrder) -> LeaseHolder:
        return LeaseHolder(
            order.worker_id,
            order.worker_instance_id,
            order.lane_id,
            self.runtime.minter.uuid(),
            self.runtime.minter.uuid(),
            order.lease_ttl_ms,
        )

    # -- the uniform road -----------------------------------------------------------------------------------------

    async def _claim_fast(self, lines: Sequence[QueueKey], order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """The first rows of these lines; of very many lines, those of the first portion that has any."""
        most = claim_limit(lines, limit)
        for portion in await self.batch_queues(lines):
            if taken := await self._send_claim(self._claim_request(tuple(portion), most, order)):
                return taken
        return []

    async def _send_claim(self, take: ClaimRequest, *doubts: ClaimRequest) -> list[answers.Claimed]:
        """Take; `doubts` are such of before whose answers got lost, and which may still arrive."""
        doubtful = [*doubts]
        got: list[answers.Claimed] = []
        try:
            got = await self._take_doubted(take, doubtful)
            return got
        finally:
            if doubtful:
                self.late_claims.watch(doubtful, got)

    async def _take_doubted(self, take: ClaimRequest, doubtful: list[ClaimRequest]) -> list[answers.Claimed]:
        """Take; what may still arrive of this and of earlier takes is added to the doubtful ones."""
        pause = StoreBackoff()
        while True:
            if (
                self._found_enough and len(take.lease_ids) >= MIN_PREMINTED_IDS
            ):  # while the store is at it, make what the next one needs
                asyncio.get_running_loop().call_soon(self._stock, len(take.lease_ids))
            try:
                taken = await self.runtime.store.claim_rows(take)
            except asyncio.CancelledError:
                doubtful.append(take)
                raise
            except errors.StoreUnavailable as lost:
                if lost.in_doubt:
                    doubtful.append(take)
                    if found := await self._find_claimed(doubtful):
                        return found
                await pause.sleep_or_raise()
                take = self._with_new_lease_ids(take)
                continue
            self.runtime.estimate.update(taken.now)
            if doubtful and not taken.rows:  # perhaps the doubtful one arrived just after we had looked for it
                return await self._find_claimed(doubtful)
            return self._accept_claimed(take, taken.rows)

    def _with_new_lease_ids(self, take: ClaimRequest) -> ClaimRequest:
        """The same take once more, with identities that nobody has seen."""
        return msgspec.structs.replace(take, lease_ids=self._next_lease_ids(len(take.lease_ids)))

    def _claim_request(self, lines: tuple[QueueKey, ...], limit: int, order: ClaimOrder) -> ClaimRequest:
        return ClaimRequest(
            lines,
            self._next_lease_ids(limit),
            order.worker_id,
            order.worker_instance_id,
            order.lease_ttl_ms,
            lease.CLAIM,
        )

    def _accept_claimed(self, take: ClaimRequest, rows: Sequence[tuple[Execution, Payload]]) -> list[answers.Claimed]:
        """What a take got; the stamps that it did not use are used later."""
        self._found_enough = len(rows) == len(take.lease_ids)
        if not self._found_enough:
            used = {row.lease_id for row, _ in rows}
            self._spare = tuple(stamp for stamp in take.lease_ids if stamp.lease_id not in used)
        if rows:
            self.runtime.notify((FEED_TOPIC,), at_once=False)  # what is claimed may soon be over, which is told, too
            self.runtime.wake_sweeps_for([row for row, _ in rows])
            self.runtime.track_lease_expiry(rows[0][0].lane_id, rows[0][0].lease_expires_at or 0)
        return [self._claimed_by_store(row, payload, take.lease_ttl_ms) for row, payload in rows]

    def _next_lease_ids(self, count: int) -> tuple[LeaseIds, ...]:
        """New identities, and before them those that an earlier take found nothing for: workers ask for many."""
        self._stock(count)
        stamps, self._spare = self._spare[:count], ()
        return stamps

    def _stock(self, count: int) -> None:
        """Have so many identities to give out."""
        missing = count - len(self._spare)
        if missing > 0:
            uuid, change_id = self.runtime.minter.uuid, self.runtime.minter.change_id
            self._spare += tuple([LeaseIds(uuid(), uuid(), change_id()) for _ in range(missing)])

    async def _find_claimed(self, takes: Sequence[ClaimRequest]) -> list[answers.Claimed]:
        """After lost answers: the rows that carry the stamps, if one of the takes happened."""
        leases = tuple(stamp.lease_id for take in takes for stamp in take.lease_ids)
        where = (Where("lease_expires_at", "set"), Where("lease_id", "in", leases))
        rows = await self.runtime.scan(Scan(Execution, where, ("rank", "execution_id"), limit=len(leases)))
        if not rows:
            return []
        loaded = await self.runtime.load([Read(Payload, (row.execution_id,)) for row in rows])
        ttl = takes[0].lease_ttl_ms
        return [self._claimed_by_store(row, found[0], ttl) for row, found in zip(rows, loaded.rows, strict=True)]

    def _claimed_by_store(self, row: Execution, payload: Payload, lease_ttl_ms: int) -> answers.Claimed:
        self.runtime.cache_leased_row(row)
        kind = _FRESH
        if row.attempt_resumed_at is not None:
            kind = HandleKind.RESUMED
        elif row.attempt_type is _RECLAIM:
            kind = HandleKind.RECLAIMED
        fields = HandleFields(
            row.execution_id,  # type: ignore[arg-type]
            row.attempt_index or 0,
            row.attempt_id,  # type: ignore[arg-type]
            row.lease_id,  # type: ignore[arg-type]
            row.lease_epoch,
            lease_ttl_ms,
            row.current_lane or row.lane_id,  # type: ignore[arg-type]
            row.worker_instance_id,  # type: ignore[arg-type]
        )
        return answers.Claimed(
            row.execution_id,
            fields.lease_id,
            row.lease_epoch,
            fields.attempt_index,
            fields.attempt_id,
            row.attempt_type or _INITIAL,
            row.lease_expires_at or 0,
            Handle.mint(self.runtime.store.tag, kind, fields),
            payload,
            row.namespace,
        )


async def gather_claims(*claims: Awaitable[answers.Claimed | list[answers.Claimed] | None]) -> list[answers.Claimed]:
    """What several claims at once have got; that one of them failed matters only when none got anything.

    What is claimed is held: it must not be lost because the store was away for a neighbour.
    """
    answered = await asyncio.gather(*claims, return_exceptions=True)
    claimed: list[answers.Claimed] = []
    for answer in answered:
        if isinstance(answer, answers.Claimed):
            claimed.append(answer)
        elif isinstance(answer, list):
            claimed += answer
    for failed in answered:
        if isinstance(failed, BaseException) and (not claimed or not isinstance(failed, errors.FabricError)):
            raise failed
    return claimed


def _rows_of(taken: Sequence[answers.Claimed], picks: Sequence[Execution]) -> list[Execution]:
    """The rows of what was claimed; a store may have taken another row of the same key than the one that was picked."""
    by_id = {row.execution_id: row for row in picks}
    others = (row for row in picks if row.execution_id not in {one.execution_id for one in taken})
    return [by_id.get(one.execution_id) or next(others) for one in taken]


def _is_decided(row: Execution) -> bool:
    return row.line is not None and row.line.guarded


def _take_turns(lines: Sequence[QueueKey]) -> bool:
    """Whether work of several keys may stand in these lines."""
    return len({line.fairness_key for line in lines if not line.guarded}) > 1
