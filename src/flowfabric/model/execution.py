"""Rows of an execution: the main row, and cold rows that a state change never rewrites.

There are three kinds of columns (docs/decisions/0002-execution-row-layout.md). The main row is narrow, and its revision
guards decisions. Two of its columns (`lease_expires_at`, `lease_renewed_at`) change with every renewal without changing
the revision. Cold rows hold payload, result and policy text.

The running attempt is part of the main row (`attempt_*`, `lineage`) and becomes an attempt row when it ends, so that a
claim inserts nothing. The lease columns keep the last lease after its release: `ownership_state` says whether it is in
force, and only a lease in force has a `lease_expires_at`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.failure import FAILURE_ENCODING
from flowfabric.model.instant import Instant
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)


class QueueKey(msgspec.Struct, frozen=True, gc=False, order=True):
    """A ready queue: everything that a worker must match to claim from it. Stored in the column `line`."""

    lane_id: str
    required: str = ""  # sorted, comma-joined capabilities
    fairness_key: str = ""
    fairness_weight: int = 1
    guarded: bool = False  # claimed by load, rule and commit instead of by the store's fast path


MISSING_QUEUE = QueueKey("")  # a row has it whose ready queue the store lost; no lane has an empty name


class Execution(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """The main row: everything that rules decide on. `line` is its ready queue and `rank` its position there."""

    execution_id: str
    partition: int
    namespace: str
    lane_id: str
    priority: int
    created_at: Instant
    last_transition_at: Instant
    last_mutation_at: Instant

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    terminal_outcome: TerminalOutcome
    attempt_state: AttemptState
    public_state: PublicState

    flow_id: str | None = None
    tags: str | None = None  # a JSON object with sorted keys; None for no tags
    required_capabilities: str | None = None
    terms: str | None = None  # `rules.execution.policy.Terms` as JSON; None if all are defaults
    blocking_text: str | None = None

    total_attempt_count: int = 0
    retry_count: int = 0
    replay_count: int = 0
    lease_reclaim_count: int = 0

    started_at: Instant | None = None
    completed_at: Instant | None = None

    attempt_index: int | None = None
    attempt_id: str | None = None
    attempt_type: AttemptType | None = None
    attempt_started_at: Instant | None = None
    attempt_suspended_at: Instant | None = None
    attempt_suspension: str | None = None
    attempt_resumed_at: Instant | None = None
    lineage: str | None = None  # Lineage as JSON: of the pending attempt, then of the running one

    lease_epoch: int = 0
    lease_id: str | None = None
    worker_id: str | None = None
    worker_instance_id: str | None = None
    current_lane: str | None = None
    lease_acquired_at: Instant | None = None
    lease_renewed_at: Instant | None = None
    lease_expires_at: Instant | None = None
    lease_expired_at: Instant | None = None
    lease_revoked_at: Instant | None = None
    lease_revoke_reason: str | None = None

    delay_until: Instant | None = None
    attempt_timeout_at: Instant | None = None
    deadline_at: Instant | None = None
    purge_at: Instant | None = None

    line: QueueKey | None = None
    rank: Instant | int = 0
    next_type: AttemptType | None = None  # type of the attempt that the next claim begins; None continues one
    next_timeout_ms: int | None = None
    granted_until: Instant | None = None
    grant: str | None = None  # Grant as JSON

    failure_reason: str | None = None
    cancellation_reason: str | None = None
    cancelled_by: str | None = None
    last_capability_mismatch_at: Instant | None = None
    progress_pct: int | None = None
    progress_message: str | None = None
    progress_updated_at: Instant | None = None
    progress_counts: str | None = None  # JSON: how often each branch of a durable function has reported

    current_suspension_id: str | None = None  # set while a suspension is open
    current_waitpoint_id: str | None = None  # its primary waitpoint
    last_hmac_validation_failed_at: Instant | None = None
    stream_index: int | None = None  # the last attempt that has written an output stream
    parent_id: str | None = (
        None  # the execution that waits for this one, or the schedule that created it; on its partition
    )
    has_waits: bool = False  # it has had waitpoints, messages or a suspension
    has_mail: bool = False  # it has been sent messages
    has_steps: bool = False  # it has recorded a durable step
    successors: str | None = None  # applied outgoing edges (`rules.flow.successors`); None if there are none
    # What would unblock it: `budget:<id>`, `quota:<id>`, `asleep:<budget>`, `route:<lane>`,
    # `code:<task>`.
    blocked_on: str | None = None
    blocked_at: Instant | None = None

    idempotency_key: str | None = None  # with which it was created
    life: int | None = None  # how often it continued as new; None if it never did
    # The life whose memos are still to be deleted; it is not claimable until then. -1 if it is being purged.
    past_life: int | None = None

    revision: int = 0  # the id of the change that wrote this row last


class Payload(msgspec.Struct, frozen=True, gc=False):
    """The input of the execution; an edge that passes data replaces it by a result."""

    execution_id: str
    execution_kind: str
    creator_identity: str
    input_payload: bytes | None = None
    payload_encoding: str | None = None
    policy: str | None = None


class Result(msgspec.Struct, frozen=True, gc=False):
    """The result of the current run; of a failed one its failure, with the encoding `ff.failure`."""

    execution_id: str
    payload: bytes
    encoding: str | None = None

    @property
    def is_failure(self) -> bool:
        """True if it is the failure of a run that failed."""
        return self.encoding == FAILURE_ENCODING


class Attempt(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """An ended attempt. The running one is part of the execution row."""

    execution_id: str
    attempt_index: int
    attempt_id: str
    attempt_type: AttemptType
    attempt_state: AttemptRecordState
    started_at: Instant
    lease_id: str
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    lineage: str | None = None
    suspended_at: Instant | None = None
    suspension_id: str | None = None
    resumed_at: Instant | None = None
    ended_at: Instant | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    failure: str | None = None  # `model.failure.StoredFailure` as JSON


class Lineage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Why an attempt exists."""

    previous_attempt_index: int | None = None
    retry_reason: str | None = None
    replay_reason: str | None = None
    replay_requested_by: str | None = None
    replayed_from_attempt_index: int | None = None
    reclaim_reason: str | None = None


class Grant(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An offer of one execution to one worker, stored in the execution's single grant slot."""

    kind: str  # "claim" or "reclaim"
    worker_id: str
    worker_instance_id: str
    lane_id: str
    created_at: int
    expires_at: int
    key_id: str = ""  # SHA-256 of the signed key; blank for the engine's own one-step claims
    capability_hash: str | None = None
    route_snapshot_json: str | None = None
    admission_summary: str | None = None
    admitted: bool = False  # issued after admission, which is repeated when the grant is redeemed


class KeyUntil(StrEnum):
    """How long an execution has its key."""

    PURGED = "purged"  # the key stays as long as the run is kept, and until `expires_at` at least
    ENDED = "ended"
    STARTED = "started"


class IdempotencyKey(msgspec.Struct, Generic[Instant], frozen=True, gc=False):
    """The digest of a create's namespace and key, and the execution it created.

    With `until` the key is taken as long as the execution is in that state, and `expires_at` says when to look again.
    """

    partition: int
    digest: str
    execution_id: str
    expires_at: Instant
    until: KeyUntil | None = None
    first_at: Instant | None = None  # when the first submit came
    revision: int = 0
