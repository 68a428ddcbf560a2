"""Steps of the state vector: the moves that several verbs share, each deriving the public state in one place."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

from flowfabric.model.change import (
    NOW,
    Change,
    ColumnRef,
    FromNow,
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
from flowfabric.model.execution import Execution
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
    """The row with these fields of its vector, its public state derived, its times moved."""
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
    release_reason: str,
    details: str | None = None,
    guard: Guard | None = None,
    extra_writes: tuple[Write, ...] = (),
    stream_reason: str | None = None,
    suspension_reason: str | None = None,
    records_outcome: bool = True,
    **fields: Any,
) -> Change:
    """The end of a life: vector, open attempt, lease, indexes, grant and the one completion event, together.

    An attempt that succeeded stays in the sheet, which says all there is to say of it; others become rows.

    `released` is the reason in the lease history, used only when a lease ends here; `stream` and `suspension` are the
    reasons with which these close, if they are open and the outcome does not say it all. `settles=False`
    leaves those who wait for this end to the dependency reconciler.
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
        writes += (lease.attempt_record(row, attempt, reason=attempt_reason, category=category),)
    writes += cleanup.close_stream(row, stream_reason or cleanup.STREAM_REASON[outcome])
    writes += cleanup.close_suspension(row, suspension_reason or outcome.value)
    writes += cleanup.report_to_parent(row, outcome)
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


# A running attempt to which nothing is attached that would have to end with it.
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
_ordinary = attrgetter(*(name for name in ORDINARY if name != _TIMED))
_ORDINARY_VALUES = tuple(value for name, value in ORDINARY.items() if name != _TIMED)


def success_template(row: Execution) -> RowTemplate | None:
    """The success of an ordinary row: what `ended` makes of it, for every such row alike; None for others.

    Those who wait for the end of a row are no part of it: what it leaves for them is written beside the form.
    """
    if _ordinary(row) != _ORDINARY_VALUES:
        return None
    terms = decode_terms(row.terms)
    if terms.quota_policy_ids:
        return None
    return _success_template(_kept_ms(terms), row.attempt_timeout_at is not None, row.flow_id is not None)


def affects_others(row: Execution) -> bool:
    """Whether others may go on because this one ends: its successors, its parent, those who wait for its limits."""
    if row.successors is not None or row.parent_id is not None:
        return True
    return row.terms is not None and bool(decode_terms(row.terms).quota_policy_ids)


@lru_cache(maxsize=256)
def _success_template(kept_ms: int, timed: bool, is_member: bool) -> RowTemplate:
    known = ORDINARY | ({_TIMED: ColumnRef(_TIMED)} if timed else {})
    row = template_row(known, kept_ms, is_member=is_member)
    return as_template(
        terminate(row, TerminalOutcome.SUCCESS, attempt=AttemptRecordState.ENDED_SUCCESS, release_reason="completed")
    )


def template_row(known: dict[str, Any], kept_ms: int, *, is_member: bool) -> Execution:
    """A row of which only this is known, to make a form of its end."""
    columns = {name: ColumnRef(name) for name in Execution.__struct_fields__} | known
    columns |= {"successors": None, "terms": encode_terms(Terms(retention_ttl_ms=kept_ms))}
    return Execution(**columns if is_member else columns | {"flow_id": None})


def completion_event(
    row: Execution, outcome: TerminalOutcome, *, release_reason: str | None, details: str | None = None
) -> Event:
    """The completion event; the same row tells the lease history of the lease that ended with it, if one did.

    A revoked lease had already left the history's books, yet its end is told too: the last holder's attempt ends here.
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
    """Active work put back on the shelf: the lease ends; the attempt waits to go on with the time it had left."""
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
    """What is left of the attempt's time; at least a millisecond, so that a timer which was armed stays armed."""
    return None if row.attempt_timeout_at is None else max(1, row.attempt_timeout_at - now)


def retention_ms(row: Execution) -> int:
    """How long a finished execution is kept."""
    return _kept_ms(decode_terms(row.terms))


def _kept_ms(terms: Terms) -> int:
    return DEFAULT_RETENTION_MS if terms.retention_ttl_ms is None else terms.retention_ttl_ms
