"""Spending, against a second telling: whatever is asked in whatever order, the books are right."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import Budget, BudgetDimension, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.change import Change, Delete, Upsert
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import reservation as reservation_rules
from flowfabric.rules.limits import usage
from flowfabric.rules.limits.budget import BudgetState

NOW = 1_700_000_000_000
B = "0b000000-0000-4000-8000-000000000001"
DIMENSIONS = ("cost", "tokens")
EMPTY = BudgetState(B, 3)

amounts = st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(0, 12), min_size=1)
executions = st.sampled_from(["e1", "e2"])
reservations = st.sampled_from(["r1", "r2", "r3"])
steps = st.one_of(
    st.tuples(st.just("report"), amounts, st.none() | st.sampled_from(["k1", "k2"])),
    st.tuples(st.just("spend"), amounts, executions),
    st.tuples(st.just("release"), executions),
    st.tuples(st.just("reset")),
    st.tuples(st.just("reserve"), amounts, reservations, executions),
    st.tuples(st.just("settle"), amounts, reservations, executions),
    st.tuples(st.just("refund"), reservations),
    st.tuples(st.just("wait"), st.integers(1, 60)),
)


def defined(hard: dict[str, int]) -> BudgetState:
    limits = tuple((name, hard[name], 0) for name in DIMENSIONS)
    _, sheet = usage.define_budget(EMPTY, usage.BudgetDefinition("", "", "", "", "", 0, limits), NOW)
    return sheet


class Books:
    """The plainest telling of a budget: lists of what was said, added up when asked."""

    def __init__(self, hard: dict[str, int]) -> None:
        self.hard = hard
        self.usage: dict[str, int] = defaultdict(int)
        self.ledger: dict[tuple[str, str], int] = defaultdict(int)
        self.open: dict[str, tuple[str, dict[str, int], int]] = {}
        self.heard: set[str] = set()

    def reserved(self, name: str, now: int) -> int:
        return sum(what.get(name, 0) for _, what, until in self.open.values() if until > now)

    def fits(self, what: dict[str, int], now: int, promised: dict[str, int] | None = None) -> bool:
        kept = promised or {}
        for name, amount in what.items():
            counted = self.usage[name] + self.reserved(name, now) - kept.get(name, 0)
            if amount > kept.get(name, 0) and self.hard[name] and counted + amount > self.hard[name]:
                return False
        return True

    def apply(self, what: dict[str, int], execution: str | None) -> None:
        for name, amount in what.items():
            self.usage[name] += amount
            if execution:
                self.ledger[execution, name] += amount


def told(sheet: BudgetState, books: Books, step: tuple[Any, ...], now: int) -> tuple[Any, BudgetState, bool]:
    """What the rule answers, and whether the books expect it to apply."""
    match step:
        case ("report", what, key):
            known = key in books.heard
            expected = not known and books.fits(what, now)
            if expected:
                books.apply(what, None)
                books.heard.update({key} - {None})
            return *usage.report_usage(sheet, usage.UsageReport(tuple(sorted(what.items())), key), now), expected
        case ("spend", what, execution):
            expected = books.fits(what, now)
            if expected:
                books.apply(what, execution)
            ask = usage.UsageReport(tuple(sorted(what.items())), None, execution)
            return *usage.report_usage(sheet, ask, now), expected
        case ("release", execution):
            for (who, name), amount in list(books.ledger.items()):
                if who == execution:
                    books.usage[name] = max(0, books.usage[name] - amount)
                    del books.ledger[who, name]
            return *usage.release_spends(sheet, execution, now), True
        case ("reset",):
            books.usage = defaultdict(int, dict.fromkeys(books.usage, 0))
            books.ledger.clear()
            return *usage.reset_budget(sheet, now), True
        case ("reserve", what, name, execution):
            known = f"settled:{name}" in books.heard
            mine = books.open.get(name)
            held = mine if mine is not None and mine[2] > now else None
            expected = not known and (held[0] == execution if held else books.fits(what, now))
            if expected:
                books.open[name] = (execution, held[1] if held else what, now + 50)
            promise = reservation_rules.ReserveRequest(name, execution, tuple(sorted(what.items())), 50)
            return *reservation_rules.reserve(sheet, promise, now), expected
        case ("settle", what, name, execution):
            mine = books.open.get(name)
            held = mine if mine is not None and mine[2] > now else None
            if f"settled:{name}" in books.heard or (held and held[0] != execution):
                expected = False
            else:
                expected = books.fits(what, now, held[1] if held else None)
            if expected:
                books.open.pop(name, None)
                books.apply(what, execution)
                books.heard.add(f"settled:{name}")
            return *reservation_rules.settle(sheet, name, execution, tuple(sorted(what.items())), now), expected
        case ("refund", name):
            books.open.pop(name, None)
            return *reservation_rules.refund(sheet, name, now), True
        case _:
            raise AssertionError(step)


@settings(max_examples=300)
@given(st.fixed_dictionaries({name: st.integers(0, 25) for name in DIMENSIONS}), st.lists(steps, max_size=40))
def test_any_life_of_a_budget_agrees_with_plain_books(hard: dict[str, int], life: list[tuple[Any, ...]]) -> None:
    sheet, books, now = defined(hard), Books(hard), NOW
    stored = rows_of(EMPTY, sheet, {})
    for step in life:
        if step[0] == "wait":
            now += step[1]
            continue
        before = sheet
        answer, sheet, expected = told(sheet, books, step, now)
        refused = isinstance(answer, limit_answers.HardBreach | limit_answers.AlreadyApplied | errors.FabricError)
        assert refused is not expected, (step, answer)
        current = reservation_rules.without_expired(sheet, now)
        for name in DIMENSIONS:
            row = current.dimensions[name]
            assert (row.usage or 0, row.reserved) == (books.usage[name], books.reserved(name, now)), step
            promised = sum(one.amount for one in current.reservations.values() if one.dimension == name)
            assert row.reserved == promised
        stored = rows_of(before, sheet, stored)
        sheet = replace(sheet, spends_cleared=False)
        assert reread(stored) == replace(sheet, keys=reread(stored).keys), "what is written is what was decided"


@settings(max_examples=200)
@given(st.integers(1, 60), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=50), st.randoms())
def test_no_order_of_fifty_reports_exceeds_a_hard_limit(hard: int, asks: list[tuple[bool, int]], chance: Any) -> None:
    sheet = defined({"cost": 0, "tokens": hard})
    chance.shuffle(asks)
    accepted = 0
    answer: Any
    for reserving_it, amount in asks:
        if reserving_it:
            promise = reservation_rules.ReserveRequest(
                f"r{accepted}{amount}{chance.random()}", "e", (("tokens", amount),), 10**6
            )
            answer, sheet = reservation_rules.reserve(sheet, promise, NOW)
        else:
            answer, sheet = usage.report_usage(sheet, usage.UsageReport((("tokens", amount),)), NOW)
        if isinstance(answer, limit_answers.HardBreach):
            assert accepted + amount > hard, "nothing that fits is refused"
        else:
            accepted += amount
        assert accepted == budget_rules.used_and_reserved(sheet.dimensions["tokens"]) <= hard


def rows_of(before: BudgetState, after: BudgetState, stored: dict[Any, Any]) -> dict[Any, Any]:
    """The rows after the change between two sheets."""
    change = budget_rules.change_between(before, after)
    if change is None:
        return stored
    assert isinstance(change, Change)
    kept = dict(stored)
    for write in change.writes:
        match write:
            case Delete(row=kind, key=key):
                kept = {name: row for name, row in kept.items() if not (name[0] is kind and name[1][: len(key)] == key)}
            case Upsert(row=row):
                kept[type(row), _key(row)] = row
            case _:
                raise AssertionError(write)
    return kept


def reread(stored: dict[Any, Any]) -> BudgetState:
    return budget_rules.budget_state(B, 3, stored.values())


def _key(row: Any) -> tuple[Any, ...]:
    match row:
        case Budget():
            return row.namespace, row.budget_id
        case BudgetDimension():
            return row.namespace, row.budget_id, row.dimension
        case BudgetSpend():
            return row.namespace, row.budget_id, row.execution_id, row.dimension
        case BudgetReservation():
            return row.namespace, row.budget_id, row.reservation_id, row.dimension
        case UsageKey():
            return row.namespace, row.budget_id, row.digest, row.expires_at
        case _:
            raise AssertionError(row)


def test_a_decision_that_changes_nothing_writes_nothing() -> None:
    sheet = defined({"cost": 1, "tokens": 1})

    assert budget_rules.change_between(sheet, sheet) is None
    _, after = usage.release_spends(sheet, "nobody", NOW)
    assert budget_rules.change_between(sheet, after) is None


@pytest.mark.parametrize("name", ["hard_limit", "soft_limit", "usage", "reserved"])
def test_a_negative_number_is_corruption(name: str) -> None:
    sheet = defined({"cost": 1, "tokens": 1})
    assert budget_rules.find_corruption(sheet) is None
    bad = replace(sheet.dimensions["cost"], **{name: -1})
    assert isinstance(budget_rules.find_corruption(replace(sheet, dimensions={"cost": bad})), errors.Corruption)


def test_dimensions_keep_their_places_and_new_ones_follow() -> None:
    sheet = defined({"cost": 1, "tokens": 1})

    _, sheet = usage.change_limits(sheet, (("zeal", 3, 0), ("tokens", 2, 1), ("calls", 4, 0)), NOW)

    for name in ("b only used", "a only used"):
        _, sheet = usage.report_usage(sheet, usage.UsageReport(((name, 1),)), NOW)
    *rows, first, second = budget_rules.in_definition_order(sheet.dimensions.values())
    assert (first.dimension, second.dimension) == ("a only used", "b only used")
    assert [(row.dimension, row.hard_limit, row.soft_limit, row.position) for row in rows] == [
        ("cost", 1, 0, 0),
        ("tokens", 2, 1, 1),
        ("zeal", 3, 0, 2),
        ("calls", 4, 0, 3),
    ]


def test_a_budget_grows_to_as_many_dimensions_as_one_may_be_made_with() -> None:
    sheet = defined({"cost": 1, "tokens": 1})
    more = tuple((f"d{number}", 1, 0) for number in range(usage.MOST_DIMENSIONS - 2))

    answer, full = usage.change_limits(sheet, more, NOW)
    assert answer == limit_answers.LimitsChanged(B)
    answer, same = usage.change_limits(full, (*more, ("cost", 9, 0)), NOW)
    assert answer == limit_answers.LimitsChanged(B), "those that it has do not count twice"
    answer, same = usage.change_limits(full, (("one more", 1, 0),), NOW)
    assert isinstance(answer, errors.InvalidInput)
    assert same is full


@pytest.mark.parametrize(
    ("hard", "used", "noted", "moved"),
    [
        ({"cost": 5, "tokens": 5}, {"cost": 6}, None, NOW),
        ({"cost": 5, "tokens": 5}, {"cost": 5}, None, None),
        ({"cost": 0, "tokens": 5}, {"cost": 9}, None, None),
        ({"cost": 5, "tokens": 5}, {"cost": 6}, NOW - 9, NOW - 9),
        ({"cost": 5, "tokens": 5}, {"cost": 5}, NOW - 9, None),
        ({"cost": 5, "tokens": 5}, {}, NOW - 9, None),
    ],
    ids=["beyond one limit", "at the limit", "without a limit", "noted before", "back within it", "not used"],
)
def test_a_breach_is_noted_while_usage_is_beyond_a_hard_limit(
    hard: dict[str, int], used: dict[str, int], noted: int | None, moved: int | None
) -> None:
    sheet = defined(hard)
    rows = {name: replace(row, usage=used.get(name)) for name, row in sheet.dimensions.items()}
    sheet = replace(sheet, dimensions=rows, root=replace(sheet.root_or_new(), breached_at=noted))

    answer, after = usage.mark_breach(sheet, NOW)

    assert (answer, after.root_or_new().breached_at) == (noted != moved, moved)
    period = replace(sheet, root=replace(sheet.root_or_new(), reset_interval_ms=1000))
    assert usage.mark_breach(period, NOW) == (False, period), "the next reset clears it"


def test_a_need_that_is_met_leaves_less_room_in_its_dimension_and_as_much_in_others() -> None:
    sheet = defined({"cost": 5, "tokens": 5})
    tokens, cost = budget_rules.BudgetNeed(B, "tokens", 3), budget_rules.BudgetNeed(B, "cost", 5)

    after = budget_rules.with_reserved(sheet, tokens)

    assert (budget_rules.has_capacity_for(sheet, tokens), budget_rules.has_capacity_for(after, tokens)) == (True, False)
    assert (
        budget_rules.has_capacity_for(after, cost),
        budget_rules.has_capacity_for(budget_rules.with_reserved(after, cost), cost),
    ) == (
        True,
        False,
    )
    assert budget_rules.has_capacity_for(after, budget_rules.BudgetNeed(B, "never heard of", 9))
