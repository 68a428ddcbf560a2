"""Conflicts: the request contradicts stored data."""

from __future__ import annotations

from flowfabric.errors.base import FabricError


class ConflictError(FabricError):
    """The request contradicts stored data."""

    family = "conflict"
    kind = "conflict"


class IdInOtherNamespace(ConflictError):
    """This id is in use in another namespace."""

    kind = "id_in_other_namespace"


class DependencyAlreadyExists(ConflictError):
    """These two executions are already connected."""

    kind = "dependency_already_exists"

    existing: object = None


class CycleDetected(ConflictError):
    """The dependency would close a cycle."""

    kind = "cycle_detected"


class SelfReferencingEdge(ConflictError):
    """An execution cannot depend on itself."""

    kind = "self_referencing_edge"


class ExecutionAlreadyInFlow(ConflictError):
    """The execution already belongs to a flow."""

    kind = "execution_already_in_flow"


class WaitpointAlreadyExists(ConflictError):
    """An open waitpoint with this id exists."""

    kind = "waitpoint_already_exists"


class BudgetAttachConflict(ConflictError):
    """Another budget is attached here."""

    kind = "budget_attach_conflict"


class QuotaAttachConflict(ConflictError):
    """Another quota policy is attached here."""

    kind = "quota_attach_conflict"


class RotationConflict(ConflictError):
    """This key id exists with another secret."""

    kind = "rotation_conflict"

    kid: str

    def __init__(self, detail: str = "", *, kid: str, **facts: object) -> None:
        super().__init__(detail, kid=kid, **facts)


class ActiveAttemptExists(ConflictError):
    """An attempt of this execution is still running."""

    kind = "active_attempt_exists"


class IdempotencyConflict(ConflictError):
    """This idempotency key was used for another request."""

    kind = "idempotency_conflict"
