"""Queue depth: gauges per lane, computed from counts of the partial indexes that hold unfinished executions.

Every unfinished execution is in one of these indexes, sometimes in two: an expired lease is both in the lease index and
in a ready queue. Therefore each index counts for one public state only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from flowfabric.model.states import OwnershipState, PublicState
from flowfabric.model.worker import RegisteredWorker

GROUP_BY_COLUMNS = ("lane_id", "public_state", "ownership_state")

GroupKey = tuple[str, PublicState, OwnershipState]
Gauge = tuple[str, str, str | None]  # name, lane, state


class CountedIndex(StrEnum):
    """The indexes that hold unfinished executions."""

    QUEUE = "line"
    DELAY = "delay"
    LIMIT = "limit"
    JOIN = "join"
    LEASE = "lease"
    SUSPENSION = "suspension"


STATE_OF_INDEX = {
    CountedIndex.QUEUE: PublicState.WAITING,
    CountedIndex.DELAY: PublicState.DELAYED,
    CountedIndex.LIMIT: PublicState.RATE_LIMITED,
    CountedIndex.JOIN: PublicState.WAITING_CHILDREN,
    CountedIndex.LEASE: PublicState.ACTIVE,
    CountedIndex.SUSPENSION: PublicState.SUSPENDED,
}
QUEUE, ACTIVE, SUSPENDED, WORKERS = (
    "ff_queue_depth",
    "ff_active_executions",
    "ff_suspended_executions",
    "ff_workers",
)
NAMES = {PublicState.ACTIVE: ACTIVE, PublicState.SUSPENDED: SUSPENDED}


def queue_depths(
    counts_by_index: Mapping[CountedIndex, Mapping[GroupKey, int]],
    workers: Iterable[RegisteredWorker],
    lanes: Sequence[str],
) -> dict[Gauge, int]:
    """Return the gauges of each lane; a lane without executions gets zeros."""
    gauges: Counter[Gauge] = Counter()
    for lane in lanes:
        gauges.update({(QUEUE, lane, PublicState.WAITING.value): 0, (ACTIVE, lane, None): 0})
        gauges.update({(SUSPENDED, lane, None): 0, (WORKERS, lane, None): 0})
    for index, counts in counts_by_index.items():
        for (lane, state, ownership), count in counts.items():
            # A revoked lease has no expiry, so it is counted in the queue where it waits for a takeover.
            is_lost = index is CountedIndex.QUEUE and ownership is OwnershipState.LEASE_REVOKED
            if state is STATE_OF_INDEX[index] or is_lost:
                name = NAMES.get(state, QUEUE)
                gauges[name, lane, state.value if name == QUEUE else None] += count
    for worker in workers:
        for lane in msgspec.json.decode(worker.lanes, type=list[str]):
            gauges[WORKERS, lane, None] += 1
    return gauges
