"""Schemas of waitpoints, signals and messages."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from flowfabric.api.encoding import (
    I64,
    Natural,
    Octets,
    RedactedRepr,
    RequestBody,
)
from flowfabric.model.suspension import WaitpointState

DEDUP_TTL_MS = 86_400_000
MAX_SIGNALS = 10_000
SIGNAL_LOG_LENGTH = 1000


class ObservedSignalItem(msgspec.Struct, frozen=True):
    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: int
    payload_b64: bytes | None


class ObservedSignalsResponse(msgspec.Struct, frozen=True):
    signals: list[ObservedSignalItem]


class WaitpointEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open waitpoint without its token."""

    waitpoint_id: str
    waitpoint_key: str
    execution_id: str
    state: WaitpointState
    required_signal_names: list[str]
    created_at: int
    token_kid: str
    token_fingerprint: str
    activated_at: int | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class WaitpointTokenResponse(RedactedRepr, msgspec.Struct, frozen=True):
    token: str


class DeliverSignalRequest(RedactedRepr, RequestBody, frozen=True):
    """A signal; the server supplies the id and the instants if they are omitted."""

    execution_id: str
    waitpoint_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    waitpoint_token: str
    target_scope: str = "waitpoint"
    signal_id: str | None = None
    now: I64 | None = None
    payload: Octets | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    created_at: Natural | None = None
    dedup_ttl_ms: Natural | None = DEDUP_TTL_MS
    resume_delay_ms: Natural | None = None
    max_signals_per_execution: Natural | None = MAX_SIGNALS
    signal_maxlen: Natural | None = SIGNAL_LOG_LENGTH
    uuid_fields: ClassVar = ("waitpoint_id", "signal_id")
    execution_id_fields: ClassVar = ("execution_id",)
    octets_field: ClassVar = "payload"


class MessageRequest(RequestBody, frozen=True):
    """A message to a run."""

    mailbox: str
    message_id: str | None = None
    payload: Octets | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    sender: str = ""
    idempotency_key: str | None = None
    uuid_fields: ClassVar = ("message_id",)
    octets_field: ClassVar = "payload"


class SendMessageRequest(MessageRequest, frozen=True):
    """A message to the mailbox of a durable function."""

    dedup_ttl_ms: Natural = DEDUP_TTL_MS


class AskRequest(MessageRequest, frozen=True):
    """A message that wants a reply. The same `message_id`, or the same `idempotency_key`, is the same question."""

    wait_ms: Natural = 0
