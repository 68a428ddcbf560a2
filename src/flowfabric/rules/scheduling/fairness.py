"""Fairness: the order in which ready work of one lane is claimed.

Priority comes first, raised by waiting if a policy asks for ageing. Fairness keys (tenants) whose first rows have equal
priority are served in weighted round robin: with weights 3 and 1, three of four claims go to the first. Within a key,
age decides (`queue.position_offset`).

Credits implement the round robin. With every pick, each competing key gains its weight, and the picked key pays the sum
of all weights; the key with the most credit is next. Each claimer keeps its own credits, so the result is fair per
worker and approximately fair overall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from heapq import heappop, heappush

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.rules.execution.policy import decode_terms

Credits = Mapping[str, int]  # credit per fairness key; the key with the most is next

MAX_IDLE_KEYS = 1024  # keys without ready work whose credits are kept


def effective_priority(row: Execution, now: int) -> int:
    """Return the priority of a row, one step higher for every `ageing` milliseconds that it has waited."""
    ageing = decode_terms(row.terms).ageing
    return row.priority + (max(0, now - row.created_at) // ageing if ageing else 0)


def fair_order(
    rows: Iterable[Execution], before: Credits, now: int, limit: int, *, truncated: Set[str] = frozenset()
) -> tuple[list[Execution], dict[str, int]]:
    """Return the next `limit` rows in the order in which they should be claimed, and the credits afterwards.

    Keys in `truncated` may have more rows than given. The order ends where one of those might be next.
    """
    queues = _rows_by_key(rows)
    rotation = _Rotation(now)
    for key, queue in queues.items():
        rotation.add(key, before.get(key, 0), queue[0])
    picks: list[Execution] = []
    while len(picks) < limit and (first := rotation.first()) is not None:
        queue = queues[first]
        if not queue:
            break  # the next row was not loaded
        rotation.take_turn(first, queue[1] if len(queue) > 1 else queue[0] if first in truncated else None)
        picks.append(queue.popleft())
    return picks, rotation.credits()


def charge(
    rows: Iterable[Execution],
    before: Credits,
    now: int,
    claimed: Iterable[Execution],
    *,
    cut: Set[str] = frozenset(),
) -> dict[str, int]:
    """Return the credits after these rows were claimed in this order, whether or not it was their turn.

    For each row, every key of the same priority gains its weight and the claimed key pays the sum of the weights. Keys
    in `cut` may have more rows than given.
    """
    queues = _rows_by_key(rows)
    balances = {key: before.get(key, 0) for key in queues}
    for row in claimed:
        priority, claimed_key = effective_priority(row, now), fairness_key_of(row)
        weights = {
            key: _weight(queue[0]) for key, queue in queues.items() if effective_priority(queue[0], now) == priority
        }
        weights[claimed_key] = _weight(row)
        if len(weights) > 1:
            for key, weight in weights.items():
                balances[key] = balances.get(key, 0) + weight
            balances[claimed_key] -= sum(weights.values())
        queue = queues.get(claimed_key, deque())
        if row in queue and (len(queue) > 1 or claimed_key not in cut):
            queue.remove(row)
        if not queue:
            queues.pop(claimed_key, None)
    return balances


def keep_idle_credits(before: Credits, after: Credits) -> dict[str, int]:
    """Return the credits after a claim, including those of keys that had no ready row.

    The work of such a key may be blocked by a limit. When it is ready again the key keeps the turn it had.
    """
    idle = {key: credit for key, credit in before.items() if credit and key not in after}
    return {**idle, **after} if len(idle) <= MAX_IDLE_KEYS else dict(after)


class _Level:
    """The keys whose first rows have one priority and therefore take turns.

    All keys of one weight gain the same with each turn, so their relative order stays and `count` replaces a
    counter for each key.
    """

    def __init__(self) -> None:
        self.count = 0
        self.weights = 0  # sum of the weights of all keys
        self.heaps: dict[int, list[tuple[int, int, str, str]]] = {}  # one heap per weight; the next key is first


class _Turn(msgspec.Struct, frozen=True):
    """A key in its level, with its credit relative to the level's count."""

    base: int
    weight: int
    level: _Level


class _Rotation:
    """Keys ordered by priority and credit. The cost of a pick does not depend on the number of keys."""

    def __init__(self, now: int) -> None:
        self._now = now
        self._levels: dict[int, _Level] = {}
        self._turns: dict[str, _Turn] = {}
        self._finished: dict[str, int] = {}  # credits of keys without rows

    def add(self, key: str, credit: int, head: Execution) -> None:
        level = self._levels.setdefault(effective_priority(head, self._now), _Level())
        weight = _weight(head)
        turn = self._turns[key] = _Turn(credit - weight * level.count, weight, level)
        level.weights += weight
        heappush(level.heaps.setdefault(weight, []), (-turn.base, head.rank, head.execution_id, key))

    def first(self) -> str | None:
        """Return the key whose turn it is."""
        while self._levels:
            highest = max(self._levels)
            heaps = self._levels[highest].heaps
            if heaps:
                ahead = self._levels[highest].count + 1
                return min((heap[0][0] - weight * ahead, *heap[0][1:]) for weight, heap in heaps.items())[-1]
            del self._levels[highest]
        return None

    def take_turn(self, key: str, head: Execution | None) -> None:
        """Charge the key whose turn it is; `head` is its next row, if there is one."""
        turn = self._turns.pop(key)
        level, credit = turn.level, self._credit_of(turn)
        if level.weights > turn.weight:  # other keys compete
            level.count += 1
            credit += turn.weight - level.weights
        heap = level.heaps[turn.weight]
        heappop(heap)
        if not heap:
            del level.heaps[turn.weight]
        level.weights -= turn.weight
        if head is None:
            self._finished[key] = credit
        else:
            self.add(key, credit, head)

    def credits(self) -> dict[str, int]:
        """Return the credits of all keys."""
        return self._finished | {key: self._credit_of(turn) for key, turn in self._turns.items()}

    @staticmethod
    def _credit_of(turn: _Turn) -> int:
        return turn.base + turn.weight * turn.level.count


def _rows_by_key(rows: Iterable[Execution]) -> dict[str, deque[Execution]]:
    queues: dict[str, deque[Execution]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.execution_id)):
        queues.setdefault(fairness_key_of(row), deque()).append(row)
    return queues


def fairness_key_of(row: Execution) -> str:
    """Return the fairness key of a row's ready queue; empty if it is in none."""
    return row.line.fairness_key if row.line is not None else ""


def _weight(row: Execution) -> int:
    return row.line.fairness_weight if row.line is not None else 1
