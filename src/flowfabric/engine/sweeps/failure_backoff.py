"""Forbearance: how a sweep treats items that fail again and again."""

from __future__ import annotations

from collections.abc import Hashable

MAX_FAILURES = 3  # in a row, after which an item is left alone
BACKOFF_CYCLES = 10
MAX_TRACKED = 500
CLEANUP_EVERY_CYCLES = 50


class FailureBackoff:
    """Patience with items that fail: after three failures in a row one is spared for ten cycles, then starts afresh."""

    def __init__(self) -> None:
        self._cycle = 0
        self._failures: dict[Hashable, int] = {}
        self._spared_until: dict[Hashable, int] = {}

    def next_cycle(self) -> None:
        """A pass begins."""
        self._cycle += 1
        over = [item for item, until in self._spared_until.items() if until <= self._cycle]
        for item in over:
            del self._spared_until[item]
        if self._cycle % CLEANUP_EVERY_CYCLES == 0 and len(self._failures) > MAX_TRACKED:
            self._failures.clear()

    def is_backing_off(self, item: Hashable) -> bool:
        """Whether the item is left alone in this pass."""
        return item in self._spared_until

    def record(self, item: Hashable, *, failed: bool) -> None:
        """What became of an item."""
        if not failed:
            self._failures.pop(item, None)
            return
        count = self._failures.pop(item, 0) + 1
        if count < MAX_FAILURES:
            self._failures[item] = count
        else:
            self._spared_until[item] = self._cycle + BACKOFF_CYCLES + 1
