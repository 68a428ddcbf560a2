"""The clock of a file: one clock for all processes that have it open, whatever their wall clocks show.

All processes of a machine share the clock that counts since its boot, which nobody can set. The file keeps an anchor:
an instant, and the reading of that clock at this instant. The file's time is the anchor's instant plus the time since,
so every process reads the same time to the millisecond. Wall clocks matter in two cases only:

* At the first use after a boot, time starts at the wall clock, but never before the newest instant in the file.
* A wall clock that the kernel itself confirms and that differs from the file's time has been set, or the machine was
  paused. The file follows it by a tenth of the time that passes, in both directions, so it never goes backwards. It
  steps forward at once when it is more than a minute behind.

An anchor holds for `WINDOW_MS`. Until then nobody replaces it, so a process that knows it need not read the file; the
first write after that puts the next one, which continues where the old one is then. The newest instant in the file is
therefore at most `WINDOW_MS` and a tenth after its anchor.

If the boot cannot be identified (no /proc), the wall clock takes the place of the clock since boot: time
still never goes backwards, but a wall clock that is set forward sets the file's time forward.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import apsw

from flowfabric.clock import Clock, boot_ms, wall_ms

WINDOW_MS = 10_000
MAX_SLEW_MS = WINDOW_MS // 10  # the largest correction towards the wall clock per window
STEP_THRESHOLD_MS = 60_000  # the file's time steps forward if it is further behind
KERNEL_TOLERANCE_MS = 2_000  # the precision of the kernel's boot time, with a margin
REREAD_INTERVAL_MS = 1_000  # between two reads of the anchor after the known one has expired


class ClockAnchor(NamedTuple):
    """The reading of the clock since boot at an instant, and the correction (slew) within this window."""

    boot: str
    passed: int
    instant: int
    slew: int

    def time_at(self, passed: int) -> int:
        """Return the file's time for a reading of the clock since boot."""
        since = max(0, passed - self.passed)
        return self.instant + since + self.slew * min(since, WINDOW_MS) // WINDOW_MS

    def is_valid_at(self, passed: int) -> bool:
        """True if the anchor cannot have been replaced yet."""
        return 0 <= passed - self.passed < WINDOW_MS


class HostClock:
    """The clocks of the host."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.boot_id = self._boot()
        # Returns milliseconds since the boot, sleep included.
        self.since_boot_ms: Clock = boot_ms if self.boot_id else wall_ms

    def wall_ms(self) -> int:
        """Return the wall clock of this process."""
        return wall_ms()

    def kernel_agrees(self, wall: int) -> bool:
        """True if the kernel confirms this wall time; a process may see a faked clock."""
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = (self._proc / "stat").read_text().splitlines()
            booted = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
            return abs(booted * 1000 + self.since_boot_ms() - wall) <= KERNEL_TOLERANCE_MS
        return False

    def _boot(self) -> str:
        """Return an id of this boot and of the time namespace: a container may have a clock of its own."""
        try:
            boot = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
        with contextlib.suppress(OSError):
            return f"{boot} {(self._proc / 'self/ns/time').readlink()}"
        return boot


class FileClock:
    """The clock of one file in one process."""

    def __init__(self, machine: HostClock | None = None) -> None:
        self._machine = machine or HostClock()
        self._passed = self._machine.since_boot_ms
        self._anchor: ClockAnchor | None = None
        self._offset: int | None = None  # added to the clock since boot if there is no slew
        self._read_at = 0

    def __call__(self) -> int:
        """Return the file's time; the wall clock before the file is open."""
        offset, anchor = self._offset, self._anchor
        if offset is not None:
            return self._passed() + offset
        return self._machine.wall_ms() if anchor is None else anchor.time_at(self._passed())

    def read(self, db: apsw.Connection) -> int:
        """Return the file's time for a reader; read the anchor again if the known one has expired."""
        known, passed = self._anchor, self._passed()
        if known is not None and not known.is_valid_at(passed) and not 0 <= passed - self._read_at < REREAD_INTERVAL_MS:
            self._read_at = passed
            found = self._stored(db)
            if found is not None and found.passed > known.passed:
                self._adopt(found)
        return self()

    def refresh_anchor(self, db: apsw.Connection) -> None:
        """Adopt a valid anchor of the file, or write one; called by a writer between two transactions."""
        if self._anchor is not None and self._anchor.is_valid_at(self._passed()):
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            anchor = self._stored(db)
            if anchor is None or not anchor.is_valid_at(self._passed()):
                anchor = self._next(db, anchor)
                db.execute("DELETE FROM ff_clock WHERE boot NOT LIKE ? || '%'", (anchor.boot.split(" ")[0],))
                db.execute("INSERT OR REPLACE INTO ff_clock (boot, passed, instant, slew) VALUES (?, ?, ?, ?)", anchor)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        self._adopt(anchor)

    def _adopt(self, anchor: ClockAnchor) -> None:
        self._offset = None  # other threads read both fields; without an offset they use the anchor
        self._anchor = anchor
        if anchor.boot and not anchor.slew:
            self._offset = anchor.instant - anchor.passed

    def _stored(self, db: apsw.Connection) -> ClockAnchor | None:
        boot = self._machine.boot_id
        for passed, instant, slew in db.execute("SELECT passed, instant, slew FROM ff_clock WHERE boot = ?", (boot,)):
            return ClockAnchor(boot, int(passed), int(instant), int(slew))
        return None

    def _next(self, db: apsw.Connection, before: ClockAnchor | None) -> ClockAnchor:
        passed, wall = self._passed(), self._machine.wall_ms()
        if before is None or passed < before.passed:
            return ClockAnchor(self._machine.boot_id, passed, max(wall, _newest(db)), 0)
        instant, slew = before.time_at(passed), 0
        behind = wall - instant
        if behind and self._machine.kernel_agrees(wall):
            slew = max(-MAX_SLEW_MS, min(behind, MAX_SLEW_MS))
            if behind > STEP_THRESHOLD_MS:
                instant, slew = wall, 0
        return ClockAnchor(self._machine.boot_id, passed, instant, slew)


class InjectedClock:
    """A clock that is injected by a test; nothing of it is stored."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self) -> int:
        return self._clock()

    def read(self, db: apsw.Connection) -> int:
        """Return the injected time."""
        return self._clock()

    def refresh_anchor(self, db: apsw.Connection) -> None:
        """Do nothing: there is no anchor."""


def _newest(db: apsw.Connection) -> int:
    """Return an upper bound of all instants in the file; the last event's for files without a clock."""
    ((newest,),) = db.execute(
        "SELECT max(coalesce((SELECT max(instant + max(slew, 0)) + ? FROM ff_clock), 0),"
        " coalesce((SELECT at FROM ff_event ORDER BY position DESC LIMIT 1), 0))",
        (WINDOW_MS,),
    )
    return int(newest)
