"""The order in which executions are unblocked when a limit has capacity again.

It is the order in which claims would return them: by priority, then in weighted round robin over the fairness keys of a
lane, then by age (`rules.scheduling.fairness`). Lanes do not alternate; between lanes, priority and age decide.

The round robin continues from the credits of this process's claims. Only a claim uses up credit. Until then, an
unblocked execution counts as claimed, so that the next freed slot goes to the next key.
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
    rows: Sequence[Execution], lane_credits: LaneCredits, now: int, *, truncated: Set[str] = frozenset()
) -> list[Execution]:
    """Return the rows in the order in which they should be unblocked.

    Lists (`blocked_on`) in `truncated` may contain more rows. The order ends where one of those might be next; it has
    at least one row if there are any.
    """
    heap = []
    for lane, queued in _by_lane(rows).items():
        keys = _truncated_keys(queued, truncated)
        picks, _ = fairness.fair_order(queued, lane_credits.get(lane, {}), now, len(queued), truncated=keys)
        heap.append((*_sort_key(picks[0], now), picks, 0, bool(keys)))
    heapify(heap)
    order: list[Execution] = []
    while heap:
        *_, picks, index, has_more = heappop(heap)
        order.append(picks[index])
        if index + 1 < len(picks):
            heappush(heap, (*_sort_key(picks[index + 1], now), picks, index + 1, has_more))
        elif has_more:
            break
    return order


def credits_after(
    rows: Sequence[Execution],
    lane_credits: LaneCredits,
    now: int,
    unblocked: Iterable[Execution],
    *,
    truncated: Set[str] = frozenset(),
) -> LaneCredits:
    """Return the credits after the first of these rows were unblocked; keys without waiting rows have none."""
    counts = Counter(row.lane_id for row in unblocked)
    after = {}
    for lane, queued in _by_lane(rows).items():
        _, remaining = fairness.fair_order(
            queued, lane_credits.get(lane, {}), now, counts[lane], truncated=_truncated_keys(queued, truncated)
        )
        if any(remaining.values()):
            after[lane] = remaining
    return after


def _by_lane(rows: Iterable[Execution]) -> dict[str, list[Execution]]:
    """Group the rows by lane, with the ready queues that they will enter."""
    lanes: dict[str, list[Execution]] = {}
    for row in rows:
        queued = msgspec.structs.replace(row, line=queue.queue_of(row))
        lanes.setdefault(row.lane_id, []).append(queued)
    return lanes


def _truncated_keys(rows: Iterable[Execution], truncated: Set[str]) -> set[str]:
    """Return the fairness keys that may have more waiting rows."""
    return {fairness.fairness_key_of(row) for row in rows if row.blocked_on in truncated}


def _sort_key(row: Execution, now: int) -> tuple[int, int, str]:
    return -fairness.effective_priority(row, now), row.rank, row.execution_id
