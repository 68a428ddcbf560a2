"""Everything FlowFabric may refuse, and how it may break, on one page.

    FabricError
    ├── NotFound                what was named does not exist
    ├── ValidationError         the request itself is wrong; the same words will be refused again
    ├── ContentionError         the moment is wrong; another moment may be right
    ├── ConflictError           the request contradicts what is stored
    ├── StateError              the thing is in a state that forbids this, or makes it needless
    ├── BugError                this should not have been possible
    ├── StoreUnavailable        the store did not answer properly              (family: transport)
    ├── Unavailable             an operation cannot be served now
    │   ├── SchemaTooNew
    │   ├── PartitionMismatch
    │   └── ForkedProcess
    ├── ResourceExhausted       a bounded pool is full
    │   └── WorkerAtCapacity
    ├── OperationTimeout        an operation took longer than it was given     (family: timeout)
    ├── StreamDisconnected      a subscription ended; its cursor resumes it
    └── StreamBackpressure      a subscription lost old events; it goes on

Below each family stands one class per `kind`, the code that travels on the wire. The first line of a class's
docstring is the sentence a person reads. Every error is made from an optional positional `detail` and keyword
facts, which become attributes:

    InvalidInput("fence_required")
    StaleLease(execution_id=execution_id, lease_epoch=3)

Two errors are equal when type, kind, detail and facts are, and every error survives pickling. Context from a call
site is added as a note (`add_note`), so that it never changes what an error is or how it is classified.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias


class Classification(StrEnum):
    """What the one who meets an error should do about it."""

    RETRYABLE = "retryable"  # ask again, a little later
    COOPERATIVE = "cooperative"  # stop on your own terms and report; do not retry blindly
    INFORMATIONAL = "informational"  # it is already as you wanted, or will not matter
    BUG = "bug"  # tell the people who wrote this
    TERMINAL = "terminal"  # final; asking again will not help


class StoreFault(StrEnum):
    """What went wrong between the engine and its store."""

    TRANSPORT = "transport"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    AUTH = "auth"
    CLUSTER = "cluster"
    BUSY_LOADING = "busy_loading"
    SCRIPT_NOT_LOADED = "script_not_loaded"
    OTHER = "other"

    @property
    def passes(self) -> bool:
        """Whether this usually goes away by itself."""
        return self in _PASSING_FAULTS


_PASSING_FAULTS = frozenset({StoreFault.TRANSPORT, StoreFault.TIMEOUT, StoreFault.CLUSTER, StoreFault.BUSY_LOADING})


class FabricError(Exception):
    """FlowFabric could not do what was asked."""

    family: str = "fabric"
    kind: str = "fabric_error"
    classification: Classification = Classification.TERMINAL

    execution_id: str | None = None

    def __init__(self, detail: str = "", **facts: object) -> None:
        if not _OWN_NAMES.isdisjoint(facts):
            raise TypeError(f"not usable as facts: {sorted(_OWN_NAMES.intersection(facts))}")
        super().__init__(detail)
        self.detail = detail
        self.facts = facts
        self.__dict__.update(facts)

    @property
    def retryable(self) -> bool:
        """Whether asking again, a little later, may be answered differently."""
        return self.classification is Classification.RETRYABLE

    @property
    def sentence(self) -> str:
        """What happened, for people: the first line of the class's docstring."""
        return (type(self).__doc__ or "").partition("\n")[0]

    def __str__(self) -> str:
        code = f"{self.kind}: {self.detail}" if self.detail else self.kind
        facts = ", ".join(f"{name}={value}" for name, value in self.facts.items() if value is not None)
        return f"{code} — {self.sentence} ({facts})" if facts else f"{code} — {self.sentence}"

    def __repr__(self) -> str:
        given = [repr(self.detail)] if self.detail else []
        given += [f"{name}={value!r}" for name, value in self.facts.items()]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, FabricError):
            return NotImplemented
        return (self.kind, self.detail, self.facts) == (other.kind, other.detail, other.facts)

    def __hash__(self) -> int:
        return hash((type(self), self.kind, self.detail))  # facts may be unhashable; equal errors still meet

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.detail, self.facts)  # required facts have no place in `args`


_OWN_NAMES = frozenset({"args", "classification", "detail", "facts", "family", "kind", "retryable", "sentence"})


def _again(cls: type[FabricError], detail: str, facts: dict[str, object]) -> FabricError:
    return cls(detail=detail, **facts)


# ---------------------------------------------------------------------------------------------------------------
# Not found


class NotFound(FabricError):
    """There is no such thing."""

    family = "not_found"
    kind = "not_found"

    entity: str

    def __init__(self, entity: str, detail: str = "", **facts: object) -> None:
        """`entity` says what is missing: execution, flow, budget, quota_policy, waitpoint, api_token…"""
        super().__init__(detail, entity=entity, **facts)
        self.kind = f"{entity}_not_found"

    @property
    def sentence(self) -> str:
        """What is missing, for people."""
        return f"There is no such {self.entity.replace('_', ' ')}."


