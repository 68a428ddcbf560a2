"""Explain: find the obstacle that keeps an execution from running."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.model import obstacles
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import MISSING_QUEUE, Execution
from flowfabric.model.limits.budget import BudgetDimension
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.states import BlockingReason, EligibilityState, LifecyclePhase, OwnershipState
from flowfabric.model.suspension import Suspension
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import releases
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.rules.scheduling import capabilities, workers
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state


def explain_row(row: Execution, now: int) -> obstacles.Obstacle | None:
    """Return the obstacle that the execution's own row shows; None if other rows have to be inspected."""
    match row.lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            reason = row.failure_reason or row.cancellation_reason
            return obstacles.EndedObstacle(row.terminal_outcome, row.completed_at or 0, reason)
        case LifecyclePhase.ACTIVE:
            return _explain_lease(row, now)
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


def _explain_lease(row: Execution, now: int) -> obstacles.Obstacle:
    instance = row.worker_instance_id or ""
    if row.ownership_state is OwnershipState.LEASE_REVOKED:
        return obstacles.LeaseLost(instance, "revoked", row.lease_revoked_at or 0, row.lease_revoke_reason)
    if row.lease_expires_at is not None and row.lease_expires_at <= now:
        return obstacles.LeaseLost(instance, "expired", row.lease_expires_at)
    return obstacles.Running(row.worker_id or "", instance, row.lease_acquired_at or 0, row.lease_expires_at or 0)


def waits_for_worker(row: Execution, obstacle: obstacles.Obstacle, now: int) -> bool:
    """True if a worker has to act next: one of its version takes it over, or any ends a delay or wait that is over."""
    match obstacle:
        case obstacles.LeaseLost():
            return capabilities.pinned_version(row.required_capabilities) is not None
        case obstacles.DelayedObstacle(until=int(until)) | obstacles.SuspendedObstacle(until=int(until)):
            return until <= now
        case _:
            return False


def explain_suspension(row: Execution, suspension: Suspension | None) -> obstacles.SuspendedObstacle | obstacles.Held:
    """Return what a suspended execution waits for."""
    if suspension is None:
        return obstacles.SuspendedObstacle(row.blocking_reason.value)
    reason, keys = (
        suspension.reason_code or row.blocking_reason.value,
        tuple(waitpoint.waitpoint_key for waitpoint in wait_encoding.bound_waitpoints(suspension)),
    )
    if keys:
        return obstacles.SuspendedObstacle(reason, keys, suspension.timeout_at)
    names, gates = tuple(gate_rules.parked_on(suspension)), wait_state.open_gates(suspension)
    held = [gates[name] for name in names if name in gates and releases.is_hold(gates[name])]
    if held:
        first = min(held, key=lambda gate: gate.opened_at)
        why = first.note or "what it would do next does not fit what it remembers"
        return obstacles.Held(first.task or "", first.version or "", first.opened_at, why)
    descriptions = tuple(gate_rules.describe_wait(name, gates[name]) for name in names if name in gates)
    return obstacles.SuspendedObstacle(reason, names, suspension.timeout_at, descriptions)


def may_show_budget(row: Execution, need: budget_rules.BudgetNeed) -> bool:
    """True if the execution may show the numbers of the budget that it waits for.

    The lease holder chooses the key that it waits on. That must not be a way to read any budget of `default`.
    """
    return need.namespace == row.namespace or need.budget_id in decode_terms(row.terms).budget_ids


def explain_budget_need(state: BudgetState, need: budget_rules.BudgetNeed) -> obstacles.BudgetExhausted:
    """Return the budget that an execution is suspended on as an obstacle."""
    return _exhausted(state, state.dimension(need.dimension), need.amount)


def explain_budgets(states: Sequence[BudgetState]) -> obstacles.BudgetExhausted | None:
    """Return the first of these budgets without capacity."""
    for state in states:
        full = budget_rules.first_exhausted(state.dimensions.values())
        if full is not None:
            return _exhausted(state, full)
    return None


def _exhausted(state: BudgetState, row: BudgetDimension, needed: int = 0) -> obstacles.BudgetExhausted:
    root = state.root_or_new()
    return obstacles.BudgetExhausted(
        state.budget_id,
        row.dimension,
        row.usage or 0,
        row.reserved,
        row.hard_limit,
        root.next_reset_at,
        needed,
        root.scope_id,
    )


def explain_quotas(row: Execution, states: Sequence[QuotaState], now: int) -> obstacles.QuotaFull | None:
    """Return the first of these policies that would not admit the execution now."""
    for state in states:
        limits = quota.limits_of(state.root)
        if not isinstance(limits, limit_answers.QuotaLimits) or limits.unlimited:
            continue
        request = quota.AdmissionRequest(
            execution_id=row.execution_id,
            window_ms=quota.window_ms(limits),
            rate_limit=limits.max_requests_per_window,
            concurrency_cap=limits.active_concurrency_cap,
            call_id=0,
        )
        answer, _ = quota.admit(state, request, now)
        if isinstance(answer, limit_answers.RateExceeded):
            limit = limits.max_requests_per_window
            return obstacles.QuotaFull(state.quota_policy_id, "rate", limit, limit, now + answer.retry_after_ms)
        if isinstance(answer, limit_answers.ConcurrencyExceeded):
            used, cap = state.root_or_new().active, limits.active_concurrency_cap
            return obstacles.QuotaFull(state.quota_policy_id, "concurrency", used, cap)
    return None


def explain_workers(row: Execution, live: Sequence[RegisteredWorker]) -> obstacles.Obstacle | None:
    """Return the obstacle if no live worker can run the execution."""
    of_lane = [worker for worker in live if row.lane_id in workers.lanes_of(worker)]
    version = capabilities.pinned_version(row.required_capabilities)
    if version is not None and not any(
        capabilities.version_token(version) in capabilities.tokens_of(worker.capabilities) for worker in of_lane
    ):
        return obstacles.Pinned(version, row.lane_id)
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
