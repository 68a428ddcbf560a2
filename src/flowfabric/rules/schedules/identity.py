"""Ids of schedules and of their runs, both derived: the same name and the same instant have the same id everywhere."""

from __future__ import annotations

import hashlib
import uuid

from flowfabric import ids
from flowfabric.ids import LaneId, PartitionCounts

_VERSION = 8  # UUIDs of schedules have it; ids of executions that are minted have another one


def schedule_id(namespace: str, name: str, lane: LaneId, counts: PartitionCounts) -> str:
    """Return the id of a new schedule, on the partition of its task's lane."""
    digest = hashlib.sha256(f"{len(namespace)}:{namespace}:{name}".encode("utf-8", "surrogatepass")).digest()
    number = int.from_bytes(digest[:16]) & ~(0xF000 << 64) & ~(0xC000 << 48) | _VERSION << 76 | 0x8000 << 48
    return ids.execution_id_for_lane(lane, counts, str(uuid.UUID(int=number)))


def is_schedule_id(text: str) -> bool:
    """True if an id may be that of a schedule. An execution whose id a caller chose may look the same."""
    return text[-22:-21] == str(_VERSION)


def run_id(schedule: str, instant: int) -> str:
    """Return the id of the run of an instant, on the partition of its schedule."""
    partition, uuid_text = schedule.rsplit(":", 1)
    return f"{partition}:{uuid.uuid5(uuid.UUID(uuid_text), str(instant))}"


def triggered_run_id(schedule: str, trigger: str) -> str:
    """Return the id of a run that was asked for, on the partition of its schedule."""
    return f"{schedule.rsplit(':', 1)[0]}:{trigger}"


def jitter_ms(schedule: str, instant: int, most_ms: int) -> int:
    """Return by how much an instant is delayed: the same on every machine, different for each schedule and instant."""
    return ids.hash_number(f"{schedule}@{instant}") % most_ms if most_ms > 0 else 0
