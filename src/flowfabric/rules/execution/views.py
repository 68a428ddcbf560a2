"""Views: an execution and its attempts as readers and the API see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.event import Event, FeedEvent
from flowfabric.model.execution import Attempt, Execution, Payload
from flowfabric.model.failure import read_failure
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    AttemptType,
    BlockingReason,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.model.text import first_line
from flowfabric.model.view import view_of
from flowfabric.rules.execution import lease
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.expire import ATTEMPT_TIMEOUT
from flowfabric.rules.execution.policy import decode_terms

TIMEOUT = "timeout"  # failure category of a handler that its worker stopped


class AttemptOutcome(StrEnum):
    """How an attempt ended, as reported in metrics."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    RETRY = "retry"


def attempt_outcome(outcome: str | None, ended: Attempt | None) -> AttemptOutcome | None:
    """Return how an attempt ended; None if it has not ended on its own.

    `outcome` is the terminal outcome of the execution, None while it lives. `ended` is the record of the attempt. A
    successful attempt leaves no record, and a reclaimed attempt has no outcome.
    """
    if outcome == TerminalOutcome.SUCCESS:
        return AttemptOutcome.OK
    if ended is None:
        return None
    if outcome is None:
        return AttemptOutcome.RETRY if ended.attempt_state is AttemptRecordState.ENDED_FAILURE else None
    if ended.attempt_state is AttemptRecordState.ENDED_CANCELLED:
        return AttemptOutcome.CANCELLED
    if ended.failure_category == TIMEOUT or ended.failure_reason == ATTEMPT_TIMEOUT:
        return AttemptOutcome.TIMEOUT
    return AttemptOutcome.ERROR


REPLAY_INITIATED = "replay_initiated"


class CurrentAttempt(msgspec.Struct, frozen=True):
    """The attempt that is running or interrupted."""

    attempt_id: str
    attempt_index: int


class CurrentLease(msgspec.Struct, frozen=True):
    """The lease that is held."""

    lease_epoch: int
    worker_instance_id: str
    expires_at: int
    lease_id: str
    attempt_index: int
    last_heartbeat_at: int | None


class ExecutionSnapshot(msgspec.Struct, frozen=True):
    """An execution as shown to people."""

    execution_id: str
    flow_id: str | None
    lane_id: str
    namespace: str
    public_state: PublicState
    blocking_reason: BlockingReason | None
    blocking_detail: str | None
    current_attempt: CurrentAttempt | None
    current_lease: CurrentLease | None
    current_waitpoint: str | None
    created_at: int
    last_mutation_at: int
    total_attempt_count: int
    tags: dict[str, str]
    priority: int
    started_at: int | None
    ended_at: int | None
    delay_until: int | None
    parent_id: str | None
    reason: str | None  # the first line of its failure or cancellation
    life: int  # how often it continued as new
    idempotency_key: str | None  # with which it was created
    unread: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # messages that it has not received; not in lists


class ExecutionListing(ExecutionSnapshot, frozen=True, kw_only=True):
    """An execution in a list, with its kind; `blocking_detail` is cut to its first line."""

    execution_kind: str
    worker_instance_id: str | None  # the worker that holds it, or that held it last
    progress_pct: int | None


class StateVector(msgspec.Struct, frozen=True):
    """The seven state dimensions by name."""

    lifecycle_phase: str
    ownership_state: str
    eligibility_state: str
    blocking_reason: str
    terminal_outcome: str
    attempt_state: str
    public_state: str


class ExecutionInfo(msgspec.Struct, frozen=True):
    """An execution as the API returns it; the API omits unset optional fields."""

    execution_id: str
    namespace: str
    lane_id: str
    priority: int
    execution_kind: str
    state_vector: StateVector
    public_state: PublicState
    created_at: int
    started_at: int | None
    completed_at: int | None
    current_attempt_index: int
    flow_id: str | None
    blocking_detail: str


class ExecutionContext(msgspec.Struct, frozen=True):
    """The data a handler needs to start."""

    input_payload: bytes
    execution_kind: str
    tags: dict[str, str]


class ExecutionInput(msgspec.Struct, frozen=True):
    """The input of an execution and the other constants of its creation."""

    execution_kind: str
    payload: bytes
    encoding: str | None
    creator_identity: str
    policy: dict[str, Any] | None


def execution_input(payload: Payload) -> ExecutionInput:
    """Return the input of an execution. Raises `Corruption` if the stored policy is not valid."""
    try:
        policy = None if payload.policy is None else msgspec.json.decode(payload.policy, type=dict[str, Any])
    except msgspec.DecodeError as fault:
        raise errors.Corruption(f"payload: policy: {fault}") from fault
    return ExecutionInput(
        payload.execution_kind,
        payload.input_payload or b"",
        payload.payload_encoding,
        payload.creator_identity,
        policy,
    )


