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
from flowfabric.model.worker import Worker

BY = ("lane_id", "public_state", "ownership_state")

Stand = tuple[str, PublicState, OwnershipState]
Level = tuple[str, str, str | None]  # name, lane, state


class Place(StrEnum):
    """Where executions stand that have not ended."""

    LINE = "line"
    DELAY = "delay"
    LIMIT = "limit"
    JOIN = "join"
    LEASE = "lease"
    SUSPENSION = "suspension"


ANSWERS_FOR = {
    Place.LINE: PublicState.WAITING,
    Place.DELAY: PublicState.DELAYED,
    Place.LIMIT: PublicState.RATE_LIMITED,
    Place.JOIN: PublicState.WAITING_CHILDREN,
    Place.LEASE: PublicState.ACTIVE,
    Place.SUSPENSION: PublicState.SUSPENDED,
}
QUEUE, ACTIVE, SUSPENDED, WORKERS = (
    "ff_queue_depth",
    "ff_active_executions",
    "ff_suspended_executions",
    "ff_workers",
)
NAMES = {PublicState.ACTIVE: ACTIVE, PublicState.SUSPENDED: SUSPENDED}


def levels(
    stands: Mapping[Place, Mapping[Stand, int]], workers: Iterable[Worker], lanes: Sequence[str]
) -> dict[Level, int]:
    """The levels of each lane; a lane where nothing is has zeros."""
    found: Counter[Level] = Counter()
    for lane in lanes:
        found.update({(QUEUE, lane, PublicState.WAITING.value): 0, (ACTIVE, lane, None): 0})
        found.update({(SUSPENDED, lane, None): 0, (WORKERS, lane, None): 0})
    for place, counts in stands.items():
        for (lane, state, owned), count in counts.items():
            # A revoked lease has no end any more: it is found where it waits for whoever takes it over.
            is_lost = place is Place.LINE and owned is OwnershipState.LEASE_REVOKED
            if state is ANSWERS_FOR[place] or is_lost:
                name = NAMES.get(state, QUEUE)
                found[name, lane, state.value if name == QUEUE else None] += count
    for worker in workers:
        for lane in msgspec.json.decode(worker.lanes, type=list[str]):
            found[WORKERS, lane, None] += 1
    return found
