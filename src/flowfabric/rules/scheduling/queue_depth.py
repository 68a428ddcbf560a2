"""Queue depth: gauges per lane, computed from counts of the partial indexes that hold unfinished executions.

Every unfinished execution is in one of these indexes, sometimes in two: an expired lease is both in the lease index and
in a ready queue. Therefore each index counts for one public state only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.states import OwnershipState, PublicState

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


class LaneLevels(msgspec.Struct, frozen=True):
    """One lane: unfinished executions by public state, live workers, and since when the next execution waits."""

    lane_id: str
    states: dict[str, int]
    workers: int
    waiting_since: int | None  # when the execution that is claimed next entered its queue
    at_least: list[str] = []  # the states of which more may exist, because counting is bounded


def lane_levels(
    counts_by_index: Mapping[CountedIndex, Mapping[GroupKey, int]],
    workers: Iterable[RegisteredWorker],
    lanes: Sequence[str],
    heads: Iterable[Execution],
    bounds: Mapping[CountedIndex, int],
) -> list[LaneLevels]:
    """Return the levels of each lane.

    `heads` are the first executions of the ready queues. `bounds` are how many rows of each index were counted at most,
    of the ready queues how many of each.
    """
    states: dict[str, Counter[str]] = {lane: Counter() for lane in lanes}
    served: Counter[str] = Counter()
    for (name, lane, state), count in queue_depths(counts_by_index, workers, lanes).items():
        if name == WORKERS:
            served[lane] += count
        elif count:
            public = state or (PublicState.ACTIVE if name == ACTIVE else PublicState.SUSPENDED).value
            states.setdefault(lane, Counter())[public] += count
    since: dict[str, int] = {}
    for row in heads:
        since[row.lane_id] = min(row.last_transition_at, since.get(row.lane_id, row.last_transition_at))
    cut = _cut_states(counts_by_index, bounds)
    return [
        LaneLevels(lane, dict(found), served[lane], since.get(lane), sorted(cut(lane) & found.keys()))
        for lane, found in sorted(states.items())
    ]


def _cut_states(
    counts_by_index: Mapping[CountedIndex, Mapping[GroupKey, int]], bounds: Mapping[CountedIndex, int]
) -> Callable[[str], set[str]]:
    """Return which states of a lane may have more executions than were counted."""
    counted: dict[CountedIndex, Counter[str]] = {index: Counter() for index in counts_by_index}
    for index, counts in counts_by_index.items():
        for (lane, _, _), count in counts.items():
            counted[index][lane] += count

    def is_cut(index: CountedIndex, lane: str) -> bool:
        lanes = counted[index]
        return (lanes[lane] if index is CountedIndex.QUEUE else lanes.total()) >= bounds[index]

    return lambda lane: {STATE_OF_INDEX[index].value for index in counted if is_cut(index, lane)}


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
