"""Other ways out of a suspension: an operator's word, and the timeout."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, assert_never

import msgspec

from flowfabric import errors
from flowfabric.model.change import NOW, Change, Insert, Patch, Write, at, seen
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptRecordState, BlockingReason, LifecyclePhase, PublicState, TerminalOutcome
from flowfabric.model.suspension import NO_TIMEOUT, Remembered, Signal, Suspension, TimeoutBehavior
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import cleanup, transitions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.encoding import Place

AUTO_RESUMED = "timed_out_auto_resume"
SCOPE = "resume"
TRACE_LIFE_MS = 2 * 60 * 1000  # how long a resume can be asked for after its answer got lost


class Resumed(msgspec.Struct, frozen=True):
    public_state: PublicState


class Expiry(StrEnum):
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
        trace = (Insert(Remembered(row.execution_id, SCOPE, call_id, at(TRACE_LIFE_MS), "")),)
    change = _resumed(row, root, {"close_reason": wait_state.RESUMED, "satisfied_at": NOW}, delay_ms, trace)
    return Decision(Resumed(PublicState.DELAYED if delay_ms > 0 else PublicState.WAITING), change)


def _resumed(
    row: Execution, root: Suspension, fields: dict[str, Any], delay_ms: int = 0, also: tuple[Write, ...] = ()
) -> Change:
    closed = {"closed_at": NOW, "due_at": None, **fields}
    return Change(
        guards=(seen(row), wait_state.guard_of(root, row.execution_id)),
        writes=(
            wait_state.resumption(row, delay_ms, f"resume delay {delay_ms}ms"),
            Patch(Suspension, (row.execution_id,), closed),
            *also,
        ),
    )


def expire_suspension(row: Execution | None, root: Suspension | None, signal_id: str, now: int) -> Decision[Expiry]:
    """Do what the suspension wants done when its time is over; nothing before that. Retries are not asked.

    `signal_id` is for the signal by which a worker that is resumed can tell that nobody signalled.
    """
    if (
        row is None
        or row.lifecycle_phase is not LifecyclePhase.SUSPENDED
        or root is None
        or not wait_state.is_open(root)
    ):
        return Decision(Expiry.NOT_SUSPENDED)
    if root.timeout_at is None or root.timeout_at > now:
        return Decision(Expiry.NOT_DUE)
    behavior = root.timeout_behavior or TimeoutBehavior.FAIL
    match behavior:
        case TimeoutBehavior.FAIL:
            answer, change = Expiry.FAILED, _ended(row, root, TerminalOutcome.FAILED, behavior)
        case TimeoutBehavior.CANCEL:
            answer, change = Expiry.CANCELLED, _ended(row, root, TerminalOutcome.CANCELLED, behavior)
        case TimeoutBehavior.EXPIRE:
            answer, change = Expiry.EXPIRED, _ended(row, root, TerminalOutcome.EXPIRED, behavior)
        case TimeoutBehavior.AUTO_RESUME:
            answer, change = Expiry.RESUMED, _auto_resumed(row, root, signal_id, now)
        case TimeoutBehavior.ESCALATE:
            answer, change = Expiry.ESCALATED, _escalated(row, root)
        case _:
            assert_never(behavior)
    return Decision(answer, msgspec.structs.replace(change, not_before=root.timeout_at))


def _ended(row: Execution, root: Suspension, outcome: TerminalOutcome, behavior: TimeoutBehavior) -> Change:
    cancelled = outcome is TerminalOutcome.CANCELLED
    reason = f"suspension_timeout:{behavior.value}"
    change = transitions.ended(
        row,
        outcome,
        attempt=AttemptRecordState.ENDED_CANCELLED if cancelled else AttemptRecordState.ENDED_FAILURE,
        attempt_reason=reason,
        released=reason,
        stream=cleanup.SUSPENSION_TIMEOUT,
        suspension=f"timed_out_{behavior.value}",
        failure_reason=reason,
    )
    return msgspec.structs.replace(change, guards=(*change.guards, wait_state.guard_of(root, row.execution_id)))


def _auto_resumed(row: Execution, root: Suspension, signal_id: str, now: int) -> Change:
    if root.waits_on is not None:
        fields, writes = gate_rules.moved_on(
            row, root, {}, gate_rules.past(root, gate_rules.waits_on(root), now), reason=AUTO_RESUMED
        )
        return Change(
            guards=(seen(row), wait_state.guard_of(root, row.execution_id)),
            writes=(Patch(Suspension, (row.execution_id,), fields), *writes),
        )
    primary = wait_encoding.bound(root)[0].waitpoint_id
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
        created_at=at(0),
        accepted_at=at(0),
        observed_effect=AUTO_RESUMED,
    )
    fields = {
        "close_reason": AUTO_RESUMED,
        "satisfied_at": NOW,
        "closer_signal_id": signal_id,
        "satisfiers": wait_encoding.written([Place(primary, 0)]),
    }
    return _resumed(row, root, fields, also=(Insert(signal),))


def _escalated(row: Execution, root: Suspension) -> Change:
    text = f"suspension escalated: timeout at {root.timeout_at}"
    paused = transitions.moved(row, {"blocking_reason": BlockingReason.PAUSED_BY_OPERATOR, "blocking_text": text})
    fields = {
        "reason_code": "waiting_for_operator_review",
        "timeout_at": None,
        "timeout_behavior": None,
        "due_at": NO_TIMEOUT,
    }
    return Change(
        guards=(seen(row), wait_state.guard_of(root, row.execution_id)),
        writes=(paused, Patch(Suspension, (row.execution_id,), fields)),
    )
