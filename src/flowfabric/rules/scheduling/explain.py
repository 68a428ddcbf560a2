"""Explaining: which of the things that could keep an execution from running does."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.model import obstacles
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import MISSING_QUEUE, Execution
from flowfabric.model.states import BlockingReason, EligibilityState, LifecyclePhase, OwnershipState
from flowfabric.model.suspension import Suspension
from flowfabric.model.worker import Worker
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetSheet
from flowfabric.rules.limits.quota import QuotaSheet
from flowfabric.rules.scheduling import workers
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state


def of_itself(row: Execution, now: int) -> obstacles.Obstacle | None:
    """What the execution's own row tells; None when it waits for something that other rows tell of."""
    match row.lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            reason = row.failure_reason or row.cancellation_reason
            return obstacles.Ended(row.terminal_outcome, row.completed_at or 0, reason)
        case LifecyclePhase.ACTIVE:
            return _held(row, now)
        case _:
            pass
    match row.eligibility_state:
        case EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
            retrying = row.blocking_reason is BlockingReason.WAITING_FOR_RETRY_BACKOFF
            failure = row.failure_reason if retrying else None
            return obstacles.Delayed(row.delay_until or 0, row.blocking_reason.value, failure, row.blocking_text)
        case EligibilityState.BLOCKED_BY_OPERATOR | EligibilityState.BLOCKED_BY_LANE_STATE:
            return obstacles.Paused(row.blocking_reason.value, row.blocking_text or "", row.blocked_at)
        case _:
            pass
    if row.line == MISSING_QUEUE:
        return obstacles.QueueMissing(row.lane_id)
    grant = grant_rules.stored_grant(row)
    if grant is not None and grant_rules.live_grant(row, now):
        return obstacles.Offered(grant.worker_id, grant.expires_at)
    return None


def _held(row: Execution, now: int) -> obstacles.Obstacle:
    instance = row.worker_instance_id or ""
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return obstacles.LeaseLost(instance, "revoked", row.lease_revoked_at or 0, row.lease_revoke_reason)
    if row.lease_expires_at is not None and row.lease_expires_at <= now:
        return obstacles.LeaseLost(instance, "expired", row.lease_expires_at)
    return obstacles.Running(row.worker_id or "", instance, row.lease_acquired_at or 0, row.lease_expires_at or 0)


def of_suspension(row: Execution, root: Suspension | None) -> obstacles.Suspended:
    """What a suspended execution waits for."""
    if root is None:
        return obstacles.Suspended(row.blocking_reason.value)
    reason, keys = (
        root.reason_code or row.blocking_reason.value,
        tuple(one.waitpoint_key for one in wait_encoding.bound(root)),
    )
    if keys:
        return obstacles.Suspended(reason, keys, root.timeout_at)
    names, found = tuple(gate_rules.waits_on(root)), wait_state.open_gates(root)
    told = tuple(gate_rules.awaited(name, found[name]) for name in names if name in found)
    return obstacles.Suspended(reason, names, root.timeout_at, told)


def may_show(row: Execution, need: budget_rules.Need) -> bool:
    """Whether an execution that sleeps on a budget may show its figures.

    Whoever holds a lease chooses the key that it sleeps on. It must not be a way to read any budget of `default`.
    """
    return need.namespace == row.namespace or need.budget_id in decode_terms(row.terms).budget_ids


def of_need(sheet: BudgetSheet, need: budget_rules.Need) -> obstacles.BudgetExhausted:
    """The budget that an execution sleeps on."""
    row = sheet.dimension(need.dimension)
    return obstacles.BudgetExhausted(
        need.budget_id,
        need.dimension,
        row.usage or 0,
        row.reserved,
        row.hard_limit,
        sheet.row().next_reset_at,
        need.amount,
    )


def of_budgets(sheets: Sequence[BudgetSheet]) -> obstacles.BudgetExhausted | None:
    """The first of these budgets that has no room."""
    for sheet in sheets:
        full = budget_rules.exhausted(sheet.dimensions.values())
        if full is not None:
            resets_at = sheet.row().next_reset_at
            return obstacles.BudgetExhausted(
                sheet.budget_id, full.dimension, full.usage or 0, full.reserved, full.hard_limit, resets_at
            )
    return None


def of_quotas(row: Execution, sheets: Sequence[QuotaSheet], now: int) -> obstacles.QuotaFull | None:
    """The first of these policies that would not admit the execution now."""
    for sheet in sheets:
        limits = quota.limits_of(sheet.root)
        if not isinstance(limits, limit_answers.QuotaLimits) or limits.unlimited:
            continue
        ask = quota.Asking(
            execution_id=row.execution_id,
            window_ms=quota.window_ms(limits),
            rate_limit=limits.max_requests_per_window,
            concurrency_cap=limits.active_concurrency_cap,
            admission=0,
        )
        answer, _ = quota.check(sheet, ask, now)
        if isinstance(answer, limit_answers.RateExceeded):
            limit = limits.max_requests_per_window
            return obstacles.QuotaFull(sheet.quota_policy_id, "rate", limit, limit, now + answer.retry_after_ms)
        if isinstance(answer, limit_answers.ConcurrencyExceeded):
            used, cap = sheet.row().active, limits.active_concurrency_cap
            return obstacles.QuotaFull(sheet.quota_policy_id, "concurrency", used, cap)
    return None


def of_workers(row: Execution, live: Sequence[Worker]) -> obstacles.Obstacle | None:
    """Whether somebody is there to run it."""
    of_lane = [worker for worker in live if row.lane_id in workers.lanes_of(worker)]
    if not of_lane:
        return obstacles.NoWorker(row.lane_id, row.namespace)
    lacking = [(worker, workers.lacks(worker, row.required_capabilities)) for worker in of_lane]
    if not all(missing for _, missing in lacking):
        return None
    return obstacles.NoCapableWorker(
        row.required_capabilities or "",
        row.lane_id,
        tuple(obstacles.Lacking(worker.worker_instance_id, missing) for worker, missing in lacking),
    )
