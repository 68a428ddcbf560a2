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

    kind = "use_claim_resumed_execution"


class NotAResumedExecution(ContentionError):
    """The execution has no interrupted attempt to continue and must be claimed as a fresh one."""

    kind = "not_a_resumed_execution"


class ExecutionNotLeaseable(ContentionError):
    """The execution cannot be leased in its current state."""

    kind = "execution_not_leaseable"


class LeaseConflict(ContentionError):
    """Another lease on this execution exists."""

    kind = "lease_conflict"


class InvalidClaimGrant(ContentionError):
    """There is no grant that allows this worker to claim this execution."""

    kind = "invalid_claim_grant"


class ClaimGrantExpired(ContentionError):
    """The grant has expired; request a new one."""

    kind = "claim_grant_expired"


class NoEligibleExecution(ContentionError):
    """No execution is waiting that this worker could run."""

    kind = "no_eligible_execution"


class WaitpointNotFound(ContentionError):
    """There is no such waitpoint, or not yet."""

    kind = "waitpoint_not_found"


class WaitpointPendingUseBufferScript(ContentionError):
    """The waitpoint is still pending; signals to it are buffered."""

    kind = "waitpoint_pending_use_buffer_script"


class StaleGraphRevision(ContentionError):
    """The flow's graph has changed since it was read."""

    kind = "stale_graph_revision"

    expected: int | None = None
    actual: int | None = None


class ExecutionNotActive(ContentionError):
    """The execution is not running; for its former holder this is final."""

    kind = "execution_not_active"

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

    kind = "execution_not_eligible"


class ExecutionNotInEligibleSet(ContentionError):
    """The execution is not waiting in this lane."""

    kind = "execution_not_in_eligible_set"


class ExecutionNotReclaimable(ContentionError):
    """The execution's lease is neither expired nor revoked, so it cannot be taken over."""

    kind = "execution_not_reclaimable"


class NoActiveLease(ContentionError):
    """Nobody holds a lease on this execution."""

    kind = "no_active_lease"


class RateLimitExceeded(ContentionError):
    """The quota's rate is used up for now."""

    kind = "rate_limit_exceeded"

    retry_after_ms: int | None = None

    @property
    def sentence(self) -> str:
        """When there is capacity again, if that is known."""
        again = "" if self.retry_after_ms is None else f"; try again in {self.retry_after_ms} ms"
        return f"The quota's rate is used up for now{again}."


class ConcurrencyLimitExceeded(ContentionError):
    """The quota's concurrency limit is reached."""

    kind = "concurrency_limit_exceeded"


class RetryExhausted(ContentionError):
    """The store could not commit this against concurrent writers; the whole call may be retried."""

    kind = "retry_exhausted"
