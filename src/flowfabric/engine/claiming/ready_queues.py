"""Ready queues of each lane: which exist, and which rows are at their heads.

A process knows the queues that it has written to or loaded. Executions whose lease expired enter their queue when a
claim marks them. A claim refreshes its lane, that is, marks expired leases and loads queues of other processes: before
it returns nothing, when a known lease has expired, and twice a second under load.

A row that cannot be read is skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set

from flowfabric import errors
from flowfabric.engine.claiming.fair_turns import FairTurns
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.states import EligibilityState
from flowfabric.rules.execution import expire
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import capabilities, fairness
from flowfabric.stores.queries import Scan, Where

logger = logging.getLogger("flowfabric.claiming")
LANE_REFRESH_MS = 500  # between two refreshes; half of the time after the expiry of a lease that a takeover may need
LOOKAHEAD_ROWS = 10
EXPIRED_LEASES_BATCH = 100
ELIGIBLE = (Where("eligibility_state", "=", EligibilityState.ELIGIBLE_NOW),)
QUEUE_ORDER = ("rank", "execution_id")
MAX_QUEUES_PER_CLAIM = 64  # queues that one round trip claims from
MAX_KEYS_PER_CLAIM = 8  # fairness keys that are claimed from separately: each costs a round trip
MAX_COMPARED_QUEUES = 1024  # queues whose heads are compared; as many rows are read of all of them


class ReadyQueues:
    """The ready queues of each lane, as far as this process knows them."""

    def __init__(self, runtime: Runtime, turns: FairTurns) -> None:
        self.runtime = runtime
        self.turns = turns
        self._rotation = 0
        self._unreadable: set[str] = set()

    async def refresh_lane(self, lane_id: str) -> None:
        """Mark expired leases of the lane, and load the queues that other processes added."""
        if self.fits_one_round_trip(lane_id):
            await asyncio.gather(self.mark_expired_leases(lane_id), self.runtime.load_lane_queues(lane_id))
        else:  # of very many, every claim loads the nonempty ones
            await self.mark_expired_leases(lane_id)
        self.runtime._lane_refreshed_at[lane_id] = self.runtime.estimate.now()

    def is_lane_fresh(self, lane_id: str) -> bool:
        """True if the lane was refreshed recently and no known lease has expired since."""
        now = self.runtime.estimate.now()
        if self.runtime._next_lease_expiry.get(lane_id, now + 1) <= now:
            return False
        return abs(now - self.runtime._lane_refreshed_at.get(lane_id, 0)) < LANE_REFRESH_MS

    async def mark_expired_leases(self, lane_id: str) -> None:
        """Mark all expired leases of the lane: each of these executions may be at the head of its queue.

        If other processes have just marked a whole batch, the rest is left to them.
        """
        where = (Where("lane_id", "=", lane_id), Where("lease_expired_at", "unset"))
        while True:
            self.runtime._next_lease_expiry.pop(lane_id, None)  # before the read, which may miss later ones
            due = await self.runtime.retry_while_unavailable(
                lambda: self.runtime.store.due(Execution, "lease_expires_at", limit=EXPIRED_LEASES_BATCH, where=where)
            )
            self.runtime.estimate.update(due.now)
            if due.next_at is not None:
                self.runtime.track_lease_expiry(lane_id, due.next_at)
            marks = await asyncio.gather(*(self._mark_expired(row.execution_id) for row in due.rows))
            if len(due.rows) < EXPIRED_LEASES_BATCH or not any(marks):
                return

    async def _mark_expired(self, execution_id: str) -> bool:
        try:
            answer = await self.runtime.decide_execution(execution_id, expire.mark_lease_expired_if_due)
            return isinstance(answer, answers.MarkedExpired)
        except errors.Corruption as fault:
            self.skip_unreadable(execution_id, fault)
            return False

    def skip_unreadable(self, execution_id: str, fault: errors.Corruption) -> None:
        """Log once that a row cannot be read."""
        if execution_id not in self._unreadable:
            self._unreadable.add(execution_id)
            logger.warning("%s cannot be claimed: %s", execution_id, fault)

    async def lane_queues(self, lane_id: str) -> list[QueueKey]:
        """Return the known queues of a lane in a fixed order; of very many, the nonempty ones.

        Queues are never forgotten. If each user of an application has a fairness key, most are empty at any time.
        """
        if lane_id not in self.runtime._queues:
            await self.runtime.load_lane_queues(lane_id)
        if self.fits_one_round_trip(lane_id):
            return sorted(self.runtime._queues.get(lane_id, ()))
        return await self.runtime.retry_while_unavailable(lambda: self.runtime.store.nonempty_queues(lane_id))

    def fits_one_round_trip(self, lane_id: str) -> bool:
        """True if one round trip reads all queues of a lane, so that one without a result proves that it is empty."""
        return len(self.runtime._queues.get(lane_id, ())) <= MAX_QUEUES_PER_CLAIM

    def is_fast(self, lane_id: str, queues: Sequence[QueueKey]) -> bool:
        """True if the store alone may claim from these queues of a lane: none is guarded, and all have one key."""
        return lane_id not in self.runtime._guarded_lanes and not takes_turns(queues)

    async def covered_queues(self, lane_id: str, offered: Set[str]) -> list[QueueKey]:
        """Return the queues whose work a worker with these capabilities can run."""
        return [queue for queue in await self.lane_queues(lane_id) if capabilities.covers(queue.required, offered)]

    async def batch_queues(self, queues: Sequence[QueueKey]) -> list[Sequence[QueueKey]]:
        """Divide the queues into batches of one round trip each; of several, those with the best heads come first."""
        if len(queues) <= MAX_QUEUES_PER_CLAIM:
            return _batches(queues, MAX_QUEUES_PER_CLAIM)
        [compared, *others] = self.rotating_windows(queues)
        in_order = [*dict.fromkeys(_queues_of(await self.queue_heads(compared, 1)))]
        return [batch for window in (in_order, *others) for batch in _batches(window, MAX_QUEUES_PER_CLAIM)]

    def rotating_windows(self, queues: Sequence[QueueKey]) -> list[Sequence[QueueKey]]:
        """Divide the queues into windows that can be compared; each call starts with another window."""
        windows = _batches(queues, MAX_COMPARED_QUEUES)
        if len(windows) <= 1:
            return windows
        self._rotation += 1
        start = self._rotation % len(windows)
        return windows[start:] + windows[:start]

    async def claim_candidates(
        self,
        lane_id: str,
        queues: Sequence[QueueKey],
        wanted: int,
        *,
        exclude: Set[str] = frozenset(),
        where: tuple[Where, ...] = (),
    ) -> tuple[list[Execution], Set[str]]:
        """Return rows that include the next `wanted` in fair order, and the fairness keys that may have more rows.

        Of many queues only some rows each are read. If that is not enough to find `wanted` rows, more rows are read of
        the keys that come first.
        """
        key_count = len({queue.fairness_key for queue in queues})
        few = len(queues) <= MAX_QUEUES_PER_CLAIM and key_count <= MAX_KEYS_PER_CLAIM
        depth = wanted if few else min(wanted, max(1, MAX_COMPARED_QUEUES // len(queues)))
        rows = await self.queue_heads(queues, depth, exclude=exclude, where=where)
        if depth == wanted:
            return rows, frozenset()
        cut = {queue.fairness_key for queue, count in Counter(_queues_of(rows)).items() if count >= depth}
        picks, _ = fairness.fair_order(
            rows, self.turns.turns_of(lane_id), self.runtime.estimate.now(), wanted, truncated=cut
        )
        if len(picks) in (wanted, len(rows)):
            return rows, cut
        keys = [key for key in dict.fromkeys(map(fairness.fairness_key_of, picks)) if key in cut][:MAX_KEYS_PER_CLAIM]
        near = [one for one in dict.fromkeys(_queues_of(rows)) if one.fairness_key in keys][:MAX_QUEUES_PER_CLAIM]
        more = await self.queue_heads(near, wanted, exclude=exclude, where=where)
        left = {queue.fairness_key for queue in _queues_of(rows) if queue not in near}
        return more + [row for row in rows if row.line not in near], cut & left

    async def queue_heads(
        self,
        queues: Sequence[QueueKey],
        limit: int,
        *,
        exclude: Set[str] = frozenset(),
        where: tuple[Where, ...] = (),
    ) -> list[Execution]:
        """Return the first rows of each queue by position, without granted rows and those in `exclude`.

        Of few queues some more rows are read, because some may have to be skipped.
        """
        if not queues:
            return []
        size = limit + (LOOKAHEAD_ROWS if len(queues) <= MAX_QUEUES_PER_CLAIM else 0)
        conditions = (Where("line", "in", tuple(queues)), *where)
        page = await self.runtime.scan(
            Scan(Execution, conditions, QUEUE_ORDER, None, size, limit_by="line", partial=True)
        )
        rows = self._claimable(page, exclude)
        found, seen = Counter(row.line for row in rows), Counter(row.line for row in page)
        for queue in queues:  # read more if many of its first rows were skipped
            if seen[queue] == size and found[queue] < limit:
                last = [row for row in page if row.line == queue][-1]
                after = (last.rank, last.execution_id)
                rows += await self._rows_after(queue, limit - found[queue], exclude, where, after)
        return sorted(rows, key=lambda row: (row.rank, row.execution_id))

    async def _rows_after(
        self, queue: QueueKey, limit: int, exclude: Set[str], where: tuple[Where, ...], after: tuple[int, str]
    ) -> list[Execution]:
        found: list[Execution] = []
        size = limit + LOOKAHEAD_ROWS
        while True:
            page = await self.runtime.scan(
                Scan(Execution, (Where("line", "=", queue), *where), QUEUE_ORDER, after, size, partial=True)
            )
            found += self._claimable(page, exclude)
            if len(found) >= limit or len(page) < size:
                return found[:limit]
            after = (page[-1].rank, page[-1].execution_id)

    def _claimable(self, page: Sequence[Execution], exclude: Set[str]) -> list[Execution]:
        now = self.runtime.estimate.now()
        return [
            row
            for row in page
            if row.execution_id not in exclude and not grant_rules.has_live_grant(row, now) and self._is_readable(row)
        ]

    def _is_readable(self, row: Execution) -> bool:
        try:
            decode_terms(row.terms)
        except errors.Corruption as fault:
            self.skip_unreadable(row.execution_id, fault)
            return False
        return True

    async def forget_guarded(self, lane_id: str) -> None:
        """Forget that a lane has guarded work, unless there is some: granted, or for other workers."""
        if lane_id not in self.runtime._guarded_lanes and lane_id not in self.runtime._takeover_lanes:
            return
        for queue in await self.lane_queues(lane_id):
            first = Scan(Execution, (Where("line", "=", queue),), QUEUE_ORDER, limit=1, partial=True)
            if queue.guarded and await self.runtime.scan(first):
                return
        self.runtime._guarded_lanes.discard(lane_id)
        self.runtime._takeover_lanes.discard(lane_id)


def claim_limit(queues: Sequence[QueueKey], limit: int) -> int:
    """Return how many rows one request may claim from these queues; the first batch has that many of the best."""
    return limit if len(queues) <= MAX_QUEUES_PER_CLAIM else min(limit, MAX_QUEUES_PER_CLAIM)


def _queues_of(rows: Iterable[Execution]) -> Iterator[QueueKey]:
    return (row.line for row in rows if row.line is not None)


def takes_turns(queues: Sequence[QueueKey]) -> bool:
    """True if these queues hold work of several fairness keys."""
    return len({queue.fairness_key for queue in queues if not queue.guarded}) > 1


def lookahead_rows(queues: Sequence[QueueKey]) -> int:
    """Return how many rows of each of these queues are read at once."""
    return LOOKAHEAD_ROWS if len(queues) <= MAX_QUEUES_PER_CLAIM else 1


def in_namespaces(names: Set[str] | None) -> tuple[Where, ...]:
    """Return the filter of a scan for work of these namespaces; None is all of them."""
    return () if names is None else (Where("namespace", "in", tuple(sorted(names))),)


def _batches(queues: Sequence[QueueKey], size: int) -> list[Sequence[QueueKey]]:
    return [queues[start : start + size] for start in range(0, len(queues), size)]
