"""Claims of some namespaces.

Lines know no namespace, so such work is looked for among that of others: what stands before it is passed by in the
store, and it is claimed by decision. A look that took long and found nothing is not repeated at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from flowfabric import errors
from flowfabric.engine.claiming.claimer import MAX_TRIES, MOST_ROUNDS, Claimer
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import QueueKey
from flowfabric.stores.queries import Where

CHEAP_SCAN_S = 0.01  # what a look may take to be repeated at will
PAUSE_FACTOR, MAX_PAUSE_S = 10, 1.0  # how much longer than that the next one is waited for


class NamespaceClaimer(Claimer):
    """What a worker of some namespaces does to get work."""

    @cached_property
    def _resting(self) -> dict[tuple[str, frozenset[str]], float]:
        return {}

    async def claim_available(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim what is there; of some namespaces, if the order names them."""
        if order.namespaces is None:
            return await super().claim_available(order, limit)
        return await self._claim_within(order, limit)

    async def _claim_within(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim work of some namespaces only, wherever it stands in the lines that the worker covers."""
        clock, asked = asyncio.get_running_loop().time, (order.lane_id, order.namespaces or frozenset())
        await asyncio.sleep(max(0.0, self._resting.pop(asked, 0.0) - clock()))
        began = clock()
        self.runtime._namespace_filtered_lanes.add(order.lane_id)
        await self.refresh_lane(order.lane_id)
        claimed: list[answers.Claimed] = []
        try:
            for portion in self.rotating_windows(await self.covered_queues(order.lane_id, order.capabilities)):
                await self._claim_own(portion, order, limit, claimed)
        except errors.StoreUnavailable:
            if not claimed:  # those are held already: the next call may meet the error
                raise
        if not claimed and (took := clock() - began) > CHEAP_SCAN_S:
            self._resting[asked] = clock() + min(took * PAUSE_FACTOR, MAX_PAUSE_S)
        return claimed

    async def _claim_own(
        self, lines: Sequence[QueueKey], order: ClaimOrder, limit: int, claimed: list[answers.Claimed]
    ) -> None:
        """Claim from these lines as long as something is there, and less was claimed than is wanted."""
        own = (Where("namespace", "in", tuple(sorted(order.namespaces or ()))),)
        tries, rounds = Counter[str](), 0
        while (wanted := limit - len(claimed)) > 0:
            tried = {name for name, count in tries.items() if count >= MAX_TRIES}
            rows, cut = await self.claim_candidates(order.lane_id, lines, wanted, exclude=tried, where=own)
            if not rows:
                return
            turn = await self._next_turn(order, rows, cut, wanted, yields=rounds < MOST_ROUNDS)
            if turn is None:
                rounds += 1
                continue
            tries.update(row.execution_id for row in turn.picks)
            taken = await self._claim_guarded(turn.picks, order)
            self._use_up(turn, order, taken)
            claimed += taken
