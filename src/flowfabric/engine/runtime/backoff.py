"""StoreBackoff: the delays between attempts while the store is unavailable."""

from __future__ import annotations

import asyncio
import random
import sys

from flowfabric import errors

RETRY_FOR_S = 15.0
PERMANENT_FAULTS = (errors.StoreFault.OTHER, errors.StoreFault.AUTH)  # retrying does not help
_RANDOM = random.SystemRandom()  # the application's own generator is left alone


class StoreBackoff:
    """A growing, jittered delay between attempts, up to a limit that starts with the first failure."""

    __slots__ = ("_attempts", "_give_up_at", "_retry_for_s")

    def __init__(self, retry_for_s: float = RETRY_FOR_S) -> None:
        self._retry_for_s = retry_for_s
        self._attempts = 0

    async def sleep_or_raise(self) -> None:
        """Sleep before the next attempt; called in an exception handler, raises its error when the time is used up.

        A permanent fault (closed store, not a database, wrong password) is raised at once, unless the outcome is
        unknown: then the caller has to find out first.
        """
        error = sys.exception()
        if isinstance(error, errors.StoreUnavailable) and error.source in PERMANENT_FAULTS and not error.in_doubt:
            raise
        now = asyncio.get_running_loop().time()
        if not self._attempts:
            self._give_up_at = now + self._retry_for_s
        elif now >= self._give_up_at:
            raise
        self._attempts += 1
        await asyncio.sleep(_RANDOM.random() * min(1.0, 0.02 * 2**self._attempts))
