"""State errors: the current state forbids the operation, or makes it unnecessary."""

from __future__ import annotations

from flowfabric.errors.base import Classification, FabricError


class StateError(FabricError):
    """The current state does not allow this."""

    family = "state"
    kind = "state_conflict"


class StaleLease(StateError):
    """Another worker holds this execution now; the result of this one comes too late."""

    lease_epoch: int | None = None


class LeaseExpired(StateError):
    """The lease ran out before this arrived; the work will be taken over."""

    lease_epoch: int | None = None


class LeaseRevoked(StateError):
    """An operator revoked the lease."""

    lease_epoch: int | None = None


class ExecutionNotSuspended(StateError):
    """The execution is not suspended."""

    classification = Classification.INFORMATIONAL


class AlreadySuspended(StateError):
    """The execution is already suspended."""

    classification = Classification.INFORMATIONAL


class WaitpointClosed(StateError):
    """The waitpoint is closed and accepts no more signals."""

    classification = Classification.INFORMATIONAL


class TargetNotSignalable(StateError):
    """The execution no longer waits for this signal."""


class InboxClosed(StateError):
    """The function has closed its inbox: it has read every message and takes no more."""


class DuplicateSignal(StateError):
    """This signal has been delivered before."""

    classification = Classification.INFORMATIONAL


class ResumeConditionNotMet(StateError):
    """The condition that the execution waits for is not met yet."""


class WaitpointNotPending(StateError):
    """The waitpoint was already activated or closed."""

    classification = Classification.INFORMATIONAL


class PendingWaitpointExpired(StateError):
    """The waitpoint was not activated in time."""

    classification = Classification.INFORMATIONAL


class WaitpointNotOpen(StateError):
    """The waitpoint is not open."""

    classification = Classification.INFORMATIONAL


class ExecutionNotTerminal(StateError):
    """The execution has not ended yet."""


class MaxReplaysExhausted(StateError):
    """The execution has been replayed as often as its policy allows."""


class StreamClosed(StateError):
    """The output stream is closed."""


class StaleOwnerCannotAppend(StateError):
    """Only the lease holder can write to the output stream, and another worker holds the lease now."""


class GrantAlreadyExists(StateError):
    """Another grant for this execution is still valid."""

    classification = Classification.INFORMATIONAL


class ExecutionNotInFlow(StateError):
    """The execution is not a member of this flow."""


class FlowAlreadyTerminal(StateError):
    """The flow has ended and can no longer change."""


class DepsNotSatisfied(StateError):
    """The execution still waits for others."""

    classification = Classification.INFORMATIONAL


class NotBlockedByDeps(StateError):
    """The execution does not wait for others."""

    classification = Classification.INFORMATIONAL


class NotRunnable(StateError):
    """The execution is not in a runnable state."""


class Terminal(StateError):
    """The execution has ended."""


class BudgetExceeded(StateError):
    """A hard limit of the budget is reached; stop and report."""

    classification = Classification.COOPERATIVE


class BudgetSoftExceeded(StateError):
    """A soft limit of the budget is exceeded; work may continue."""

    classification = Classification.INFORMATIONAL


class OkAlreadyApplied(StateError):
    """This was applied before; nothing changed."""

    classification = Classification.INFORMATIONAL


class AttemptNotStarted(StateError):
    """The attempt has not started yet."""


class AttemptAlreadyTerminal(StateError):
    """The attempt has already ended."""

    classification = Classification.INFORMATIONAL


class ExecutionNotEligibleForAttempt(StateError):
    """The execution cannot start an attempt in its current state."""


class ReplayNotAllowed(StateError):
    """This execution cannot be replayed."""


class MaxRetriesExhausted(StateError):
    """The execution has been retried as often as its policy allows."""


class StreamAlreadyClosed(StateError):
    """The output stream was closed before."""

    classification = Classification.INFORMATIONAL


class AlreadySatisfied(StateError):
    """It is already as requested."""

    classification = Classification.INFORMATIONAL
