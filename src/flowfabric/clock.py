"""Time as the engine sees it: an estimate of the store's clock, good enough to ask with, never to decide by."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def wall_ms() -> int:
    """Milliseconds since the epoch by this machine's clock."""
    return time.time_ns() // 1_000_000


def boot_ms() -> int:
    """Milliseconds since this machine's boot, also while it slept: all its processes agree, and nobody can set it."""
    return time.clock_gettime_ns(_SINCE_BOOT) // 1_000_000


_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SteadyClock:
    """The wall clock as it was when this was made, plus what has passed since, whatever becomes of the wall clock."""

    def __init__(self) -> None:
        self._offset = wall_ms() - boot_ms()

    def __call__(self) -> int:
        return self._offset + boot_ms()


class StoreClockEstimate:
    """The store's time: by its own clock where that can be read here, else as last heard, plus what has passed since.

    A wrong estimate costs a second look, nothing else: a change carries the instants it relies on, and a refusal is
    final only when it was decided with a time that the store gave.
    """

    def __init__(self, clock: Clock | None = None, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passing = monotonic_s
        self._heard = 0
        self._at = 0.0

    def update(self, now: int) -> None:
        """The store said what time it is."""
        self._heard = now
        self._at = self._passing()

    def now(self) -> int:
        """The store's time, about."""
        if self._clock is not None:
            return self._clock()
        if not self._heard:
            return wall_ms()
        return self._heard + int((self._passing() - self._at) * 1000)


class ManualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance_ms(self, length: int) -> int:
        """Let time pass."""
        self.now += length
        return self.now
