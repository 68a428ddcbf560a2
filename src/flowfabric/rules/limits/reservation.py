"""Reservations: capacity in a budget that is reserved for work whose cost is not known yet.

A reservation counts against the limits until it is settled (and becomes usage), refunded, or expired. It expires by
itself, so that the reservations of a dead worker do not block others.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import BudgetDimension, BudgetReservation
from flowfabric.rules.limits.budget import (
    MAX_AMOUNT,
    Amounts,
    BudgetDecision,
    BudgetState,
    apply_usage,
    find_hard_breach,
    record_breach,
    was_applied,
)

Rows = dict[tuple[str, str], BudgetReservation]


class ReserveRequest(msgspec.Struct, frozen=True):
    """Capacity to reserve for an execution."""

    reservation_id: str
    execution_id: str
    amounts: Amounts
    ttl_ms: int


def settlement_digest(reservation_id: str) -> str:
    """Return the digest under which a settlement is recorded; it cannot equal the digest of an idempotency key."""
    return f"settled:{reservation_id}"


def reserve(
    state: BudgetState, request: ReserveRequest, now: int
) -> BudgetDecision[limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied]:
    """Reserve capacity. Repeating it with the same id extends the reservation; once settled, it is applied already."""
    if was_applied(state, settlement_digest(request.reservation_id), now):
        return limit_answers.AlreadyApplied(), state
    state = without_expired(state, now)
    expires_at = now + request.ttl_ms
    dimensions, reservations = dict(state.dimensions), dict(state.reservations)
    own_rows = _rows_of(state, request.reservation_id)
    if refused := _check_owner(own_rows, request.execution_id):
        return refused, state
    if not own_rows:
        if breach := find_hard_breach(state, request.amounts):
            return record_breach(state, breach, now)
        for name, amount in request.amounts:
            known = state.dimension(name)
            if known.reserved + amount > MAX_AMOUNT:
                return errors.InvalidInput(f"{name}: more than {MAX_AMOUNT} would be reserved"), state
            dimensions[name] = replace(known, reserved=known.reserved + amount)
            fields = (request.reservation_id, name, request.execution_id, amount, expires_at)
            row = BudgetReservation(state.budget_id, *fields, namespace=state.namespace)
            reservations[request.reservation_id, name] = row
    for key, row in own_rows.items():
        reservations[key] = replace(row, expires_at=expires_at)
    answer = limit_answers.Reserved(request.reservation_id, expires_at)
    return answer, _with_reservations(state, reservations, dimensions, now)


def settle(
    state: BudgetState, reservation_id: str, execution_id: str, amounts: Amounts, now: int
) -> BudgetDecision[limit_answers.UsageResult]:
    """Turn a reservation into usage of the actual amounts.

    Up to the reserved amounts it always applies. Amounts beyond, or after the reservation expired, are checked like any
    report and may breach a hard limit; an open reservation then stays.
    """
    digest = settlement_digest(reservation_id)
    if was_applied(state, digest, now):
        return limit_answers.AlreadyApplied(), state
    state = without_expired(state, now)
    own_rows = _rows_of(state, reservation_id)
    if refused := _check_owner(own_rows, execution_id):
        return refused, state
    reserved = {row.dimension: row.amount for row in own_rows.values()}
    released = _release(state, own_rows, now)
    beyond = tuple((name, amount) for name, amount in amounts if amount > reserved.get(name, 0))
    if breach := find_hard_breach(released, beyond):
        return record_breach(state, breach, now)
    answer, after = apply_usage(released, amounts, digest, execution_id, now)
    return answer, state if isinstance(answer, errors.FabricError) else after


def refund(
    state: BudgetState, reservation_id: str, now: int, execution_id: str | None = None
) -> BudgetDecision[limit_answers.Refunded]:
    """Release a reservation unused; with `execution_id`, only if it belongs to that execution."""
    state = without_expired(state, now)
    own_rows = _rows_of(state, reservation_id)
    if execution_id is not None and (refused := _check_owner(own_rows, execution_id)):
        return refused, state
    amounts = {row.dimension: row.amount for row in own_rows.values()}
    return limit_answers.Refunded(reservation_id, amounts), _release(state, own_rows, now)


def expire_reservations(state: BudgetState, now: int) -> BudgetDecision[bool]:
    """Release expired reservations and schedule the next expiry, for the sweep; True if any was released."""
    after = without_expired(state, now)
    if after is state and state.root is not None and state.root.lapse_at != _next_expiry(state.reservations):
        after = _with_reservations(state, state.reservations, state.dimensions, now)
        return False, after
    return after is not state, after


def without_expired(state: BudgetState, now: int) -> BudgetState:
    """Return the state without expired reservations."""
    return _release(state, {key: row for key, row in state.reservations.items() if row.expires_at <= now}, now)


def _check_owner(rows: Rows, execution_id: str) -> errors.FabricError | None:
    if all(row.execution_id == execution_id for row in rows.values()):
        return None
    return errors.InvalidInput("reservation_id: of another execution")


def _rows_of(state: BudgetState, reservation_id: str) -> Rows:
    return {key: row for key, row in state.reservations.items() if key[0] == reservation_id}


def _release(state: BudgetState, rows: Rows, now: int) -> BudgetState:
    if not rows:
        return state
    dimensions = dict(state.dimensions)
    for row in rows.values():
        known = dimensions[row.dimension]
        dimensions[row.dimension] = replace(known, reserved=max(0, known.reserved - row.amount))
    remaining = {key: row for key, row in state.reservations.items() if key not in rows}
    return _with_reservations(state, remaining, dimensions, now)


def _with_reservations(
    state: BudgetState, reservations: Rows, dimensions: dict[str, BudgetDimension], now: int
) -> BudgetState:
    root = replace(state.root_or_new(), lapse_at=_next_expiry(reservations), last_updated_at=now)
    return replace(state, root=root, reservations=reservations, dimensions=dimensions)


def _next_expiry(reservations: Rows) -> int | None:
    return min((row.expires_at for row in reservations.values()), default=None)
