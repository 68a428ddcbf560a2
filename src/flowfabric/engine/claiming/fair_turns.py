"""Fair turns of this process: what each fairness key has in hand, and which keys wait for a limit.

A turn is used up when an execution is claimed, and only then. Keys whose work waits for a limit take part in the turns
of claims that need the same limit: they keep their place in the rotation, whatever was refused or unblocked in between.
What is known of them comes from refusals and from the lists that unblocking reads, so it may be out of date. A claim
reads the lists again before it lets a blocked key go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution import operator
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import unblock_order
from flowfabric.rules.scheduling import capabilities, fairness, queue

MAX_RIVALS = 1024  # blocked keys of one limit that are remembered
MAX_UNBLOCKED = 10_000  # unblocked executions of a lane that are remembered: this process may never claim there


class Rival(msgspec.Struct, frozen=True):
    """A blocked execution that takes turns with claimable ones, since they need the limit that it waits for."""

    reason: BlockingReason
    limit: NamespacedId
    row: Execution

    def holds_up(self, row: Execution) -> bool:
        """True if a claimable row needs the same limit."""
        return operator.is_eligible(row) and (self.reason, self.limit) in _limits_of([row])


class FairTurns:
    """The fair turns of this process."""

    def __init__(self) -> None:
        self._turns: dict[str, dict[str, int]] = {}  # by lane
        self._first_blocked: dict[tuple[BlockingReason, NamespacedId], dict[tuple[str, str], Execution]] = {}
        self._unblock_turns: dict[str, unblock_order.LaneCredits] = {}
        self._unblocked: dict[str, set[str]] = {}

    def turns_of(self, lane_id: str) -> fairness.Credits:
        """Whose turn it is in a lane, for this process."""
        return self._turns.get(lane_id, {})

    def keep_turns(self, lane_id: str, turns: dict[str, int]) -> None:
        """Remember whose turn it is after a claim."""
        self._turns[lane_id] = turns
        self._forget_unblock_turns(lane_id)

    def unblock_turns(self, lists: str, rows: Iterable[Execution]) -> unblock_order.LaneCredits:
        """Whose turn it is to be unblocked in the lanes of these rows.

        It goes on from the last claim of this process, as if what was unblocked since had been claimed: other processes
        may have done that.
        """
        return {row.lane_id: self.turns_of(row.lane_id) for row in rows} | dict(self._unblock_turns.get(lists, {}))

    def keep_unblock_turns(self, lists: str, turns: unblock_order.LaneCredits, unblocked: Iterable[Execution]) -> None:
        """Remember whose turn it is after these rows were unblocked."""
        chosen = [*unblocked]
        lanes = {row.lane_id for row in chosen}
        known = {lane: kept for lane, kept in self._unblock_turns.get(lists, {}).items() if lane not in lanes}
        known |= {lane: kept for lane, kept in turns.items() if lane in lanes}
        self._unblock_turns[lists] = known
        for row in chosen:
            self._unblocked.setdefault(row.lane_id, set()).add(row.execution_id)
        for lane in lanes:
            if len(self._unblocked[lane]) > MAX_UNBLOCKED:
                self._forget_unblock_turns(lane)  # the next unblocking goes on from the turns of claims

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
            self._forget_unblock_turns(row.lane_id)  # it was not claimed, so it is its turn still
        known = self._first_blocked.setdefault((reason, limit), {})
        row = _queued(row)
        key = (row.lane_id, fairness.fairness_key_of(row))
        first = known.get(key)
        if (first is None and len(known) < MAX_RIVALS) or (first is not None and _place(row) < _place(first)):
            known[key] = row

    def note_lists(
        self, reason: BlockingReason, limit: NamespacedId, rows: Iterable[Execution], *, whole: bool = True
    ) -> None:
        """Remember the first rows that wait for a limit, as read from its lists; `whole` if these are all the lists."""
        known = {} if whole else self._first_blocked.get((reason, limit), {})
        for row in sorted(map(_queued, rows), key=_place, reverse=True):
            known[row.lane_id, fairness.fairness_key_of(row)] = row
        if known:
            self._first_blocked[reason, limit] = known
        else:
            self._first_blocked.pop((reason, limit), None)

    def rivals(self, order: ClaimOrder, rows: Sequence[Execution]) -> dict[str, Rival]:
        """The blocked executions that take turns with these claimable ones, by id: the first of each key.

        A key takes turns with other keys only, so blocked work of the one key that is claimable is left out. A row that
        was unblocked meanwhile may be among them: it stands for the rows behind it, which are not known yet.
        """
        if not self._first_blocked:
            return {}
        keys_by_limit: dict[tuple[BlockingReason, NamespacedId], set[str]] = {}
        for row in rows:
            for limit in _limits_of([row]):
                keys_by_limit.setdefault(limit, set()).add(fairness.fairness_key_of(row))
        return {
            row.execution_id: Rival(reason, limit, row)
            for (reason, limit), keys in keys_by_limit.items()
            for (lane, key), row in self._first_blocked.get((reason, limit), {}).items()
            if lane == order.lane_id and keys != {key} and _may_claim(order, row)
        }


def _may_claim(order: ClaimOrder, row: Execution) -> bool:
    if order.namespaces is not None and row.namespace not in order.namespaces:
        return False
    return not capabilities.missing(row.required_capabilities, order.capabilities)


def _limits_of(rows: Iterable[Execution]) -> set[tuple[BlockingReason, NamespacedId]]:
    found: set[tuple[BlockingReason, NamespacedId]] = set()
    for row in rows:
        terms = decode_terms(row.terms)
        for reason, names in (
            (BlockingReason.WAITING_FOR_BUDGET, terms.budget_ids),
            (BlockingReason.WAITING_FOR_QUOTA, terms.quota_policy_ids),
        ):
            found.update((reason, one) for one in owner_rules.candidates(row.namespace, names))
    return found


def _queued(row: Execution) -> Execution:
    """Return the row with the ready queue that it enters when it is unblocked."""
    return msgspec.structs.replace(row, line=queue.queue_of(row))


def _place(row: Execution) -> tuple[int, str]:
    return row.rank, row.execution_id
