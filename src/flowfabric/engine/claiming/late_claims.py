"""Late claims: what a claim took after its caller had given it up is given back.

A claim whose answer got lost, or whose caller was cancelled, may still be on its way to the store. If it arrives,
nobody works on what it takes. So the process that sent it looks for the identities that it carried, for as long as the
leases would last, and gives back what it finds. A process that dies leaves that to the leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from flowfabric import errors
from flowfabric.model.answers import execution as answers
from flowfabric.stores.claims import ClaimRequest

logger = logging.getLogger("flowfabric.claiming")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0


class LateClaims:
    """The claims of one process that were given up and may still arrive."""

    def __init__(
        self,
        find: Callable[[Sequence[ClaimRequest]], Awaitable[list[answers.Claimed]]],
        give_back: Callable[[answers.Claimed], Awaitable[object]],
    ) -> None:
        """`find` returns what some claims took; `give_back` makes that claimable again."""
        self._find = find
        self._give_back = give_back
        self._watches: set[asyncio.Task[None]] = set()

    def watch(self, takes: Sequence[ClaimRequest], got: Sequence[answers.Claimed] = ()) -> None:
        """Give back whatever these take from now on; those that the caller `got` something from have arrived."""
        arrived = {one.lease_id for one in got}
        left = [take for take in takes if arrived.isdisjoint(stamp.lease_id for stamp in take.lease_ids)]
        if left:
            watch = asyncio.create_task(self._run(left))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def close(self) -> None:
        """Watch no longer."""
        watches = [*self._watches]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _run(self, takes: list[ClaimRequest]) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + max(take.lease_ttl_ms for take in takes) / 1000
        pause_s = FIRST_PAUSE_S
        while takes and clock() < until:
            try:
                late = await self._find(takes)
                for one in late:
                    logger.warning("%s was claimed by a request that was given up; it is given back", one.execution_id)
                    await self._give_back(one)
            except errors.FabricError as fault:
                logger.info("late claims could not be looked for: %s", fault)
                late = []
            arrived = {one.lease_id for one in late}
            takes = [take for take in takes if arrived.isdisjoint(stamp.lease_id for stamp in take.lease_ids)]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
