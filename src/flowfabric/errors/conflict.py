"""Conflicts: the request contradicts stored data."""

from __future__ import annotations

from flowfabric.errors.base import FabricError


class ConflictError(FabricError):
    """The request contradicts stored data."""

    family = "conflict"
    kind = "conflict"


class IdInOtherNamespace(ConflictError):
    """This id is in use in another namespace."""


class KeyElsewhere(ConflictError):
    """A run with this idempotency key belongs on another partition; mint its id again, with the key."""


class KeyTaken(ConflictError):
    """A run has this key, and the task allows one at a time; wait for its end, or submit with another key."""

    run: object = None  # the SDK sets the run that has it


class SpreadChangePending(ConflictError):
    """An earlier change of the lane's spread is not yet in effect; try again in some seconds."""

    lane_id: str
    effective_at: int


class TooManySpreads(ConflictError):
    """The lane has had too many different spreads; choose one that it had before."""

    lane_id: str
    most: int


class DependencyAlreadyExists(ConflictError):
    """These two executions are already connected."""

    existing: object = None


class CycleDetected(ConflictError):
    """The dependency would close a cycle."""


class SelfReferencingEdge(ConflictError):
    """An execution cannot depend on itself."""


class ExecutionAlreadyInFlow(ConflictError):
    """The execution already belongs to a flow."""


class WaitpointAlreadyExists(ConflictError):
    """An open waitpoint with this id exists."""


class BudgetAttachConflict(ConflictError):
    """Another budget is attached here."""


class QuotaAttachConflict(ConflictError):
    """Another quota policy is attached here."""


class RotationConflict(ConflictError):
    """This key id exists with another secret."""

    kid: str

    def __init__(self, detail: str = "", *, kid: str, **facts: object) -> None:
        super().__init__(detail, kid=kid, **facts)


class ActiveAttemptExists(ConflictError):
    """An attempt of this execution is still running."""


class IdempotencyConflict(ConflictError):
    """This idempotency key was used for another request."""


class ScheduleExists(ConflictError):
    """A schedule of this name exists with another definition."""


class SchedulePaused(ConflictError):
    """The schedule is paused."""


class ScheduleBusy(ConflictError):
    """Too many runs of the schedule are under way."""
