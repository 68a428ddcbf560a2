"""Usage: define a budget, report usage, release what an execution spent, reset the period.

A report that would exceed a hard limit applies nothing in any dimension and does not use up its idempotency key. Usage
exactly at the limit is within it, although admission then finds the budget exhausted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.rules.limits.budget import (
    DEDUP_TTL_MS,
    UNACKNOWLEDGED_TTL_MS,
    Amounts,
    BudgetDecision,
    BudgetState,
    acknowledge,
    apply_usage,
    find_hard_breach,
    record_breach,
    was_applied,
)
from flowfabric.rules.limits.reservation import draw, without_expired

MOST_DIMENSIONS = 64

Limits = tuple[tuple[str, int, int], ...]  # dimension, hard limit, soft limit


class BudgetDefinition(msgspec.Struct, frozen=True):
    """The arguments with which a budget is created."""

    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
    reset_interval_ms: int
    limits: Limits
    declaration: str | None = None  # digest of the declaration in application code


class UsageReport(msgspec.Struct, frozen=True):
    """Usage to apply in this order, once per digest, and in an execution's ledger if given.

    With `reservation_id` it is taken from a reservation of the execution, as far as that has capacity left.
    `acknowledged` are digests of earlier reports that the caller has recorded; None if it acknowledges none, ever.
    """

    amounts: Amounts
    digest: str | None = None
    execution_id: str | None = None
    reservation_id: str | None = None
    acknowledged: tuple[str, ...] | None = None


def sum_by_dimension(pairs: Iterable[tuple[str, int]], *, by_name: bool) -> Amounts:
    """Add up the amounts per dimension; ordered by name or by first appearance."""
    sums: dict[str, int] = {}
    for dimension, amount in pairs:
        sums[dimension] = sums.get(dimension, 0) + amount
    return tuple(sorted(sums.items()) if by_name else sums.items())


def usage_key_digest(key: str) -> str:
    """Return the hash under which an idempotency key is stored."""
    return hashlib.sha256(key.encode()).hexdigest()


def define_budget(
    state: BudgetState, definition: BudgetDefinition, now: int
) -> BudgetDecision[limit_answers.BudgetDefined]:
    """Define a budget once; usage before the definition counts.

    A declaration in code is applied again only when it has changed. Until then limits that an operator has set stay, no
    matter how many processes repeat the declaration.
    """
    if state.root is not None and state.root.defined:
        if definition.declaration in (None, state.root.declaration):
            return limit_answers.BudgetExists(state.budget_id), state
        answer, after = change_limits(state, definition.limits, now)
        return answer, replace(after, root=replace(after.root_or_new(), declaration=definition.declaration))
    root = replace(
        state.root_or_new(),
        defined=True,
        scope_type=definition.scope_type,
        scope_id=definition.scope_id,
        enforcement_mode=definition.enforcement_mode,
        on_hard_limit=definition.on_hard_limit,
        on_soft_limit=definition.on_soft_limit,
        reset_interval_ms=definition.reset_interval_ms,
        declaration=definition.declaration,
        created_at=now,
        last_updated_at=now,
        next_reset_at=now + definition.reset_interval_ms if definition.reset_interval_ms else None,
    )
    return limit_answers.BudgetCreated(state.budget_id), replace(_with_limits(state, definition.limits), root=root)


def change_limits(state: BudgetState, limits: Limits, now: int) -> BudgetDecision[limit_answers.LimitsChanged]:
    """Set limits of existing or new dimensions of a defined budget; the other dimensions stay."""
    if state.root is None or not state.root.defined:
        return errors.NotFound("budget"), state
    after = replace(_with_limits(state, limits), root=replace(state.root, last_updated_at=now))
    if len(after.dimensions) > MOST_DIMENSIONS:
        return errors.InvalidInput(f"too_many_dimensions: limit={MOST_DIMENSIONS}, got={len(after.dimensions)}"), state
    return limit_answers.LimitsChanged(state.budget_id), after


def _with_limits(state: BudgetState, limits: Limits) -> BudgetState:
    dimensions = dict(state.dimensions)
    next_position = max((row.position + 1 for row in dimensions.values() if row.position is not None), default=0)
    for name, hard, soft in limits:
        known = state.dimension(name)
        position = known.position
        if position is None:
            position, next_position = next_position, next_position + 1
        dimensions[name] = replace(known, hard_limit=hard, soft_limit=soft, position=position)
    return replace(state, dimensions=dimensions)


def report_usage(state: BudgetState, report: UsageReport, now: int) -> BudgetDecision[limit_answers.UsageResult]:
    """Apply usage in all dimensions, or in none if a hard limit would be exceeded.

    The key of a caller that acknowledges is kept until then, and for 30 days at most.
    """
    state = acknowledge(state, report.acknowledged or (), now)
    if report.digest is not None and was_applied(state, report.digest, now):
        return limit_answers.AlreadyApplied(), state
    if report.digest is None and report.acknowledged and not report.amounts:
        return limit_answers.Ok(), state
    state = without_expired(state, now)
    drawn: BudgetState | errors.FabricError = state
    unreserved = report.amounts
    if report.reservation_id is not None and report.execution_id is not None:
        drawn, unreserved = draw(state, report.reservation_id, report.execution_id, report.amounts, now)
    if isinstance(drawn, errors.FabricError):
        return drawn, state
    if breach := find_hard_breach(drawn, unreserved):
        return record_breach(state, breach, now)
    key_ttl_ms = DEDUP_TTL_MS if report.acknowledged is None else UNACKNOWLEDGED_TTL_MS
    answer, after = apply_usage(drawn, report.amounts, report.digest, report.execution_id, now, key_ttl_ms=key_ttl_ms)
    return answer, state if isinstance(answer, errors.FabricError) else after


def release_spends(state: BudgetState, execution_id: str, now: int) -> BudgetDecision[limit_answers.BudgetReleased]:
    """Return what an execution has spent since the last reset, and delete its ledger."""
    ledger = {key: row for key, row in state.spends.items() if key[0] == execution_id}
    if not ledger:
        return limit_answers.BudgetReleased(state.budget_id, {}), state
    dimensions = dict(state.dimensions)
    for row in ledger.values():
        known = state.dimension(row.dimension)
        dimensions[row.dimension] = replace(known, usage=max(0, (known.usage or 0) - row.amount))
    spends = {key: row for key, row in state.spends.items() if key not in ledger}
    amounts = {row.dimension: row.amount for row in ledger.values()}
    root = replace(state.root_or_new(), last_updated_at=now)
    after = replace(state, root=root, dimensions=dimensions, spends=spends)
    return limit_answers.BudgetReleased(state.budget_id, amounts), after


def reset_budget(state: BudgetState, now: int) -> BudgetDecision[limit_answers.BudgetReset]:
    """Begin a new period with zero usage and empty ledgers. Reservations and idempotency keys stay."""
    root = state.root
    if root is None or not root.defined:
        return errors.NotFound("budget"), state
    next_at = now + root.reset_interval_ms if root.reset_interval_ms else None
    root = replace(
        root,
        reset_count=root.reset_count + 1,
        last_reset_at=now,
        last_updated_at=now,
        last_breach_at=None,
        last_breach_dim=None,
        next_reset_at=next_at,
    )
    dimensions = {name: row if row.usage is None else replace(row, usage=0) for name, row in state.dimensions.items()}
    after = replace(state, root=root, dimensions=dimensions, spends={}, spends_cleared=True)
    return limit_answers.BudgetReset(next_at or 0), after


def reset_if_due(state: BudgetState, now: int) -> BudgetDecision[limit_answers.BudgetReset | None]:
    """Reset a budget whose reset is due, for the sweep; None if it is not due."""
    root = state.root
    if root is None or not root.defined or root.next_reset_at is None or root.next_reset_at > now:
        return None, state
    return reset_budget(state, now)


def mark_breach(state: BudgetState, now: int) -> BudgetDecision[bool]:
    """Mark or unmark a budget without resets as breached, for the reconciler; True if that changed."""
    root = state.root
    if root is None or not root.defined or root.reset_interval_ms:
        return False, state
    is_over = any(row.hard_limit and (row.usage or 0) > row.hard_limit for row in state.dimensions.values())
    if is_over == (root.breached_at is not None):
        return False, state
    return True, replace(state, root=replace(root, breached_at=now if is_over else None))