# ---------------------------------------------------------------------------------------------------------------
# Validation


class ValidationError(FabricError):
    """The request is not acceptable as it stands."""

    family = "validation"
    kind = "validation_error"


class InvalidInput(ValidationError):
    """An argument is missing, malformed or out of range."""

    kind = "invalid_input"


class CapabilityMismatch(ValidationError):
    """The worker lacks capabilities that this execution requires; the detail lists them."""

    kind = "capability_mismatch"


class InvalidCapabilities(ValidationError):
    """The capability list is not well formed or too long."""

    kind = "invalid_capabilities"


class InvalidPolicyJson(ValidationError):
    """The execution policy cannot be used; the detail names the part that is wrong."""

    kind = "invalid_policy_json"


class PayloadTooLarge(ValidationError):
    """The payload is larger than allowed."""

    kind = "payload_too_large"


class SignalLimitExceeded(ValidationError):
    """This execution has accepted as many signals as it may."""

    kind = "signal_limit_exceeded"


class InvalidWaitpointKey(ValidationError):
    """The waitpoint key is not usable here."""

    kind = "invalid_waitpoint_key"


class InvalidToken(ValidationError):
    """The waitpoint token is missing, wrong or no longer valid."""

    kind = "invalid_token"


class WaitpointNotTokenBound(ValidationError):
    """This waitpoint has no token, so it cannot be activated or signalled."""

    kind = "waitpoint_not_token_bound"


class RetentionLimitExceeded(ValidationError):
    """Keeping this much would exceed the retention limit."""

    kind = "retention_limit_exceeded"


class InvalidLeaseForSuspend(ValidationError):
    """Only the holder of a live lease can suspend an execution."""

    kind = "invalid_lease_for_suspend"


class InvalidDependency(ValidationError):
    """The dependency is not known to this execution or cannot be used."""

    kind = "invalid_dependency"


class InvalidWaitpointForExecution(ValidationError):
    """The waitpoint belongs to another execution or another attempt."""

    kind = "invalid_waitpoint_for_execution"


class InvalidBlockingReason(ValidationError):
    """An execution cannot be blocked or unblocked for this reason."""

    kind = "invalid_blocking_reason"


class InvalidOffset(ValidationError):
    """The position is not one that this log knows."""

    kind = "invalid_offset"


class Unauthorized(ValidationError):
    """The caller is not allowed to do this."""

    kind = "unauthorized"


class InvalidBudgetScope(ValidationError):
    """The budget's scope does not fit what it is attached to."""

    kind = "invalid_budget_scope"


class BudgetOverrideNotAllowed(ValidationError):
    """This budget may not be overridden."""

    kind = "budget_override_not_allowed"


class InvalidQuotaSpec(ValidationError):
    """The quota policy's numbers do not make sense together."""

    kind = "invalid_quota_spec"


class InvalidKid(ValidationError):
    """A key id must not be empty and must not contain a colon."""

    kind = "invalid_kid"


class InvalidSecretHex(ValidationError):
    """A secret must be an even, non-zero number of hexadecimal digits."""

    kind = "invalid_secret_hex"


class InvalidGraceMs(ValidationError):
    """The grace period must be a whole number of milliseconds from 0 to 2^53 - 1."""

    kind = "invalid_grace_ms"


class InvalidTagKey(ValidationError):
    """A tag key is a lowercase namespace, a dot and a lowercase field; the detail is the key."""

    kind = "invalid_tag_key"


class InvalidFrameType(ValidationError):
    """The frame type is not known."""

    kind = "invalid_frame_type"


class Corruption(ValidationError):
    """Bytes that FlowFabric wrote earlier can no longer be read; the detail says where."""

    kind = "corruption"


class HandleFromOtherBackend(ValidationError):
    """The handle was given out by another store."""

    kind = "handle_from_other_backend"


# ---------------------------------------------------------------------------------------------------------------
# Contention


class ContentionError(FabricError):
    """Someone else was faster, or it is too early."""

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
    """The execution cannot be leased in its present state."""

    kind = "execution_not_leaseable"


class LeaseConflict(ContentionError):
    """Another lease on this execution is in the way."""

    kind = "lease_conflict"


class InvalidClaimGrant(ContentionError):
    """There is no grant that allows this worker to claim this execution."""

    kind = "invalid_claim_grant"


class ClaimGrantExpired(ContentionError):
    """The grant's time is over; ask for a new one."""

    kind = "claim_grant_expired"


