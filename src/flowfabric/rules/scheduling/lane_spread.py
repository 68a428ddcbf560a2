"""The spread of a lane: over how many partitions its executions are distributed, and where their idempotency keys are.

A key and its run are written in one change, so they are on one partition, which follows from the key and the spread.
When the spread changes, most keys get another partition. Two runs of one key are prevented as follows.

* A change takes effect `GRACE_MS` after it is written. Who read the lane's row at an instant therefore knows the spread
  of the time that follows, and a create with a key is written no later than that (`KeyPlace.until`), by the clock of
  its partition. So no key is written under a spread that has ended.
* A create under the present spread first looks the key up in the partitions that it had under earlier spreads. It does
  so no earlier than `SETTLE_MS` after the end of such a spread, by the clock of that partition, so that a commit of the
  last moment is visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flowfabric import errors
from flowfabric.ids import LaneId, PartitionCounts, key_partition, lane_partitions
from flowfabric.model.change import Change, Guard, Insert, Upsert
from flowfabric.model.deployment import LaneNearCeiling, NodeLoad
from flowfabric.model.instant import Draft, FromNow
from flowfabric.model.scheduling.lane import Lane, LaneSpread
from flowfabric.rules.decision import Decision, refuse

GRACE_MS = 10_000  # several times the age at which processes read lanes again
SETTLE_MS = 2_000  # from the instant at which a store checks a change until its commit is visible
BUSY_CPU = 0.7  # share of a core; a server executes commands in one thread
MAX_FORMER = 32  # spreads of one lane: a create with a key reads a row for each

_decode_former = msgspec.json.Decoder(list[tuple[int, int]]).decode


class KeyPlace(msgspec.Struct, frozen=True):
    """Where a run with a key belongs, and until when a create may rely on it."""

    is_here: bool  # it is on the partition of the id that was given
    until: int  # the last instant at which the run may be created there
    lookups: tuple[tuple[int, int], ...] = ()  # other partitions of the key, and when each may be read


def spread_of(row: Lane | None, now: int) -> int:
    """Return the spread that is in effect."""
    if row is None:
        return 1
    return row.spread if now >= row.effective_at else row.previous


def view(row: Lane | None, lane_id: str, now: int) -> LaneSpread:
    """Return the spread of a lane, and the one that follows."""
    if row is None or now >= row.effective_at:
        return LaneSpread(lane_id, spread_of(row, now))
    return LaneSpread(lane_id, row.previous, row.spread, row.effective_at)


def set_spread(row: Lane | None, lane_id: str, spread: int, counts: PartitionCounts, now: int) -> Decision[LaneSpread]:
    """Change the spread of a lane after the grace period. The same value again changes nothing."""
    if not 1 <= spread <= counts.flow:
        return refuse(errors.InvalidInput(f"spread: {spread} is not within 1..{counts.flow}", field="spread"))
    if spread == (1 if row is None else row.spread):
        return Decision(view(row, lane_id, now))
    if row is not None and now < row.effective_at:
        return refuse(errors.SpreadChangePending(lane_id=lane_id, effective_at=row.effective_at))
    former = {} if row is None else {**_former(row), row.previous: row.effective_at}
    previous = spread_of(row, now)
    if len(former.keys() | {previous, spread}) > MAX_FORMER:
        return refuse(errors.TooManySpreads(lane_id=lane_id, most=MAX_FORMER))
    text = msgspec.json.encode(sorted(former.items())).decode()
    changed: Lane[Draft] = Lane(lane_id, spread, previous, FromNow(GRACE_MS), text)
    change = Change(
        guards=(Guard(Lane, (lane_id,), None if row is None else row.revision),),
        writes=(Insert(changed) if row is None else Upsert(changed),),
        not_before=None if row is None else row.effective_at,
    )
    return Decision(lambda at: LaneSpread(lane_id, previous, spread, at + GRACE_MS), change)


def place_key(
    row: Lane | None, lane_id: str, key: str, partition: int, *, loaded_at: int, now: int, counts: PartitionCounts
) -> KeyPlace | None:
    """Return where a run with this key belongs; None if the given partition is none of the lane's.

    Such an id was chosen by the caller, and its key is unique within its partition. `loaded_at` is when the lane's row
    was read.
    """
    lane = LaneId(lane_id)
    former = {} if row is None else _former(row)
    widest = 1 if row is None else max(row.spread, row.previous, *former)
    if partition not in lane_partitions(lane, widest, counts):
        return None
    # A change of the lane that was written just before `loaded_at` may not have been visible yet.
    until, spread = loaded_at + GRACE_MS - SETTLE_MS - 1, spread_of(row, now)
    if row is not None:
        if now < row.effective_at:
            until = min(until, row.effective_at - 1)
        else:
            former[row.previous] = row.effective_at
    here = key_partition(lane, spread, counts, key)
    lookups: dict[int, int] = {}
    for earlier, ended_at in former.items():
        # The create itself reads the key on its own partition.
        other = key_partition(lane, earlier, counts, key)
        if earlier != spread and other not in (here, partition):
            lookups[other] = max(lookups.get(other, 0), ended_at + SETTLE_MS)
    if partition != here:
        lookups[here] = 0
    return KeyPlace(partition == here, until, tuple(lookups.items()))


def lanes_near_ceiling(
    nodes: Iterable[NodeLoad], unfinished: Mapping[str, int], spreads: Mapping[str, int], counts: PartitionCounts
) -> list[LaneNearCeiling]:
    """Return the lanes that have most of the unfinished executions of a server which uses most of a core.

    The work of a lane counts as evenly spread over its partitions.
    """
    found = []
    for node in nodes:
        if node.cpu < BUSY_CPU:
            continue
        held = frozenset(node.partitions)
        work: dict[str, float] = {}
        for lane, count in unfinished.items():
            partitions = lane_partitions(LaneId(lane), spreads.get(lane, 1), counts)
            work[lane] = count * len(held.intersection(partitions)) / len(partitions)
        total = sum(work.values())
        found += [
            LaneNearCeiling(lane, spreads.get(lane, 1), here / total, node.address, node.cpu)
            for lane, here in work.items()
            if here > total / 2
        ]
    return found


def _former(row: Lane) -> dict[int, int]:
    """Return the spreads before the previous one, and when each last ended."""
    return dict(_decode_former(row.former))
