"""How much stands where: the levels that people watch, from counts of the places where executions stand.

Each execution that has not ended stands in one place that an index knows, sometimes in two: a lost lease is both a
lease and a place in a line. So each place answers for one public state only.
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
    """Where executions stand that have not ended."""

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
    stands: Mapping[CountedIndex, Mapping[GroupKey, int]], workers: Iterable[RegisteredWorker], lanes: Sequence[str]
) -> dict[Gauge, int]:
    """The levels of each lane; a lane where nothing is has zeros."""
    found: Counter[Gauge] = Counter()
    for lane in lanes:
        found.update({(QUEUE, lane, PublicState.WAITING.value): 0, (ACTIVE, lane, None): 0})
        found.update({(SUSPENDED, lane, None): 0, (WORKERS, lane, None): 0})
    for place, counts in stands.items():
        for (lane, state, owned), count in counts.items():
            # A revoked lease has no end any more: it is found where it waits for whoever takes it over.
            is_lost = place is CountedIndex.QUEUE and owned is OwnershipState.LEASE_REVOKED
            if state is STATE_OF_INDEX[place] or is_lost:
                name = NAMES.get(state, QUEUE)
                found[name, lane, state.value if name == QUEUE else None] += count
    for worker in workers:
        for lane in msgspec.json.decode(worker.lanes, type=list[str]):
            found[WORKERS, lane, None] += 1
    return found
