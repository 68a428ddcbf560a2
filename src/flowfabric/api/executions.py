"""Schemas of executions: create, read, cancel, and wait for outcomes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import ids
from flowfabric.api.encoding import (
    I32,
    I64,
    U16,
    Natural,
    Octets,
    RequestBody,
    check_ids,
)
from flowfabric.engine.types import KeyMode
from flowfabric.model.execution import KeyUntil
from flowfabric.model.failure import StoredFailure
from flowfabric.model.states import PublicState

MAX_AWAITED = 1000
MAX_BULK = 10_000
MAX_RESULTS = 1000


class AwaitOutcomesRequest(RequestBody, frozen=True):
    execution_ids: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_AWAITED)]
    wait_ms: Natural = 0  # at most 30 s

    def __post_init__(self) -> None:
        check_ids(ids.parse_execution_id, *self.execution_ids)


class AwaitOutcomesResponse(msgspec.Struct, frozen=True):
    """The outcomes that exist, and by execution the error body (with `code`) of each refused read."""

    ended: list[ExecutionOutcomeResponse]
    refused: dict[str, dict[str, Any]]


class CreateExecutionRequest(RequestBody, frozen=True):
    """A new execution. Fields with a default may be omitted; the server supplies the id and the instants."""

    namespace: str
    lane_id: str
    execution_kind: str
    execution_id: str | None = None
    input_payload: Octets | UnsetType = UNSET
    input_payload_b64: bytes | None = None
    priority: I32 = 0  # clamped to 0..9000
    creator_identity: str = ""
    payload_encoding: str | None = None
    idempotency_key: str | None = None
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    policy: dict[str, Any] | None = None
    delay_until: I64 | None = None
    execution_deadline_at: I64 | None = None
    parent_id: str | None = None
    key_lane: str | None = None  # the lane that the id was minted for, if not `lane_id`
    partition_id: U16 | None = None  # ignored: the id determines the partition
    now: I64 | None = None  # ignored: the clock of the store is used

    def __post_init__(self) -> None:
        check_ids(ids.parse_lane_id, self.lane_id, self.key_lane)
        check_ids(ids.parse_execution_id, self.execution_id, self.parent_id)
        if self.input_payload is UNSET and self.input_payload_b64 is None:
            raise ValueError("input_payload is missing")
        if self.input_payload is not UNSET and self.input_payload_b64 is not None:
            raise ValueError("input_payload is given twice")


class KeyMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to the execution that a submit creates or finds; the sender mints its id."""

    mailbox: str
    message_id: str
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    sender: str = ""
    wants_reply: bool = False


class StartByKeyRequest(RequestBody, frozen=True):
    """An execution to create under the key in the path, unless that is taken; and a message to it.

    `mode` says what happens if the key is taken, `until` as long as what.
    """

    execution: CreateExecutionRequest
    mode: KeyMode = KeyMode.RETURN
    until: KeyUntil = KeyUntil.PURGED
    ttl_ms: Natural | None = None
    wait_ms: Natural = 0
    latest_ms: Natural | None = None
    most: Natural = 0
    message: KeyMessage | None = None


class KeyHolderResponse(msgspec.Struct, frozen=True):
    execution_id: str


class ExecutionInfoResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """An execution; its instants are milliseconds as text."""

    execution_id: str
    namespace: str
    lane_id: str
    priority: int
    execution_kind: str
    state_vector: Any
    public_state: PublicState
    created_at: str
    current_attempt_index: int
    flow_id: str | None
    blocking_detail: str
    started_at: str | UnsetType = UNSET
    completed_at: str | UnsetType = UNSET


class RevokeLeaseResponse(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "Revoked"
    lease_id: str
    lease_epoch: str


class CreateExecutionsRequest(RequestBody, frozen=True):
    executions: Annotated[list[CreateExecutionRequest], Meta(max_length=MAX_BULK)]


class CreateExecutionsResponse(msgspec.Struct, frozen=True):
    """One result per execution, in order: Created, Duplicate, or an error body."""

    results: list[dict[str, Any]]


class CancelExecutionRequest(RequestBody, frozen=True):
    execution_id: str
    reason: str
    now: I64 | None = None
    source: str = "operator_override"
    lease_id: str | None = None
    lease_epoch: I64 | None = None
    attempt_id: str | None = None
    uuid_fields: ClassVar = ("lease_id", "attempt_id")
    execution_id_fields: ClassVar = ("execution_id",)


class ChangePriorityRequest(RequestBody, frozen=True):
    new_priority: I32


class SetTagsRequest(RequestBody, frozen=True):
    tags: dict[str, str]


class ResumeExecutionRequest(RequestBody, frozen=True):
    trigger_type: str = "operator"
    resume_delay_ms: I64 = 0


class ResumeExecutionResponse(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "Resumed"
    public_state: PublicState


class SetTagsResponse(msgspec.Struct, frozen=True):
    set: int


class ExecutionInputResponse(msgspec.Struct, frozen=True):
    """What a handler starts with; the input is base64."""

    execution_kind: str
    input_payload_b64: bytes
    payload_encoding: str | None
    creator_identity: str
    policy: dict[str, Any] | None


class ReadProgressResponse(msgspec.Struct, frozen=True):
    pct: int | None
    message: str | None


class ExplanationResponse(msgspec.Struct, frozen=True):
    """The reason why an execution is not running: the obstacle by name, its facts, and a sentence."""

    execution_id: str
    public_state: str
    obstacle: str
    facts: dict[str, Any]
    sentence: str
    parts: list[str | int]  # the sentence, with its instants as milliseconds between the texts


class ExecutionOutcomeResponse(msgspec.Struct, frozen=True):
    execution_id: str
    outcome: str
    has_result: bool
    encoding: str | None
    reason: str | None
    result_b64: bytes | UnsetType | None = UNSET
    namespace: str | None = None
    error: StoredFailure | None = None


class ReadResultsRequest(RequestBody, frozen=True):
    execution_ids: Annotated[list[str], Meta(max_length=MAX_RESULTS)]
    namespace: str | None = None  # if set, all executions must belong to it

    def __post_init__(self) -> None:
        check_ids(ids.parse_execution_id, *self.execution_ids)


class ReadResultsResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results in base64 by execution, null if there is none; `rest` lists the ids to request next."""

    results: dict[str, bytes | None]
    rest: list[str] = []