def blocking_detail(row: Execution) -> str:
    """Return why the execution waits, as text. A detail that names an instant is built from the column."""
    match row.blocking_reason:
        case BlockingReason.WAITING_FOR_RETRY_BACKOFF:
            return f"retry backoff until {row.delay_until} (attempt {row.attempt_index} failed: {row.failure_reason})"
        case BlockingReason.WAITING_FOR_DELAY:
            return f"delayed until {row.delay_until}"
        case _:
            return row.blocking_text or ""


def last_mutation_at(row: Execution) -> int:
    """Return the time of the last write; a renewal only writes `lease_renewed_at`."""
    return max(row.last_mutation_at, row.lease_renewed_at or 0)


def renewal_deadline(row: Execution) -> int | None:
    """Return when the holder should have renewed: after two thirds of the lease."""
    if row.lease_expires_at is None or row.lease_renewed_at is None:
        return None
    return row.lease_renewed_at + (row.lease_expires_at - row.lease_renewed_at) * 2 // 3


def make_state_vector(row: Execution) -> StateVector:
    """Return the state vector of a row."""
    return StateVector(**{name: getattr(row, name).value for name in StateVector.__struct_fields__})


def execution_snapshot(row: Execution, unread: dict[str, int] | msgspec.UnsetType = msgspec.UNSET) -> ExecutionSnapshot:
    """Return the execution as shown to people."""
    attempt = None
    if row.attempt_id is not None and row.attempt_index is not None:
        attempt = CurrentAttempt(row.attempt_id, row.attempt_index)
    current_lease = None
    if row.ownership_state is not OwnershipState.UNOWNED and row.lease_expires_at is not None:
        current_lease = CurrentLease(
            row.lease_epoch,
            row.worker_instance_id or "",
            row.lease_expires_at,
            row.lease_id or "",
            row.attempt_index or 0,
            row.lease_renewed_at,
        )
    return view_of(
        ExecutionSnapshot,
        row,
        blocking_reason=None if row.blocking_reason is BlockingReason.NONE else row.blocking_reason,
        blocking_detail=blocking_detail(row) or None,
        current_attempt=attempt,
        current_lease=current_lease,
        current_waitpoint=row.current_waitpoint_id,
        last_mutation_at=last_mutation_at(row),
        tags=tag_rules.decode_tags(row.tags),
        ended_at=row.completed_at,
        reason=failure_line(row),
        unread=unread,
        life=row.life or 0,
    )


def failure_line(row: Execution) -> str | None:
    """Return the first line of the failure or cancellation; None if it succeeded or nothing has failed."""
    if row.terminal_outcome is TerminalOutcome.SUCCESS:
        return None  # the reason is of an earlier attempt
    return first_line(row.failure_reason or row.cancellation_reason) or None


def execution_listing(row: Execution, kind: str) -> ExecutionListing:
    """Return the execution as lists show it."""
    snapshot = execution_snapshot(row)
    return view_of(
        ExecutionListing,
        snapshot,
        blocking_detail=first_line(snapshot.blocking_detail) or None,
        execution_kind=kind,
        worker_instance_id=row.worker_instance_id,
        progress_pct=row.progress_pct,
    )


def execution_info(row: Execution, payload: Payload) -> ExecutionInfo:
    """Return the execution as the API returns it."""
    return view_of(
        ExecutionInfo,
        row,
        execution_kind=payload.execution_kind,
        state_vector=make_state_vector(row),
        current_attempt_index=row.attempt_index or 0,
        blocking_detail=blocking_detail(row),
    )


def attempt_views(row: Execution | None, ended: Iterable[Attempt]) -> list[AttemptView]:
    """Return all attempts by index: the recorded ones, then the one in the execution's columns."""
    views = [_attempt_view(attempt) for attempt in ended]
    if row is None:
        return views
    if lease.holds_successful_attempt(row):
        record = lease.attempt_record(row, AttemptRecordState.ENDED_SUCCESS, ended_at=row.completed_at)
        assert isinstance(record.row, Attempt)
        return [*views, _attempt_view(record.row)]
    if not lease.has_open_attempt(row):
        return views
    is_suspended = row.attempt_suspended_at is not None
    views.append(
        AttemptView(
            execution_id=row.execution_id,
            attempt_index=row.attempt_index or 0,
            attempt_id=row.attempt_id or "",
            attempt_type=row.attempt_type or AttemptType.INITIAL,
            attempt_state=AttemptRecordState.SUSPENDED if is_suspended else AttemptRecordState.STARTED,
            created_at=row.attempt_started_at or 0,
            started_at=row.attempt_started_at or 0,
            lease_id=row.lease_id or "",
            lease_epoch=row.lease_epoch,
            worker_id=row.worker_id or "",
            worker_instance_id=row.worker_instance_id or "",
            lineage=lease.decode_lineage(row.lineage),
            suspended_at=row.attempt_suspended_at,
            suspension_id=row.attempt_suspension,
            resumed_at=row.attempt_resumed_at,
        )
    )
    return views


