"""Late claims: executions that were claimed after the caller had given up are released.

A claim whose reply was lost, or whose caller was cancelled, may still reach the store. Then nobody works on what it
claims. So this process searches for the lease ids of the request for as long as the leases would last, and releases
what it finds. If the process dies, the leases expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from flowfabric import errors
from flowfabric.event_loop import start_background
from flowfabric.model.answers import execution as answers
from flowfabric.stores.claims import ClaimRequest

logger = logging.getLogger("flowfabric.claiming")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0


class LateClaims:
    """The abandoned claims of one process that may still be executed."""

    def __init__(
        self,
        find: Callable[[Sequence[ClaimRequest]], Awaitable[list[answers.Claimed]]],
        give_back: Callable[[answers.Claimed], Awaitable[object]],
    ) -> None:
        """`find` returns what some requests claimed; `give_back` makes an execution claimable again."""
        self._find = find
        self._give_back = give_back
        self._watches: set[asyncio.Task[None]] = set()

    def watch(self, requests: Sequence[ClaimRequest], claimed: Sequence[answers.Claimed] = ()) -> None:
        """Release the executions that these requests still claim; requests that returned `claimed` were executed."""
        if pending := _without_executed(requests, claimed):
            start_background(self._run(pending), self._watches)

    async def close(self) -> None:
        """Stop watching."""
        watches = [*self._watches]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _run(self, requests: list[ClaimRequest]) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + max(request.lease_ttl_ms for request in requests) / 1000
        pause_s = FIRST_PAUSE_S
        while requests and clock() < until:
            try:
                late = await self._find(requests)
                for one in late:
                    logger.warning("%s was claimed by an abandoned request; it is released", one.execution_id)
                    await self._give_back(one)
            except errors.FabricError as fault:
                logger.info("the search for late claims failed: %s", fault)
                late = []
            requests = _without_executed(requests, late)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _without_executed(requests: Sequence[ClaimRequest], claimed: Sequence[answers.Claimed]) -> list[ClaimRequest]:
    """Return the requests that claimed none of these."""
    lease_ids = {one.lease_id for one in claimed}
    return [one for one in requests if lease_ids.isdisjoint(ids.lease_id for ids in one.lease_ids)]