class NoEligibleExecution(ContentionError):
    """Nothing is waiting that this worker could run."""

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
    """The execution is not running; for the one who held it this is final."""

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


class ExecutionNotEligible(ContentionError):
    """The execution is not waiting for a worker now."""

    kind = "execution_not_eligible"


class ExecutionNotInEligibleSet(ContentionError):
    """The execution is not waiting in this lane."""

    kind = "execution_not_in_eligible_set"


class ExecutionNotReclaimable(ContentionError):
    """The execution's lease is neither expired nor revoked, so nobody can take it over."""

    kind = "execution_not_reclaimable"


class NoActiveLease(ContentionError):
    """Nobody holds a lease on this execution."""

    kind = "no_active_lease"


class RateLimitExceeded(ContentionError):
    """The quota's rate is used up for now."""

    kind = "rate_limit_exceeded"

    retry_after_ms: int | None = None


class ConcurrencyLimitExceeded(ContentionError):
    """As many executions run under this quota as may run together."""

    kind = "concurrency_limit_exceeded"


class RetryExhausted(ContentionError):
    """The store could not settle this against concurrent writers; the whole call may be tried again."""

    kind = "retry_exhausted"


# ---------------------------------------------------------------------------------------------------------------
# Conflict


class ConflictError(FabricError):
    """The request contradicts what is already there."""

    family = "conflict"
    kind = "conflict"


class DependencyAlreadyExists(ConflictError):
    """These two executions are already connected."""

    kind = "dependency_already_exists"

    existing: object = None


class CycleDetected(ConflictError):
    """The dependency would close a circle."""

    kind = "cycle_detected"


class SelfReferencingEdge(ConflictError):
    """An execution cannot depend on itself."""

    kind = "self_referencing_edge"


class ExecutionAlreadyInFlow(ConflictError):
    """The execution belongs to a flow already."""

    kind = "execution_already_in_flow"


class WaitpointAlreadyExists(ConflictError):
    """An open waitpoint with this id exists."""

    kind = "waitpoint_already_exists"


class BudgetAttachConflict(ConflictError):
    """Another budget is attached in this place."""

    kind = "budget_attach_conflict"


class QuotaAttachConflict(ConflictError):
    """Another quota policy is attached in this place."""

    kind = "quota_attach_conflict"


class RotationConflict(ConflictError):
    """This key id is known with another secret."""

    kind = "rotation_conflict"

    kid: str

    def __init__(self, detail: str = "", *, kid: str, **facts: object) -> None:
        super().__init__(detail, kid=kid, **facts)


class ActiveAttemptExists(ConflictError):
    """An attempt of this execution is still running."""

    kind = "active_attempt_exists"


# ---------------------------------------------------------------------------------------------------------------
# State


class StateError(FabricError):
    """The present state does not allow this."""

    family = "state"
    kind = "state_conflict"


class StaleLease(StateError):
    """Someone else holds this execution now; whatever this worker still had to say is too late."""

    kind = "stale_lease"

    lease_epoch: int | None = None


class LeaseExpired(StateError):
    """The lease ran out before this arrived; the work will be taken over."""

    kind = "lease_expired"

    lease_epoch: int | None = None


class LeaseRevoked(StateError):
    """An operator took the lease away."""

    kind = "lease_revoked"

    lease_epoch: int | None = None


class ExecutionNotSuspended(StateError):
    """The execution is not suspended."""

    kind = "execution_not_suspended"
    classification = Classification.INFORMATIONAL


class AlreadySuspended(StateError):
    """The execution is suspended already."""

    kind = "already_suspended"
    classification = Classification.INFORMATIONAL


class WaitpointClosed(StateError):
    """The waitpoint is closed and takes no more signals."""

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
    """What the execution waits for has not happened yet."""

    kind = "resume_condition_not_met"


class WaitpointNotPending(StateError):
    """The waitpoint was activated or closed already."""

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
    """Only the holder of the lease can write to the output stream, and someone else holds it now."""

    kind = "stale_owner_cannot_append"


class GrantAlreadyExists(StateError):
    """Another grant for this execution is still valid."""

    kind = "grant_already_exists"
    classification = Classification.INFORMATIONAL


class ExecutionNotInFlow(StateError):
    """The execution is not a member of this flow."""

    kind = "execution_not_in_flow"


class FlowAlreadyTerminal(StateError):
    """The flow has ended and cannot change any more."""

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
    """A soft limit of the budget is passed; work may go on."""

    kind = "budget_soft_exceeded"
    classification = Classification.INFORMATIONAL


class OkAlreadyApplied(StateError):
    """This was done before; nothing changed now."""

    kind = "ok_already_applied"
    classification = Classification.INFORMATIONAL


class AttemptNotStarted(StateError):
    """The attempt has not started yet."""

    kind = "attempt_not_started"


