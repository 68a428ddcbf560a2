"""Steps of the state vector: the moves that several verbs share, each deriving the public state in one place."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

from flowfabric.model.change import (
    NOW,
    Change,
    Form,
    FromNow,
    Guard,
    Own,
    Patch,
    Write,
    as_form,
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


def moved(row: Execution, fields: dict[str, Any]) -> Patch:
    """The row with these fields of its vector, its public state derived, its times moved."""
    fields["public_state"] = public_state(
        fields.get("lifecycle_phase", row.lifecycle_phase),
        fields.get("eligibility_state", row.eligibility_state),
        fields.get("terminal_outcome", row.terminal_outcome),
    )
    fields["last_transition_at"] = NOW
    fields["last_mutation_at"] = NOW
    return Patch(Execution, (row.execution_id,), fields)


def ended(
    row: Execution,
    outcome: TerminalOutcome,
    *,
    attempt: AttemptRecordState,
    attempt_reason: str | None = None,
    category: str | None = None,
    released: str,
    details: str | None = None,
    guard: Guard | None = None,
    also: tuple[Write, ...] = (),
    stream: str | None = None,
    suspension: str | None = None,
    settles: bool = True,
    **fields: Any,
) -> Change:
    """The end of a life: vector, open attempt, lease, indexes, grant and the one completion event, together.

    An attempt that succeeded stays in the sheet, which says all there is to say of it; others become rows.

    `released` is the reason in the lease history, used only when a lease ends here; `stream` and `suspension` are the
    reasons with which these close, if they are open and the outcome does not say it all. `settles=False`
    leaves those who wait for this end to the dependency reconciler.
    """
    was_active = row.lifecycle_phase is LifecyclePhase.ACTIVE
    fields |= ENDED
    fields["terminal_outcome"] = outcome
    fields["purge_at"] = FromNow(retention_ms(row))
    if row.blocking_reason is not BlockingReason.NONE:
        fields["blocking_reason"] = BlockingReason.NONE
    if row.attempt_index is not None:
        fields.setdefault("attempt_state", AttemptState.ATTEMPT_TERMINAL)
    fields |= LIFE_LEAVES.cleared(row)
    if was_active:
        fields |= lease.release(row)
    elif row.line is not None:
        fields["line"] = None
    writes: tuple[Write, ...] = (moved(row, fields),)
    if lease.has_open_attempt(row) and outcome is not TerminalOutcome.SUCCESS:
        writes += (lease.attempt_ended(row, attempt, reason=attempt_reason, category=category),)
    writes += cleanup.close_stream(row, stream or cleanup.STREAM_REASON[outcome])
    writes += cleanup.close_suspension(row, suspension or outcome.value)
    writes += cleanup.tell_parent(row, outcome)
    if settles:
        also += successors.settled(row, outcome)
    return Change(
        guards=(guard or seen(row),),
        writes=writes + also + quota.released_at_end(row),
        events=(completion(row, outcome, released=released if was_active else None, details=details),),
    )


ENDED: dict[str, Any] = {
    "lifecycle_phase": LifecyclePhase.TERMINAL,
    "eligibility_state": EligibilityState.NOT_APPLICABLE,
    "completed_at": NOW,
}
LIFE_LEAVES = lease.Leftovers(
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
    **dict.fromkeys(LIFE_LEAVES.names),
    **dict.fromkeys(lease.LEASE_LEAVES.names),
}
_TIMED = "attempt_timeout_at"
_ordinary = attrgetter(*(name for name in ORDINARY if name != _TIMED))
_ORDINARY_VALUES = tuple(value for name, value in ORDINARY.items() if name != _TIMED)


def success_form(row: Execution) -> Form | None:
    """The success of an ordinary row: what `ended` makes of it, for every such row alike; None for others.

    Those who wait for the end of a row are no part of it: what it leaves for them is written beside the form.
    """
    if _ordinary(row) != _ORDINARY_VALUES:
        return None
    terms = decode_terms(row.terms)
    if terms.quota_policy_ids:
        return None
    return _success_form(_kept_ms(terms), row.attempt_timeout_at is not None, row.flow_id is not None)


def concerns_others(row: Execution) -> bool:
    """Whether others may go on because this one ends: its successors, its parent, those who wait for its limits."""
    if row.successors is not None or row.parent_id is not None:
        return True
    return row.terms is not None and bool(decode_terms(row.terms).quota_policy_ids)


@lru_cache(maxsize=256)
def _success_form(kept_ms: int, timed: bool, is_member: bool) -> Form:
    known = ORDINARY | ({_TIMED: Own(_TIMED)} if timed else {})
    row = unseen(known, kept_ms, is_member=is_member)
    return as_form(ended(row, TerminalOutcome.SUCCESS, attempt=AttemptRecordState.ENDED_SUCCESS, released="completed"))


def unseen(known: dict[str, Any], kept_ms: int, *, is_member: bool) -> Execution:
    """A row of which only this is known, to make a form of its end."""
    columns = {name: Own(name) for name in Execution.__struct_fields__} | known
    columns |= {"successors": None, "terms": encode_terms(Terms(retention_ttl_ms=kept_ms))}
    return Execution(**columns if is_member else columns | {"flow_id": None})


def completion(row: Execution, outcome: TerminalOutcome, *, released: str | None, details: str | None = None) -> Event:
    """The completion event; the same row tells the lease history of the lease that ended with it, if one did.

    A revoked lease had already left the history's books, yet its end is told too: the last holder's attempt ends here.
    """
    if released is None:
        return Event(
            execution_id=row.execution_id,
            namespace=row.namespace,
            tags=row.tags,
            flow_id=row.flow_id,
            outcome=outcome.value,
            details=details,
        )
    return lease_event(row, "released", reason=released, outcome=outcome.value, details=details)


def parked(
    row: Execution,
    *,
    eligibility: EligibilityState,
    reason: BlockingReason,
    suspension: str,
    released: str,
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
        next_timeout_ms=remaining_ms(row, now),
    )
    fields = {**lease.release(row), **fields}
    return Change(
        guards=(seen(row, live(row)),),
        writes=(moved(row, fields),),
        events=(lease_event(row, "released", reason=released),),
    )


def remaining_ms(row: Execution, now: int) -> int | None:
    """What is left of the attempt's time; at least a millisecond, so that a timer which was armed stays armed."""
    return None if row.attempt_timeout_at is None else max(1, row.attempt_timeout_at - now)


def retention_ms(row: Execution) -> int:
    """How long a finished execution is kept."""
    return _kept_ms(decode_terms(row.terms))


def _kept_ms(terms: Terms) -> int:
    return DEFAULT_RETENTION_MS if terms.retention_ttl_ms is None else terms.retention_ttl_ms
