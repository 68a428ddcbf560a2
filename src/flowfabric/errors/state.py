"""State errors: the current state forbids the operation, or makes it unnecessary."""

from __future__ import annotations

from flowfabric.errors.base import Classification, FabricError


class StateError(FabricError):
    """The current state does not allow this."""

    family = "state"
    kind = "state_conflict"


class StaleLease(StateError):
    """Another worker holds this execution now; the result of this one comes too late."""

    kind = "stale_lease"

    lease_epoch: int | None = None


class LeaseExpired(StateError):
    """The lease ran out before this arrived; the work will be taken over."""

    kind = "lease_expired"

    lease_epoch: int | None = None


class LeaseRevoked(StateError):
    """An operator revoked the lease."""

    kind = "lease_revoked"

    lease_epoch: int | None = None


class ExecutionNotSuspended(StateError):
    """The execution is not suspended."""

    kind = "execution_not_suspended"
    classification = Classification.INFORMATIONAL


class AlreadySuspended(StateError):
    """The execution is already suspended."""

    kind = "already_suspended"
    classification = Classification.INFORMATIONAL


class WaitpointClosed(StateError):
    """The waitpoint is closed and accepts no more signals."""

    kind = "waitpoint_closed"
    classification = Classification.INFORMATIONAL


class TargetNotSignalable(StateError):
    """The execution no longer waits for this signal."""

    kind = "target_not_signalable"


class DuplicateSignal(StateError):
    """This signal has been delivered before."""

    kind = "duplicate_signal"
    classification = Classification.INFORMATIONAL


class ResumeConditionNotMet(StateError):
    """The condition that the execution waits for is not met yet."""

    kind = "resume_condition_not_met"


class WaitpointNotPending(StateError):
    """The waitpoint was already activated or closed."""

    kind = "waitpoint_not_pending"
    classification = Classification.INFORMATIONAL


class PendingWaitpointExpired(StateError):
    """The waitpoint was not activated in time."""

    kind = "pending_waitpoint_expired"
    classification = Classification.INFORMATIONAL


class WaitpointNotOpen(StateError):
    """The waitpoint is not open."""

    kind = "waitpoint_not_open"
    classification = Classification.INFORMATIONAL


class ExecutionNotTerminal(StateError):
    """The execution has not ended yet."""

    kind = "execution_not_terminal"


class MaxReplaysExhausted(StateError):
    """The execution has been replayed as often as its policy allows."""

    kind = "max_replays_exhausted"


class StreamClosed(StateError):
    """The output stream is closed."""

    kind = "stream_closed"


class StaleOwnerCannotAppend(StateError):
    """Only the lease holder can write to the output stream, and another worker holds the lease now."""

    kind = "stale_owner_cannot_append"


class GrantAlreadyExists(StateError):
    """Another grant for this execution is still valid."""

    kind = "grant_already_exists"
    classification = Classification.INFORMATIONAL


class ExecutionNotInFlow(StateError):
    """The execution is not a member of this flow."""

    kind = "execution_not_in_flow"


class FlowAlreadyTerminal(StateError):
    """The flow has ended and can no longer change."""

    kind = "flow_already_terminal"


class DepsNotSatisfied(StateError):
    """The execution still waits for others."""

    kind = "deps_not_satisfied"
    classification = Classification.INFORMATIONAL


class NotBlockedByDeps(StateError):
    """The execution does not wait for others."""

    kind = "not_blocked_by_deps"
    classification = Classification.INFORMATIONAL


class NotRunnable(StateError):
    """The execution is not in a runnable state."""

    kind = "not_runnable"


class Terminal(StateError):
    """The execution has ended."""

    kind = "terminal"


class BudgetExceeded(StateError):
    """A hard limit of the budget is reached; stop and report."""

    kind = "budget_exceeded"
    classification = Classification.COOPERATIVE


class BudgetSoftExceeded(StateError):
    """A soft limit of the budget is exceeded; work may continue."""

    kind = "budget_soft_exceeded"
    classification = Classification.INFORMATIONAL


class OkAlreadyApplied(StateError):
    """This was applied before; nothing changed."""

    kind = "ok_already_applied"
    classification = Classification.INFORMATIONAL


class AttemptNotStarted(StateError):
    """The attempt has not started yet."""

    kind = "attempt_not_started"


class AttemptAlreadyTerminal(StateError):
    """The attempt has already ended."""

    kind = "attempt_already_terminal"
    classification = Classification.INFORMATIONAL


class ExecutionNotEligibleForAttempt(StateError):
    """The execution cannot start an attempt in its current state."""

    kind = "execution_not_eligible_for_attempt"


class ReplayNotAllowed(StateError):
    """This execution cannot be replayed."""

    kind = "replay_not_allowed"


class MaxRetriesExhausted(StateError):
    """The execution has been retried as often as its policy allows."""

    kind = "max_retries_exhausted"


class StreamAlreadyClosed(StateError):
    """The output stream was closed before."""

    kind = "stream_already_closed"
    classification = Classification.INFORMATIONAL


class AlreadySatisfied(StateError):
    """It is already as requested."""

    kind = "already_satisfied"
    classification = Classification.INFORMATIONAL
