"""State shared by suspend, signal and resume: which waitpoints and gates are open, and how a row resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric.model.change import Guard, Patch, Write
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Gate
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.suspension import NO_TIMEOUT, Signal, Suspension, Waitpoint, WaitpointState
from flowfabric.model.view import view_of
from flowfabric.rules.execution import transitions
from flowfabric.rules.scheduling import queue
from flowfabric.rules.suspension import encoding as wait_encoding

RESUMED = "resumed"
NEVER_COMMITTED = "never_committed"
# Columns of the suspension row that belong to the execution, not to one of its suspensions.
KEPT_COLUMNS = ("signal_count", "gates", "asks_until", "mail", "message_count", "inbox_closed_at")


def is_open(suspension: Suspension | None) -> bool:
    """True if the execution waits on a suspension."""
    return suspension is not None and suspension.suspension_id is not None and suspension.closed_at is None


def seen_suspension(suspension: Suspension | None, execution_id: str) -> Guard:
    """Return a guard on the suspension row as it was loaded, or on its absence."""
    return Guard(Suspension, (execution_id,), None if suspension is None else suspension.revision)


def suspension_or_new(suspension: Suspension | None, row: Execution) -> Suspension:
    """Return the suspension row, or the one that is about to be created."""
    return suspension or Suspension(row.execution_id, row.partition)


def next_suspension(previous: Suspension, **fields: Any) -> Suspension[Draft]:
    """Return the row with another suspension in place of the previous one; what belongs to the execution stays."""
    kept = {name: getattr(previous, name) for name in KEPT_COLUMNS}
    return Suspension(previous.execution_id, previous.partition, created_at=NOW, **kept, **fields)


def mark_has_waits(row: Execution) -> tuple[Write, ...]:
    """Return the write that marks the execution as having a suspension row, for the change that creates the row."""
    return () if row.has_waits else (Patch(Execution, (row.execution_id,), {"has_waits": True}),)


def waitpoint_state(waitpoint: Waitpoint, suspension: Suspension | None, now: int) -> WaitpointState:
    """Return whether a waitpoint accepts signals. An expired pending waitpoint is closed, swept or not."""
    if waitpoint.closed_at is not None:
        return WaitpointState.CLOSED
    if waitpoint.gate is not None:
        gate = open_gates(suspension).get(waitpoint.gate)
        # After a replay a new gate of this name may exist, with waitpoints of its own.
        is_own = gate is not None and any(waitpoint.waitpoint_id == waitpoint_id for waitpoint_id, _ in gate.waitpoints)
        is_active = gate is not None and is_own and not is_gate_expired(gate, now)
        return WaitpointState.ACTIVE if is_active else WaitpointState.CLOSED
    if waitpoint.suspension_id is not None:
        is_active = (
            suspension is not None
            and suspension.suspension_id == waitpoint.suspension_id
            and suspension.closed_at is None
        )
        return WaitpointState.ACTIVE if is_active else WaitpointState.CLOSED
    return WaitpointState.CLOSED if is_pending_expired(waitpoint, now) else WaitpointState.PENDING


def is_pending_expired(waitpoint: Waitpoint, now: int) -> bool:
    """True if the waitpoint was not activated before it expired, swept or not."""
    return waitpoint.close_reason in (None, NEVER_COMMITTED) and was_never_activated(waitpoint, now)


def was_never_activated(waitpoint: Waitpoint, now: int) -> bool:
    """True if the waitpoint expired without being activated, even if it was closed for another reason."""
    has_expired = waitpoint.expires_at is not None and waitpoint.expires_at <= now
    return has_expired and waitpoint.activated_at is None


def waitpoint_close_reason(waitpoint: Waitpoint, suspension: Suspension | None, now: int) -> str | None:
    """Return why a waitpoint is closed; None while it is open."""
    if waitpoint.close_reason is not None:
        return waitpoint.close_reason
    if waitpoint_state(waitpoint, suspension, now) is not WaitpointState.CLOSED:
        return None
    if waitpoint.suspension_id is None and waitpoint.gate is None:
        return NEVER_COMMITTED
    is_own = (
        suspension is not None
        and waitpoint.suspension_id is not None
        and suspension.suspension_id == waitpoint.suspension_id
    )
    return (suspension.close_reason if suspension is not None and is_own else None) or RESUMED


def open_gates(suspension: Suspension | None) -> dict[str, Gate]:
    """Return the open gates of a durable function by name."""
    text = None if suspension is None else suspension.gates
    return {} if text is None else msgspec.json.decode(text, type=dict[str, Gate])


def gate_columns(gates: Mapping[str, Gate]) -> dict[str, Any]:
    """Return the columns of the suspension row for these open gates."""
    asking = [NO_TIMEOUT if gate.expires_at is None else gate.expires_at for gate in gates.values() if gate.waitpoints]
    return {"gates": wait_encoding.encode_or_none(gates), "asks_until": max(asking, default=None)}


def is_gate_expired(gate: Gate, now: int) -> bool:
    """True if the gate has expired. Nothing counts from then on, even before it is closed."""
    return gate.expires_at is not None and gate.expires_at <= now


def resume_row(row: Execution, delay_ms: int, detail: str) -> Patch:
    """Return the patch that makes a suspended row claimable at once, or after a delay that `detail` explains."""
    fields = queue.enqueue_fields(row, AttemptState.ATTEMPT_INTERRUPTED)
    fields.update(lifecycle_phase=LifecyclePhase.RUNNABLE, current_suspension_id=None, current_waitpoint_id=None)
    if delay_ms > 0:
        fields.update(
            eligibility_state=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
            blocking_reason=BlockingReason.WAITING_FOR_RESUME_DELAY,
            blocking_text=detail,
            delay_until=FromNow(delay_ms),
            line=None,
        )
    return transitions.transition(row, fields)


class ObservedSignal(msgspec.Struct, frozen=True):
    """A signal as the resumed worker sees it."""

    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: int
    payload: bytes | None


def observed_signal(signal: Signal) -> ObservedSignal:
    """Return the signal as the resumed worker sees it."""
    return view_of(ObservedSignal, signal, correlation_id=signal.correlation_id or "")
