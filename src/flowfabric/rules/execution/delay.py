"""Delay: the lease holder defers its execution until an instant or until its children are done.

Deferring releases the lease and keeps the attempt. Promotion makes a delayed execution claimable when its time has
passed.
"""

from __future__ import annotations

from flowfabric import errors
from flowfabric.model.answers.execution import Delayed, Moved, Promotion
from flowfabric.model.change import Change, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.model.states import BlockingReason, EligibilityState, LifecyclePhase, PublicState
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences, transitions
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.scheduling import queue


def delay(
    row: Execution | None, fence: Fence, source: str | None, until: int | FromNow, now: int, *, detail: str = ""
) -> Decision[Delayed]:
    """Release active work until an instant, which may be in the past; the same attempt continues afterwards.

    `detail` is shown to people who ask why the execution does not run.
    """
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_fence(row, fence, source, now):
        return refused
    change = transitions.defer(
        row,
        eligibility=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        reason=BlockingReason.WAITING_FOR_DELAY,
        suspension="worker_delay",
        release_reason="worker_delay",
        now=now,
        delay_until=until,
        blocking_text=detail or None,
    )
    return Decision(Delayed(row.execution_id), change)


def defer_for_children(
    row: Execution | None, fence: Fence, source: str | None, *, unresolved: bool, now: int
) -> Decision[Moved]:
    """Release active work until its dependencies are resolved; with none unresolved it is claimable at once."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_fence(row, fence, source, now):
        return refused
    if unresolved:
        eligibility, reason = EligibilityState.BLOCKED_BY_DEPENDENCIES, BlockingReason.WAITING_FOR_CHILDREN
        text, line = "waiting for child executions to complete", None
    else:
        eligibility, reason = EligibilityState.ELIGIBLE_NOW, BlockingReason.WAITING_FOR_WORKER
        text, line = None, queue.queue_of(row)
    change = transitions.defer(
        row,
        eligibility=eligibility,
        reason=reason,
        suspension="waiting_children",
        release_reason="waiting_children",
        now=now,
        blocking_text=text,
        line=line,
    )
    public = PublicState.WAITING_CHILDREN if unresolved else PublicState.WAITING
    return Decision(Moved(row.execution_id, public), change)


def promote_delayed(row: Execution | None, now: int) -> Decision[Promotion]:
    """Make a delayed execution claimable once `delay_until` has passed; otherwise change nothing."""
    if row is None:
        return Decision(Promotion.NOT_FOUND)
    if row.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return Decision(Promotion.NOT_RUNNABLE)
    if row.eligibility_state is not EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
        return Decision(Promotion.NOT_DELAYED)
    if row.past_life is not None or (row.delay_until is not None and row.delay_until > now):
        return Decision(Promotion.NOT_YET_DUE)
    fields = queue.enqueue_fields(row, row.attempt_state)
    change = Change(guards=(seen(row),), writes=(transitions.transition(row, fields),), not_before=row.delay_until)
    return Decision(Promotion.PROMOTED, change)
