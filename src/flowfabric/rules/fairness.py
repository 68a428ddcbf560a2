"""Fairness: in which order waiting work of one lane is claimed.

Priority comes first, raised by waiting where a policy asks for ageing. Among keys (tenants) whose first rows are of
equal priority it goes by weighted turns: with weights 3 and 1, three of four claims go to the first. Within a key it
goes by age. The turns are kept by whoever claims, so they are fair for each worker and about fair for all together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from flowfabric.model.execution import Execution
from flowfabric.rules.policy import decode_terms

Turns = Mapping[str, int]  # what each key has in hand: the one with the most is next


def effective_priority(row: Execution, now: int) -> int:
    """The priority of a row, one step higher for every `ageing` milliseconds that it has waited."""
    ageing = decode_terms(row.terms).ageing
    return row.priority + (max(0, now - row.created_at) // ageing if ageing else 0)


def plan(
    rows: Iterable[Execution], turns: Turns, now: int, limit: int, most_keys: int | None = None
) -> tuple[list[Execution], dict[str, int]]:
    """The next `limit` of these rows in the order in which they should be claimed, and the turns afterwards.

    The plan ends before the first row of one key too many; those keys are next the next time.
    """
    queues: dict[str, deque[Execution]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.execution_id)):
        queues.setdefault(key_of(row), deque()).append(row)
    in_hand = {key: turns.get(key, 0) for key in queues}
    priorities = {key: effective_priority(queue[0], now) for key, queue in queues.items()}
    picks: list[Execution] = []
    keys: set[str] = set()
    while queues and len(picks) < limit:
        key, after = _next_key(queues, priorities, in_hand)
        keys.add(key)
        if most_keys is not None and len(keys) > most_keys:
            break
        in_hand = after
        picks.append(queues[key].popleft())
        if queues[key]:
            priorities[key] = effective_priority(queues[key][0], now)
        else:
            del queues[key], priorities[key]
    return picks, in_hand


def key_of(row: Execution) -> str:
    """Whose turn a row takes."""
    return row.line.fairness_key if row.line is not None else ""


def _next_key(
    queues: Mapping[str, deque[Execution]], priorities: Mapping[str, int], in_hand: dict[str, int]
) -> tuple[str, dict[str, int]]:
    if len(queues) == 1:
        return next(iter(queues)), in_hand
    highest = max(priorities.values())
    equals = [key for key, priority in priorities.items() if priority == highest]
    if len(equals) == 1:
        return equals[0], in_hand
    weights = {key: _weight(queues[key][0]) for key in equals}
    after = in_hand | {key: in_hand[key] + weight for key, weight in weights.items()}
    chosen = min(equals, key=lambda key: (-after[key], queues[key][0].rank, queues[key][0].execution_id))
    after[chosen] -= sum(weights.values())
    return chosen, after


def _weight(row: Execution) -> int:
    return row.line.fairness_weight if row.line is not None else 1
