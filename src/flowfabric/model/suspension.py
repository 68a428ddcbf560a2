"""Rows of waits: an execution's suspension, its waitpoints and the signals they received.

The suspension row is the aggregate root, one per execution. The first waitpoint, message or suspension creates it, and
it stays until the execution is deleted. It holds the open suspension or the last closed one. Whether a waitpoint is
open follows from this row (`rules.suspension.state.waitpoint_state`), so that one write closes everything a suspension
waits on.

No token is stored. A token follows from the key, the execution and the waitpoint; a waitpoint stores which key signed
it, and a prefix of the digest for people to recognise it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant

NO_TIMEOUT = 9_999_999_999_999  # sort key of a suspension without a timeout


class WaitpointState(StrEnum):
    PENDING = "pending"
    ACTIVE = "active"
    CLOSED = "closed"


class TimeoutBehavior(StrEnum):
    """What happens to a suspended execution when its timeout passes."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    AUTO_RESUME = "auto_resume_with_timeout_signal"
    ESCALATE = "escalate"


class Requester(StrEnum):
    """Who requested a suspension; stored for readers only."""

    WORKER = "worker"
    OPERATOR = "operator"
    POLICY = "policy"
    SYSTEM_TIMEOUT_POLICY = "system_timeout_policy"


class Suspension(msgspec.Struct, Generic[Instant], frozen=True):
    """The aggregate root of everything an execution waits for.

    `suspension_id` is unset before the first suspension. A suspension is open until `closed_at` is set; while it is
    open, `due_at` is its timeout, or `NO_TIMEOUT`. `progress` and `satisfiers` store the progress of the condition. A
    durable function waits on gates instead (`model.gate`); `gates` holds the open ones. While one of them asks people,
    parked or not, `asks_until` is the instant at which the last such gate expires, or `NO_TIMEOUT`.
    """

    execution_id: str
    partition: int
    signal_count: int = 0  # accepted by the execution so far; the cap applies to it
    suspension_id: str | None = None
    attempt_index: int | None = None
    waitpoints: str | None = None  # [[waitpoint_id, waitpoint_key], …] as JSON, the primary first
    reason_code: str | None = None
    requested_by: Requester | None = None
    continuation_metadata_pointer: str | None = None
    created_at: Instant | None = None
    timeout_at: Instant | None = None
    timeout_behavior: TimeoutBehavior | None = None
    due_at: Instant | None = None
    resume_condition: str | None = None
    resume_policy: str | None = None
    last_signal_at: Instant | None = None
    satisfied_at: Instant | None = None
    closed_at: Instant | None = None
    close_reason: str | None = None
    closer_signal_id: str | None = None
    progress: str | None = None
    satisfiers: str | None = None  # [[waitpoint_id, seq], …] as JSON, in the order of acceptance
    waits_on: str | None = None  # the gates that a parked function waits for, as JSON
    gates: str | None = None  # open gates by name, as JSON
    mail: str | None = None  # per mailbox, the next message to read and the next to write, as JSON
    asks_until: int | None = None
    message_count: int = 0  # messages sent so far: the number of the last one
    inbox_closed_at: Instant | None = None  # senders are refused since then
    revision: int = 0


class Waitpoint(msgspec.Struct, Generic[Instant], frozen=True):
    """A target of signals. It belongs to a suspension or to a gate; while it belongs to neither, it is pending."""

    waitpoint_id: str
    partition: int
    execution_id: str
    attempt_index: int
    waitpoint_key: str
    created_at: Instant
    token_kid: str
    token_fingerprint: str
    suspension_id: str | None = None
    gate: str | None = None
    activated_at: Instant | None = None
    expires_at: Instant | None = None
    pending_until: Instant | None = None  # equals `expires_at` while it is pending; the sweep scans it
    closed_at: Instant | None = None  # closed on its own; otherwise see its suspension
    close_reason: str | None = None
    signal_count: int = 0
    matched_signal_count: int = 0
    last_signal_at: Instant | None = None
    log_start: int = 1  # first entry of its log that is kept


class Signal(msgspec.Struct, Generic[Instant], frozen=True):
    """An accepted signal, by its sequence number at the waitpoint; 0 is the engine's own timeout signal."""

    execution_id: str
    waitpoint_id: str
    seq: int
    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    target_scope: str
    created_at: Instant
    accepted_at: Instant
    observed_effect: str
    correlation_id: str | None = None
    idempotency_key: str | None = None
    payload_encoding: str | None = None
    payload: bytes | None = None


class IdempotencyRecord(msgspec.Struct, Generic[Instant], frozen=True):
    """The answer to an idempotent call: a suspend, or a delivery to the waitpoint that `scope` names."""

    execution_id: str
    scope: str
    digest: str
    expires_at: Instant
    answer: str
