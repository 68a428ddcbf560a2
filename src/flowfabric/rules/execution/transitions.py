"""Transitions of the state vector that several operations share.

The public state is derived in one place, `transition`. `terminate` ends an execution and everything attached to it.
Most executions complete in exactly the same way, so the change of an ordinary success is built once as a template that
stores apply to any such row.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

from flowfabric.model.change import (
    Change,
    ColumnRef,
    Guard,
    Patch,
    RowTemplate,
    Write,
    as_template,
    lease_event,
    live,
    seen,
)
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, Result
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
    public_state,
)
from flowfabric.rules.execution import cleanup, lease
from flowfabric.rules.execution.policy import Terms, decode_terms, encode_terms
from flowfabric.rules.flow import successors
from flowfabric.rules.limits import quota

DEFAULT_RETENTION_MS = 24 * 60 * 60 * 1000


def transition(row: Execution, fields: dict[str, Any]) -> Patch:
    """Return the patch of these columns, with the public state derived and the timestamps set."""
    fields["public_state"] = public_state(
        fields.get("lifecycle_phase", row.lifecycle_phase),
        fields.get("eligibility_state", row.eligibility_state),
        fields.get("terminal_outcome", row.terminal_outcome),
    )
    fields["last_transition_at"] = NOW
    fields["last_mutation_at"] = NOW
    return Patch(Execution, (row.execution_id,), fields)


def terminate(
    row: Execution,
    outcome: TerminalOutcome,
    *,
    attempt: AttemptRecordState,
    attempt_reason: str | None = None,
    category: str | None = None,
    failure: str | None = None,
    release_reason: str,
    details: str | None = None,
    guard: Guard | None = None,
    extra_writes: tuple[Write, ...] = (),
    stream_reason: str | None = None,
    suspension_reason: str | None = None,
    records_outcome: bool = True,
    result: Result | None = None,
    **fields: Any,
) -> Change:
    """Return the change that ends an execution: state, open attempt, lease, queue, grant and one completion event.

    A successful attempt stays in the columns of the execution; other attempts become rows.

    `release_reason` appears in the lease history if a lease ends here. `stream_reason` and `suspension_reason` close an
    open stream or suspension; without them the outcome is the reason. `records_outcome=False` leaves the outgoing edges
    to the dependency reconciler. `result` is reported to the parent.
    """
    was_active = row.lifecycle_phase is LifecyclePhase.ACTIVE
    fields |= TERMINAL_FIELDS
    fields["terminal_outcome"] = outcome
    fields["purge_at"] = FromNow(retention_ms(row))
    if row.blocking_reason is not BlockingReason.NONE:
        fields["blocking_reason"] = BlockingReason.NONE
    if row.attempt_index is not None:
        fields.setdefault("attempt_state", AttemptState.ATTEMPT_TERMINAL)
    fields |= LIFE_FIELDS.clear(row)
    if was_active:
        fields |= lease.release(row)
    elif row.line is not None:
        fields["line"] = None
    writes: tuple[Write, ...] = (transition(row, fields),)
    if lease.has_open_attempt(row) and outcome is not TerminalOutcome.SUCCESS:
        writes += (lease.attempt_record(row, attempt, reason=attempt_reason, category=category, failure=failure),)
    writes += cleanup.close_stream(row, stream_reason or cleanup.STREAM_REASON[outcome])
    writes += cleanup.close_suspension(row, suspension_reason or outcome.value)
    writes += cleanup.report_to_parent(row, outcome, result)
    writes += cleanup.request_child_cancels(row, outcome)
    if records_outcome:
        extra_writes += successors.outcome_writes(row, outcome)
    return Change(
        guards=(guard or seen(row),),
        writes=writes + extra_writes + quota.release_messages(row),
        events=(
            completion_event(row, outcome, release_reason=release_reason if was_active else None, details=details),
        ),
    )


TERMINAL_FIELDS: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.TERMINAL,
    "eligibility_state": EligibilityState.NOT_APPLICABLE,
    "completed_at": NOW,
}
LIFE_FIELDS = lease.ClearableFields(
    "blocking_text",
    "delay_until",
    "deadline_at",
    "granted_until",
    "grant",
    "current_suspension_id",
    "current_waitpoint_id",
    "blocked_on",
    "blocked_at",
)


# Columns of a running attempt with nothing attached that would have to be closed with it.
ORDINARY: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.ACTIVE,
    "ownership_state": OwnershipState.LEASED,
    "attempt_state": AttemptState.RUNNING_ATTEMPT,
    "blocking_reason": BlockingReason.NONE,
    "terminal_outcome": TerminalOutcome.NONE,
    "stream_index": None,
    "parent_id": None,
    **dict.fromkeys(LIFE_FIELDS.names),
    **dict.fromkeys(lease.LEASE_FIELDS.names),
}
_TIMED = "attempt_timeout_at"
_ordinary_values = attrgetter(*(name for name in ORDINARY if name != _TIMED))
_ORDINARY_VALUES = tuple(value for name, value in ORDINARY.items() if name != _TIMED)


def success_template(row: Execution) -> RowTemplate | None:
    """Return the shared template for the success of an ordinary row; None for any other row.

    It equals what `terminate` returns. Writes for the successors of the row are not part of it and go beside it.
    """
    if _ordinary_values(row) != _ORDINARY_VALUES:
        return None
    terms = decode_terms(row.terms)
    if terms.quota_policy_ids:
        return None
    return _success_template(_retention_ms(terms), row.attempt_timeout_at is not None, row.flow_id is not None)


def affects_others(row: Execution) -> bool:
    """True if ending this row may unblock others: its successors, its parent, or waiters for its quotas."""
    if row.successors is not None or row.parent_id is not None:
        return True
    return row.terms is not None and bool(decode_terms(row.terms).quota_policy_ids)


@lru_cache(maxsize=256)
def _success_template(retention: int, has_timeout: bool, is_member: bool) -> RowTemplate:
    columns = ORDINARY | ({_TIMED: ColumnRef(_TIMED)} if has_timeout else {})
    row = template_row(columns, retention, is_member=is_member)
    return as_template(
        terminate(row, TerminalOutcome.SUCCESS, attempt=AttemptRecordState.ENDED_SUCCESS, release_reason="completed")
    )


def template_row(known: dict[str, Any], retention: int, *, is_member: bool) -> Execution:
    """Return a row with these known columns and references for all others, to build a template from."""
    columns = lease.COLUMNS | known
    columns |= {"successors": None, "terms": encode_terms(Terms(retention_ttl_ms=retention))}
    return Execution(**columns if is_member else columns | {"flow_id": None})


def completion_event(
    row: Execution, outcome: TerminalOutcome, *, release_reason: str | None, details: str | None = None
) -> Event:
    """Return the completion event; if a lease ended with it, the same event is part of the lease history.

    This includes a lease that was revoked before, because the attempt of its holder ends here.
    """
    if release_reason is None:
        return Event(
            execution_id=row.execution_id,
            namespace=row.namespace,
            tags=row.tags,
            flow_id=row.flow_id,
            outcome=outcome.value,
            details=details,
        )
    return lease_event(row, "released", reason=release_reason, outcome=outcome.value, details=details)


def defer(
    row: Execution,
    *,
    eligibility: EligibilityState,
    reason: BlockingReason,
    suspension: str,
    release_reason: str,
    now: int,
    **fields: Any,
) -> Change:
    """Release active work; the interrupted attempt continues later with its remaining time."""
    fields.update(
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        eligibility_state=eligibility,
        blocking_reason=reason,
        attempt_state=AttemptState.ATTEMPT_INTERRUPTED,
        attempt_suspended_at=NOW,
        attempt_suspension=suspension,
        next_type=None,
        next_timeout_ms=remaining_timeout_ms(row, now),
    )
    fields = {**lease.release(row), **fields}
    return Change(
        guards=(seen(row, live(row)),),
        writes=(transition(row, fields),),
        events=(lease_event(row, "released", reason=release_reason),),
    )


def remaining_timeout_ms(row: Execution, now: int) -> int | None:
    """Return the remaining time of the attempt; at least 1 ms, so that an armed timer stays armed."""
    return None if row.attempt_timeout_at is None else max(1, row.attempt_timeout_at - now)


def retention_ms(row: Execution) -> int:
    """Return how long a finished execution is kept."""
    return _retention_ms(decode_terms(row.terms))


def _retention_ms(terms: Terms) -> int:
    return DEFAULT_RETENTION_MS if terms.retention_ttl_ms is None else terms.retention_ttl_ms
