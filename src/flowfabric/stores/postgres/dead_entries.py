"""Where claims begin to read a ready queue that is full of dead index entries.

A claimed row leaves the index of queues, but its entry stays until no snapshot can see it any more. One idle
transaction holds all of them back (horizon.sql says which ones do); then each claim steps over every entry that was
claimed since, and costs more and more. The server tells how many entries a claim stepped over. Up to `BLOATED` nothing
changes: a claim reads its queues from the head. Beyond that this page decides what a claim reads:

* The part behind the floor, always. The floor lies behind the last row that was claimed, and a little before the time
  of the last claim that left nothing: nothing can be created before it, but by commits that take longer than
  `LEEWAY_MS`.
* Of what lies before the floor one slice, of about `SLICE` entries, if this process may afford it: `RATE` entries a
  second. Rows that return to their old position (retries, delays, priorities) are found there. A claim that would come
  back with nothing goes on with further slices.

So a claim reads a bounded number of entries, and a row that can be claimed waits no longer than the whole round takes:
one second for each `RATE` dead entries, and the poll interval of a worker.

The index of leases has the same trouble, since every claim looks for leases that have ended. There a position is the
instant when a lease ends, and the floor lies just before the time of the last look that found nothing.

When a round finds few entries, because the transaction has ended, claims read from the head again. A process that
starts beside many dead entries walks over all of them once, and halves slices that turn out to be too large.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from flowfabric.model.execution import Execution

BLOATED = 500  # entries that a claim steps over before it does not read from the head any more
SLICE = 1024  # entries of a slice before the floor
RATE = 10_000  # entries before floors that a process reads in a second
LEEWAY_MS = 200
KEPT_S = 1.0

Position = tuple[int, str]

# Where the first slices of a queue end, before the floor, in milliseconds: another priority, a day, an hour ...
DISTANCES = (10**11, 86_400_000, 3_600_000, 600_000, 60_000, 10_000, 2_000)

LOWEST: Position = (-(2**63), "")
HIGHEST: Position = (2**63 - 1, "")


class Range(NamedTuple):
    """A part of a queue or of another list: behind one position, up to another one."""

    line: Any
    low: Position = LOWEST
    high: Position = HIGHEST


class Slice:
    """A part before the floor, and how many entries it had when it was last read."""

    __slots__ = ("entries", "high", "low")

    def __init__(self, low: Position, high: Position, entries: int) -> None:
        self.low = low
        self.high = high
        self.entries = entries

    def halves(self) -> list[Slice]:
        """The same as two slices, or as one when it cannot be divided."""
        middle = (self.low[0] + self.high[0]) // 2
        if not self.low[0] < middle < self.high[0]:
            return [self]
        half = self.entries // 2
        return [Slice(self.low, (middle, ""), half), Slice((middle, ""), self.high, half)]


class Queue:
    """What is known of one queue with many dead entries: the floor, and slices that lead up to it in turns."""

    __slots__ = ("floor", "newest", "slices", "unread")

    def __init__(self, floor: Position, entries: int) -> None:
        self.floor = floor
        bounds = [LOWEST, *((floor[0] - distance, "") for distance in DISTANCES), floor]
        self.slices = deque(Slice(low, high, entries) for low, high in itertools.pairwise(bounds))
        self.newest = self.slices[-1]
        self.unread = len(self.slices)  # of this round

    def raise_to(self, floor: Position, entries: int) -> None:
        """Let the floor follow the claims."""
        if floor <= self.floor:
            return
        if self.newest.entries + entries > SLICE or self.newest.high != self.floor:
            self.newest = Slice(self.floor, self.floor, 0)
            self.slices.append(self.newest)
            self.unread += 1
        self.newest.high = self.floor = floor
        self.newest.entries += entries

    def was_read(self, part: Slice, entries: int) -> None:
        """Note what reading the first slice cost; it comes up again in the next round."""
        part.entries = entries
        self.slices.popleft()
        self.slices.extend(part.halves() if entries > 2 * SLICE else [part])
        self.unread -= 1

    @property
    def is_clean(self) -> bool:
        """Whether a whole round found few entries."""
        return self.unread <= 0 and sum(part.entries for part in self.slices) < BLOATED // 2

    def begin_round(self) -> None:
        """Read every slice once more."""
        if self.unread <= 0:
            self.unread = len(self.slices)


class DeadEntries:
    """The queues of one store whose heads are not read by every claim."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, Queue] = {}
        self._allowance = float(RATE)
        self._at = monotonic()

    def hide(self, lines: Iterable[Hashable]) -> bool:
        """Whether some of these queues may hold rows that a claim does not read."""
        return bool(self._queues) and any(line in self._queues for line in lines)

    def ranges(self, lines: Sequence[Hashable]) -> tuple[list[Range], tuple[Queue, Slice] | None]:
        """What a claim of these queues shall read, and which slice is part of that."""
        known = [(line, self._queues.get(line)) for line in lines]
        parts = [Range(line) if queue is None else Range(line, queue.floor) for line, queue in known]
        waiting = [(line, queue) for line, queue in known if queue is not None]
        if not waiting or not self._affords():
            return parts, None
        line, queue = max(waiting, key=lambda one: one[1].unread)
        queue.begin_round()
        part = queue.slices[0]
        return [Range(line, part.low, part.high), *parts], (queue, part)

    def note(
        self,
        lines: Sequence[Hashable],
        part: tuple[Queue, Slice] | None,
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
            queue.was_read(read, entries - behind)
        for line in lines:
            known = self._queues.get(line)
            if known is not None:
                known.raise_to(floor, behind)
                if known.is_clean:
                    del self._queues[line]
            elif part is None and entries > BLOATED + 4 * found:
                self._queues[line] = Queue(floor, entries)

    def affords(self, lines: Sequence[Hashable]) -> bool:
        """Whether a claim that found nothing may read a further slice of these queues, of which some is unread."""
        return any(line in self._queues and self._queues[line].unread > 0 for line in lines) and self._affords()

    def _affords(self) -> bool:
        now = monotonic()
        self._allowance = min(float(RATE), self._allowance + (now - self._at) * RATE)
        self._at = now
        return self._allowance > 0


class NextInstants:
    """The next instant of a list, kept for a moment where it costs many dead entries to find it.

    Rows that have left the list meanwhile make it too early, which costs a look. One that has come since with a shorter
    time may be missed for `KEPT_S`.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[int | None, float]] = {}

    def knows(self, key: Hashable) -> bool:
        """Whether the next instant, or that there is none, need not be looked for."""
        return key in self._kept and monotonic() < self._kept[key][1]

    def get(self, key: Hashable) -> int | None:
        """The instant that is kept."""
        return self._kept[key][0]

    def keep(self, key: Hashable, at: int | None, entries: int) -> None:
        """Keep an instant that so many entries were stepped over for."""
        if entries > BLOATED:
            self._kept[key] = (at, monotonic() + KEPT_S)


def floor_of_claim(rows: Sequence[Execution], *, full: bool, now: int) -> Position:
    """Where a claim left nothing before: behind the last of its rows, or if there were too few just before now."""
    if not full or not rows:
        return (now - LEEWAY_MS, "")
    last = max(rows, key=lambda row: (row.rank, row.execution_id))
    youth = max(0, last.created_at - (now - LEEWAY_MS))
    return (last.rank - youth, "" if youth else last.execution_id)


def floor_of_due(rows: Sequence[Any], column: str, now: int) -> Position:
    """Where a look for due rows left nothing before: just before the first of them, or before now."""
    instants = [getattr(row, column) for row in rows]
    return (min([*instants, now - LEEWAY_MS]) - 1, "")
