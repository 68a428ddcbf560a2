"""Fairness: in which order waiting work of one lane is claimed.

Priority comes first, raised by waiting where a policy asks for ageing. Among keys (tenants) whose first rows are of
equal priority it goes by weighted turns: with weights 3 and 1, three of four claims go to the first. Within a key it
goes by age. The turns are kept by whoever claims, so they are fair for each worker and about fair for all together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from heapq import heappop, heappush

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.rules.execution.policy import decode_terms

Credits = Mapping[str, int]  # what each key has in hand: the one with the most is next

MOST_ABSENT = 1024  # keys without claimable work whose turns are kept


def effective_priority(row: Execution, now: int) -> int:
    """The priority of a row, one step higher for every `ageing` milliseconds that it has waited."""
    ageing = decode_terms(row.terms).ageing
    return row.priority + (max(0, now - row.created_at) // ageing if ageing else 0)


def fair_order(
    rows: Iterable[Execution], turns: Credits, now: int, limit: int, *, truncated: Set[str] = frozenset()
) -> tuple[list[Execution], dict[str, int]]:
    """The next `limit` of these rows in the order in which they should be claimed, and the turns afterwards.

    Of the keys in `cut` there may be more rows than these. The plan ends where one of those might be next.
    """
    queues: dict[str, deque[Execution]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.execution_id)):
        queues.setdefault(fairness_key_of(row), deque()).append(row)
    in_turn = _InTurn(now)
    for key, queue in queues.items():
        in_turn.add(key, turns.get(key, 0), queue[0])
    picks: list[Execution] = []
    while len(picks) < limit and (first := in_turn.first()) is not None:
        queue = queues[first]
        if not queue:
            break  # a row that was not read
        in_turn.take_turn(first, queue[1] if len(queue) > 1 else queue[0] if first in truncated else None)
        picks.append(queue.popleft())
    return picks, in_turn.in_hand()


def charge(
    rows: Iterable[Execution],
    turns: Credits,
    now: int,
    claimed: Iterable[Execution],
    *,
    cut: Set[str] = frozenset(),
) -> dict[str, int]:
    """The turns after these of the rows were claimed, in this order, whether or not it was their turn.

    For each of them every key of the same priority gets its weight; the claimed key gives the sum of the weights.
    """
    queues: dict[str, deque[Execution]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.execution_id)):
        queues.setdefault(fairness_key_of(row), deque()).append(row)
    in_hand = {key: turns.get(key, 0) for key in queues}
    for row in claimed:
        level, taker = effective_priority(row, now), fairness_key_of(row)
        weights = {
            key: _weight(queue[0]) for key, queue in queues.items() if effective_priority(queue[0], now) == level
        }
        weights[taker] = _weight(row)
        if len(weights) > 1:
            for key, weight in weights.items():
                in_hand[key] = in_hand.get(key, 0) + weight
            in_hand[taker] -= sum(weights.values())
        queue = queues.get(taker, deque())
        if row in queue and (len(queue) > 1 or taker not in cut):
            queue.remove(row)
        if not queue:
            queues.pop(taker, None)
    return in_hand


def keep_idle_credits(before: Credits, after: Credits) -> dict[str, int]:
    """The turns after a claim, with those of keys that had no claimable row.

    Their work may wait for a limit. When it is claimable again it is their turn, if it was their turn before.
    """
    absent = {key: in_hand for key, in_hand in before.items() if in_hand and key not in after}
    return {**absent, **after} if len(absent) <= MOST_ABSENT else dict(after)


class _Level:
    """The keys whose first rows are of one priority, which take turns.

    With each turn all of them get their weight in hand, and whoever has the most gives the sum of the weights for it.
    Those of one weight get the same, so the order among them stays: the count of turns stands for what they got.
    """

    def __init__(self) -> None:
        self.count = 0
        self.weights = 0  # their sum
        self.heaps: dict[int, list[tuple[int, int, str, str]]] = {}  # by weight, the first in front


class _Turn(msgspec.Struct, frozen=True):
    """A key in its level, and what it had in hand when the level's count was 0."""

    base: int
    weight: int
    level: _Level


class _InTurn:
    """Keys by priority and turns; the cost of a turn does not depend on how many there are."""

    def __init__(self, now: int) -> None:
        self._now = now
        self._levels: dict[int, _Level] = {}
        self._turns: dict[str, _Turn] = {}
        self._over: dict[str, int] = {}  # what keys without rows have in hand

    def add(self, key: str, in_hand: int, head: Execution) -> None:
        level = self._levels.setdefault(effective_priority(head, self._now), _Level())
        weight = _weight(head)
        turn = self._turns[key] = _Turn(in_hand - weight * level.count, weight, level)
        level.weights += weight
        heappush(level.heaps.setdefault(weight, []), (-turn.base, head.rank, head.execution_id, key))

    def first(self) -> str | None:
        """Whose turn it is."""
        while self._levels:
            highest = max(self._levels)
            heaps = self._levels[highest].heaps
            if heaps:
                ahead = self._levels[highest].count + 1
                return min((heap[0][0] - weight * ahead, *heap[0][1:]) for weight, heap in heaps.items())[-1]
            del self._levels[highest]
        return None

    def take_turn(self, key: str, head: Execution | None) -> None:
        """Let the key that is first have its turn; the row behind the one that it is given for, if there is one."""
        turn = self._turns.pop(key)
        level, in_hand = turn.level, self._in_hand(turn)
        if level.weights > turn.weight:  # it is not alone
            level.count += 1
            in_hand += turn.weight - level.weights
        heap = level.heaps[turn.weight]
        heappop(heap)
        if not heap:
            del level.heaps[turn.weight]
        level.weights -= turn.weight
        if head is None:
            self._over[key] = in_hand
        else:
            self.add(key, in_hand, head)

    def in_hand(self) -> dict[str, int]:
        return self._over | {key: self._in_hand(turn) for key, turn in self._turns.items()}

    @staticmethod
    def _in_hand(turn: _Turn) -> int:
        return turn.base + turn.weight * turn.level.count


def fairness_key_of(row: Execution) -> str:
    """Whose turn a row takes."""
    return row.line.fairness_key if row.line is not None else ""


def _weight(row: Execution) -> int:
    return row.line.fairness_weight if row.line is not None else 1
