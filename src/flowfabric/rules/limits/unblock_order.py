"""The order in which executions are unblocked when a limit has capacity again.

It is the order in which claims would have given them out: priority first, then weighted turns of the fairness keys of a
lane, then age (`rules.fairness`). Lanes do not take turns with each other; between them it goes by priority and age.

The turns go on from those of the process's claims (`engine.fair_turns`). A turn is used up by the claim. Until then
unblocking counts what it unblocked as claimed, so that the next freed slot is for the next key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.rules.scheduling import fairness, queue

LaneCredits = Mapping[str, fairness.Credits]


def unblock_order(
    rows: Sequence[Execution], turns: LaneCredits, now: int, *, truncated: Set[str] = frozenset()
) -> list[Execution]:
    """The rows in the order in which they should be unblocked.

    Of the lists (`blocked_on`) in `cut` there may be more rows than these. The order ends where one of those might be
    next; it has at least one row if there are any.
    """
    heap = []
    for lane, queued in _by_lane(rows).items():
        keys = _keys(queued, truncated)
        picks, _ = fairness.fair_order(queued, turns.get(lane, {}), now, len(queued), truncated=keys)
        heap.append((*_place(picks[0], now), picks, 0, bool(keys)))
    heapify(heap)
    order: list[Execution] = []
    while heap:
        *_, picks, number, has_more = heappop(heap)
        order.append(picks[number])
        if number + 1 < len(picks):
            heappush(heap, (*_place(picks[number + 1], now), picks, number + 1, has_more))
        elif has_more:
            break
    return order


def credits_after(
    rows: Sequence[Execution],
    turns: LaneCredits,
    now: int,
    unblocked: Iterable[Execution],
    *,
    truncated: Set[str] = frozenset(),
) -> LaneCredits:
    """The turns after the first of these rows were unblocked; keys of which nothing waited have none."""
    counts = Counter(row.lane_id for row in unblocked)
    after = {}
    for lane, queued in _by_lane(rows).items():
        _, kept = fairness.fair_order(
            queued, turns.get(lane, {}), now, counts[lane], truncated=_keys(queued, truncated)
        )
        if any(kept.values()):
            after[lane] = kept
    return after


def _by_lane(rows: Iterable[Execution]) -> dict[str, list[Execution]]:
    """The rows with the ready queues that they will stand in, by lane."""
    lanes: dict[str, list[Execution]] = {}
    for row in rows:
        queued = msgspec.structs.replace(row, line=queue.queue_of(row))
        lanes.setdefault(row.lane_id, []).append(queued)
    return lanes


def _keys(rows: Iterable[Execution], cut: Set[str]) -> set[str]:
    """The fairness keys of which more rows may wait."""
    return {fairness.fairness_key_of(row) for row in rows if row.blocked_on in cut}


def _place(row: Execution, now: int) -> tuple[int, int, str]:
    return -fairness.effective_priority(row, now), row.rank, row.execution_id
