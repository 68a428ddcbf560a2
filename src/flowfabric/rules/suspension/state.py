"""What suspending, signalling and resuming have in common: which waitpoints are open, and the way back to the line."""

from __future__ import annotations

import msgspec

from flowfabric.model.change import FromNow, Guard, Patch, Write
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Gate
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.suspension import Signal, Suspension, Waitpoint, WaitpointState
from flowfabric.rules.execution import transitions
from flowfabric.rules.scheduling import queue

RESUMED = "resumed"
NEVER_COMMITTED = "never_committed"


def is_open(root: Suspension | None) -> bool:
    """Whether the execution waits on a suspension."""
    return root is not None and root.suspension_id is not None and root.closed_at is None


def seen_suspension(root: Suspension | None, execution_id: str) -> Guard:
    """The root as it was seen, or its absence."""
    return Guard(Suspension, (execution_id,), None if root is None else root.revision)


def suspension_or_new(root: Suspension | None, row: Execution) -> Suspension:
    """The root, or the one that is yet to be."""
    return root or Suspension(row.execution_id, row.partition)


def mark_has_waits(row: Execution) -> tuple[Write, ...]:
    """The sheet's mark that there is a root, for the change that brings it into being."""
    return () if row.has_waits else (Patch(Execution, (row.execution_id,), {"has_waits": True}),)


def waitpoint_state(waitpoint: Waitpoint, root: Suspension | None, now: int) -> WaitpointState:
    """Whether a waitpoint takes signals; a pending one whose time is over is closed, swept or not."""
    if waitpoint.closed_at is not None:
        return WaitpointState.CLOSED
    if waitpoint.gate is not None:
        gate = open_gates(root).get(waitpoint.gate)
        # The gate of this name may be that of a later life, with waitpoints of its own.
        own = gate is not None and any(waitpoint.waitpoint_id == one for one, _ in gate.waitpoints)
        holds = gate is not None and own and not is_gate_expired(gate, now)
        return WaitpointState.ACTIVE if holds else WaitpointState.CLOSED
    if waitpoint.suspension_id is not None:
        holds = root is not None and root.suspension_id == waitpoint.suspension_id and root.closed_at is None
        return WaitpointState.ACTIVE if holds else WaitpointState.CLOSED
    return WaitpointState.CLOSED if is_pending_expired(waitpoint, now) else WaitpointState.PENDING


def is_pending_expired(waitpoint: Waitpoint, now: int) -> bool:
    """Whether a waitpoint waited for its activation until its time was over, swept or not."""
    return waitpoint.close_reason in (None, NEVER_COMMITTED) and was_never_activated(waitpoint, now)


def was_never_activated(waitpoint: Waitpoint, now: int) -> bool:
    """Whether a waitpoint's time is over without its activation, whatever else became of it."""
    past = waitpoint.expires_at is not None and waitpoint.expires_at <= now
    return past and waitpoint.activated_at is None


def waitpoint_close_reason(waitpoint: Waitpoint, root: Suspension | None, now: int) -> str | None:
    """Why a waitpoint is closed; None while it is open."""
    if waitpoint.close_reason is not None:
        return waitpoint.close_reason
    if waitpoint_state(waitpoint, root, now) is not WaitpointState.CLOSED:
        return None
    if waitpoint.suspension_id is None and waitpoint.gate is None:
        return NEVER_COMMITTED
    own = root is not None and waitpoint.suspension_id is not None and root.suspension_id == waitpoint.suspension_id
    return (root.close_reason if root is not None and own else None) or RESUMED


def open_gates(root: Suspension | None) -> dict[str, Gate]:
    """The gates that a durable function may wait for, by name."""
    text = None if root is None else root.gates
    return {} if text is None else msgspec.json.decode(text, type=dict[str, Gate])


def is_gate_expired(gate: Gate, now: int) -> bool:
    """Whether a gate's own time is over; from then on nothing counts, closed or not."""
    return gate.expires_at is not None and gate.expires_at <= now


def resume_row(row: Execution, delay_ms: int, detail: str) -> Patch:
    """The suspended row on its way back: claimable at once, or after a delay that `detail` explains."""
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
    """A signal as the worker that it resumed sees it."""

    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: int
    payload: bytes | None


def observed_signal(signal: Signal) -> ObservedSignal:
    """The signal for its receiver."""
    return ObservedSignal(
        signal.signal_id,
        signal.signal_name,
        signal.signal_category,
        signal.source_type,
        signal.source_identity,
        signal.correlation_id or "",
        signal.accepted_at,
        signal.payload,
    )
