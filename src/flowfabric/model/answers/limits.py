"""What budgets and quotas answer. A breach and a refused admission are answers, not errors."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class BudgetCreated(msgspec.Struct, frozen=True):
    budget_id: str


class BudgetExists(msgspec.Struct, frozen=True):
    """The budget was defined before; nothing was changed."""

    budget_id: str


class LimitsChanged(msgspec.Struct, frozen=True):
    budget_id: str


BudgetDefined = BudgetCreated | BudgetExists | LimitsChanged


class Ok(msgspec.Struct, frozen=True):
    """Applied, within all limits."""


class AlreadyApplied(msgspec.Struct, frozen=True):
    """This report was applied before, under the same key."""


class SoftBreach(msgspec.Struct, frozen=True):
    """Applied, and beyond a soft limit now."""

    dimension: str
    current_usage: int  # after the report
    soft_limit: int


class HardBreach(msgspec.Struct, frozen=True):
    """Not applied: a hard limit would have been exceeded."""

    dimension: str
    current_usage: int  # before the report
    hard_limit: int
    reserved: int = 0  # promised to others, which counts too
    action: str = ""  # what the budget asks for at its hard limit
    parked: bool = False  # whether the execution was put to sleep until there is room
    namespace: str | msgspec.UnsetType = msgspec.UNSET  # the owner of the budget, unless that is `default`


UsageResult = Ok | AlreadyApplied | SoftBreach | HardBreach


class Reserved(msgspec.Struct, frozen=True):
    """Room that is kept free until the reservation is settled, refunded or over."""

    reservation_id: str
    expires_at: int


class Refunded(msgspec.Struct, frozen=True):
    """What a reservation gave back; nothing when it was over or never made."""

    reservation_id: str
    amounts: dict[str, int]


class BudgetReleased(msgspec.Struct, frozen=True):
    """What an execution's ledger gave back."""

    budget_id: str
    amounts: dict[str, int]


class BudgetReset(msgspec.Struct, frozen=True):
    next_reset_at: int  # 0 when no reset is scheduled


class BudgetStatus(msgspec.Struct, frozen=True):
    """A budget for people; instants are decimal texts."""

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
    """What a pass of a reconciler did."""

    processed: int
    errors: int


class QuotaPolicyCreated(msgspec.Struct, frozen=True):
    quota_policy_id: str


class QuotaPolicyExists(msgspec.Struct, frozen=True):
    """The policy was defined before; nothing was changed."""

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
    """The execution has a slot now."""


class AlreadyAdmitted(msgspec.Struct, frozen=True):
    """It had one."""


class RateExceeded(msgspec.Struct, frozen=True):
    retry_after_ms: int


class ConcurrencyExceeded(msgspec.Struct, frozen=True):
    """All slots are taken."""


AdmissionResult = Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded


class AdmissionReleased(msgspec.Struct, frozen=True):
    """There is no slot for this execution (any more)."""


class QuotaLimitKind(StrEnum):
    """What a quota refused by: the label of its metric."""

    RATE = "rate"
    CONCURRENCY = "concurrency"
