"""Other ways out of a suspension: an operator's word, and the timeout."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, assert_never

import msgspec

from flowfabric import errors
from flowfabric.model.change import NOW, Change, Insert, Patch, Write, from_now, seen
from flowfabric.model.execution import Execution
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
TRACE_LIFE_MS = 2 * 60 * 1000  # how long a resume can be asked for after its answer got lost


class Resumed(msgspec.Struct, frozen=True):
    public_state: PublicState


class SuspensionExpiry(StrEnum):
    """What became of a suspension whose timeout was looked at."""

    NOT_DUE = "not_due"
    NOT_SUSPENDED = "not_suspended"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    RESUMED = "resumed"
    ESCALATED = "escalated"


def resume_execution(
    row: Execution | None, root: Suspension | None, delay_ms: int, call_id: str | None = None
) -> Decision[Resumed]:
    """Let a suspended execution go on, whatever it waits for. The signals that came so far are not handed to it.

    No feed tells of it. A call that names itself leaves a trace: when its answer gets lost, and the work waits for
    something else by the time somebody looks, it must not be resumed from that as well.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.SUSPENDED or root is None or not wait_state.is_open(root):
        return refuse(errors.ExecutionNotSuspended(execution_id=row.execution_id))
    trace: tuple[Write, ...] = ()
    if call_id is not None:
        trace = (Insert(IdempotencyRecord(row.execution_id, SCOPE, call_id, from_now(TRACE_LIFE_MS), "")),)
    change = _resumed(row, root, {"close_reason": wait_state.RESUMED, "satisfied_at": NOW}, delay_ms, trace)
    return Decision(Resumed(PublicState.DELAYED if delay_ms > 0 else PublicState.WAITING), change)


def _resumed(
    row: Execution, root: Suspension, fields: dict[str, Any], delay_ms: int = 0, also: tuple[Write, ...] = ()
) -> Change:
    closed = {"closed_at": NOW, "due_at": None, **fields}
    return Change(
        guards=(seen(row), wait_state.seen_suspension(root, row.execution_id)),
        writes=(
            wait_state.resume_row(row, delay_ms, f"resume delay {delay_ms}ms"),
            Patch(Suspension, (row.execution_id,), closed),
            *also,
        ),
    )


def expire_suspension(
    row: Execution | None, root: Suspension | None, signal_id: str, now: int
) -> Decision[SuspensionExpiry]:
    """Do what the suspension wants done when its time is over; nothing before that. Retries are not asked.

    `signal_id` is for the signal by which a worker that is resumed can tell that nobody signalled.
    """
    if (
        row is None
        or row.lifecycle_phase is not LifecyclePhase.SUSPENDED
        or root is None
        or not wait_state.is_open(root)
    ):
        return Decision(SuspensionExpiry.NOT_SUSPENDED)
    if root.timeout_at is None or root.timeout_at > now:
        return Decision(SuspensionExpiry.NOT_DUE)
    behavior = root.timeout_behavior or TimeoutBehavior.FAIL
    match behavior:
        case TimeoutBehavior.FAIL:
            answer, change = SuspensionExpiry.FAILED, _ended(row, root, TerminalOutcome.FAILED, behavior)
        case TimeoutBehavior.CANCEL:
            answer, change = SuspensionExpiry.CANCELLED, _ended(row, root, TerminalOutcome.CANCELLED, behavior)
        case TimeoutBehavior.EXPIRE:
            answer, change = SuspensionExpiry.EXPIRED, _ended(row, root, TerminalOutcome.EXPIRED, behavior)
        case TimeoutBehavior.AUTO_RESUME:
            answer, change = SuspensionExpiry.RESUMED, _auto_resumed(row, root, signal_id, now)
        case TimeoutBehavior.ESCALATE:
            answer, change = SuspensionExpiry.ESCALATED, _escalated(row, root)
        case _:
            assert_never(behavior)
    return Decision(answer, msgspec.structs.replace(change, not_before=root.timeout_at))


def _ended(row: Execution, root: Suspension, outcome: TerminalOutcome, behavior: TimeoutBehavior) -> Change:
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
    return msgspec.structs.replace(change, guards=(*change.guards, wait_state.seen_suspension(root, row.execution_id)))


def _auto_resumed(row: Execution, root: Suspension, signal_id: str, now: int) -> Change:
    if root.waits_on is not None:
        fields, writes = gate_rules.update_gates(
            row, root, {}, gate_rules.expired_gates(root, gate_rules.parked_on(root), now), reason=AUTO_RESUMED
        )
        return Change(
            guards=(seen(row), wait_state.seen_suspension(root, row.execution_id)),
            writes=(Patch(Suspension, (row.execution_id,), fields), *writes),
        )
    primary = wait_encoding.bound_waitpoints(root)[0].waitpoint_id
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
        created_at=from_now(0),
        accepted_at=from_now(0),
        observed_effect=AUTO_RESUMED,
    )
    fields = {
        "close_reason": AUTO_RESUMED,
        "satisfied_at": NOW,
        "closer_signal_id": signal_id,
        "satisfiers": wait_encoding.encode_or_none([SignalRef(primary, 0)]),
    }
    return _resumed(row, root, fields, also=(Insert(signal),))


def _escalated(row: Execution, root: Suspension) -> Change:
    text = f"suspension escalated: timeout at {root.timeout_at}"
    paused = transitions.transition(row, {"blocking_reason": BlockingReason.PAUSED_BY_OPERATOR, "blocking_text": text})
    fields = {
        "reason_code": "waiting_for_operator_review",
        "timeout_at": None,
        "timeout_behavior": None,
        "due_at": NO_TIMEOUT,
    }
    return Change(
        guards=(seen(row), wait_state.seen_suspension(root, row.execution_id)),
        writes=(paused, Patch(Suspension, (row.execution_id,), fields)),
    )
