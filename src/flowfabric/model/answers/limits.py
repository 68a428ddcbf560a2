"""Answers of operations on budgets and quotas. A breach and a refused admission are answers, not errors."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class BudgetCreated(msgspec.Struct, frozen=True):
    budget_id: str


class BudgetExists(msgspec.Struct, frozen=True):
    """The budget was defined before; nothing changed."""

    budget_id: str


class LimitsChanged(msgspec.Struct, frozen=True):
    budget_id: str


BudgetDefined = BudgetCreated | BudgetExists | LimitsChanged


class Ok(msgspec.Struct, frozen=True):
    """The report was applied within all limits."""


class AlreadyApplied(msgspec.Struct, frozen=True):
    """This report was applied before, with the same key."""


class SoftBreach(msgspec.Struct, frozen=True):
    """The report was applied and exceeds a soft limit."""

    dimension: str
    current_usage: int  # after the report
    soft_limit: int


class HardBreach(msgspec.Struct, frozen=True):
    """The report was not applied, because it would exceed a hard limit."""

    dimension: str
    current_usage: int  # before the report
    hard_limit: int
    reserved: int = 0  # reserved by others; counts as well
    action: str = ""  # the budget's action at its hard limit
    parked: bool = False  # the execution was suspended until there is capacity
    namespace: str | msgspec.UnsetType = msgspec.UNSET  # the owner of the budget, unless that is `default`


UsageResult = Ok | AlreadyApplied | SoftBreach | HardBreach


class Reserved(msgspec.Struct, frozen=True):
    """Capacity that is reserved until it is settled, refunded or expired."""

    reservation_id: str
    expires_at: int


class Refunded(msgspec.Struct, frozen=True):
    """What a reservation returned; empty if it had expired or never existed."""

    reservation_id: str
    amounts: dict[str, int]


class BudgetReleased(msgspec.Struct, frozen=True):
    """What an execution's ledger returned."""

    budget_id: str
    amounts: dict[str, int]


class BudgetReset(msgspec.Struct, frozen=True):
    next_reset_at: int  # 0 when no reset is scheduled


class BudgetStatus(msgspec.Struct, frozen=True):
    """A budget as shown to readers; instants are decimal texts."""

    budget_id: str
    scope_type: str
    scope_id: str
    enforcement_mode: str
    usage: dict[str, int]
    hard_limits: dict[str, int]
    soft_limits: dict[str, int]
    breach_count: int
    soft_breach_count: int
    on_hard_limit: str = ""
    on_soft_limit: str = ""
    reserved: dict[str, int] = {}
    last_breach_at: str | None = None
    last_breach_dim: str | None = None
    next_reset_at: str | None = None
    created_at: str | None = None


class Reconciled(msgspec.Struct, frozen=True):
    """The result of one pass of a reconciler."""

    processed: int
    errors: int


class QuotaPolicyCreated(msgspec.Struct, frozen=True):
    quota_policy_id: str


class QuotaPolicyExists(msgspec.Struct, frozen=True):
    """The policy was defined before; nothing changed."""

    quota_policy_id: str


class QuotaLimits(msgspec.Struct, frozen=True):
    """The four numbers of a quota policy; 0 is no limit."""

    requests_per_window_seconds: int
    max_requests_per_window: int
    active_concurrency_cap: int
    jitter_ms: int = 0

    @property
    def unlimited(self) -> bool:
        return not self.max_requests_per_window and not self.active_concurrency_cap


class Admitted(msgspec.Struct, frozen=True):
    """The execution now has a slot."""


class AlreadyAdmitted(msgspec.Struct, frozen=True):
    """The execution already had a slot."""


class RateExceeded(msgspec.Struct, frozen=True):
    retry_after_ms: int


class ConcurrencyExceeded(msgspec.Struct, frozen=True):
    """All slots are in use."""


AdmissionResult = Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded


class AdmissionReleased(msgspec.Struct, frozen=True):
    """The execution has no slot any more."""


class QuotaLimitKind(StrEnum):
    """Which limit refused an admission: the label of its metric."""

    RATE = "rate"
    CONCURRENCY = "concurrency"
