"""Predicates for executions in a state in which an operation makes sense."""

from __future__ import annotations

from flowfabric.model.execution import Execution


def is_waiting(row: Execution) -> bool:
    return row.eligibility_state.value == "eligible_now"


def is_granted(row: Execution) -> bool:
    return row.grant is not None


def is_resumable(row: Execution) -> bool:
    return is_granted(row) and row.attempt_state.value == "attempt_interrupted"


def is_active(row: Execution) -> bool:
    return row.lifecycle_phase.value == "active"


def is_abandoned(row: Execution) -> bool:
    return row.ownership_state.value in ("lease_expired_reclaimable", "lease_revoked")


def is_delayed(row: Execution) -> bool:
    return row.delay_until is not None


def is_blocked(row: Execution) -> bool:
    return row.eligibility_state.value.startswith("blocked")


def is_over(row: Execution) -> bool:
    return row.lifecycle_phase.value == "terminal"