def current_history(row: Execution, history: Sequence[FeedEvent]) -> Sequence[FeedEvent]:
    """Return the lease events of this execution, without those of an earlier execution with the same id.

    Events outlive a purge, and clocks can be set back, so timestamps do not tell the two apart. But an execution begins
    with its first lease, and before that it can only have been replayed.
    """
    start = len(history)
    if row.lease_epoch:
        first_leases = (index for index in reversed(range(len(history))) if _is_first_lease(history[index].event))
        start = next(first_leases, 0)  # 0: events of the first lease were trimmed, and so was everything older
    current = history[start:]
    replays = row.replay_count - sum(entry.event.lease == REPLAY_INITIATED for entry in current)
    before = [entry for entry in history[:start] if entry.event.lease == REPLAY_INITIATED]
    return [*before[-replays:], *current] if replays > 0 else current


def _is_first_lease(event: Event) -> bool:
    return event.lease == "acquired" and event.lease_epoch == 1


def core_fields(row: Execution, payload: Payload) -> dict[str, Any]:
    """Return the core record by wire names, without unset fields."""
    owned = row.ownership_state is not OwnershipState.UNOWNED
    pending = row.attempt_state in (AttemptState.PENDING_RETRY_ATTEMPT, AttemptState.PENDING_REPLAY_ATTEMPT)
    lineage = lease.decode_lineage(row.lineage if pending else None)
    terms = decode_terms(row.terms)
    fields: dict[str, Any] = {
        "execution_id": row.execution_id,
        "namespace": row.namespace,
        "lane_id": row.lane_id,
        "execution_kind": payload.execution_kind,
        "partition_id": row.partition,
        "priority": row.priority,
        "creator_identity": payload.creator_identity,
        **msgspec.structs.asdict(make_state_vector(row)),
        "blocking_detail": blocking_detail(row) or None,
        "total_attempt_count": row.total_attempt_count,
        "retry_count": row.retry_count,
        "replay_count": row.replay_count,
        "lease_reclaim_count": row.lease_reclaim_count,
        "current_attempt_index": row.attempt_index,
        "current_attempt_id": row.attempt_id,
        "current_lease_id": row.lease_id if owned else None,
        "current_lease_epoch": row.lease_epoch,
        "current_worker_id": row.worker_id if owned else None,
        "current_worker_instance_id": row.worker_instance_id if owned else None,
        "current_lane": row.current_lane,
        "created_at": row.created_at,
        "started_at": row.started_at,
        "completed_at": row.completed_at,
        "last_transition_at": row.last_transition_at,
        "last_mutation_at": last_mutation_at(row),
        "lease_acquired_at": row.lease_acquired_at,
        "lease_expires_at": row.lease_expires_at,
        "lease_last_renewed_at": row.lease_renewed_at if owned else None,
        "lease_renewal_deadline": renewal_deadline(row) if owned else None,
        "lease_expired_at": row.lease_expired_at,
        "lease_revoked_at": row.lease_revoked_at,
        "lease_revoke_reason": row.lease_revoke_reason,
        "delay_until": row.delay_until,
        "execution_deadline_at": row.deadline_at,
        "attempt_timeout_at": row.attempt_timeout_at,
        "pending_retry_reason": lineage.retry_reason,
        "pending_replay_reason": lineage.replay_reason,
        "pending_replay_requested_by": lineage.replay_requested_by,
        "pending_previous_attempt_index": row.attempt_index if pending else None,
        "progress_pct": row.progress_pct,
        "progress_message": row.progress_message,
        "progress_updated_at": row.progress_updated_at,
        "flow_id": row.flow_id,
        "required_capabilities": row.required_capabilities,
        "failure_reason": row.failure_reason,
        "cancellation_reason": row.cancellation_reason,
        "cancelled_by": row.cancelled_by,
        "last_capability_mismatch_at": row.last_capability_mismatch_at,
        "current_suspension_id": row.current_suspension_id,
        "current_waitpoint_id": row.current_waitpoint_id,
        "last_hmac_validation_failed_at": row.last_hmac_validation_failed_at,
        "budget_ids": ",".join(terms.budget_ids) or None,
        "quota_policy_id": ",".join(terms.quota_policy_ids) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _attempt_view(attempt: Attempt) -> AttemptView:
    error = None if attempt.failure is None else read_failure(attempt.failure)
    lineage = lease.decode_lineage(attempt.lineage)
    return view_of(AttemptView, attempt, created_at=attempt.started_at, lineage=lineage, error=error)
