"""The state vector: six dimensions with closed vocabularies, and a seventh, the public state, derived from them.

The order of members is their stored code: append new members, never reorder.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never


class LifecyclePhase(StrEnum):
    SUBMITTED = "submitted"
    RUNNABLE = "runnable"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


class OwnershipState(StrEnum):
    UNOWNED = "unowned"
    LEASED = "leased"
    LEASE_EXPIRED_RECLAIMABLE = "lease_expired_reclaimable"
    LEASE_REVOKED = "lease_revoked"


class EligibilityState(StrEnum):
    ELIGIBLE_NOW = "eligible_now"
    NOT_ELIGIBLE_UNTIL_TIME = "not_eligible_until_time"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    BLOCKED_BY_BUDGET = "blocked_by_budget"
    BLOCKED_BY_QUOTA = "blocked_by_quota"
    BLOCKED_BY_ROUTE = "blocked_by_route"
    BLOCKED_BY_LANE_STATE = "blocked_by_lane_state"
    BLOCKED_BY_OPERATOR = "blocked_by_operator"
    NOT_APPLICABLE = "not_applicable"


class BlockingReason(StrEnum):
    NONE = "none"
    WAITING_FOR_WORKER = "waiting_for_worker"
    WAITING_FOR_RETRY_BACKOFF = "waiting_for_retry_backoff"
    WAITING_FOR_RESUME_DELAY = "waiting_for_resume_delay"
    WAITING_FOR_DELAY = "waiting_for_delay"
    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_CHILDREN = "waiting_for_children"
    WAITING_FOR_BUDGET = "waiting_for_budget"
    WAITING_FOR_QUOTA = "waiting_for_quota"
    WAITING_FOR_CAPABLE_WORKER = "waiting_for_capable_worker"
    WAITING_FOR_LOCALITY_MATCH = "waiting_for_locality_match"
    PAUSED_BY_OPERATOR = "paused_by_operator"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_FLOW_CANCEL = "paused_by_flow_cancel"


class TerminalOutcome(StrEnum):
    NONE = "none"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptState(StrEnum):
    """The state of the execution with respect to its attempts."""

    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


class PublicState(StrEnum):
    WAITING = "waiting"
    DELAYED = "delayed"
    RATE_LIMITED = "rate_limited"
    WAITING_CHILDREN = "waiting_children"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    RESUMABLE = "resumable"  # a legal wire value that the derivation never yields
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptType(StrEnum):
    INITIAL = "initial"
    RETRY = "retry"
    RECLAIM = "reclaim"
    REPLAY = "replay"
    FALLBACK = "fallback"  # reserved, never produced


class AttemptRecordState(StrEnum):
    """The state of one attempt; the last four are final."""

    CREATED = "created"
    STARTED = "started"
    SUSPENDED = "suspended"
    ENDED_SUCCESS = "ended_success"
    ENDED_FAILURE = "ended_failure"
    ENDED_CANCELLED = "ended_cancelled"
    INTERRUPTED_RECLAIMED = "interrupted_reclaimed"


PUBLIC_STATE_OF_OUTCOME = {
    TerminalOutcome.NONE: PublicState.FAILED,  # a corrupt row reads as failed
    TerminalOutcome.SUCCESS: PublicState.COMPLETED,
    TerminalOutcome.FAILED: PublicState.FAILED,
    TerminalOutcome.CANCELLED: PublicState.CANCELLED,
    TerminalOutcome.EXPIRED: PublicState.EXPIRED,
    TerminalOutcome.SKIPPED: PublicState.SKIPPED,
}

PUBLIC_STATE_OF_ELIGIBILITY = {
    EligibilityState.ELIGIBLE_NOW: PublicState.WAITING,
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: PublicState.DELAYED,
    EligibilityState.BLOCKED_BY_DEPENDENCIES: PublicState.WAITING_CHILDREN,
    EligibilityState.BLOCKED_BY_BUDGET: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_QUOTA: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_ROUTE: PublicState.WAITING,
    EligibilityState.BLOCKED_BY_LANE_STATE: PublicState.WAITING,
    EligibilityState.BLOCKED_BY_OPERATOR: PublicState.WAITING,
    EligibilityState.NOT_APPLICABLE: PublicState.WAITING,  # a corrupt row reads as waiting
}


def public_state(phase: LifecyclePhase, eligibility: EligibilityState, outcome: TerminalOutcome) -> PublicState:
    """Return the public state of a vector. It is total, also over combinations that no operation produces."""
    match phase:
        case LifecyclePhase.TERMINAL:
            return PUBLIC_STATE_OF_OUTCOME[outcome]
        case LifecyclePhase.SUSPENDED:
            return PublicState.SUSPENDED
        case LifecyclePhase.ACTIVE:
            return PublicState.ACTIVE
        case LifecyclePhase.RUNNABLE:
            return PUBLIC_STATE_OF_ELIGIBILITY[eligibility]
        case LifecyclePhase.SUBMITTED:
            return PublicState.WAITING
        case _:
            assert_never(phase)
