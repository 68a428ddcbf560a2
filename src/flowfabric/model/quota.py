"""A quota policy as rows: its limits and counter, the slots it gave out, and the requests in its windows."""

from __future__ import annotations

import msgspec

from flowfabric.model.owned_id import DEFAULT_NAMESPACE


class QuotaPolicy(msgspec.Struct, frozen=True):
    """The root, identified by its namespace and its id.

    A policy that admits without having been defined has one as well, with `defined` unset.
    """

    quota_policy_id: str
    partition: int
    defined: bool = False
    requests_per_window_seconds: int = 0
    max_requests_per_window: int = 0
    active_concurrency_cap: int = 0
    jitter_ms: int = 0
    active: int = 0  # counted slots; the reconciler makes it equal to a recount
    created_at: int | None = None
    revision: int = 0
    namespace: str = DEFAULT_NAMESPACE


class QuotaSlot(msgspec.Struct, frozen=True):
    """One execution's admission.

    It belongs to one life of the execution (`life` is its replay count): the release that the end of an earlier life
    sent cannot take it. `admission` says which call it was last given to: only that call may give it back unused. It is
    negative while that call has other policies to ask, which may refuse the execution.
    """

    quota_policy_id: str
    execution_id: str
    life: int
    admission: int
    counted: bool
    expires_at: int | None = None  # None never lapses
    namespace: str = DEFAULT_NAMESPACE


class QuotaRequest(msgspec.Struct, frozen=True):
    """An admitted request in the sliding window of one dimension; one an execution, the latest."""

    quota_policy_id: str
    dimension: str
    execution_id: str
    admitted_at: int
    expires_at: int  # when the window that it was admitted with has passed over it
    namespace: str = DEFAULT_NAMESPACE
