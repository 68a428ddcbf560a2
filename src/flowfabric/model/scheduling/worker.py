"""Rows of the worker registry: live workers, what they serve, and the log of registrations."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

STOPPED = "stopped"  # reason of a worker that shuts down


class RegisteredWorker(msgspec.Struct, frozen=True):
    """One instance of a worker. An expired record counts as none, swept or not."""

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
    tasks: str | None = None  # a JSON array of `ServedTask`, by name; None if the worker has reported none
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
    expires_at: int  # when the entry is deleted
    reason: str | None = None


class WorkerRegistered(msgspec.Struct, frozen=True):
    """The worker has a new record."""

    worker_instance_id: str
    expires_at_ms: int


class WorkerRefreshed(msgspec.Struct, frozen=True):
    """The live record was extended."""

    worker_instance_id: str
    next_expiry_ms: int


class NotRegistered(msgspec.Struct, frozen=True):
    """There is no live record of this instance."""

    worker_instance_id: str


class MarkedDead(msgspec.Struct, frozen=True):
    worker_instance_id: str


class WorkerEntry(msgspec.Struct, frozen=True):
    """A live worker as shown to readers."""

    namespace: str
    worker_instance_id: str
    worker_id: str
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    liveness_ttl_ms: int
    registered_at_ms: int
    last_heartbeat_ms: int


class ServedTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task that a worker runs: its lane by default, and JSON schemas of its input and its result, as text."""

    name: str
    lane: str = "default"
    input_schema: str | None = None
    result_schema: str | None = None


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A task that live workers run, as the one that registered last describes it."""

    namespace: str
    name: str
    lane: str
    workers: int  # how many run it
    input_schema: dict[str, Any] | None = None
    result_schema: dict[str, Any] | None = None


class TaskList(msgspec.Struct, frozen=True):
    """The tasks of live workers by namespace and name; incomplete if there are more workers than one call reads."""

    tasks: list[TaskEntry]
    complete: bool = True


class WorkerPage(msgspec.Struct, frozen=True):
    """Live workers by instance id, and the cursor of the next page if there is one."""

    entries: list[WorkerEntry]
    cursor: str | None = None
