"""The worker registry: who is alive, what it serves, and the log of its comings and goings."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Worker(msgspec.Struct, frozen=True):
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
