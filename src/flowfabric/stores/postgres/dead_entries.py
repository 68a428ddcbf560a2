"""Dead index entries: decides which parts of a ready queue a claim reads.

A claimed row leaves the queue index, but its entry stays until no snapshot can see it. One idle transaction keeps all
of these entries (snapshot_holders.sql lists such transactions); then each claim reads every entry that was claimed
since, and becomes slower and slower. The server reports how many entries a claim has read. Up to `BLOAT_THRESHOLD` a
claim reads its queues from the head. Beyond that a claim reads:

* Always the part above the floor. The floor is the position of the last claimed row, or a little before the time of the
  last claim that drained the queue: only commits that take longer than `LEEWAY_MS` can create rows below it.
* One slice of about `SLICE_ENTRIES` below the floor, within the budget of this process: `ENTRIES_PER_S`. Rows that
  return to their old position (retries, delays, priorities) are found there. A claim without a result continues with
  further slices.

So a claim reads a bounded number of entries, and a claimable row waits no longer than one round over all slices: one
second for each `ENTRIES_PER_S` dead entries, plus the poll interval of a worker.

Every other read of an ordered index works alike. Scans of the first rows of several queues (guarded claims) and the
search for nonempty queues count each part that they read (`parts`, `note_part`). Such a read claims nothing, so the
floor stays below the first row that it found. Rows found in a slice will be claimed next: that slice is read again, up
to `REREADS` times, before the next slice. The search for due rows of any table is the same with instants as positions;
there the floor is below the first row found, or just before the time of the search.

When a round finds few entries, because the transaction has ended, claims read from the head again. A process that
starts beside many dead entries reads all of them once, and divides slices that turn out to be too large.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

from flowfabric.model.execution import Execution

BLOAT_THRESHOLD = 500  # entries read by a claim beyond which claims no longer read from the head
SLICE_ENTRIES = 1024  # entries of a slice below the floor
ENTRIES_PER_S = 10_000  # the budget of a process for entries below floors
LEEWAY_MS = 200
NEXT_DUE_TTL_S = 1.0
REREADS = 3  # how often a slice that has rows to claim is read again
MOST_PORTIONS = 64  # the number of slices that one slice is divided into at once
LEAST_COST = 16  # the least number of entries that a slice counts for, so that a read has few slices

Position = tuple[int, str]

# The initial bounds of slices, in milliseconds below the floor: another priority, a day, an hour ...
INITIAL_SLICE_OFFSETS_MS = (10**11, 86_400_000, 3_600_000, 600_000, 60_000, 10_000, 2_000)

LOWEST: Position = (-(2**63), "")
HIGHEST: Position = (2**63 - 1, "")


class IndexRange(NamedTuple):
    """A range of a queue or of another index: after one position, up to another one."""

    key: Any
    low: Position = LOWEST
    high: Position = HIGHEST


class IndexSlice:
    """A range below the floor, and the number of entries it had when it was last read."""

    __slots__ = ("entries", "high", "low", "rereads")

    def __init__(self, low: Position, high: Position, entries: int) -> None:
        self.low = low
        self.high = high
        self.entries = entries
        self.rereads = 0  # rereads since rows were found

    def divided(self) -> list[IndexSlice]:
        """Divide into slices of about `SLICE_ENTRIES`, assuming that entries are spread evenly."""
        count = min(self.entries // SLICE_ENTRIES + 1, MOST_PORTIONS, self.high[0] - self.low[0])
        if count < 2:
            return [self]
        step = (self.high[0] - self.low[0]) // count
        bounds = [self.low, *((self.low[0] + step * number, "") for number in range(1, count)), self.high]
        return [IndexSlice(low, high, self.entries // count) for low, high in itertools.pairwise(bounds)]


class BloatedQueue:
    """A queue with many dead entries: its floor, and the slices below it, which are read in turn."""

    __slots__ = ("bloated", "floor", "newest", "slices", "unread")

    def __init__(self, floor: Position, entries: int, bloated: int = BLOAT_THRESHOLD) -> None:
        """`bloated` is the number of entries from which this queue counts as bloated."""
        self.floor = floor
        self.bloated = bloated
        whole = IndexSlice(LOWEST, floor, entries)
        self.slices = deque([whole] if entries <= SLICE_ENTRIES else _near_the_end(whole))
        self.newest = self.slices[-1]
        self.unread = len(self.slices)  # slices that this round has not read yet

    def raise_floor(self, floor: Position, entries: int) -> None:
        """Raise the floor after a claim; `entries` is the number of entries between the two floors."""
        if floor <= self.floor:
            return
        if self.newest.entries + entries > SLICE_ENTRIES or self.newest.high != self.floor:
            self.newest = IndexSlice(self.floor, self.floor, 0)
            self.slices.append(self.newest)
            self.unread += 1
        self.newest.high = self.floor = floor
        self.newest.entries += entries

    def record_read(self, part: IndexSlice, entries: int, *, is_wanted: bool = False) -> None:
        """Record the entries of a slice. It is read again in the next round, or in this one if it has rows to claim."""
        part.entries = entries
        if is_wanted and part.rereads < REREADS:
            part.rereads += 1
            return
        try:
            self.slices.remove(part)
        except ValueError:  # a concurrent read has divided it
            return
        part.rereads = 0
        is_whole = not self.slices
        divided = [part] if entries <= 2 * SLICE_ENTRIES else _near_the_end(part) if is_whole else part.divided()
        self.slices.extend(divided)
        if part is self.newest:
            self.newest = self.slices[-1]
        if not is_wanted:
            self.unread -= 1

    @property
    def is_wanted(self) -> bool:
        """True if the next slice has rows to claim."""
        return self.slices[0].rereads > 0

    @property
    def is_clean(self) -> bool:
        """True if a complete round found few entries."""
        return self.unread <= 0 and sum(part.entries for part in self.slices) < self.bloated // 2

    def begin_round(self) -> None:
        """Start a new round over all slices if the last one is complete."""
        if self.unread <= 0:
            self.unread = len(self.slices)


def _near_the_end(whole: IndexSlice) -> list[IndexSlice]:
    """Divide into slices that become shorter towards the end, where most entries are."""
    high = whole.high
    bounds = [whole.low, *((high[0] - distance, "") for distance in INITIAL_SLICE_OFFSETS_MS), high]
    return [IndexSlice(low, high, whole.entries) for low, high in itertools.pairwise(bounds)]


class Part(NamedTuple):
    """A range that is read and counted separately: a slice, the range above a floor, or a queue without a floor."""

    key: Hashable
    range: IndexRange
    queue: BloatedQueue | None = None
    slice: IndexSlice | None = None


class DeadEntries:
    """The bloated queues of one store, and the budget for reading below their floors."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, BloatedQueue] = {}
        self._allowance = float(ENTRIES_PER_S)
        self._at = monotonic()

    def may_hide_rows(self, keys: Iterable[Hashable]) -> bool:
        """True if some of these queues may have rows that a claim does not read."""
        return bool(self._queues) and any(key in self._queues for key in keys)

    def ranges_to_read(
        self, keys: Sequence[Hashable]
    ) -> tuple[list[IndexRange], tuple[BloatedQueue, IndexSlice] | None]:
        """Return the ranges that a claim of these queues reads, and the slice among them."""
        known = [(key, self._queues.get(key)) for key in keys]
        parts = [IndexRange(key) if queue is None else IndexRange(key, queue.floor) for key, queue in known]
        waiting = [(key, queue) for key, queue in known if queue is not None]
        if not waiting:
            return parts, None
        key, queue = max(waiting, key=lambda one: (one[1].is_wanted, one[1].unread))
        if not queue.is_wanted and not self._affords():
            return parts, None
        queue.begin_round()
        part = queue.slices[0]
        return [IndexRange(key, part.low, part.high), *parts], (queue, part)

    def record_scan(
        self,
        keys: Sequence[Hashable],
        part: tuple[BloatedQueue, IndexSlice] | None,
        entries: int,
        found: int,
        floor: Position,
        *,
        is_slice_wanted: bool = False,
    ) -> None:
        """Record the number of entries and rows that a claim has read, and the floor below which it left no row.

        `is_slice_wanted` is set if the slice may have further rows to claim.
        """
        behind = entries
        if part is not None:
            queue, read = part
            behind = min(found, entries)
            self._allowance -= entries - behind
            queue.record_read(read, entries - behind, is_wanted=is_slice_wanted)
        for key in keys:
            known = self._queues.get(key)
            if known is not None:
                known.raise_floor(floor, behind)
                if known.is_clean:
                    del self._queues[key]
            elif part is None and floor > LOWEST and entries > BLOAT_THRESHOLD + 4 * found:
                self._queues[key] = BloatedQueue(floor, entries)

    def tracked_numbers(self) -> list[int]:
        """Return the ids of the ready queues that have a floor."""
        return sorted(key for key in self._queues if isinstance(key, int))

    def tracked_names(self) -> list[str]:
        """Return the lists of blocked work that have a floor."""
        return [key for key in self._queues if isinstance(key, str)]

    def parts(self, values: Mapping[Hashable, Any]) -> list[Part]:
        """Return the parts that a read of these queues reads; `values` are the queues' values in the index.

        The parts include the next slices of some queues, up to about `SLICE_ENTRIES` together.
        """
        known = [(key, value, self._queues.get(key)) for key, value in values.items()]
        found = [Part(key, IndexRange(value, queue.floor if queue else LOWEST), queue) for key, value, queue in known]
        waiting = [(key, value, queue) for key, value, queue in known if queue is not None]
        waiting.sort(key=lambda one: (one[2].is_wanted, one[2].unread), reverse=True)
        budget = SLICE_ENTRIES if self._affords() else 0
        for key, value, queue in waiting:
            if budget <= 0 and not queue.is_wanted:
                break
            queue.begin_round()
            part = queue.slices[0]
            found.append(Part(key, IndexRange(value, part.low, part.high), queue, part))
            budget -= max(part.entries, LEAST_COST)
        return found

    def note_part(self, part: Part, entries: int, found: int, floor: Position, share: int = BLOAT_THRESHOLD) -> None:
        """Record the number of entries of a part, the number of rows found, and the floor below which there is none.

        `share` is the number of dead entries that one queue may have.
        """
        dead = max(0, entries - found)
        if part.queue is None:
            if dead > share + 3 * found and part.key not in self._queues:
                self._queues[part.key] = BloatedQueue(floor, dead, share)
        elif part.slice is None:
            part.queue.raise_floor(floor, dead)
        else:
            self._allowance -= dead
            part.queue.record_read(part.slice, dead, is_wanted=found > 0)
            if part.queue.is_clean and self._queues.get(part.key) is part.queue:
                del self._queues[part.key]

    def note_all(self, keys: Sequence[Hashable], entries: int, found: int, floor: Position) -> None:
        """Record the number of entries that a read of the heads of some queues has read in total.

        If these are too many, the next read counts each queue separately.
        """
        if entries - found > BLOAT_THRESHOLD + 3 * found:
            share = share_of(len(keys))
            for key in keys:
                self._queues.setdefault(key, BloatedQueue(floor, (entries - found) // len(keys), share))

    def spend(self, entries: int) -> None:
        """Charge entries below floors to the budget of this process."""
        self._allowance -= entries

    @property
    def affords_more(self) -> bool:
        """True if the budget allows reading entries below floors."""
        return self._affords()

    def may_read_more(self, keys: Sequence[Hashable]) -> bool:
        """True if a claim without a result may read a further slice of these queues."""
        return any(key in self._queues and self._queues[key].unread > 0 for key in keys) and self._affords()

    def _affords(self) -> bool:
        now = monotonic()
        self._allowance = min(float(ENTRIES_PER_S), self._allowance + (now - self._at) * ENTRIES_PER_S)
        self._at = now
        return self._allowance > 0


class NextDueCache:
    """Caches the next due instant of an index for a short time if finding it costs many dead entries.

    A cached instant is too early if its row has left the index, which costs one search. A row with an earlier instant
    that was added since may be missed for `NEXT_DUE_TTL_S`.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[int | None, float]] = {}

    def has(self, key: Hashable) -> bool:
        """True if the next instant, or its absence, is cached."""
        return key in self._kept and monotonic() < self._kept[key][1]

    def get(self, key: Hashable) -> int | None:
        """Return the cached instant."""
        return self._kept[key][0]

    def put(self, key: Hashable, at: int | None, entries: int) -> None:
        """Cache an instant if the search has read many entries."""
        if entries > BLOAT_THRESHOLD:
            self._kept[key] = (at, monotonic() + NEXT_DUE_TTL_S)


def floor_of_claim(rows: Sequence[Execution], *, drained: bool, now: int) -> Position:
    """Return the floor after a claim: just before `now` if it left nothing, else its last row.

    A claim that found only rows that others had locked has read an unknown part of the queue: it sets no floor.
    """
    if drained:
        return (now - LEEWAY_MS, "")
    if not rows:
        return LOWEST
    last = max(rows, key=lambda row: (row.rank, row.execution_id))
    youth = max(0, last.created_at - (now - LEEWAY_MS))
    return (last.rank - youth, "" if youth else last.execution_id)


def share_of(queues: int) -> int:
    """Return the number of dead entries that each of several queues may have if they are read together."""
    return max(4, BLOAT_THRESHOLD // max(1, queues))


def floor_of_heads(ranks: Sequence[int], now: int, *, full: bool, dead: int) -> Position:
    """Return the floor after a read that claimed nothing: below its first row, and before `now`.

    If the read met more dead entries than a slice has, unclaimed rows keep the floor too low. Then the floor is the
    last row, and the rows below it are found in slices.
    """
    latest = now - LEEWAY_MS
    if not ranks:
        return (latest, "")
    if dead <= SLICE_ENTRIES:
        return (min(ranks[0], latest), "")
    return (min(ranks[-1], latest) if full else latest, "")


def floor_of_due(rows: Sequence[Any], column: str, now: int, *, full: bool, dead: int) -> Position:
    """Return the floor after a search for due rows, whose positions are instants; it may include a slice."""
    instants = [getattr(row, column) for row in rows]
    instant, _ = floor_of_heads(instants, now, full=full, dead=dead - 2 * SLICE_ENTRIES)
    return (instant - 1, "")
