"""Complete and fail: the lease holder ends its attempt.

Both are idempotent for the holder that made the first call: if the reply was lost, the same call gets the same answer.
"""

from __future__ import annotations

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Completed, RetryScheduled, TerminalFailed
from flowfabric.model.change import Change, Insert, Write, lease_event, live, seen
from flowfabric.model.execution import Execution, Lineage, Result
from flowfabric.model.failure import FAILURE_ENCODING
from flowfabric.model.instant import FromNow
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    TerminalOutcome,
)
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import mailbox
from flowfabric.rules.execution import cleanup, fences, lease, transitions
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.policy import decode_terms, parse_retry
from flowfabric.rules.execution.retry import backoff_ms, may_retry
from flowfabric.rules.flow import successors
from flowfabric.rules.suspension import state as wait_state


def complete(
    row: Execution | None,
    fence: Fence,
    source: str | None,
    payload: bytes | None,
    encoding: str | None,
    now: int,
    root: Suspension | None = None,
) -> Decision[Completed]:
    """End the execution successfully and store its result, if any, byte for byte.

    If it has had messages, `root` is its suspension row: those that nobody has read are named in the answer and the
    event. If the same holder completes again it gets the same answer, and the first result stays.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    held = fences.resolve_fence(row, fence, source)
    if isinstance(held, errors.FabricError):
        return refuse(held)
    if refused := fences.check_lease(row, held, now):
        if _ended_by(row, fence, TerminalOutcome.SUCCESS):
            return Decision(Completed(row.execution_id))
        return refused
    result = None if payload is None else Result(row.execution_id, payload, encoding)
    result_writes: tuple[Write, ...] = () if result is None else (Insert(result),)  # a replay deletes the old one
    unread = mailbox.unread(root) if row.has_mail else {}
    mail_guard = (wait_state.seen_suspension(root, row.execution_id),) if row.has_mail else ()
    template = None if unread else transitions.success_template(row)
    if template is not None:
        if row.successors is not None:
            result_writes += successors.outcome_writes(row, TerminalOutcome.SUCCESS)
        guards = (seen(row, live(row)), *mail_guard)
        return Decision(Completed(row.execution_id), Change(guards, result_writes, template=template))
    change = transitions.terminate(
        row,
        TerminalOutcome.SUCCESS,
        attempt=AttemptRecordState.ENDED_SUCCESS,
        release_reason="completed",
        guard=seen(row, live(row)),
        details=msgspec.json.encode({"unread": unread}).decode() if unread else None,
        extra_writes=result_writes,
        result=result,
    )
    if mail_guard:
        change = msgspec.structs.replace(change, guards=(*change.guards, *mail_guard))
    return Decision(Completed(row.execution_id, unread=unread or msgspec.UNSET), change)


def fail(
    row: Execution | None,
    fence: Fence,
    source: str | None,
    *,
    reason: str,
    category: str,
    failure: str | None = None,
    retry_policy: str | None,
    chance: float,
    now: int,
) -> Decision[RetryScheduled | TerminalFailed]:
    """End the attempt with a failure: schedule a retry if the policy allows one, else end the execution as failed.

    `category` is free text that names the failure; `permanent` and `cancelled` are never retried. `failure` is the
    exception as JSON; it is kept with the attempt, and for the last one in place of the result. `retry_policy` replaces
    the stored policy. `chance` spreads a backoff with jitter. If the same holder fails again it gets the first answer.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    held = fences.resolve_fence(row, fence, source)
    if isinstance(held, errors.FabricError):
        return refuse(held)
    if refused := fences.check_lease(row, held, now):
        if _ended_by(row, fence, TerminalOutcome.FAILED):
            return Decision(TerminalFailed(row.execution_id))
        if _retry_scheduled_by(row, fence):
            return Decision(RetryScheduled(row.execution_id, row.delay_until or 0, row.total_attempt_count))
        return refused
    retry = decode_terms(row.terms).retry if retry_policy is None else parse_retry(retry_policy)
    if may_retry(retry, row.retry_count, category):
        return _schedule_retry(row, backoff_ms(retry, row.retry_count, chance), reason, category, failure)
    failure_writes: tuple[Write, ...] = ()
    if failure is not None:
        failure_writes = (Insert(Result(row.execution_id, failure.encode(), FAILURE_ENCODING)),)
    change = transitions.terminate(
        row,
        TerminalOutcome.FAILED,
        attempt=AttemptRecordState.ENDED_FAILURE,
        attempt_reason=reason,
        category=category,
        failure=failure,
        release_reason="failed_terminal",
        guard=seen(row, live(row)),
        extra_writes=failure_writes,
        failure_reason=reason,
    )
    return Decision(TerminalFailed(row.execution_id), change)


def _schedule_retry(
    row: Execution, delay_ms: int, reason: str, category: str, failure: str | None
) -> Decision[RetryScheduled | TerminalFailed]:
    """Return the decision that ends the attempt and makes the execution claimable after the backoff."""
    fields = {
        "lifecycle_phase": LifecyclePhase.RUNNABLE,
        "eligibility_state": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        "blocking_reason": BlockingReason.WAITING_FOR_RETRY_BACKOFF,
        "attempt_state": AttemptState.PENDING_RETRY_ATTEMPT,
        "lineage": lease.encode_lineage(Lineage(previous_attempt_index=row.attempt_index, retry_reason=reason)),
        "retry_count": row.retry_count + 1,
        "attempt_id": None,
        "delay_until": FromNow(delay_ms),
        "failure_reason": reason,
        "next_type": AttemptType.RETRY,
        **lease.release(row),
    }
    change = Change(
        guards=(seen(row, live(row)),),
        writes=(
            transitions.transition(row, fields),
            lease.attempt_record(
                row, AttemptRecordState.ENDED_FAILURE, reason=reason, category=category, failure=failure
            ),
            *cleanup.close_stream(row, cleanup.ATTEMPT_FAILURE),
        ),
        events=(lease_event(row, "released", reason="failed_retry_scheduled"),),
    )
    return Decision(lambda now: RetryScheduled(row.execution_id, now + delay_ms, row.total_attempt_count), change)


def _ended_by(row: Execution, fence: Fence, outcome: TerminalOutcome) -> bool:
    """True if this holder already ended the execution with this outcome and the reply was lost."""
    return (
        row.lifecycle_phase is LifecyclePhase.TERMINAL
        and row.terminal_outcome is outcome
        and (row.lease_epoch, row.attempt_id) == (fence.lease_epoch, fence.attempt_id)
    )


def _retry_scheduled_by(row: Execution, fence: Fence) -> bool:
    """True if this holder already scheduled the retry. The epoch suffices, because the next claim increments it."""
    return (
        row.lifecycle_phase is LifecyclePhase.RUNNABLE
        and row.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT
        and row.lease_epoch == fence.lease_epoch
    )
