"""Explaining: which of the things that could keep an execution from running does."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.model import obstacles
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import MISSING_QUEUE, Execution
from flowfabric.model.states import BlockingReason, EligibilityState, LifecyclePhase, OwnershipState
from flowfabric.model.suspension import Suspension
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.rules.scheduling import workers
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state


def explain_row(row: Execution, now: int) -> obstacles.Obstacle | None:
    """What the execution's own row tells; None when it waits for something that other rows tell of."""
    match row.lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            reason = row.failure_reason or row.cancellation_reason
            return obstacles.EndedObstacle(row.terminal_outcome, row.completed_at or 0, reason)
        case LifecyclePhase.ACTIVE:
            return _held(row, now)
        case _:
            pass
    match row.eligibility_state:
        case EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
            retrying = row.blocking_reason is BlockingReason.WAITING_FOR_RETRY_BACKOFF
            failure = row.failure_reason if retrying else None
            return obstacles.DelayedObstacle(
                row.delay_until or 0, row.blocking_reason.value, failure, row.blocking_text
            )
        case EligibilityState.BLOCKED_BY_OPERATOR | EligibilityState.BLOCKED_BY_LANE_STATE:
            return obstacles.Paused(row.blocking_reason.value, row.blocking_text or "", row.blocked_at)
        case _:
            pass
    if row.line == MISSING_QUEUE:
        return obstacles.QueueMissing(row.lane_id)
    grant = grant_rules.stored_grant(row)
    if grant is not None and grant_rules.has_live_grant(row, now):
        return obstacles.Offered(grant.worker_id, grant.expires_at)
    return None


def _held(row: Execution, now: int) -> obstacles.Obstacle:
    instance = row.worker_instance_id or ""
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return obstacles.LeaseLost(instance, "revoked", row.lease_revoked_at or 0, row.lease_revoke_reason)
    if row.lease_expires_at is not None and row.lease_expires_at <= now:
        return obstacles.LeaseLost(instance, "expired", row.lease_expires_at)
    return obstacles.Running(row.worker_id or "", instance, row.lease_acquired_at or 0, row.lease_expires_at or 0)


def explain_suspension(row: Execution, root: Suspension | None) -> obstacles.SuspendedObstacle:
    """What a suspended execution waits for."""
    if root is None:
        return obstacles.SuspendedObstacle(row.blocking_reason.value)
    reason, keys = (
        root.reason_code or row.blocking_reason.value,
        tuple(one.waitpoint_key for one in wait_encoding.bound_waitpoints(root)),
    )
    if keys:
        return obstacles.SuspendedObstacle(reason, keys, root.timeout_at)
    names, found = tuple(gate_rules.parked_on(root)), wait_state.open_gates(root)
    told = tuple(gate_rules.describe_wait(name, found[name]) for name in names if name in found)
    return obstacles.SuspendedObstacle(reason, names, root.timeout_at, told)


def may_show_budget(row: Execution, need: budget_rules.BudgetNeed) -> bool:
    """Whether an execution that sleeps on a budget may show its figures.

    Whoever holds a lease chooses the key that it sleeps on. It must not be a way to read any budget of `default`.
    """
    return need.namespace == row.namespace or need.budget_id in decode_terms(row.terms).budget_ids


def explain_budget_need(sheet: BudgetState, need: budget_rules.BudgetNeed) -> obstacles.BudgetExhausted:
    """The budget that an execution sleeps on."""
    row = sheet.dimension(need.dimension)
    return obstacles.BudgetExhausted(
        need.budget_id,
        need.dimension,
        row.usage or 0,
        row.reserved,
        row.hard_limit,
        sheet.root_or_new().next_reset_at,
        need.amount,
    )


def explain_budgets(sheets: Sequence[BudgetState]) -> obstacles.BudgetExhausted | None:
    """The first of these budgets that has no room."""
    for sheet in sheets:
        full = budget_rules.first_exhausted(sheet.dimensions.values())
        if full is not None:
            resets_at = sheet.root_or_new().next_reset_at
            return obstacles.BudgetExhausted(
                sheet.budget_id, full.dimension, full.usage or 0, full.reserved, full.hard_limit, resets_at
            )
    return None


def explain_quotas(row: Execution, sheets: Sequence[QuotaState], now: int) -> obstacles.QuotaFull | None:
    """The first of these policies that would not admit the execution now."""
    for sheet in sheets:
        limits = quota.limits_of(sheet.root)
        if not isinstance(limits, limit_answers.QuotaLimits) or limits.unlimited:
            continue
        ask = quota.AdmissionRequest(
            execution_id=row.execution_id,
            window_ms=quota.window_ms(limits),
            rate_limit=limits.max_requests_per_window,
            concurrency_cap=limits.active_concurrency_cap,
            call_id=0,
        )
        answer, _ = quota.admit(sheet, ask, now)
        if isinstance(answer, limit_answers.RateExceeded):
            limit = limits.max_requests_per_window
            return obstacles.QuotaFull(sheet.quota_policy_id, "rate", limit, limit, now + answer.retry_after_ms)
        if isinstance(answer, limit_answers.ConcurrencyExceeded):
            used, cap = sheet.root_or_new().active, limits.active_concurrency_cap
            return obstacles.QuotaFull(sheet.quota_policy_id, "concurrency", used, cap)
    return None


def explain_workers(row: Execution, live: Sequence[RegisteredWorker]) -> obstacles.Obstacle | None:
    """Whether somebody is there to run it."""
    of_lane = [worker for worker in live if row.lane_id in workers.lanes_of(worker)]
    if not of_lane:
        return obstacles.NoWorker(row.lane_id, row.namespace)
    lacking = [(worker, workers.missing_capabilities(worker, row.required_capabilities)) for worker in of_lane]
    if not all(missing for _, missing in lacking):
        return None
    return obstacles.NoCapableWorker(
        row.required_capabilities or "",
        row.lane_id,
        tuple(obstacles.IncapableWorker(worker.worker_instance_id, missing) for worker, missing in lacking),
    )
