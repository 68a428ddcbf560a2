"""The worker registry: who is alive, by its own word and for a while.

A lapsed record behaves exactly like none, whether or not it was swept. Death has no effect on leases: they end by
their own time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.ids import fnv1a_64
from flowfabric.model.change import Change, Delete, Guard, Upsert, Write
from flowfabric.model.worker import (
    MarkedDead,
    NotRegistered,
    RegisteredWorker,
    WorkerEntry,
    WorkerEvent,
    WorkerEventKind,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.scheduling import capabilities

PARTITIONS = 256
EVENT_LIFE_MS = 7 * 24 * 60 * 60 * 1000
MAX_REASON_BYTES = 256


class Registration(msgspec.Struct, frozen=True):
    """What a worker says of itself."""

    namespace: str
    worker_instance_id: str
    worker_id: str
    lanes: frozenset[str]
    capabilities: frozenset[str]
    liveness_ttl_ms: int


def is_live(row: RegisteredWorker, now: int) -> bool:
    """Whether the record counts."""
    return row.lapses_at > now


def register(row: RegisteredWorker | None, ask: Registration, now: int) -> Decision[WorkerRegistered | WorkerRefreshed]:
    """Enter the registry, or renew what stands there under the same worker; an instance cannot change its worker."""
    live = row is not None and is_live(row, now)
    if row is not None and live and row.worker_id != ask.worker_id:
        return refuse(errors.InvalidInput("instance_id reassigned", worker_instance_id=row.worker_instance_id))
    lapses_at = now + ask.liveness_ttl_ms
    entered = RegisteredWorker(
        namespace=ask.namespace,
        worker_instance_id=ask.worker_instance_id,
        partition=fnv1a_64(ask.worker_instance_id.encode()) % PARTITIONS,
        worker_id=ask.worker_id,
        lanes=msgspec.json.encode(sorted(ask.lanes)).decode(),
        capabilities=",".join(sorted(ask.capabilities)),
        liveness_ttl_ms=ask.liveness_ttl_ms,
        registered_at_ms=row.registered_at_ms if row is not None and live else now,
        last_heartbeat_ms=now,
        lapses_at=lapses_at,
    )
    change = _change(entered, row, now, WorkerEventKind.REGISTERED, Upsert(entered))
    if live:
        return Decision(WorkerRefreshed(ask.worker_instance_id, lapses_at), change)
    return Decision(WorkerRegistered(ask.worker_instance_id, lapses_at), change)


def heartbeat(
    row: RegisteredWorker | None, worker_instance_id: str, now: int
) -> Decision[WorkerRefreshed | NotRegistered]:
    """A live worker says that it is; one that lapsed is not revived."""
    if row is None or not is_live(row, now):
        return Decision(NotRegistered(worker_instance_id))
    lapses_at = now + row.liveness_ttl_ms
    beating = msgspec.structs.replace(row, last_heartbeat_ms=now, lapses_at=lapses_at)
    change = _change(row, row, now, WorkerEventKind.HEARTBEAT, Upsert(beating))
    return Decision(WorkerRefreshed(worker_instance_id, lapses_at), change)


def mark_dead(
    row: RegisteredWorker | None, worker_instance_id: str, reason: str, now: int
) -> Decision[MarkedDead | NotRegistered]:
    """Take a live worker out of the registry; its leases are not touched."""
    if row is None or not is_live(row, now):
        return Decision(NotRegistered(worker_instance_id))
    change = _change(row, row, now, WorkerEventKind.MARKED_DEAD, Delete(RegisteredWorker, _key(row)), reason)
    return Decision(MarkedDead(worker_instance_id), change)


def remove_expired(row: RegisteredWorker | None, now: int) -> Decision[bool]:
    """Remove a record that lapsed; True when it went."""
    if row is None or row.lapses_at >= now:
        return Decision(False)
    return Decision(True, _change(row, row, now, WorkerEventKind.TTL_SWEPT, Delete(RegisteredWorker, _key(row))))


def check_reason(reason: str) -> errors.FabricError | None:
    """What is wrong with the reason for a death."""
    if len(reason.encode()) > MAX_REASON_BYTES:
        return errors.InvalidInput(f"reason: more than {MAX_REASON_BYTES} bytes")
    if any(character < " " or "\x7f" <= character <= "\x9f" for character in reason):
        return errors.InvalidInput("reason: control character")
    return None


def serves(row: RegisteredWorker, lane_id: str, required: str | None) -> bool:
    """Whether this worker serves the lane and has everything that is required."""
    return lane_id in lanes_of(row) and not missing_capabilities(row, required)


def missing_capabilities(row: RegisteredWorker, required: str | None) -> str:
    """What this worker is missing of a requirement, sorted and comma-joined."""
    return capabilities.missing(required, capabilities.tokens_of(row.capabilities))


def lanes_of(row: RegisteredWorker) -> tuple[str, ...]:
    """The lanes that a worker serves, sorted."""
    return tuple(msgspec.json.decode(row.lanes, type=list[str]))


def worker_view(row: RegisteredWorker) -> WorkerEntry:
    """The record for readers."""
    return WorkerEntry(
        row.namespace,
        row.worker_instance_id,
        row.worker_id,
        lanes_of(row),
        tuple(sorted(capabilities.tokens_of(row.capabilities))),
        row.liveness_ttl_ms,
        row.registered_at_ms,
        row.last_heartbeat_ms,
    )


def _key(row: RegisteredWorker) -> tuple[str, str]:
    return row.namespace, row.worker_instance_id


def _change(
    row: RegisteredWorker,
    seen: RegisteredWorker | None,
    now: int,
    kind: WorkerEventKind,
    write: Write,
    reason: str | None = None,
) -> Change:
    """The change with its entry in the log; it holds only while the record is as live, or as lapsed, as it was seen."""
    event = WorkerEvent(row.namespace, row.worker_instance_id, now, kind.value, now + EVENT_LIFE_MS, reason)
    bounds: dict[str, Any] = {}
    if seen is not None:
        bounds = {"not_after": seen.lapses_at - 1} if is_live(seen, now) else {"not_before": seen.lapses_at}
    guard = Guard(RegisteredWorker, _key(row), None if seen is None else seen.revision)
    return Change(guards=(guard,), writes=(write, Upsert(event)), **bounds)
