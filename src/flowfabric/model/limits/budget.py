"""Rows of a budget: its definition and counters, dimensions, ledgers, reservations and applied reports.

A budget is identified by its namespace and id. The budget row is the aggregate root: every change of another row
changes its revision too. A budget that was used before it was defined has a root as well, with `defined` unset.
"""

from __future__ import annotations

import msgspec

from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE


class Budget(msgspec.Struct, frozen=True):
    """The definition and the counters of one budget."""

    budget_id: str
    partition: int
    defined: bool = False
    scope_type: str = ""
    scope_id: str = ""
    enforcement_mode: str = ""
    on_hard_limit: str = ""
    on_soft_limit: str = ""
    reset_interval_ms: int = 0
    breach_count: int = 0
    soft_breach_count: int = 0
    reset_count: int = 0
    last_updated_at: int = 0
    created_at: int | None = None
    last_breach_at: int | None = None
    last_breach_dim: str | None = None
    last_reset_at: int | None = None
    next_reset_at: int | None = None
    breached_at: int | None = None  # set by the reconciler for readers; no rule uses it
    lapse_at: int | None = None  # no reservation expires before this instant
    revision: int = 0
    namespace: str = DEFAULT_NAMESPACE
    declaration: str | None = None  # digest of the code declaration last applied


class BudgetDimension(msgspec.Struct, frozen=True):
    """One dimension: its limits (0 is none) and what counts against them."""

    budget_id: str
    dimension: str
    hard_limit: int = 0
    soft_limit: int = 0
    usage: int | None = None  # None until the first report
    reserved: int = 0
    position: int | None = None  # its place in the definition; None if it was only reported
    namespace: str = DEFAULT_NAMESPACE


class BudgetSpend(msgspec.Struct, frozen=True):
    """What one execution has spent in one dimension since the last reset: the ledger that a release returns."""

    budget_id: str
    execution_id: str
    dimension: str
    amount: int
    namespace: str = DEFAULT_NAMESPACE


class BudgetReservation(msgspec.Struct, frozen=True):
    """Reserved capacity in one dimension; it counts until it is settled, refunded or expired."""

    budget_id: str
    reservation_id: str
    dimension: str
    execution_id: str
    amount: int  # what is left of it: usage that it covered has been taken off
    expires_at: int
    namespace: str = DEFAULT_NAMESPACE
    epoch: int = 0  # the lease that took it up last has this epoch


class UsageKey(msgspec.Struct, frozen=True):
    """The idempotency key of an applied report.

    The key of a durable function is kept until the function has acknowledged that it recorded the report.
    The expiry is part of the primary key, so that sweeping an old row never removes a newer one with the same digest.
    """

    budget_id: str
    digest: str
    expires_at: int
    namespace: str = DEFAULT_NAMESPACE
