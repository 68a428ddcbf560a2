"""Clocks: an estimate of the store's time, good enough to prepare a change, never to decide what is stored."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def wall_ms() -> int:
    """Return milliseconds since the epoch by this machine's clock."""
    return time.time_ns() // 1_000_000


def boot_ms() -> int:
    """Return milliseconds since boot, including sleep. All processes of the machine agree, and nobody can set it."""
    return time.clock_gettime_ns(_SINCE_BOOT) // 1_000_000


_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SteadyClock:
    """The wall clock at construction plus the time passed since; later adjustments of the wall clock have no effect."""

    def __init__(self) -> None:
        self._offset = wall_ms() - boot_ms()

    def __call__(self) -> int:
        return self._offset + boot_ms()


class StoreClockEstimate:
    """The store's time: read directly if possible here, else its last known value plus the time passed since.

    A wrong estimate only costs another try: a change carries the instants it relies on, and a refusal is final only if
    it was decided with a time that the store returned.
    """

    def __init__(self, clock: Clock | None = None, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.now: Clock = clock or self._extrapolate  # returns the estimated store time
        self._monotonic_s = monotonic_s
        self._store_ms = 0
        self._updated_s = 0.0

    def update(self, now: int) -> None:
        """Record the time that the store returned."""
        self._store_ms = now
        self._updated_s = self._monotonic_s()

    def _extrapolate(self) -> int:
        if not self._store_ms:
            return wall_ms()
        return self._store_ms + int((self._monotonic_s() - self._updated_s) * 1000)


class ManualClock:
    """A clock that moves only when it is advanced."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance_ms(self, length: int) -> int:
        """Advance the clock."""
        self.now += length
        return self.now
