"""Schemas of requests by the holder of a lease: renew, report, finish, suspend."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import ids
from flowfabric.api.encoding import (
    HolderRequest,
    Natural,
    Octets,
    RedactedRepr,
    RequestBody,
    check_ids,
)
from flowfabric.model.failure import StoredFailure

MAX_HANDLES = 10_000
MAX_CHILDREN = 1000


class BatchResponse(msgspec.Struct, frozen=True):
    """One result per item, in order; a refused item gets an error body with its `code`."""

    results: list[dict[str, Any]]


class RenewLeasesRequest(RequestBody, frozen=True):
    handles: Annotated[list[str], Meta(max_length=MAX_HANDLES)]
    lease_ttl_ms: Natural | None = None


class ReportProgressRequest(HolderRequest, frozen=True):
    pct: Natural | None = None
    message: str | None = None
    counts: dict[str, Natural] | None = None  # how often each branch of the function has reported


class CompleteRequest(HolderRequest, frozen=True):
    result: Octets | None = None
    result_b64: bytes | None = None
    encoding: str | None = None
    octets_field: ClassVar = "result"


class FailRequest(HolderRequest, frozen=True):
    reason: str
    category: str = "transient"
    error: StoredFailure | None = None
    retry_policy: str | None = None


class HolderCancelRequest(HolderRequest, frozen=True):
    reason: str = ""


class HolderSetTagsRequest(HolderRequest, frozen=True):
    tags: dict[str, str]


class CancelChildrenRequest(HolderRequest, frozen=True):
    execution_ids: Annotated[list[str], Meta(max_length=MAX_CHILDREN)]
    reason: str = ""

    def __post_init__(self) -> None:
        check_ids(ids.parse_execution_id, *self.execution_ids)


class DelayRequest(HolderRequest, frozen=True):
    """A delay until an instant, or for a length of time by the clock of the store; 0 releases the work at once."""

    delay_until: Natural | None = None
    delay_ms: Natural | None = None
    reason: str = ""  # shown by `explain`; used with `delay_ms` only


class HandleOnlyRequest(HolderRequest, frozen=True):
    pass


class ResumePolicySpec(RequestBody, frozen=True):
    resume_target: str = "Runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: Natural | None = None
    close_waitpoint_on_resume: bool = True


class SuspendRequest(HolderRequest, frozen=True):
    """A suspension; bindings, condition and enum values may be written in PascalCase."""

    waitpoints: list[dict[str, dict[str, str]]]
    resume_condition: Any
    reason_code: str = "WaitingForSignal"
    suspension_id: str | None = None
    resume_policy: ResumePolicySpec = ResumePolicySpec()
    requested_by: str = "Worker"
    timeout_at: Natural | None = None
    timeout_behavior: str = "Fail"
    continuation_metadata_pointer: str | None = None
    idempotency_key: str | None = None
    now: Natural | None = None
    uuid_fields: ClassVar = ("suspension_id",)


class IssuedWaitpoint(RedactedRepr, msgspec.Struct, frozen=True):
    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: str


class SuspendResponse(msgspec.Struct, frozen=True):
    """Waitpoints with their tokens. `handle` is sent if the lease was released, and not if the condition was met."""

    suspension_id: str
    waitpoints: list[IssuedWaitpoint]
    handle: str | UnsetType = UNSET


class CreateWaitpointRequest(HolderRequest, frozen=True):
    waitpoint_key: str
    expires_in_ms: Natural


class CreateWaitpointResponse(RedactedRepr, msgspec.Struct, frozen=True):
    waitpoint_id: str
    token: str
