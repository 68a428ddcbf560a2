"""The worker registry: which workers are alive, by their own heartbeats.

An expired record behaves exactly like none, whether or not it was swept. A worker's death has no effect on its leases,
which expire by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.ids import fnv1a_64
from flowfabric.model.change import Change, Delete, Guard, Upsert, Write
from flowfabric.model.scheduling.worker import (
    MarkedDead,
    NotRegistered,
    RegisteredWorker,
    ServedTask,
    TaskEntry,
    WorkerEntry,
    WorkerEvent,
    WorkerEventKind,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.scheduling import capabilities

PARTITIONS = 256
EVENT_LIFE_MS = 7 * 24 * 60 * 60 * 1000
MAX_REASON_BYTES = 256


class Registration(msgspec.Struct, frozen=True):
    """The data with which a worker registers."""

    namespace: str
    worker_instance_id: str
    worker_id: str
    lanes: frozenset[str]
    capabilities: frozenset[str]
    liveness_ttl_ms: int
    tasks: tuple[ServedTask, ...] = ()


def is_live(row: RegisteredWorker, now: int) -> bool:
    """True if the record has not expired."""
    return row.lapses_at > now


def register(
    row: RegisteredWorker | None, request: Registration, now: int
) -> Decision[WorkerRegistered | WorkerRefreshed]:
    """Register a worker, or renew its record. An instance cannot change its worker id while it is live."""
    live = row is not None and is_live(row, now)
    if row is not None and live and row.worker_id != request.worker_id:
        return refuse(errors.InvalidInput("instance_id reassigned", worker_instance_id=row.worker_instance_id))
    lapses_at = now + request.liveness_ttl_ms
    record = view_of(
        RegisteredWorker,
        request,
        partition=fnv1a_64(request.worker_instance_id.encode()) % PARTITIONS,
        lanes=msgspec.json.encode(sorted(request.lanes)).decode(),
        capabilities=",".join(sorted(request.capabilities)),
        registered_at_ms=row.registered_at_ms if row is not None and live else now,
        last_heartbeat_ms=now,
        lapses_at=lapses_at,
        tasks=encode_tasks(request.tasks),
    )
    change = _change(record, row, now, WorkerEventKind.REGISTERED, Upsert(record))
    if live:
        return Decision(WorkerRefreshed(request.worker_instance_id, lapses_at), change)
    return Decision(WorkerRegistered(request.worker_instance_id, lapses_at), change)


def heartbeat(
    row: RegisteredWorker | None, worker_instance_id: str, now: int
) -> Decision[WorkerRefreshed | NotRegistered]:
    """Extend the record of a live worker; an expired one is not revived."""
    if row is None or not is_live(row, now):
        return Decision(NotRegistered(worker_instance_id))
    lapses_at = now + row.liveness_ttl_ms
    renewed = msgspec.structs.replace(row, last_heartbeat_ms=now, lapses_at=lapses_at)
    change = _change(row, row, now, WorkerEventKind.HEARTBEAT, Upsert(renewed))
    return Decision(WorkerRefreshed(worker_instance_id, lapses_at), change)


def mark_dead(
    row: RegisteredWorker | None, worker_instance_id: str, reason: str, now: int
) -> Decision[MarkedDead | NotRegistered]:
    """Remove a live worker from the registry; its leases stay."""
    if row is None or not is_live(row, now):
        return Decision(NotRegistered(worker_instance_id))
    change = _change(row, row, now, WorkerEventKind.MARKED_DEAD, Delete(RegisteredWorker, _key(row)), reason)
    return Decision(MarkedDead(worker_instance_id), change)


def remove_expired(row: RegisteredWorker | None, now: int) -> Decision[bool]:
    """Remove an expired record; True if it was removed."""
    if row is None or row.lapses_at >= now:
        return Decision(False)
    return Decision(True, _change(row, row, now, WorkerEventKind.TTL_SWEPT, Delete(RegisteredWorker, _key(row))))


def check_reason(reason: str) -> errors.FabricError | None:
    """Return what is wrong with the reason given for a death."""
    if len(reason.encode()) > MAX_REASON_BYTES:
        return errors.InvalidInput(f"reason: more than {MAX_REASON_BYTES} bytes")
    if any(character < " " or "\x7f" <= character <= "\x9f" for character in reason):
        return errors.InvalidInput("reason: control character")
    return None


def serves(row: RegisteredWorker, lane_id: str, required: str | None) -> bool:
    """True if this worker serves the lane and has all required capabilities."""
    return lane_id in lanes_of(row) and not missing_capabilities(row, required)


def missing_capabilities(row: RegisteredWorker, required: str | None) -> str:
    """Return what this worker lacks of a requirement, sorted and comma-joined."""
    return capabilities.missing(required, capabilities.tokens_of(row.capabilities))


def lanes_of(row: RegisteredWorker) -> tuple[str, ...]:
    """Return the lanes that a worker serves, sorted."""
    return tuple(msgspec.json.decode(row.lanes, type=list[str]))


def worker_view(row: RegisteredWorker) -> WorkerEntry:
    """Return the record for readers."""
    offered = tuple(sorted(capabilities.tokens_of(row.capabilities)))
    return view_of(WorkerEntry, row, lanes=lanes_of(row), capabilities=offered)


def encode_tasks(tasks: Iterable[ServedTask]) -> str | None:
    """Return the column of these tasks; None if there are none."""
    ordered = sorted(tasks, key=lambda task: task.name)
    return msgspec.json.encode(ordered).decode() if ordered else None


def task_entries(rows: Iterable[RegisteredWorker]) -> list[TaskEntry]:
    """Return the tasks of these workers by namespace and name; the worker that registered last describes a task."""
    described: dict[tuple[str, str], tuple[ServedTask, int]] = {}
    for row in sorted(rows, key=lambda row: (row.registered_at_ms, row.worker_instance_id)):
        for task in msgspec.json.decode(row.tasks or "[]", type=list[ServedTask]):
            _, before = described.get((row.namespace, task.name), (task, 0))
            described[row.namespace, task.name] = (task, before + 1)
    return [
        TaskEntry(
            namespace=namespace,
            name=name,
            lane=task.lane,
            workers=workers,
            input_schema=_schema(task.input_schema),
            result_schema=_schema(task.result_schema),
        )
        for (namespace, name), (task, workers) in sorted(described.items(), key=lambda item: item[0])
    ]


def _schema(text: str | None) -> dict[str, Any] | None:
    return None if text is None else msgspec.json.decode(text, type=dict[str, Any])


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
    """Return the change with its log event. It commits only while the record is as live, or as expired, as it was
    loaded."""
    event = WorkerEvent(row.namespace, row.worker_instance_id, now, kind.value, now + EVENT_LIFE_MS, reason)
    bounds: dict[str, Any] = {}
    if seen is not None:
        bounds = {"not_after": seen.lapses_at - 1} if is_live(seen, now) else {"not_before": seen.lapses_at}
    guard = Guard(RegisteredWorker, _key(row), None if seen is None else seen.revision)
    return Change(guards=(guard,), writes=(write, Upsert(event)), **bounds)
