"""RecentKeys: a set that forgets its oldest members."""

from __future__ import annotations

from collections import OrderedDict


class RecentKeys:
    """A set of texts with a limit; beyond it the oldest are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[str, None] = OrderedDict()  # its oldest entry is found without a search

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Add a key."""
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def discard(self, key: str) -> None:
        """Forget a key."""
        self._keys.pop(key, None)
