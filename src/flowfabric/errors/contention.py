"""Contention: the request came at the wrong moment; a later one may succeed."""

from __future__ import annotations

from flowfabric.errors.base import Classification, FabricError


class ContentionError(FabricError):
    """A concurrent operation came first, or it is too early."""

    family = "contention"
    kind = "contention"
    classification = Classification.RETRYABLE


class UseClaimResumedExecution(ContentionError):
    """The execution continues an interrupted attempt and must be claimed as a resumed one."""


class NotAResumedExecution(ContentionError):
    """The execution has no interrupted attempt to continue and must be claimed as a fresh one."""


class ExecutionNotLeaseable(ContentionError):
    """The execution cannot be leased in its current state."""


class LeaseConflict(ContentionError):
    """Another lease on this execution exists."""


class InvalidClaimGrant(ContentionError):
    """There is no grant that allows this worker to claim this execution."""


class ClaimGrantExpired(ContentionError):
    """The grant has expired; request a new one."""


class NoEligibleExecution(ContentionError):
    """No execution is waiting that this worker could run."""


class WaitpointNotFound(ContentionError):
    """There is no such waitpoint, or not yet."""


class WaitpointPendingUseBufferScript(ContentionError):
    """The waitpoint is still pending; signals to it are buffered."""


class StaleGraphRevision(ContentionError):
    """The flow's graph has changed since it was read."""

    expected: int | None = None
    actual: int | None = None


class ExecutionNotActive(ContentionError):
    """The execution is not running; for its former holder this is final."""

    terminal_outcome: str
    lease_epoch: int
    lifecycle_phase: str
    attempt_id: str | None

    def __init__(
        self,
        detail: str = "",
        *,
        terminal_outcome: str,
        lease_epoch: int,
        lifecycle_phase: str,
        attempt_id: str | None,
        **facts: object,
    ) -> None:
        super().__init__(
            detail,
            terminal_outcome=terminal_outcome,
            lease_epoch=lease_epoch,
            lifecycle_phase=lifecycle_phase,
            attempt_id=attempt_id,
            **facts,
        )

    @property
    def sentence(self) -> str:
        """Why it is not running."""
        ended = self.lifecycle_phase == "terminal"
        state = f"has ended ({self.terminal_outcome})" if ended else f"is {self.lifecycle_phase}"
        return f"The execution is not running: it {state}."


class ExecutionNotEligible(ContentionError):
    """The execution is not waiting for a worker now."""


class ExecutionNotInEligibleSet(ContentionError):
    """The execution is not waiting in this lane."""


class ExecutionNotReclaimable(ContentionError):
    """The execution's lease is neither expired nor revoked, so it cannot be taken over."""


class NoActiveLease(ContentionError):
    """Nobody holds a lease on this execution."""


class RateLimitExceeded(ContentionError):
    """The quota's rate is used up for now."""

    retry_after_ms: int | None = None

    @property
    def sentence(self) -> str:
        """When there is capacity again, if that is known."""
        again = "" if self.retry_after_ms is None else f"; try again in {self.retry_after_ms} ms"
        return f"The quota's rate is used up for now{again}."


class ConcurrencyLimitExceeded(ContentionError):
    """The quota's concurrency limit is reached."""


class RetryExhausted(ContentionError):
    """The store could not commit this against concurrent writers; the whole call may be retried."""
