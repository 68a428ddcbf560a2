"""Reservations: capacity in a budget that is reserved for work whose cost is not known yet.

A reservation counts against the limits until it is settled (and becomes usage), refunded, or expired. It expires by
itself, so that the reservations of a dead worker do not block others. Usage can be drawn from it piece by piece; what
is left stays reserved. A durable function takes its reservation up by its id in every attempt: the epoch of the lease
says who did so last, and an earlier holder can no longer refund it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.limits.budget import BudgetDimension, BudgetReservation
from flowfabric.rules.limits.budget import (
    MAX_AMOUNT,
    Amounts,
    BudgetDecision,
    BudgetState,
    acknowledge,
    apply_usage,
    find_hard_breach,
    record_breach,
    was_applied,
)

Rows = dict[tuple[str, str], BudgetReservation]


class ReserveRequest(msgspec.Struct, frozen=True):
    """Capacity to reserve for an execution. `drawn` is what the execution has drawn from it in earlier attempts."""

    reservation_id: str
    execution_id: str
    amounts: Amounts
    ttl_ms: int
    drawn: Amounts = ()
    epoch: int = 0


def settlement_digest(reservation_id: str) -> str:
    """Return the digest under which a settlement is recorded; it cannot equal the digest of an idempotency key."""
    return f"settled:{reservation_id}"


def reserve(
    state: BudgetState, request: ReserveRequest, now: int
) -> BudgetDecision[limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied]:
    """Reserve capacity. Repeating it with the same id extends the reservation; once settled, it is applied already.

    One that has expired or was refunded is made again, for what had not been drawn from it.
    """
    if was_applied(state, settlement_digest(request.reservation_id), now):
        return limit_answers.AlreadyApplied(), state
    state = without_expired(state, now)
    expires_at = now + request.ttl_ms
    dimensions, reservations = dict(state.dimensions), dict(state.reservations)
    own_rows = _rows_of(state, request.reservation_id)
    if refused := _check_owner(own_rows, request.execution_id):
        return refused, state
    if not own_rows:
        drawn = dict(request.drawn)
        remaining = tuple((name, max(0, amount - drawn.get(name, 0))) for name, amount in request.amounts)
        if breach := find_hard_breach(state, tuple(one for one in remaining if one[1] or one[0] not in drawn)):
            return record_breach(state, breach, now)
        for name, amount in remaining:
            known = state.dimension(name)
            if known.reserved + amount > MAX_AMOUNT:
                return errors.InvalidInput(f"{name}: more than {MAX_AMOUNT} would be reserved"), state
            dimensions[name] = replace(known, reserved=known.reserved + amount)
            fields = (request.reservation_id, name, request.execution_id, amount, expires_at)
            row = BudgetReservation(state.budget_id, *fields, namespace=state.namespace, epoch=request.epoch)
            reservations[request.reservation_id, name] = row
    for key, row in own_rows.items():
        reservations[key] = replace(row, expires_at=expires_at, epoch=max(row.epoch, request.epoch))
    answer = limit_answers.Reserved(request.reservation_id, expires_at)
    lapse_at = state.root_or_new().lapse_at
    first = expires_at if lapse_at is None else min(lapse_at, expires_at)
    return answer, _with_reservations(state, reservations, dimensions, first, now)


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


def draw(
    state: BudgetState, reservation_id: str, execution_id: str, amounts: Amounts, now: int
) -> tuple[BudgetState | errors.FabricError, Amounts]:
    """Take amounts from a reservation; return the state, and the amounts that it did not cover.

    A reservation from which everything was drawn stays until it is refunded or expires, so that it is not made again.
    """
    own_rows = _rows_of(state, reservation_id)
    if refused := _check_owner(own_rows, execution_id):
        return refused, amounts
    dimensions, reservations = dict(state.dimensions), dict(state.reservations)
    for name, amount in amounts:
        row = own_rows.get((reservation_id, name))
        if row is not None:
            taken = min(amount, row.amount)
            reservations[reservation_id, name] = replace(row, amount=row.amount - taken)
            dimensions[name] = replace(dimensions[name], reserved=max(0, dimensions[name].reserved - taken))
    uncovered = tuple(
        (name, amount)
        for name, amount in amounts
        if (row := own_rows.get((reservation_id, name))) is None or amount > row.amount
    )
    return replace(state, reservations=reservations, dimensions=dimensions), uncovered


def refund(
    state: BudgetState,
    reservation_id: str,
    now: int,
    execution_id: str | None = None,
    *,
    epoch: int | None = None,
    acknowledged: tuple[str, ...] = (),
) -> BudgetDecision[limit_answers.Refunded]:
    """Release what is left of a reservation; with `execution_id`, only if it belongs to that execution.

    With `epoch`, the caller is the holder of a lease: a reservation that a later holder has taken up stays.
    """
    state = without_expired(acknowledge(state, acknowledged, now), now)
    own_rows = _rows_of(state, reservation_id)
    if execution_id is not None and (refused := _check_owner(own_rows, execution_id)):
        return refused, state
    if epoch is not None and any(row.epoch > epoch for row in own_rows.values()):
        return limit_answers.Refunded(reservation_id, {}), state
    amounts = {row.dimension: row.amount for row in own_rows.values()}
    return limit_answers.Refunded(reservation_id, amounts), _release(state, own_rows, now)


def expire_reservations(state: BudgetState, now: int) -> BudgetDecision[bool]:
    """Release expired reservations and schedule the next expiry, for the sweep; True if any was released."""
    after = without_expired(state, now)
    return len(after.reservations) < len(state.reservations), after


def may_have_expired(state: BudgetState, now: int) -> bool:
    """True if a reservation may have expired. Then all reservations have to be loaded, otherwise only one's own."""
    return state.root is not None and state.root.lapse_at is not None and state.root.lapse_at <= now


def without_expired(state: BudgetState, now: int) -> BudgetState:
    """Return the state without expired reservations."""
    if not may_have_expired(state, now):
        return state
    after = _release(state, {key: row for key, row in state.reservations.items() if row.expires_at <= now}, now)
    first = min((row.expires_at for row in after.reservations.values()), default=None)
    return _with_reservations(after, after.reservations, after.dimensions, first, now)


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
    return _with_reservations(state, remaining, dimensions, state.root_or_new().lapse_at, now)


def _with_reservations(
    state: BudgetState, reservations: Rows, dimensions: dict[str, BudgetDimension], lapse_at: int | None, now: int
) -> BudgetState:
    root = replace(state.root_or_new(), lapse_at=lapse_at, last_updated_at=now)
    return replace(state, root=root, reservations=reservations, dimensions=dimensions)
