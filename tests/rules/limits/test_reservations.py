"""Reservations that are drawn from piece by piece, and keys that are kept until they are acknowledged."""

from __future__ import annotations

from typing import Any

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.change import Delete, Upsert
from flowfabric.model.limits.budget import UsageKey
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import reservation as reservation_rules
from flowfabric.rules.limits import usage
from flowfabric.rules.limits.budget import BudgetState

NOW = 1_700_000_000_000
DAY = 24 * 60 * 60 * 1000
B = "0b000000-0000-4000-8000-000000000001"
EMPTY = BudgetState(B, 3)


def defined(hard: int = 10) -> BudgetState:
    definition = usage.BudgetDefinition("", "", "", "", "", 0, (("tokens", hard, 0),))
    return usage.define_budget(EMPTY, definition, NOW)[1]


def reserve(state: BudgetState, amount: int, *, drawn: int = 0, epoch: int = 1, now: int = NOW) -> Any:
    request = reservation_rules.ReserveRequest(
        "r1", "e1", (("tokens", amount),), 1000, (("tokens", drawn),) if drawn else (), epoch
    )
    return reservation_rules.reserve(state, request, now)


def spend(
    state: BudgetState,
    amount: int,
    key: str | None = None,
    acknowledged: tuple[str, ...] | None = (),
    *,
    execution: str = "e1",
    now: int = NOW,
) -> Any:
    report = usage.UsageReport((("tokens", amount),), key, execution, "r1", acknowledged)
    return usage.report_usage(state, report, now)


def figures(state: BudgetState) -> tuple[int, int]:
    row = state.dimension("tokens")
    return row.usage or 0, row.reserved


def test_usage_is_drawn_from_the_reservation_and_the_rest_stays_reserved() -> None:
    _, state = reserve(defined(), 10)
    answer, state = spend(state, 4)
    assert answer == limit_answers.Ok()
    assert figures(state) == (4, 6)
    refunded, state = reservation_rules.refund(state, "r1", NOW, "e1", epoch=1)
    assert refunded == limit_answers.Refunded("r1", {"tokens": 6})
    assert figures(state) == (4, 0)


def test_usage_beyond_the_reservation_needs_capacity_and_changes_nothing_without_it() -> None:
    _, state = reserve(defined(), 4)
    answer, after = spend(state, 11)
    assert isinstance(answer, limit_answers.HardBreach)
    assert figures(after) == (0, 4)
    answer, after = spend(state, 10)
    assert answer == limit_answers.Ok()
    assert figures(after) == (10, 0)


def test_a_reservation_that_was_used_up_is_not_made_again() -> None:
    _, state = reserve(defined(), 6)
    _, state = spend(state, 6)
    answer, state = reserve(state, 6, epoch=2)
    assert isinstance(answer, limit_answers.Reserved)
    assert figures(state) == (6, 0)


def test_a_reservation_that_has_ended_is_made_again_for_what_was_not_drawn() -> None:
    _, state = spend(defined(), 7)
    answer, after = reserve(state, 10, drawn=7)
    assert isinstance(answer, limit_answers.Reserved)
    assert figures(after) == (7, 3)
    answer, _ = reserve(state, 10)
    assert isinstance(answer, limit_answers.HardBreach)
    answer, after = reserve(state, 7, drawn=9)
    assert isinstance(answer, limit_answers.Reserved)
    assert figures(after) == (7, 0)


def test_a_reservation_of_another_execution_cannot_be_spent() -> None:
    _, state = reserve(defined(), 4)
    answer, after = spend(state, 1, execution="e2")
    assert isinstance(answer, errors.InvalidInput)
    assert after == state


def test_an_earlier_holder_refunds_nothing_that_a_later_one_has_taken_up() -> None:
    _, state = reserve(defined(), 4, epoch=1)
    _, state = reserve(state, 4, epoch=2)
    answer, after = reservation_rules.refund(state, "r1", NOW, "e1", epoch=1)
    assert answer == limit_answers.Refunded("r1", {})
    assert figures(after) == (0, 4)
    _, state = reserve(state, 4, epoch=1)  # a late call does not take it back
    assert reservation_rules.refund(state, "r1", NOW, "e1", epoch=1)[1] == state
    assert figures(reservation_rules.refund(state, "r1", NOW, "e1", epoch=2)[1]) == (0, 0)


def test_a_key_is_kept_for_thirty_days_until_it_is_acknowledged_and_then_for_one() -> None:
    _, state = spend(defined(), 1, "k1")
    assert state.keys == {"k1": NOW + 30 * DAY}
    assert spend(state, 1, "k1", now=NOW + 29 * DAY) == (limit_answers.AlreadyApplied(), state)
    _, after = spend(state, 1, "k2", ("k1", "unknown"), now=NOW + 1000)
    assert after.keys == {"k1": NOW + 1000 + DAY, "k2": NOW + 1000 + 30 * DAY}
    assert figures(after) == (2, 0)
    _, again = spend(after, 1, "k3", ("k1",), now=NOW + 2000)
    assert again.keys["k1"] == NOW + 1000 + DAY, "the second acknowledgement does not prolong it"


def test_acknowledging_replaces_the_row_of_the_key() -> None:
    _, state = spend(defined(), 1, "k1")
    _, after = reservation_rules.refund(state, "r1", NOW + 1000, "e1", acknowledged=("k1",))
    change = budget_rules.change_between(state, after)
    assert change is not None
    assert Delete(UsageKey, ("default", B, "k1", NOW + 30 * DAY)) in change.writes
    assert Upsert(UsageKey(B, "k1", NOW + 1000 + DAY)) in change.writes


def test_a_report_without_amounts_only_acknowledges() -> None:
    _, state = spend(defined(), 1, "k1")
    report = usage.UsageReport((), None, "e1", None, ("k1",))
    answer, after = usage.report_usage(state, report, NOW + 1000)
    assert answer == limit_answers.Ok()
    assert (after.keys, after.dimensions) == ({"k1": NOW + 1000 + DAY}, state.dimensions)


def test_a_caller_that_does_not_acknowledge_has_its_key_kept_for_a_day() -> None:
    _, state = spend(defined(), 1, "k1", None)
    assert state.keys == {"k1": NOW + DAY}
