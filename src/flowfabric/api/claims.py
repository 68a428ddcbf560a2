"""Schemas of claims: grants, claimed work and the worker registry."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import I64, Natural, RequestBody
from flowfabric.model.scheduling.worker import ServedTask

MAX_CLAIM = 1000
MAX_LANES = 100
DEFAULT_LEASE_MS = 15_000


class ClaimGrantRequest(RequestBody, frozen=True):
    lane_id: str
    worker_instance_id: str
    grant_ttl_ms: I64
    capabilities: tuple[str, ...] = ()


class ClaimGrantResponse(msgspec.Struct, frozen=True):
    """A grant; `grant_kind` (claim, resume or reclaim) says how it is redeemed."""

    execution_id: str
    partition_key: str
    grant_key: str
    expires_at_ms: int
    grant_kind: str


class ReclaimGrantRequest(RequestBody, frozen=True):
    worker_id: str
    worker_instance_id: str
    lane_id: str
    grant_ttl_ms: I64
    capability_hash: str | None = None
    route_snapshot_json: str | None = None
    admission_summary: str | None = None
    worker_capabilities: tuple[str, ...] = ()


class ReclaimGrantResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `status` (`granted`, `not_reclaimable` or `reclaim_cap_exceeded`) and the fields that belong to it."""

    status: str
    execution_id: str
    partition_key: str = ""
    grant_key: str = ""
    expires_at_ms: int | None = None
    lane_id: str = ""
    detail: str = ""
    reclaim_count: int | None = None


class ClaimedWork(msgspec.Struct, frozen=True):
    """A claimed execution with its lease; the handle fences every later request of the holder."""

    execution_id: str
    handle: str
    lease_id: str
    lease_epoch: int
    lease_expires_at: int
    attempt_index: int
    attempt_id: str
    attempt_type: str
    execution_kind: str
    input_payload_b64: bytes
    payload_encoding: str | None
    creator_identity: str
    policy: str | None
    traceparent: str | None = None  # names the submitting request, if tracing is on
    namespace: str | None = None  # unknown for a redeemed grant
    life: int = 0  # how often the execution continued as new


class ClaimWorkResponse(msgspec.Struct, frozen=True):
    claimed: list[ClaimedWork]


class ClaimWorkRequest(RequestBody, frozen=True):
    """A claim of up to `limit` executions from the given lanes, with a long poll of up to `wait_ms`."""

    worker_instance_id: str
    lanes: Annotated[list[str], Meta(min_length=1, max_length=MAX_LANES)]
    limit: Annotated[int, Meta(ge=1, le=MAX_CLAIM)] = 1
    capabilities: tuple[str, ...] = ()
    lease_ttl_ms: Natural = DEFAULT_LEASE_MS
    wait_ms: Natural = 0  # at most 30 s
    namespaces: tuple[str, ...] | None = None  # None: every namespace of the token


class EndClaimsRequest(RequestBody, frozen=True):
    worker_instance_id: str


class EndClaimsResponse(msgspec.Struct, frozen=True):
    ended: int


class RedeemGrantRequest(RequestBody, frozen=True):
    """A redemption; `grant_kind` and `grant_key` are copied from the grant."""

    grant_kind: str
    worker_id: str
    worker_instance_id: str
    grant_key: str = ""
    lane_id: str = ""
    lease_ttl_ms: Natural = DEFAULT_LEASE_MS
    lease_id: str | None = None
    attempt_id: str | None = None
    attempt_timeout_ms: Natural | None = None
    max_reclaim_count: Natural | None = None
    uuid_fields: ClassVar = ("lease_id", "attempt_id")


class WorkerInstanceRequest(RequestBody, frozen=True):
    worker_instance_id: str
    namespace: str = "default"


class RegisterWorkerRequest(WorkerInstanceRequest, frozen=True, kw_only=True):
    lanes: list[str]
    liveness_ttl_ms: Natural
    capabilities: tuple[str, ...] = ()
    tasks: tuple[ServedTask, ...] = ()


class MarkWorkerDeadRequest(WorkerInstanceRequest, frozen=True):
    reason: str = ""
