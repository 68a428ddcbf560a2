"""Answers of operations on executions."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from flowfabric.handles import Handle
from flowfabric.model.execution import Lineage, Payload
from flowfabric.model.failure import StoredFailure
from flowfabric.model.states import AttemptRecordState, AttemptType, PublicState


class Created(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    public_state: PublicState


class Duplicate(msgspec.Struct, frozen=True, gc=False):
    """An earlier create exists: with the same id, or with the same idempotency key and perhaps another id."""

    execution_id: str


class Granted(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class ClaimGrant(msgspec.Struct, frozen=True, gc=False):
    """An offer to claim one execution, or to resume its interrupted attempt."""

    execution_id: str
    partition_key: str
    grant_key: str
    expires_at_ms: int
    lane_id: str
    resumes: bool = False  # redeem it with `claim_resumed_execution`


class ReclaimGrant(msgspec.Struct, frozen=True, gc=False):
    """An offer to take over one execution whose lease expired or was revoked."""

    execution_id: str
    partition_key: str
    grant_key: str
    expires_at_ms: int
    lane_id: str


class NotReclaimable(msgspec.Struct, frozen=True, gc=False):
    detail: str = "execution_not_reclaimable"


class ReclaimCapExceeded(msgspec.Struct, frozen=True, gc=False):
    reclaim_count: int


class GrantNotFound(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class Claimed(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    lease_id: str
    lease_epoch: int
    attempt_index: int
    attempt_id: str
    attempt_type: AttemptType
    lease_expires_at: int
    handle: Handle
    payload: Payload | None = None  # the input, if the claim loaded it
    namespace: str | None = None  # set together with the payload
    life: int = 0  # how often it continued as new


class OperatorClaim(msgspec.Struct, frozen=True, gc=False):
    lease_id: str
    lease_epoch: int
    attempt_index: int


class Renewed(msgspec.Struct, frozen=True, gc=False):
    expires_at: int
    lease_epoch: int


class ProgressNoted(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class Completed(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    public_state: PublicState = PublicState.COMPLETED
    unread: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # messages that nobody has read, by name


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """The run that a submit with a key came to: a new one, or the one that has the key.

    `item` is the place of this submit's input in a batch, `superseded` the run that was cancelled for the new one.
    """

    execution_id: str
    is_new: bool = True
    item: int | None = None
    superseded: str | None = None


class Continued(msgspec.Struct, frozen=True, gc=False):
    """The next life of a run has begun; it is claimable as soon as the former one is forgotten."""

    execution_id: str
    life: int
    is_forgotten: bool = True


class RetryScheduled(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    delay_until: int
    next_attempt_index: int


class TerminalFailed(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class Delayed(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    public_state: PublicState = PublicState.DELAYED


class Moved(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    public_state: PublicState


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    public_state: PublicState = PublicState.CANCELLED


class ChildrenCancelled(msgspec.Struct, frozen=True, gc=False):
    """Children that are cancelled, now or before, and those that had ended otherwise."""

    cancelled: tuple[str, ...]
    ended: tuple[str, ...]


class Revoked(msgspec.Struct, frozen=True, gc=False):
    lease_id: str
    lease_epoch: int


class NothingToDo(msgspec.Struct, frozen=True, gc=False):
    """Nothing was left to do, for this reason."""

    variant: ClassVar[str] = "AlreadySatisfied"

    reason: str


class MarkedExpired(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class Expired(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class AlreadyTerminal(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class NotDue(msgspec.Struct, frozen=True, gc=False):
    """The timer that a sweep found is not armed any more, or not due yet."""

    execution_id: str


class Promotion(StrEnum):
    PROMOTED = "promoted"
    NOT_YET_DUE = "not_yet_due"
    NOT_DELAYED = "not_delayed_cleaned"
    NOT_RUNNABLE = "not_runnable_cleaned"
    NOT_FOUND = "not_found_cleaned"


class Changed(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class Replayed(msgspec.Struct, frozen=True, gc=False):
    public_state: PublicState


class Blocked(msgspec.Struct, frozen=True, gc=False):
    execution_id: str
    reason: str


class Rejected(msgspec.Struct, frozen=True, gc=False):
    message: str


class Unblocked(msgspec.Struct, frozen=True, gc=False):
    execution_id: str


class AttemptView(msgspec.Struct, frozen=True, gc=False):
    """One attempt as read, running or ended."""

    execution_id: str
    attempt_index: int
    attempt_id: str
    attempt_type: AttemptType
    attempt_state: AttemptRecordState
    created_at: int
    started_at: int
    lease_id: str
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    lineage: Lineage
    suspended_at: int | None = None
    suspension_id: str | None = None
    resumed_at: int | None = None
    ended_at: int | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    error: StoredFailure | None = None  # the exception that ended it, if the holder reported one
