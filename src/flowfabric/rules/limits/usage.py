"""Spending: how a budget is defined, charged, given back and begun anew.

A report that would exceed a hard limit applies nothing in any dimension and does not use up its idempotency key; one
that arrives exactly at the limit is within it, though admission finds the budget exhausted then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.rules.limits.budget import (
    Amounts,
    BudgetDecision,
    BudgetState,
    apply_usage,
    find_hard_breach,
    record_breach,
    was_applied,
)
from flowfabric.rules.limits.reservation import without_expired

MOST_DIMENSIONS = 64

Limits = tuple[tuple[str, int, int], ...]  # dimension, hard limit, soft limit


class BudgetDefinition(msgspec.Struct, frozen=True):
    """What a budget is created with."""

    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
    reset_interval_ms: int
    limits: Limits
    declaration: str | None = None  # a digest of what an application declares in its code


class UsageReport(msgspec.Struct, frozen=True):
    """Usage to apply: in this order, once per digest, and for an execution's ledger if one is named."""

    amounts: Amounts
    digest: str | None = None
    execution_id: str | None = None


def sum_by_dimension(pairs: Iterable[tuple[str, int]], *, by_name: bool) -> Amounts:
    """Each dimension once, its amounts added up; in order of name or of first appearance."""
    sums: dict[str, int] = {}
    for dimension, amount in pairs:
        sums[dimension] = sums.get(dimension, 0) + amount
    return tuple(sorted(sums.items()) if by_name else sums.items())


def usage_key_digest(key: str) -> str:
    """What an idempotency key is remembered by, whatever its length."""
    return hashlib.sha256(key.encode()).hexdigest()


def define_budget(sheet: BudgetState, ask: BudgetDefinition, now: int) -> BudgetDecision[limit_answers.BudgetDefined]:
    """Define a budget once; what was used before that counts.

    A declaration in code counts again when it has changed. Until then the limits that an operator set since stay,
    however many processes declare the same.
    """
    if sheet.root is not None and sheet.root.defined:
        if ask.declaration in (None, sheet.root.declaration):
            return limit_answers.BudgetExists(sheet.budget_id), sheet
        answer, after = change_limits(sheet, ask.limits, now)
        return answer, replace(after, root=replace(after.root_or_new(), declaration=ask.declaration))
    root = replace(
        sheet.root_or_new(),
        defined=True,
        scope_type=ask.scope_type,
        scope_id=ask.scope_id,
        enforcement_mode=ask.enforcement_mode,
        on_hard_limit=ask.on_hard_limit,
        on_soft_limit=ask.on_soft_limit,
        reset_interval_ms=ask.reset_interval_ms,
        declaration=ask.declaration,
        created_at=now,
        last_updated_at=now,
        next_reset_at=now + ask.reset_interval_ms if ask.reset_interval_ms else None,
    )
    return limit_answers.BudgetCreated(sheet.budget_id), replace(_limited(sheet, ask.limits), root=root)


def change_limits(sheet: BudgetState, limits: Limits, now: int) -> BudgetDecision[limit_answers.LimitsChanged]:
    """Give dimensions of a defined budget other limits, or new dimensions their first ones; the rest stays."""
    if sheet.root is None or not sheet.root.defined:
        return errors.NotFound("budget"), sheet
    after = replace(_limited(sheet, limits), root=replace(sheet.root, last_updated_at=now))
    if len(after.dimensions) > MOST_DIMENSIONS:
        return errors.InvalidInput(f"too_many_dimensions: limit={MOST_DIMENSIONS}, got={len(after.dimensions)}"), sheet
    return limit_answers.LimitsChanged(sheet.budget_id), after


def _limited(sheet: BudgetState, limits: Limits) -> BudgetState:
    dimensions = dict(sheet.dimensions)
    following = max((row.position + 1 for row in dimensions.values() if row.position is not None), default=0)
    for name, hard, soft in limits:
        known = sheet.dimension(name)
        position = known.position
        if position is None:
            position, following = following, following + 1
        dimensions[name] = replace(known, hard_limit=hard, soft_limit=soft, position=position)
    return replace(sheet, dimensions=dimensions)


def report_usage(sheet: BudgetState, ask: UsageReport, now: int) -> BudgetDecision[limit_answers.UsageResult]:
    """Apply usage in all its dimensions, or in none when a hard limit would be exceeded."""
    if ask.digest is not None and was_applied(sheet, ask.digest, now):
        return limit_answers.AlreadyApplied(), sheet
    sheet = without_expired(sheet, now)
    if breach := find_hard_breach(sheet, ask.amounts):
        return record_breach(sheet, breach, now)
    return apply_usage(sheet, ask.amounts, ask.digest, ask.execution_id, now)


def release_spends(sheet: BudgetState, execution_id: str, now: int) -> BudgetDecision[limit_answers.BudgetReleased]:
    """Give back what an execution has spent since the last reset, and forget its ledger."""
    mine = {key: row for key, row in sheet.spends.items() if key[0] == execution_id}
    if not mine:
        return limit_answers.BudgetReleased(sheet.budget_id, {}), sheet
    dimensions = dict(sheet.dimensions)
    for row in mine.values():
        known = sheet.dimension(row.dimension)
        dimensions[row.dimension] = replace(known, usage=max(0, (known.usage or 0) - row.amount))
    spends = {key: row for key, row in sheet.spends.items() if key not in mine}
    given = {row.dimension: row.amount for row in mine.values()}
    root = replace(sheet.root_or_new(), last_updated_at=now)
    after = replace(sheet, root=root, dimensions=dimensions, spends=spends)
    return limit_answers.BudgetReleased(sheet.budget_id, given), after


def reset_budget(sheet: BudgetState, now: int) -> BudgetDecision[limit_answers.BudgetReset]:
    """Begin a new period: nothing is used, no ledger is kept. What is reserved stays reserved, keys are remembered."""
    root = sheet.root
    if root is None or not root.defined:
        return errors.NotFound("budget"), sheet
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
    dimensions = {name: row if row.usage is None else replace(row, usage=0) for name, row in sheet.dimensions.items()}
    after = replace(sheet, root=root, dimensions=dimensions, spends={}, spends_cleared=True)
    return limit_answers.BudgetReset(next_at or 0), after


def reset_if_due(sheet: BudgetState, now: int) -> BudgetDecision[limit_answers.BudgetReset | None]:
    """The sweep's form: None when somebody reset it meanwhile, or it has no next reset."""
    root = sheet.root
    if root is None or not root.defined or root.next_reset_at is None or root.next_reset_at > now:
        return None, sheet
    return reset_budget(sheet, now)


def mark_breach(sheet: BudgetState, now: int) -> BudgetDecision[bool]:
    """The reconciler's note on a budget that never resets: set while usage exceeds a hard limit; True if it moved."""
    root = sheet.root
    if root is None or not root.defined or root.reset_interval_ms:
        return False, sheet
    over = any(row.hard_limit and (row.usage or 0) > row.hard_limit for row in sheet.dimensions.values())
    if over == (root.breached_at is not None):
        return False, sheet
    return True, replace(sheet, root=replace(root, breached_at=now if over else None))
