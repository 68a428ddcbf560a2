"""Downstreams: an execution waits for its dependencies; it is released when they are met, else skipped."""

from __future__ import annotations

from typing import Any

from flowfabric.model.change import Change, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.rules.execution import lease, transitions
from flowfabric.rules.scheduling import queue

IMPOSSIBLE_REASON = "dependency_impossible"


def waits_for_dependencies(child: Execution | None) -> bool:
    """True if the child waits for its dependencies and for nothing else."""
    return (
        child is not None
        and child.lifecycle_phase is LifecyclePhase.RUNNABLE
        and child.ownership_state is OwnershipState.UNOWNED
        and child.terminal_outcome is TerminalOutcome.NONE
        and child.eligibility_state is EligibilityState.BLOCKED_BY_DEPENDENCIES
    )


def release_child(child: Execution | None) -> Patch:
    """Return the patch that enqueues a child whose dependencies are met."""
    assert child is not None
    fields: dict[str, Any] = {}
    state = child.attempt_state
    if state is AttemptState.NONE:
        fields["attempt_state"] = state = AttemptState.PENDING_FIRST_ATTEMPT
    fields.update(queue.enqueue_fields(child, state))
    return transitions.transition(child, fields)


def waiting_fields(text: str) -> dict[str, Any]:
    """Return the columns of an execution that waits for others and is not claimable."""
    return {
        "eligibility_state": EligibilityState.BLOCKED_BY_DEPENDENCIES,
        "blocking_reason": BlockingReason.WAITING_FOR_CHILDREN,
        "blocking_text": text,
        "delay_until": None,
        "blocked_on": None,
        "blocked_at": None,
        "line": None,
    }


def skip_child(child: Execution) -> Change:
    """Return the change that ends an execution whose dependencies can never be met."""
    fields: dict[str, Any] = {} if lease.has_open_attempt(child) else {"attempt_state": AttemptState.NONE}
    return transitions.terminate(
        child,
        TerminalOutcome.SKIPPED,
        attempt=AttemptRecordState.ENDED_CANCELLED,
        attempt_reason=IMPOSSIBLE_REASON,
        release_reason=IMPOSSIBLE_REASON,
        suspension_reason=TerminalOutcome.CANCELLED.value,
        **fields,
    )
