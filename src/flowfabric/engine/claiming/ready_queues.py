"""Lines: where claimable work stands, and who stands first.

A process knows the lines of a lane that it wrote to or heard of. Leases that lapsed enter their line when somebody
notices. Every claim looks for those of its lane, and for lines that other processes began: always when it found
nothing, or when a lease ends that it knows of, and twice a second when it is busy.

A row that cannot be read is left where it is, and stands in nobody's way.
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
LANE_REFRESH_MS = 500  # how old a look around in a lane may be; half of what a takeover may take beyond the ttl
LOOKAHEAD_ROWS = 10
EXPIRED_LEASES_BATCH = 100
ELIGIBLE = (Where("eligibility_state", "=", EligibilityState.ELIGIBLE_NOW),)
QUEUE_ORDER = ("rank", "execution_id")
MAX_QUEUES_PER_CLAIM = 64  # that are taken from in one trip
MAX_KEYS_PER_CLAIM = 8  # whose work is taken key by key: each costs a trip of its own
MAX_COMPARED_QUEUES = 1024  # whose first rows are looked at to see which come first, and how many rows of all of them


class ReadyQueues:
    """The ready queues of each lane, as far as this process knows them."""

    def __init__(self, runtime: Runtime, turns: FairTurns) -> None:
        self.runtime = runtime
        self.turns = turns
        self._rotation = 0
        self._unreadable: set[str] = set()

    async def refresh_lane(self, lane_id: str) -> None:
        """Put lapsed leases of the lane into their lines, and hear of lines that other processes began."""
        if self.fits_one_round_trip(lane_id):
            await asyncio.gather(self.mark_expired_leases(lane_id), self.runtime.load_lane_queues(lane_id))
        else:  # where there are very many, every claim asks which of them have work
            await self.mark_expired_leases(lane_id)
        self.runtime._lane_refreshed_at[lane_id] = self.runtime.estimate.now()

    def is_lane_fresh(self, lane_id: str) -> bool:
        """Whether the last look around in this lane is recent, and no lease that is known of has lapsed since."""
        now = self.runtime.estimate.now()
        if self.runtime._next_lease_expiry.get(lane_id, now + 1) <= now:
            return False
        return abs(now - self.runtime._lane_refreshed_at.get(lane_id, 0)) < LANE_REFRESH_MS

    async def mark_expired_leases(self, lane_id: str) -> None:
        """Mark all leases of the lane that have lapsed: any of their work may be the first in line.

        Whoever finds that others have just marked what it found leaves the rest to them.
        """
        where = (Where("lane_id", "=", lane_id), Where("lease_expired_at", "unset"))
        while True:
            self.runtime._next_lease_expiry.pop(
                lane_id, None
            )  # those that are noted from here on may be missing in what is read
            due = await self.runtime.retry_while_unavailable(
                lambda: self.runtime.store.due(Execution, "lease_expires_at", limit=EXPIRED_LEASES_BATCH, where=where)
            )
            self.runtime.estimate.update(due.now)
            if due.next_at is not None:
                self.runtime.track_lease_expiry(lane_id, due.next_at)
            marks = await asyncio.gather(*(self._marks_lapsed(row.execution_id) for row in due.rows))
            if len(due.rows) < EXPIRED_LEASES_BATCH or not any(marks):
                return

    async def _marks_lapsed(self, execution_id: str) -> bool:
        try:
            answer = await self.runtime.decide_execution(execution_id, expire.mark_lease_expired_if_due)
            return isinstance(answer, answers.MarkedExpired)
        except errors.Corruption as fault:
            self.skip_unreadable(execution_id, fault)
            return False

    def skip_unreadable(self, execution_id: str, fault: errors.Corruption) -> None:
        """Leave out a row that cannot be read, and say so once."""
        if execution_id not in self._unreadable:
            self._unreadable.add(execution_id)
            logger.warning("%s cannot be claimed: %s", execution_id, fault)

    async def lane_queues(self, lane_id: str) -> list[QueueKey]:
        """The lines of a lane that this process knows of, in a fixed order; of very many, those with work in them.

        Lines are never forgotten. Where each user of an application has a key, most of them are empty at any time.
        """
        if lane_id not in self.runtime._queues:
            await self.runtime.load_lane_queues(lane_id)
        if self.fits_one_round_trip(lane_id):
            return sorted(self.runtime._queues.get(lane_id, ()))
        return await self.runtime.retry_while_unavailable(lambda: self.runtime.store.nonempty_queues(lane_id))

    def fits_one_round_trip(self, lane_id: str) -> bool:
        """Whether one look sees all lines of a lane, so that what it did not find is not there."""
        return len(self.runtime._queues.get(lane_id, ())) <= MAX_QUEUES_PER_CLAIM

    def is_fast(self, lane_id: str, lines: Sequence[QueueKey]) -> bool:
        """True if the store alone may claim from these queues of a lane: none is guarded, and all have one key."""
        return lane_id not in self.runtime._guarded_lanes and not takes_turns(lines)

    async def covered_queues(self, lane_id: str, offered: Set[str]) -> list[QueueKey]:
        """The lines whose work a worker with these capabilities can do."""
        return [line for line in await self.lane_queues(lane_id) if capabilities.covers(line.required, offered)]

    async def batch_queues(self, lines: Sequence[QueueKey]) -> list[Sequence[QueueKey]]:
        """The lines in portions that one trip can take from; of more than one can, those with the best work first."""
        if len(lines) <= MAX_QUEUES_PER_CLAIM:
            return _portions(lines, MAX_QUEUES_PER_CLAIM)
        [compared, *others] = self.rotating_windows(lines)
        firsts = await self.queue_heads(compared, 1)
        in_order = [line for line in dict.fromkeys(row.line for row in firsts) if line is not None]
        return [portion for some in (in_order, *others) for portion in _portions(some, MAX_QUEUES_PER_CLAIM)]

    def rotating_windows(self, lines: Sequence[QueueKey]) -> list[Sequence[QueueKey]]:
        """The lines, or as many at a time as can be compared with each other, beginning with others each time."""
        portions = _portions(lines, MAX_COMPARED_QUEUES)
        if len(portions) <= 1:
            return portions
        self._rotation += 1
        start = self._rotation % len(portions)
        return portions[start:] + portions[:start]

    async def claim_candidates(
        self,
        lane_id: str,
        lines: Sequence[QueueKey],
        wanted: int,
        *,
        exclude: Set[str] = frozenset(),
        where: tuple[Where, ...] = (),
    ) -> tuple[list[Execution], Set[str]]:
        """The rows of these lines among which the next `wanted` are, and the keys of which more may stand there.

        Of many lines some rows each are read. When the next ones of a key are needed before enough is found, those of
        the keys that come first are read as far as can be needed.
        """
        few = len(lines) <= MAX_QUEUES_PER_CLAIM and len({line.fairness_key for line in lines}) <= MAX_KEYS_PER_CLAIM
        depth = wanted if few else min(wanted, max(1, MAX_COMPARED_QUEUES // len(lines)))
        rows = await self.queue_heads(lines, depth, exclude=exclude, where=where)
        if depth == wanted:
            return rows, frozenset()
        cut = {line.fairness_key for line, count in Counter(_lines(rows)).items() if count >= depth}
        picks, _ = fairness.fair_order(
            rows, self.turns.turns_of(lane_id), self.runtime.estimate.now(), wanted, truncated=cut
        )
        if len(picks) in (wanted, len(rows)):
            return rows, cut
        next_ones = [key for key in dict.fromkeys(map(fairness.fairness_key_of, picks)) if key in cut][
            :MAX_KEYS_PER_CLAIM
        ]
        near = [line for line in dict.fromkeys(_lines(rows)) if line.fairness_key in next_ones][:MAX_QUEUES_PER_CLAIM]
        further = await self.queue_heads(near, wanted, exclude=exclude, where=where)
        left = {line.fairness_key for line in _lines(rows) if line not in near}
        return further + [row for row in rows if row.line not in near], cut & left

    async def queue_heads(
        self,
        lines: Sequence[QueueKey],
        limit: int,
        *,
        exclude: Set[str] = frozenset(),
        where: tuple[Where, ...] = (),
    ) -> list[Execution]:
        """The first rows of each of the lines, without those granted to somebody and those named, best rank first.

        Of few lines some more rows are read at once, since some may have to be passed over.
        """
        if not lines:
            return []
        size = limit + (LOOKAHEAD_ROWS if len(lines) <= MAX_QUEUES_PER_CLAIM else 0)
        conditions = (Where("line", "in", tuple(lines)), *where)
        page = await self.runtime.scan(
            Scan(Execution, conditions, QUEUE_ORDER, None, size, limit_by="line", partial=True)
        )
        rows = self._claimable(page, exclude)
        found, seen = Counter(row.line for row in rows), Counter(row.line for row in page)
        for line in lines:  # many of its first rows were passed over: look further
            if seen[line] == size and found[line] < limit:
                last = [row for row in page if row.line == line][-1]
                rows += await self._further(line, limit - found[line], exclude, where, (last.rank, last.execution_id))
        return sorted(rows, key=lambda row: (row.rank, row.execution_id))

    async def _further(
        self, line: QueueKey, limit: int, without: Set[str], where: tuple[Where, ...], after: tuple[int, str]
    ) -> list[Execution]:
        found: list[Execution] = []
        size = limit + LOOKAHEAD_ROWS
        while True:
            page = await self.runtime.scan(
                Scan(Execution, (Where("line", "=", line), *where), QUEUE_ORDER, after, size, partial=True)
            )
            found += self._claimable(page, without)
            if len(found) >= limit or len(page) < size:
                return found[:limit]
            after = (page[-1].rank, page[-1].execution_id)

    def _claimable(self, page: Sequence[Execution], without: Set[str]) -> list[Execution]:
        now = self.runtime.estimate.now()
        return [
            row
            for row in page
            if row.execution_id not in without and not grant_rules.has_live_grant(row, now) and self._is_readable(row)
        ]

    def _is_readable(self, row: Execution) -> bool:
        try:
            decode_terms(row.terms)
        except errors.Corruption as fault:
            self.skip_unreadable(row.execution_id, fault)
            return False
        return True

    async def forget_guarded(self, lane_id: str) -> None:
        """Stop expecting decided work in a lane, unless there is some: granted, or beyond the worker that looked."""
        if lane_id not in self.runtime._guarded_lanes and lane_id not in self.runtime._takeover_lanes:
            return
        for line in await self.lane_queues(lane_id):
            first = Scan(Execution, (Where("line", "=", line),), QUEUE_ORDER, limit=1, partial=True)
            if line.guarded and await self.runtime.scan(first):
                return
        self.runtime._guarded_lanes.discard(lane_id)
        self.runtime._takeover_lanes.discard(lane_id)


def claim_limit(lines: Sequence[QueueKey], limit: int) -> int:
    """How many of these lines can be claimed together: the best so many stand in the first portion."""
    return limit if len(lines) <= MAX_QUEUES_PER_CLAIM else min(limit, MAX_QUEUES_PER_CLAIM)


def _lines(rows: Iterable[Execution]) -> Iterator[QueueKey]:
    """The lines in which these rows stand."""
    return (row.line for row in rows if row.line is not None)


def takes_turns(lines: Sequence[QueueKey]) -> bool:
    """True if these queues hold work of several fairness keys."""
    return len({line.fairness_key for line in lines if not line.guarded}) > 1


def lookahead_rows(lines: Sequence[QueueKey]) -> int:
    """Return how many rows of each of these queues are read at once."""
    return LOOKAHEAD_ROWS if len(lines) <= MAX_QUEUES_PER_CLAIM else 1


def in_namespaces(names: Set[str] | None) -> tuple[Where, ...]:
    """Return the filter of a scan for work of these namespaces; None is all of them."""
    return () if names is None else (Where("namespace", "in", tuple(sorted(names))),)


def _portions(lines: Sequence[QueueKey], size: int) -> list[Sequence[QueueKey]]:
    return [lines[first : first + size] for first in range(0, len(lines), size)]
