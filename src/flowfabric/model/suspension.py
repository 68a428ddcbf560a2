"""What an execution waits for, as rows: its suspension, its waitpoints and the signals they were sent.

The suspension is the root of all of them, one row an execution: it comes into being with the first waitpoint, message
or suspension and stays until the execution goes. It holds the open suspension or the last one that was closed.
Whether a waitpoint is open follows from that row (`rules.waits.state_of`), so that everything a suspension waits on
closes in one write.

No token is kept anywhere. A token follows from the key, the execution and the waitpoint; a waitpoint remembers which
key signed it, and enough of the digest for people to recognise it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

NO_TIMEOUT = 9_999_999_999_999  # where a suspension without a timeout stands in the list of suspended executions


class WaitpointState(StrEnum):
    PENDING = "pending"
    ACTIVE = "active"
    CLOSED = "closed"


class TimeoutBehavior(StrEnum):
    """What happens to a suspended execution whose time is over."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    AUTO_RESUME = "auto_resume_with_timeout_signal"
    ESCALATE = "escalate"


class Requester(StrEnum):
    """Who asked for a suspension; kept for people."""

    WORKER = "worker"
    OPERATOR = "operator"
    POLICY = "policy"
    SYSTEM_TIMEOUT_POLICY = "system_timeout_policy"


class Suspension(msgspec.Struct, frozen=True):
    """The root of everything an execution waits for.

    `suspension_id` is unset before the first suspension. A suspension is open until `closed_at` is set; while it is
    open, `due_at` is its timeout, or `NO_TIMEOUT`. `progress` and `satisfiers` tell how far the condition has come.
    A durable function waits on gates instead (`model.gate`); `gates` holds those that are open.
    """

    execution_id: str
    partition: int
    signal_count: int = 0  # accepted in the whole life: what the cap counts
    suspension_id: str | None = None
    attempt_index: int | None = None
    waitpoints: str | None = None  # [[waitpoint_id, waitpoint_key], …] as JSON, the primary first
    reason_code: str | None = None
    requested_by: Requester | None = None
    continuation_metadata_pointer: str | None = None
    created_at: int | None = None
    timeout_at: int | None = None
    timeout_behavior: TimeoutBehavior | None = None
    due_at: int | None = None
    resume_condition: str | None = None
    resume_policy: str | None = None
    last_signal_at: int | None = None
    satisfied_at: int | None = None
    closed_at: int | None = None
    close_reason: str | None = None
    closer_signal_id: str | None = None
    progress: str | None = None
    satisfiers: str | None = None  # [[waitpoint_id, seq], …] as JSON, in the order of acceptance
    waits_on: str | None = None  # the gates that a parked function waits for, as JSON
    gates: str | None = None  # open gates by name, as JSON
    mail: str | None = None  # per name, the next entry to be read and the next to be written, as JSON
    revision: int = 0


class Waitpoint(msgspec.Struct, frozen=True):
    """A place to which signals are sent. It belongs to a suspension or to a gate; while to neither, it is pending."""

    waitpoint_id: str
    partition: int
    execution_id: str
    attempt_index: int
    waitpoint_key: str
    created_at: int
    token_kid: str
    token_fingerprint: str
    suspension_id: str | None = None
    gate: str | None = None
    activated_at: int | None = None
    expires_at: int | None = None
    pending_until: int | None = None  # the same as `expires_at` while it is pending: what the sweep looks for
    closed_at: int | None = None  # closed on its own; one that closed with its suspension shows it there
    close_reason: str | None = None
    signal_count: int = 0
    matched_signal_count: int = 0
    last_signal_at: int | None = None
    log_start: int = 1  # the first entry of its log that is still kept


class Signal(msgspec.Struct, frozen=True):
    """A signal that was accepted, by its place in the waitpoint's log; place 0 is the engine's own timeout signal."""

    execution_id: str
    waitpoint_id: str
    seq: int
    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    target_scope: str
    created_at: int
    accepted_at: int
    observed_effect: str
    correlation_id: str | None = None
    idempotency_key: str | None = None
    payload_encoding: str | None = None
    payload: bytes | None = None


class IdempotencyRecord(msgspec.Struct, frozen=True):
    """The answer to an idempotent call: of a suspend, or of a delivery to the waitpoint that `scope` names."""

    execution_id: str
    scope: str
    digest: str
    expires_at: int
    answer: str