class AttemptAlreadyTerminal(StateError):
    """The attempt has ended already."""

    kind = "attempt_already_terminal"
    classification = Classification.INFORMATIONAL


class ExecutionNotEligibleForAttempt(StateError):
    """The execution cannot start an attempt in its present state."""

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


# ---------------------------------------------------------------------------------------------------------------
# Bugs, stores, limits of the machine


class BugError(FabricError):
    """Something happened that FlowFabric believes impossible; please report it."""

    family = "bug"
    kind = "bug"
    classification = Classification.BUG


class AttemptNotInCreatedState(BugError):
    """An attempt was started twice; please report it."""

    kind = "attempt_not_in_created_state"


class StoreUnavailable(FabricError):
    """The store could not be reached or did not answer properly."""

    family = "transport"
    kind = "transport"

    backend: str
    source: StoreFault
    in_doubt: bool  # whether what was asked may have been written all the same

    def __init__(
        self,
        detail: str = "",
        *,
        backend: str = "",
        source: StoreFault | str = StoreFault.OTHER,
        in_doubt: bool = False,
        **facts: object,
    ) -> None:
        """Raise it `from` the driver's own error, so that the cause stays visible."""
        fault = StoreFault(source)
        super().__init__(detail, backend=backend, source=fault, in_doubt=in_doubt, **facts)
        self.classification = Classification.RETRYABLE if fault.passes else Classification.TERMINAL


class Unavailable(FabricError):
    """This operation cannot be served now."""

    family = "unavailable"
    kind = "unavailable"

    op: str

    def __init__(self, op: str = "", detail: str = "", **facts: object) -> None:
        super().__init__(detail, op=op, **facts)


class SchemaTooNew(Unavailable):
    """The store was written by a newer release; update this one before it touches anything."""

    kind = "schema_too_new"

    found: int
    known: int

    def __init__(self, op: str = "open", detail: str = "", *, found: int, known: int, **facts: object) -> None:
        super().__init__(op, detail, found=found, known=known, **facts)


class PartitionMismatch(Unavailable):
    """The store was begun with other numbers of partitions; ids that exist would not be found with these."""

    kind = "partition_mismatch"

    stored: int
    config: int


class ForkedProcess(Unavailable):
    """The engine was opened before this process forked; open a new one in the child."""

    kind = "forked_process"


class ResourceExhausted(FabricError):
    """Too many calls of this sort are under way; try again in a moment."""

    family = "resource_exhausted"
    kind = "resource_exhausted"
    classification = Classification.RETRYABLE

    pool: str
    max: int
    retry_after_ms: int | None

    def __init__(
        self,
        pool: str,
        max: int = 0,  # noqa: A002 - the field's name on the wire
        retry_after_ms: int | None = None,
        detail: str = "",
        **facts: object,
    ) -> None:
        super().__init__(detail, pool=pool, max=max, retry_after_ms=retry_after_ms, **facts)


class WorkerAtCapacity(ResourceExhausted):
    """The worker runs as many tasks as it may; the grant stays usable."""

    kind = "worker_at_capacity"


class OperationTimeout(FabricError):
    """The operation took longer than it was given."""

    family = "timeout"
    kind = "timeout"

    op: str
    elapsed_ms: int

    def __init__(self, op: str, elapsed_ms: int = 0, detail: str = "", **facts: object) -> None:
        super().__init__(detail, op=op, elapsed_ms=elapsed_ms, **facts)


# ---------------------------------------------------------------------------------------------------------------
# Subscriptions


class StreamDisconnected(FabricError):
    """The subscription ended; subscribing again with its cursor loses nothing."""

    family = "stream_disconnected"
    kind = "stream_disconnected"

    cursor: bytes

    def __init__(self, cursor: bytes, detail: str = "", **facts: object) -> None:
        super().__init__(detail, cursor=cursor, **facts)


class StreamBackpressure(FabricError):
    """Events after the cursor are no longer kept; delivery goes on with the oldest that are."""

    family = "stream_backpressure"
    kind = "stream_backpressure"
    classification = Classification.INFORMATIONAL


# ---------------------------------------------------------------------------------------------------------------
# Looking up

ENTITIES = ("execution", "flow", "attempt", "budget", "quota_policy", "stream", "waitpoint", "suspension")

ByKind: TypeAlias = dict[str, type[FabricError]]


def _kinds_below(cls: type[FabricError]) -> ByKind:
    found: ByKind = {}
    for below in cls.__subclasses__():
        found[below.kind] = below
        found.update(_kinds_below(below))
    return found


by_kind: ByKind = {f"{entity}_not_found": NotFound for entity in ENTITIES} | _kinds_below(FabricError)
"""The class of every code. `waitpoint_not_found` is the contention kind; a missing waitpoint shares its words."""
