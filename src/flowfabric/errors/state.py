"""State errors: the current state forbids the operation, or makes it unnecessary."""

from __future__ import annotations

from flowfabric.errors.base import Classification, FabricError


class StateError(FabricError):
    """The current state does not allow this."""

    family = "state"
    kind = "state_conflict"


class _Informational:
    """Marks errors that say that the requested state already holds, or that it does not matter."""

    classification = Classification.INFORMATIONAL


class StaleLease(StateError):
    """Another worker holds this execution now; the result of this one comes too late."""

    lease_epoch: int | None = None


class LeaseExpired(StateError):
    """The lease ran out before this arrived; the work will be taken over."""

    lease_epoch: int | None = None


class LeaseRevoked(StateError):
    """An operator revoked the lease."""

    lease_epoch: int | None = None


class ExecutionNotSuspended(_Informational, StateError):
    """The execution is not suspended."""


class AlreadySuspended(_Informational, StateError):
    """The execution is already suspended."""


class WaitpointClosed(_Informational, StateError):
    """The waitpoint is closed and accepts no more signals."""


class TargetNotSignalable(StateError):
    """The execution no longer waits for this signal."""


class InboxClosed(StateError):
    """The function has closed its inbox: it has read every message and takes no more."""


class DuplicateSignal(_Informational, StateError):
    """This signal has been delivered before."""


class ResumeConditionNotMet(StateError):
    """The condition that the execution waits for is not met yet."""


class WaitpointNotPending(_Informational, StateError):
    """The waitpoint was already activated or closed."""


class PendingWaitpointExpired(_Informational, StateError):
    """The waitpoint was not activated in time."""


class WaitpointNotOpen(_Informational, StateError):
    """The waitpoint is not open."""


class ExecutionNotTerminal(StateError):
    """The execution has not ended yet."""


class MaxReplaysExhausted(StateError):
    """The execution has been replayed as often as its policy allows."""


class StreamClosed(StateError):
    """The output stream is closed."""


class StaleOwnerCannotAppend(StateError):
    """Only the lease holder can write to the output stream, and another worker holds the lease now."""


class GrantAlreadyExists(_Informational, StateError):
    """Another grant for this execution is still valid."""


class ExecutionNotInFlow(StateError):
    """The execution is not a member of this flow."""


class FlowAlreadyTerminal(StateError):
    """The flow has ended and can no longer change."""


class DepsNotSatisfied(_Informational, StateError):
    """The execution still waits for others."""


class NotBlockedByDeps(_Informational, StateError):
    """The execution does not wait for others."""


class NotRunnable(StateError):
    """The execution is not in a runnable state."""


class Terminal(StateError):
    """The execution has ended."""


class BudgetExceeded(StateError):
    """A hard limit of the budget is reached; stop and report."""

    classification = Classification.COOPERATIVE


class BudgetSoftExceeded(_Informational, StateError):
    """A soft limit of the budget is exceeded; work may continue."""


class OkAlreadyApplied(_Informational, StateError):
    """This was applied before; nothing changed."""


class AttemptNotStarted(StateError):
    """The attempt has not started yet."""


class AttemptAlreadyTerminal(_Informational, StateError):
    """The attempt has already ended."""


class ExecutionNotEligibleForAttempt(StateError):
    """The execution cannot start an attempt in its current state."""


class ReplayNotAllowed(StateError):
    """This execution cannot be replayed."""


class MaxRetriesExhausted(StateError):
    """The execution has been retried as often as its policy allows."""


class StreamAlreadyClosed(_Informational, StateError):
    """The output stream was closed before."""


class AlreadySatisfied(_Informational, StateError):
    """It is already as requested."""
