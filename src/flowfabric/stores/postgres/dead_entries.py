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

BLOAT_THRESHOLD = 500  # entries that a claim steps over before it does not read from the head any more
SLICE_ENTRIES = 1024  # entries of a slice before the floor
ENTRIES_PER_S = 10_000  # entries before floors that a process reads in a second
LEEWAY_MS = 200
NEXT_DUE_TTL_S = 1.0
REREADS = 3  # of a slice with rows that somebody may want to claim
MOST_PORTIONS = 64  # that a slice is divided into at once
LEAST_COST = 16  # entries that a slice is taken to have at least, so that a read has few slices

Position = tuple[int, str]

# Where the first slices of a queue end, before the floor, in milliseconds: another priority, a day, an hour ...
INITIAL_SLICE_OFFSETS_MS = (10**11, 86_400_000, 3_600_000, 600_000, 60_000, 10_000, 2_000)

LOWEST: Position = (-(2**63), "")
HIGHEST: Position = (2**63 - 1, "")


class IndexRange(NamedTuple):
    """A part of a queue or of another list: behind one position, up to another one."""

    key: Any
    low: Position = LOWEST
    high: Position = HIGHEST


class IndexSlice:
    """A part before the floor, and how many entries it had when it was last read."""

    __slots__ = ("entries", "high", "low", "rereads")

    def __init__(self, low: Position, high: Position, entries: int) -> None:
        self.low = low
        self.high = high
        self.entries = entries
        self.rereads = 0  # since it was found to have rows

    def divided(self) -> list[IndexSlice]:
        """The same as slices of about `SLICE` entries, if these lie evenly; as one when it cannot be divided."""
        count = min(self.entries // SLICE_ENTRIES + 1, MOST_PORTIONS, self.high[0] - self.low[0])
        if count < 2:
            return [self]
        step = (self.high[0] - self.low[0]) // count
        bounds = [self.low, *((self.low[0] + step * number, "") for number in range(1, count)), self.high]
        return [IndexSlice(low, high, self.entries // count) for low, high in itertools.pairwise(bounds)]


class BloatedQueue:
    """What is known of one queue with many dead entries: the floor, and slices that lead up to it in turns."""

    __slots__ = ("bloated", "floor", "newest", "slices", "unread")

    def __init__(self, floor: Position, entries: int, bloated: int = BLOAT_THRESHOLD) -> None:
        """`bloated` is the number of entries that is too much for this queue."""
        self.floor = floor
        self.bloated = bloated
        whole = IndexSlice(LOWEST, floor, entries)
        self.slices = deque([whole] if entries <= SLICE_ENTRIES else _near_the_end(whole))
        self.newest = self.slices[-1]
        self.unread = len(self.slices)  # of this round

    def raise_floor(self, floor: Position, entries: int) -> None:
        """Let the floor follow the claims."""
        if floor <= self.floor:
            return
        if self.newest.entries + entries > SLICE_ENTRIES or self.newest.high != self.floor:
            self.newest = IndexSlice(self.floor, self.floor, 0)
            self.slices.append(self.newest)
            self.unread += 1
        self.newest.high = self.floor = floor
        self.newest.entries += entries

    def record_read(self, part: IndexSlice, entries: int, *, is_wanted: bool = False) -> None:
        """Note what reading a slice cost; it comes up again in the next round, or next if its rows are wanted."""
        part.entries = entries
        if is_wanted and part.rereads < REREADS:
            part.rereads += 1
            return
        try:
            self.slices.remove(part)
        except ValueError:  # somebody else has read it at the same time, and divided it
            return
        part.rereads = 0
        is_whole = not self.slices
        divided = [part] if entries <= 2 * SLICE_ENTRIES else _near_the_end(part) if is_whole else part.divided()
        self.slices.extend(divided)
        if part is self.newest:
            self.newest = self.slices[-1]
        self.unread -= 1

    @property
    def is_wanted(self) -> bool:
        """Whether the next slice has rows that somebody may want to claim."""
        return self.slices[0].rereads > 0

    @property
    def is_clean(self) -> bool:
        """Whether a whole round found few entries."""
        return self.unread <= 0 and sum(part.entries for part in self.slices) < self.bloated // 2

    def begin_round(self) -> None:
        """Read every slice once more."""
        if self.unread <= 0:
            self.unread = len(self.slices)


def _near_the_end(whole: IndexSlice) -> list[IndexSlice]:
    """Slices that become shorter towards the end, where most entries are."""
    high = whole.high
    bounds = [whole.low, *((high[0] - distance, "") for distance in INITIAL_SLICE_OFFSETS_MS), high]
    return [IndexSlice(low, high, whole.entries) for low, high in itertools.pairwise(bounds)]


class Part(NamedTuple):
    """A part that is read and counted by itself: a slice, what is behind the floor, or a whole queue without one."""

    key: Hashable
    range: IndexRange
    queue: BloatedQueue | None = None
    slice: IndexSlice | None = None


class DeadEntries:
    """The queues of one store whose heads are not read by every claim."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, BloatedQueue] = {}
        self._allowance = float(ENTRIES_PER_S)
        self._at = monotonic()

    def may_hide_rows(self, lines: Iterable[Hashable]) -> bool:
        """Whether some of these queues may hold rows that a claim does not read."""
        return bool(self._queues) and any(line in self._queues for line in lines)

    def ranges_to_read(
        self, lines: Sequence[Hashable]
    ) -> tuple[list[IndexRange], tuple[BloatedQueue, IndexSlice] | None]:
        """What a claim of these queues shall read, and which slice is part of that."""
        known = [(line, self._queues.get(line)) for line in lines]
        parts = [IndexRange(line) if queue is None else IndexRange(line, queue.floor) for line, queue in known]
        waiting = [(line, queue) for line, queue in known if queue is not None]
        if not waiting:
            return parts, None
        line, queue = max(waiting, key=lambda one: (one[1].is_wanted, one[1].unread))
        if not queue.is_wanted and not self._affords():
            return parts, None
        queue.begin_round()
        part = queue.slices[0]
        return [IndexRange(line, part.low, part.high), *parts], (queue, part)

    def record_scan(
        self,
        lines: Sequence[Hashable],
        part: tuple[BloatedQueue, IndexSlice] | None,
        entries: int,
        found: int,
        floor: Position,
    ) -> None:
        """Learn from a claim how many entries it stepped over, how many rows it found, and where it left nothing."""
        behind = entries
        if part is not None:
            queue, read = part
            behind = min(found, entries)
            self._allowance -= entries - behind
            queue.record_read(read, entries - behind)
        for line in lines:
            known = self._queues.get(line)
            if known is not None:
                known.raise_floor(floor, behind)
                if known.is_clean:
                    del self._queues[line]
            elif part is None and entries > BLOAT_THRESHOLD + 4 * found:
                self._queues[line] = BloatedQueue(floor, entries)

    def tracked_numbers(self) -> list[int]:
        """The ready queues that have a floor, by number."""
        return sorted(key for key in self._queues if isinstance(key, int))

    def parts(self, values: Mapping[Hashable, Any]) -> list[Part]:
        """What a read of these queues shall read, each part counted by itself; `values` are what the index has.

        The first slices of as many of them come along as have about `SLICE` entries together.
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
        """Learn from a part how many entries it has, how many rows were found and stay, and where nothing is before.

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
        """Learn from a read of the heads of some queues how many entries they have together.

        If these are too many, the next read counts each queue by itself.
        """
        if entries - found > BLOAT_THRESHOLD + 3 * found:
            share = share_of(len(keys))
            for key in keys:
                self._queues.setdefault(key, BloatedQueue(floor, (entries - found) // len(keys), share))

    def spend(self, entries: int) -> None:
        """Take entries that were read before floors from what this process may afford."""
        self._allowance -= entries

    @property
    def affords_more(self) -> bool:
        """Whether this process may read entries before floors."""
        return self._affords()

    def may_read_more(self, lines: Sequence[Hashable]) -> bool:
        """Whether a claim that found nothing may read a further slice of these queues, of which some is unread."""
        return any(line in self._queues and self._queues[line].unread > 0 for line in lines) and self._affords()

    def _affords(self) -> bool:
        now = monotonic()
        self._allowance = min(float(ENTRIES_PER_S), self._allowance + (now - self._at) * ENTRIES_PER_S)
        self._at = now
        return self._allowance > 0


class NextDueCache:
    """The next instant of a list, kept for a moment where it costs many dead entries to find it.

    Rows that have left the list meanwhile make it too early, which costs a look. One that has come since with a shorter
    time may be missed for `KEPT_S`.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[int | None, float]] = {}

    def has(self, key: Hashable) -> bool:
        """Whether the next instant, or that there is none, need not be looked for."""
        return key in self._kept and monotonic() < self._kept[key][1]

    def get(self, key: Hashable) -> int | None:
        """The instant that is kept."""
        return self._kept[key][0]

    def put(self, key: Hashable, at: int | None, entries: int) -> None:
        """Keep an instant that so many entries were stepped over for."""
        if entries > BLOAT_THRESHOLD:
            self._kept[key] = (at, monotonic() + NEXT_DUE_TTL_S)


def floor_of_claim(rows: Sequence[Execution], *, full: bool, now: int) -> Position:
    """Where a claim left nothing before: behind the last of its rows, or if there were too few just before now."""
    if not full or not rows:
        return (now - LEEWAY_MS, "")
    last = max(rows, key=lambda row: (row.rank, row.execution_id))
    youth = max(0, last.created_at - (now - LEEWAY_MS))
    return (last.rank - youth, "" if youth else last.execution_id)


def share_of(queues: int) -> int:
    """How many dead entries one of so many queues may have that are read together."""
    return max(4, BLOAT_THRESHOLD // max(1, queues))


def floor_of_heads(ranks: Sequence[int], now: int, *, full: bool, dead: int) -> Position:
    """Where a read that claimed nothing shall begin the next time: before its first row, and before now.

    If it stepped over more than a slice has, rows that stay keep the floor too low. Then it is behind the last row, and
    those before it are found in slices.
    """
    latest = now - LEEWAY_MS
    if not ranks:
        return (latest, "")
    if dead <= SLICE_ENTRIES:
        return (min(ranks[0], latest), "")
    return (min(ranks[-1], latest) if full else latest, "")


def floor_of_due(rows: Sequence[Any], column: str, now: int, *, full: bool, dead: int) -> Position:
    """The same for a look for due rows, whose positions are instants; a slice may be part of it."""
    instants = [getattr(row, column) for row in rows]
    instant, _ = floor_of_heads(instants, now, full=full, dead=dead - 2 * SLICE_ENTRIES)
    return (instant - 1, "")
