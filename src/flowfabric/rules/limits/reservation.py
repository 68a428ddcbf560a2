"""Reserving: room in a budget that is kept free for work whose price is not known yet.

A reservation counts against the limits until it is settled (and becomes usage), refunded, or over. It is over when its
own time ends, so that the promises of a worker that died do not hold up the others.
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
    """Room to keep free for an execution for a while."""

    reservation_id: str
    execution_id: str
    amounts: Amounts
    ttl_ms: int


def settlement_digest(reservation_id: str) -> str:
    """What a settlement is remembered by; no digest of an idempotency key looks like this."""
    return f"settled:{reservation_id}"


def reserve(
    sheet: BudgetState, ask: ReserveRequest, now: int
) -> BudgetDecision[limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied]:
    """Keep room free. Asked again under the same id, a reservation lasts longer; once settled, it is applied."""
    if was_applied(sheet, settlement_digest(ask.reservation_id), now):
        return limit_answers.AlreadyApplied(), sheet
    sheet = without_expired(sheet, now)
    until = now + ask.ttl_ms
    dimensions, reservations = dict(sheet.dimensions), dict(sheet.reservations)
    mine = _promised(sheet, ask.reservation_id)
    if refused := _of_another(mine, ask.execution_id):
        return refused, sheet
    if not mine:
        if breach := find_hard_breach(sheet, ask.amounts):
            return record_breach(sheet, breach, now)
        for name, amount in ask.amounts:
            known = sheet.dimension(name)
            if known.reserved + amount > MAX_AMOUNT:
                return errors.InvalidInput(f"{name}: more than {MAX_AMOUNT} would be reserved"), sheet
            dimensions[name] = replace(known, reserved=known.reserved + amount)
            held = (ask.reservation_id, name, ask.execution_id, amount, until)
            row = BudgetReservation(sheet.budget_id, *held, namespace=sheet.namespace)
            reservations[ask.reservation_id, name] = row
    for key, row in mine.items():
        reservations[key] = replace(row, expires_at=until)
    answer = limit_answers.Reserved(ask.reservation_id, until)
    return answer, _promising(sheet, reservations, dimensions, now)


def settle(
    sheet: BudgetState, reservation_id: str, execution_id: str, amounts: Amounts, now: int
) -> BudgetDecision[limit_answers.UsageResult]:
    """Turn a reservation into usage, of what was really spent.

    Within what was promised it always applies. What goes beyond, or comes when the reservation is over, is a report
    like any other and may meet a hard limit; a reservation that is still open then stays.
    """
    digest = settlement_digest(reservation_id)
    if was_applied(sheet, digest, now):
        return limit_answers.AlreadyApplied(), sheet
    sheet = without_expired(sheet, now)
    mine = _promised(sheet, reservation_id)
    if refused := _of_another(mine, execution_id):
        return refused, sheet
    promised = {row.dimension: row.amount for row in mine.values()}
    free = _given_back(sheet, mine, now)
    beyond = tuple((name, amount) for name, amount in amounts if amount > promised.get(name, 0))
    if breach := find_hard_breach(free, beyond):
        return record_breach(sheet, breach, now)
    answer, after = apply_usage(free, amounts, digest, execution_id, now)
    return answer, sheet if isinstance(answer, errors.FabricError) else after


def refund(
    sheet: BudgetState, reservation_id: str, now: int, execution_id: str | None = None
) -> BudgetDecision[limit_answers.Refunded]:
    """Give a reservation's room back unused; only of one execution, if one is named."""
    sheet = without_expired(sheet, now)
    mine = _promised(sheet, reservation_id)
    if execution_id is not None and (refused := _of_another(mine, execution_id)):
        return refused, sheet
    given = {row.dimension: row.amount for row in mine.values()}
    return limit_answers.Refunded(reservation_id, given), _given_back(sheet, mine, now)


def expire_reservations(sheet: BudgetState, now: int) -> BudgetDecision[bool]:
    """The sweep's form: let go of what is over, and know when to look again; True when something was let go."""
    after = without_expired(sheet, now)
    if after is sheet and sheet.root is not None and sheet.root.lapse_at != _first_end(sheet.reservations):
        after = _promising(sheet, sheet.reservations, sheet.dimensions, now)
        return False, after
    return after is not sheet, after


def without_expired(sheet: BudgetState, now: int) -> BudgetState:
    """The sheet without the reservations whose time is over."""
    return _given_back(sheet, {key: row for key, row in sheet.reservations.items() if row.expires_at <= now}, now)


def _of_another(mine: Rows, execution_id: str) -> errors.FabricError | None:
    if all(row.execution_id == execution_id for row in mine.values()):
        return None
    return errors.InvalidInput("reservation_id: of another execution")


def _promised(sheet: BudgetState, reservation_id: str) -> Rows:
    return {key: row for key, row in sheet.reservations.items() if key[0] == reservation_id}


def _given_back(sheet: BudgetState, rows: Rows, now: int) -> BudgetState:
    if not rows:
        return sheet
    dimensions = dict(sheet.dimensions)
    for row in rows.values():
        known = dimensions[row.dimension]
        dimensions[row.dimension] = replace(known, reserved=max(0, known.reserved - row.amount))
    kept = {key: row for key, row in sheet.reservations.items() if key not in rows}
    return _promising(sheet, kept, dimensions, now)


def _promising(sheet: BudgetState, reservations: Rows, dimensions: dict[str, BudgetDimension], now: int) -> BudgetState:
    root = replace(sheet.root_or_new(), lapse_at=_first_end(reservations), last_updated_at=now)
    return replace(sheet, root=root, reservations=reservations, dimensions=dimensions)


def _first_end(reservations: Rows) -> int | None:
    return min((row.expires_at for row in reservations.values()), default=None)
