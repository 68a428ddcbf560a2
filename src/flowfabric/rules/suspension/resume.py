"""Resume without signals: by an operator, or by the suspension's timeout."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, assert_never

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, Write, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, BlockingReason, LifecyclePhase, PublicState, TerminalOutcome
from flowfabric.model.suspension import NO_TIMEOUT, IdempotencyRecord, Signal, Suspension, TimeoutBehavior
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import cleanup, transitions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.encoding import SignalRef

AUTO_RESUMED = "timed_out_auto_resume"
SCOPE = "resume"
CALL_RECORD_TTL_MS = 2 * 60 * 1000  # how long the outcome of a resume with a lost reply can be found


class Resumed(msgspec.Struct, frozen=True):
    """The execution was resumed and has this public state."""

    public_state: PublicState


class SuspensionExpiry(StrEnum):
    """The result of checking a suspension's timeout."""

    NOT_DUE = "not_due"
    NOT_SUSPENDED = "not_suspended"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    RESUMED = "resumed"
    ESCALATED = "escalated"


def resume_execution(
    row: Execution | None, suspension: Suspension | None, delay_ms: int, call_id: str | None = None
) -> Decision[Resumed]:
    """Resume a suspended execution, no matter what it waits for. Signals received so far are not passed to it.

    No event is emitted. With `call_id` a record is stored: if the reply is lost and the execution waits for something
    else by then, the retry must not resume that wait as well.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.SUSPENDED or suspension is None or not wait_state.is_open(suspension):
        return refuse(errors.ExecutionNotSuspended(execution_id=row.execution_id))
    call_record: tuple[Write, ...] = ()
    if call_id is not None:
        call_record = (Insert(IdempotencyRecord(row.execution_id, SCOPE, call_id, FromNow(CALL_RECORD_TTL_MS), "")),)
    change = _resume_change(
        row, suspension, {"close_reason": wait_state.RESUMED, "satisfied_at": NOW}, delay_ms, call_record
    )
    return Decision(Resumed(PublicState.DELAYED if delay_ms > 0 else PublicState.WAITING), change)


def _resume_change(
    row: Execution,
    suspension: Suspension,
    fields: dict[str, Any],
    delay_ms: int = 0,
    extra_writes: tuple[Write, ...] = (),
) -> Change:
    closed = {"closed_at": NOW, "due_at": None, **fields}
    return Change(
        guards=(seen(row), wait_state.seen_suspension(suspension, row.execution_id)),
        writes=(
            wait_state.resume_row(row, delay_ms, f"resume delay {delay_ms}ms"),
            Patch(Suspension, (row.execution_id,), closed),
            *extra_writes,
        ),
    )


def expire_suspension(
    row: Execution | None, suspension: Suspension | None, signal_id: str, now: int
) -> Decision[SuspensionExpiry]:
    """Apply the timeout behaviour of a suspension that is due; otherwise change nothing. Retries do not apply.

    `signal_id` is the id of the synthetic signal by which a resumed worker sees a timeout.
    """
    if (
        row is None
        or row.lifecycle_phase is not LifecyclePhase.SUSPENDED
        or suspension is None
        or not wait_state.is_open(suspension)
    ):
        return Decision(SuspensionExpiry.NOT_SUSPENDED)
    if suspension.timeout_at is None or suspension.timeout_at > now:
        return Decision(SuspensionExpiry.NOT_DUE)
    behavior = suspension.timeout_behavior or TimeoutBehavior.FAIL
    match behavior:
        case TimeoutBehavior.FAIL:
            answer, change = SuspensionExpiry.FAILED, _terminate(row, suspension, TerminalOutcome.FAILED, behavior)
        case TimeoutBehavior.CANCEL:
            answer, change = (
                SuspensionExpiry.CANCELLED,
                _terminate(row, suspension, TerminalOutcome.CANCELLED, behavior),
            )
        case TimeoutBehavior.EXPIRE:
            answer, change = SuspensionExpiry.EXPIRED, _terminate(row, suspension, TerminalOutcome.EXPIRED, behavior)
        case TimeoutBehavior.AUTO_RESUME:
            answer, change = SuspensionExpiry.RESUMED, _auto_resume(row, suspension, signal_id, now)
        case TimeoutBehavior.ESCALATE:
            answer, change = SuspensionExpiry.ESCALATED, _escalate(row, suspension)
        case _:
            assert_never(behavior)
    return Decision(answer, msgspec.structs.replace(change, not_before=suspension.timeout_at))


def _terminate(row: Execution, suspension: Suspension, outcome: TerminalOutcome, behavior: TimeoutBehavior) -> Change:
    cancelled = outcome is TerminalOutcome.CANCELLED
    reason = f"suspension_timeout:{behavior.value}"
    change = transitions.terminate(
        row,
        outcome,
        attempt=AttemptRecordState.ENDED_CANCELLED if cancelled else AttemptRecordState.ENDED_FAILURE,
        attempt_reason=reason,
        release_reason=reason,
        stream_reason=cleanup.SUSPENSION_TIMEOUT,
        suspension_reason=f"timed_out_{behavior.value}",
        failure_reason=reason,
    )
    return msgspec.structs.replace(
        change, guards=(*change.guards, wait_state.seen_suspension(suspension, row.execution_id))
    )


def _auto_resume(row: Execution, suspension: Suspension, signal_id: str, now: int) -> Change:
    if suspension.waits_on is not None:
        fields, writes = gate_rules.update_gates(
            row,
            suspension,
            {},
            gate_rules.expired_gates(suspension, gate_rules.parked_on(suspension), now),
            reason=AUTO_RESUMED,
        )
        return Change(
            guards=(seen(row), wait_state.seen_suspension(suspension, row.execution_id)),
            writes=(Patch(Suspension, (row.execution_id,), fields), *writes),
        )
    primary = wait_encoding.bound_waitpoints(suspension)[0].waitpoint_id
    signal = Signal(
        execution_id=row.execution_id,
        waitpoint_id=primary,
        seq=0,
        signal_id=signal_id,
        signal_name="timeout",
        signal_category="system",
        source_type="system",
        source_identity="suspension_timeout",
        target_scope="execution",
        created_at=NOW,
        accepted_at=NOW,
        observed_effect=AUTO_RESUMED,
    )
    fields = {
        "close_reason": AUTO_RESUMED,
        "satisfied_at": NOW,
        "closer_signal_id": signal_id,
        "satisfiers": wait_encoding.encode_or_none([SignalRef(primary, 0)]),
    }
    return _resume_change(row, suspension, fields, extra_writes=(Insert(signal),))


def _escalate(row: Execution, suspension: Suspension) -> Change:
    text = f"suspension escalated: timeout at {suspension.timeout_at}"
    paused = transitions.transition(row, {"blocking_reason": BlockingReason.PAUSED_BY_OPERATOR, "blocking_text": text})
    fields = {
        "reason_code": "waiting_for_operator_review",
        "timeout_at": None,
        "timeout_behavior": None,
        "due_at": NO_TIMEOUT,
    }
    return Change(
        guards=(seen(row), wait_state.seen_suspension(suspension, row.execution_id)),
        writes=(paused, Patch(Suspension, (row.execution_id,), fields)),
    )
