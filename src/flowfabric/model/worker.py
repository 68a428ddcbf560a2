"""The worker registry: who is alive, what it serves, and the log of its comings and goings."""

from __future__ import annotations

from enum import StrEnum

import msgspec

STOPPED = "stopped"  # the reason of a worker that leaves the registry by itself


class RegisteredWorker(msgspec.Struct, frozen=True):
    """One instance of a worker. A lapsed record is as good as none, swept or not."""

    namespace: str
    worker_instance_id: str
    partition: int
    worker_id: str
    lanes: str  # a sorted JSON array
    capabilities: str  # sorted, comma-joined
    liveness_ttl_ms: int
    registered_at_ms: int
    last_heartbeat_ms: int
    lapses_at: int  # last heartbeat + ttl: it is live before this instant
    revision: int = 0


class WorkerEventKind(StrEnum):
    REGISTERED = "registered"
    HEARTBEAT = "heartbeat"
    MARKED_DEAD = "marked_dead"
    TTL_SWEPT = "ttl_swept"


class WorkerEvent(msgspec.Struct, frozen=True):
    """An entry of the registry's log; the same event in the same millisecond is one entry."""

    namespace: str
    worker_instance_id: str
    event_at_ms: int
    event_kind: str  # a WorkerEventKind
    expires_at: int  # when the log forgets it
    reason: str | None = None


class WorkerRegistered(msgspec.Struct, frozen=True):
    """A new record."""

    worker_instance_id: str
    expires_at_ms: int


class WorkerRefreshed(msgspec.Struct, frozen=True):
    """A live record lives on."""

    worker_instance_id: str
    next_expiry_ms: int


class NotRegistered(msgspec.Struct, frozen=True):
    """There is no live record of this instance."""

    worker_instance_id: str


class MarkedDead(msgspec.Struct, frozen=True):
    worker_instance_id: str


class WorkerEntry(msgspec.Struct, frozen=True):
    """A live worker for readers."""

    namespace: str
    worker_instance_id: str
    worker_id: str
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    liveness_ttl_ms: int
    registered_at_ms: int
    last_heartbeat_ms: int


class WorkerPage(msgspec.Struct, frozen=True):
    """Live workers by instance id, and the cursor of the next page when there is one."""

    entries: list[WorkerEntry]
    cursor: str | None = None
