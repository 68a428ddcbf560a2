"""FailureBackoff: a sweep skips items that fail repeatedly."""

from __future__ import annotations

from collections.abc import Hashable

MAX_FAILURES = 3  # an item that failed so often in a row is skipped
BACKOFF_CYCLES = 10
MAX_TRACKED = 500
CLEANUP_EVERY_CYCLES = 50


class FailureBackoff:
    """Skips an item for some passes after several failures in a row; then its failures are counted from zero."""

    def __init__(self) -> None:
        self._cycle = 0
        self._failures: dict[Hashable, int] = {}
        self._skipped_until: dict[Hashable, int] = {}

    def next_cycle(self) -> None:
        """Begin a pass."""
        self._cycle += 1
        for item in [item for item, until in self._skipped_until.items() if until <= self._cycle]:
            del self._skipped_until[item]
        if self._cycle % CLEANUP_EVERY_CYCLES == 0 and len(self._failures) > MAX_TRACKED:
            self._failures.clear()

    def is_backing_off(self, item: Hashable) -> bool:
        """Return whether the item is skipped in this pass."""
        return item in self._skipped_until

    def record(self, item: Hashable, *, failed: bool) -> None:
        """Record the result for an item."""
        if not failed:
            self._failures.pop(item, None)
            return
        count = self._failures.pop(item, 0) + 1
        if count < MAX_FAILURES:
            self._failures[item] = count
        else:
            self._skipped_until[item] = self._cycle + BACKOFF_CYCLES + 1
