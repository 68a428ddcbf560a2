"""Schemas of budgets and quota policies.

Three callers spend: an operator by budget id, an application for an execution, and the holder of a lease with its
handle.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from flowfabric.api.encoding import I64, HolderRequest, Natural, RequestBody


class BudgetRef(msgspec.Struct, frozen=True):
    budget_id: str


class CreateBudgetRequest(RequestBody, frozen=True):
    """A budget definition; `dimensions`, `hard_limits` and `soft_limits` are parallel lists."""

    budget_id: str
    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
    reset_interval_ms: Natural
    dimensions: list[str]
    hard_limits: list[Natural]
    soft_limits: list[Natural]
    now: I64 | None = None
    namespace: str | None = None
    declaration: str | None = None  # a digest of the declaring code; a different digest changes the limits
    uuid_fields: ClassVar = ("budget_id",)


class BudgetIds(msgspec.Struct, frozen=True):
    budgets: list[str]


class ReportUsageRequest(RequestBody, frozen=True):
    dimensions: dict[str, Natural]
    now: I64 | None = None
    dedup_key: str | None = None
    namespace: str | None = None


class HardBreachResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refused report: nothing was applied. `reserved` is sent if it is not 0, because it counts against the limit."""

    dimension: str
    current_usage: int
    hard_limit: int
    reserved: int = 0


class ChangeBudgetLimitsRequest(RequestBody, frozen=True):
    dimensions: list[str]
    hard_limits: list[Natural]
    soft_limits: list[Natural]
    namespace: str | None = None


class ReleaseBudgetRequest(RequestBody, frozen=True):
    execution_id: str
    namespace: str | None = None
    execution_id_fields: ClassVar = ("execution_id",)


class QuotaRef(msgspec.Struct, frozen=True):
    quota_policy_id: str


class CreateQuotaPolicyRequest(RequestBody, frozen=True):
    quota_policy_id: str
    window_seconds: Natural
    max_requests_per_window: Natural
    max_concurrent: Natural
    jitter_ms: Natural = 0
    now: I64 | None = None
    namespace: str | None = None
    uuid_fields: ClassVar = ("quota_policy_id",)


class ExecutionBudgetRequest(RequestBody, frozen=True, kw_only=True):
    """A request on behalf of an execution to one of its budgets."""

    namespace: str | None = None  # with it, the server loads no row for an unbound token
    shared: bool = True  # fall back to the shared budget of that id, if the token may use it


class RecordSpendRequest(ExecutionBudgetRequest, frozen=True):
    budget_id: str
    dimensions: dict[str, Natural]
    idempotency_key: str | None = None
    reservation_id: str | None = None  # the usage is taken from this reservation first
    acknowledged: list[str] | None = None  # keys of reports that the caller has recorded; null if it never says so
    uuid_fields: ClassVar = ("budget_id", "reservation_id")


class ReserveBudgetRequest(ExecutionBudgetRequest, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]
    ttl_ms: Natural
    drawn: dict[str, Natural] | None = None  # spent from it before; if it has ended, only the rest is reserved again
    epoch: Natural = 0  # that of the caller's lease
    uuid_fields: ClassVar = ("budget_id", "reservation_id")


class SettleReservationRequest(ExecutionBudgetRequest, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]
    uuid_fields: ClassVar = ("budget_id", "reservation_id")


class RefundReservationRequest(RequestBody, frozen=True):
    reservation_id: str
    namespace: str | None = None
    shared: bool = True
    execution_id: str | None = None  # if set, a reservation of another execution is refused
    epoch: Natural | None = None  # a reservation that a later lease has taken up stays
    acknowledged: tuple[str, ...] = ()  # keys of reports that the caller has recorded
    uuid_fields: ClassVar = ("reservation_id",)
    execution_id_fields: ClassVar = ("execution_id",)


class WakeBudgetResponse(msgspec.Struct, frozen=True):
    still_waiting: bool


class HolderUsageRequest(HolderRequest, frozen=True):
    budget_id: str
    dimensions: dict[str, Natural]
    dedup_key: str | None = None
    uuid_fields: ClassVar = ("budget_id",)


class HolderReserveRequest(HolderRequest, frozen=True):
    budget_id: str
    amounts: dict[str, Natural]
    ttl_ms: Natural
    reservation_id: str | None = None
    uuid_fields: ClassVar = ("budget_id", "reservation_id")


class HolderSettleRequest(HolderRequest, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]
    uuid_fields: ClassVar = ("budget_id", "reservation_id")


class HolderRefundRequest(HolderRequest, frozen=True):
    budget_id: str
    reservation_id: str
    uuid_fields: ClassVar = ("budget_id", "reservation_id")
