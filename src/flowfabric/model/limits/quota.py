"""Rows of a quota policy: its limits and counter, the slots it granted, and the requests in its windows."""

from __future__ import annotations

import msgspec

from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE


class QuotaPolicy(msgspec.Struct, frozen=True):
    """The aggregate root, identified by namespace and id.

    A policy that admits without having been defined has a root as well, with `defined` unset.
    """

    quota_policy_id: str
    partition: int
    defined: bool = False
    requests_per_window_seconds: int = 0
    max_requests_per_window: int = 0
    active_concurrency_cap: int = 0
    jitter_ms: int = 0
    active: int = 0  # counted slots; the reconciler recounts it
    created_at: int | None = None
    revision: int = 0
    namespace: str = DEFAULT_NAMESPACE


class QuotaSlot(msgspec.Struct, frozen=True):
    """The admission of one execution.

    It belongs to one run of the execution (`life` is its replay count): a release sent by an earlier run cannot remove
    it. `admission` is the call that holds it: only that call may release it unused. It is negative while that call
    still has other policies to ask.
    """

    quota_policy_id: str
    execution_id: str
    life: int
    admission: int
    counted: bool
    expires_at: int | None = None  # None never expires
    namespace: str = DEFAULT_NAMESPACE


class QuotaRequest(msgspec.Struct, frozen=True):
    """The latest admitted request of an execution in the sliding window of one dimension."""

    quota_policy_id: str
    dimension: str
    execution_id: str
    admitted_at: int
    expires_at: int  # when it leaves the window that it was admitted with
    namespace: str = DEFAULT_NAMESPACE
