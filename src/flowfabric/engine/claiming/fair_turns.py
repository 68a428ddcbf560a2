"""Fair turns of this process: the credits of each fairness key, and the first blocked row of each.

A turn is used up when an execution is claimed, and only then. The blocked rows come from refusals and from the lists
that unblocking reads, so they may be out of date. A claim reads the lists again before it lets a blocked key go first
(`rules.limits.blocked_keys`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.model.execution import Execution
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.limits import blocked_keys, unblock_order
from flowfabric.rules.scheduling import fairness

MAX_BLOCKED_KEYS = 1024  # of one limit that are remembered
MAX_UNBLOCKED = 10_000  # executions of a lane that are remembered: this process may never claim there


class FairTurns:
    """The fair turns of this process."""

    def __init__(self) -> None:
        self._turns: dict[str, dict[str, int]] = {}  # by lane
        self._blocked_heads: dict[blocked_keys.BlockingLimit, dict[blocked_keys.LaneKey, Execution]] = {}
        self._unblock_turns: dict[str, unblock_order.LaneCredits] = {}
        self._unblocked: dict[str, set[str]] = {}

    def turns_of(self, lane_id: str) -> fairness.Credits:
        """Return the credits of a lane after the last claim of this process."""
        return self._turns.get(lane_id, {})

    def keep_turns(self, lane_id: str, turns: dict[str, int]) -> None:
        """Keep the credits after a claim."""
        self._turns[lane_id] = turns
        self._forget_unblock_turns(lane_id)

    def unblock_turns(self, lists: str, rows: Iterable[Execution]) -> unblock_order.LaneCredits:
        """Return the credits for unblocking in the lanes of these rows.

        They continue from the last claim of this process, as if what was unblocked since had been claimed: other
        processes may have claimed it.
        """
        return {row.lane_id: self.turns_of(row.lane_id) for row in rows} | dict(self._unblock_turns.get(lists, {}))

    def keep_unblock_turns(self, lists: str, turns: unblock_order.LaneCredits, unblocked: Iterable[Execution]) -> None:
        """Keep the credits after these rows were unblocked."""
        chosen = [*unblocked]
        lanes = {row.lane_id for row in chosen}
        known = {lane: kept for lane, kept in self._unblock_turns.get(lists, {}).items() if lane not in lanes}
        known |= {lane: kept for lane, kept in turns.items() if lane in lanes}
        self._unblock_turns[lists] = known
        for row in chosen:
            self._unblocked.setdefault(row.lane_id, set()).add(row.execution_id)
        for lane in lanes:
            if len(self._unblocked[lane]) > MAX_UNBLOCKED:
                self._forget_unblock_turns(lane)  # the next unblocking continues from the credits of claims

    def _forget_unblock_turns(self, lane_id: str) -> None:
        self._unblocked.pop(lane_id, None)
        for lists, turns in [*self._unblock_turns.items()]:
            left = {lane: kept for lane, kept in turns.items() if lane != lane_id}
            if left:
                self._unblock_turns[lists] = left
            else:
                del self._unblock_turns[lists]

    def note_blocked(self, row: Execution, reason: BlockingReason, limit: NamespacedId) -> None:
        """Remember that a row was blocked by a limit."""
        if row.execution_id in self._unblocked.get(row.lane_id, ()):
            self._forget_unblock_turns(row.lane_id)  # it was not claimed, so its turn is not used up
        heads = self._blocked_heads.setdefault((reason, limit), {})
        row = blocked_keys.with_queue(row)
        if blocked_keys.is_new_head(row, heads, max_keys=MAX_BLOCKED_KEYS):
            heads[blocked_keys.key_of(row)] = row

    def note_lists(
        self, reason: BlockingReason, limit: NamespacedId, rows: Iterable[Execution], *, whole: bool = True
    ) -> None:
        """Remember the first rows that wait for a limit, as read from its lists; `whole` if these are all the lists."""
        known = {} if whole else self._blocked_heads.get((reason, limit), {})
        heads = known | blocked_keys.heads_of(rows)
        if heads:
            self._blocked_heads[reason, limit] = heads
        else:
            self._blocked_heads.pop((reason, limit), None)

    def competitors(self, order: ClaimOrder, rows: Sequence[Execution]) -> dict[str, blocked_keys.Competitor]:
        """Return the blocked executions, by id, that take turns with these claimable ones."""
        if not self._blocked_heads:
            return {}
        return blocked_keys.competitors(
            self._blocked_heads, rows, order.lane_id, offered=order.capabilities, namespaces=order.namespaces
        )
