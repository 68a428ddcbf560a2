"""Budget usage compared with a naive model: the counters are right for any sequence of requests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.change import Change, Delete, Upsert
from flowfabric.model.limits.budget import Budget, BudgetDimension, BudgetReservation, BudgetSpend, UsageKey
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
    _, state = usage.define_budget(EMPTY, usage.BudgetDefinition("", "", "", "", "", 0, limits), NOW)
    return state


class BudgetModel:
    """A naive budget: lists of requests that are summed up when needed."""

    def __init__(self, hard: dict[str, int]) -> None:
        self.hard = hard
        self.usage: dict[str, int] = defaultdict(int)
        self.ledger: dict[tuple[str, str], int] = defaultdict(int)
        self.open: dict[str, tuple[str, dict[str, int], int]] = {}
        self.seen_keys: set[str] = set()

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


def apply_step(
    state: BudgetState, model: BudgetModel, step: tuple[Any, ...], now: int
) -> tuple[Any, BudgetState, bool]:
    """Return the answer of the rule, and whether the model expects it to apply."""
    match step:
        case ("report", what, key):
            known = key in model.seen_keys
            expected = not known and model.fits(what, now)
            if expected:
                model.apply(what, None)
                model.seen_keys.update({key} - {None})
            return *usage.report_usage(state, usage.UsageReport(tuple(sorted(what.items())), key), now), expected
        case ("spend", what, execution):
            expected = model.fits(what, now)
            if expected:
                model.apply(what, execution)
            ask = usage.UsageReport(tuple(sorted(what.items())), None, execution)
            return *usage.report_usage(state, ask, now), expected
        case ("release", execution):
            for (who, name), amount in list(model.ledger.items()):
                if who == execution:
                    model.usage[name] = max(0, model.usage[name] - amount)
                    del model.ledger[who, name]
            return *usage.release_spends(state, execution, now), True
        case ("reset",):
            model.usage = defaultdict(int, dict.fromkeys(model.usage, 0))
            model.ledger.clear()
            return *usage.reset_budget(state, now), True
        case ("reserve", what, name, execution):
            known = f"settled:{name}" in model.seen_keys
            mine = model.open.get(name)
            held = mine if mine is not None and mine[2] > now else None
            expected = not known and (held[0] == execution if held else model.fits(what, now))
            if expected:
                model.open[name] = (execution, held[1] if held else what, now + 50)
            promise = reservation_rules.ReserveRequest(name, execution, tuple(sorted(what.items())), 50)
            return *reservation_rules.reserve(state, promise, now), expected
        case ("settle", what, name, execution):
            mine = model.open.get(name)
            held = mine if mine is not None and mine[2] > now else None
            if f"settled:{name}" in model.seen_keys or (held and held[0] != execution):
                expected = False
            else:
                expected = model.fits(what, now, held[1] if held else None)
            if expected:
                model.open.pop(name, None)
                model.apply(what, execution)
                model.seen_keys.add(f"settled:{name}")
            return *reservation_rules.settle(state, name, execution, tuple(sorted(what.items())), now), expected
        case ("refund", name):
            model.open.pop(name, None)
            return *reservation_rules.refund(state, name, now), True
        case _:
            raise AssertionError(step)


@settings(max_examples=300)
@given(st.fixed_dictionaries({name: st.integers(0, 25) for name in DIMENSIONS}), st.lists(steps, max_size=40))
def test_any_sequence_of_budget_requests_agrees_with_the_model(
    hard: dict[str, int], life: list[tuple[Any, ...]]
) -> None:
    state, model, now = defined(hard), BudgetModel(hard), NOW
    stored = rows_of(EMPTY, state, {})
    for step in life:
        if step[0] == "wait":
            now += step[1]
            continue
        before = state
        answer, state, expected = apply_step(state, model, step, now)
        refused = isinstance(answer, limit_answers.HardBreach | limit_answers.AlreadyApplied | errors.FabricError)
        assert refused is not expected, (step, answer)
        current = reservation_rules.without_expired(state, now)
        for name in DIMENSIONS:
            row = current.dimensions[name]
            assert (row.usage or 0, row.reserved) == (model.usage[name], model.reserved(name, now)), step
            promised = sum(one.amount for one in current.reservations.values() if one.dimension == name)
            assert row.reserved == promised
        stored = rows_of(before, state, stored)
        state = replace(state, spends_cleared=False)
        assert reread(stored) == replace(state, keys=reread(stored).keys), "what is written is what was decided"


@settings(max_examples=200)
@given(st.integers(1, 60), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=50), st.randoms())
def test_no_order_of_fifty_reports_exceeds_a_hard_limit(hard: int, asks: list[tuple[bool, int]], chance: Any) -> None:
    state = defined({"cost": 0, "tokens": hard})
    chance.shuffle(asks)
    accepted = 0
    answer: Any
    for reserving_it, amount in asks:
        if reserving_it:
            promise = reservation_rules.ReserveRequest(
                f"r{accepted}{amount}{chance.random()}", "e", (("tokens", amount),), 10**6
            )
            answer, state = reservation_rules.reserve(state, promise, NOW)
        else:
            answer, state = usage.report_usage(state, usage.UsageReport((("tokens", amount),)), NOW)
        if isinstance(answer, limit_answers.HardBreach):
            assert accepted + amount > hard, "nothing that fits is refused"
        else:
            accepted += amount
        assert accepted == budget_rules.used_and_reserved(state.dimensions["tokens"]) <= hard


def rows_of(before: BudgetState, after: BudgetState, stored: dict[Any, Any]) -> dict[Any, Any]:
    """Return the rows after the change between two states."""
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
    state = defined({"cost": 1, "tokens": 1})

    assert budget_rules.change_between(state, state) is None
    _, after = usage.release_spends(state, "nobody", NOW)
    assert budget_rules.change_between(state, after) is None


@pytest.mark.parametrize("name", ["hard_limit", "soft_limit", "usage", "reserved"])
def test_a_negative_number_is_corruption(name: str) -> None:
    state = defined({"cost": 1, "tokens": 1})
    assert budget_rules.find_corruption(state) is None
    bad = replace(state.dimensions["cost"], **{name: -1})
    assert isinstance(budget_rules.find_corruption(replace(state, dimensions={"cost": bad})), errors.Corruption)


def test_dimensions_keep_their_order_and_new_ones_follow() -> None:
    state = defined({"cost": 1, "tokens": 1})

    _, state = usage.change_limits(state, (("zeal", 3, 0), ("tokens", 2, 1), ("calls", 4, 0)), NOW)

    for name in ("b only used", "a only used"):
        _, state = usage.report_usage(state, usage.UsageReport(((name, 1),)), NOW)
    *rows, first, second = budget_rules.in_definition_order(state.dimensions.values())
    assert (first.dimension, second.dimension) == ("a only used", "b only used")
    assert [(row.dimension, row.hard_limit, row.soft_limit, row.position) for row in rows] == [
        ("cost", 1, 0, 0),
        ("tokens", 2, 1, 1),
        ("zeal", 3, 0, 2),
        ("calls", 4, 0, 3),
    ]


def test_a_budget_may_grow_to_as_many_dimensions_as_a_new_one_may_have() -> None:
    state = defined({"cost": 1, "tokens": 1})
    more = tuple((f"d{number}", 1, 0) for number in range(usage.MOST_DIMENSIONS - 2))

    answer, full = usage.change_limits(state, more, NOW)
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
def test_a_breach_is_recorded_while_usage_exceeds_a_hard_limit(
    hard: dict[str, int], used: dict[str, int], noted: int | None, moved: int | None
) -> None:
    state = defined(hard)
    rows = {name: replace(row, usage=used.get(name)) for name, row in state.dimensions.items()}
    state = replace(state, dimensions=rows, root=replace(state.root_or_new(), breached_at=noted))

    answer, after = usage.mark_breach(state, NOW)

    assert (answer, after.root_or_new().breached_at) == (noted != moved, moved)
    period = replace(state, root=replace(state.root_or_new(), reset_interval_ms=1000))
    assert usage.mark_breach(period, NOW) == (False, period), "the next reset clears it"


def test_a_granted_request_reduces_the_capacity_of_its_dimension_only() -> None:
    state = defined({"cost": 5, "tokens": 5})
    tokens, cost = budget_rules.BudgetNeed(B, "tokens", 3), budget_rules.BudgetNeed(B, "cost", 5)

    after = budget_rules.with_reserved(state, tokens)

    assert (budget_rules.has_capacity_for(state, tokens), budget_rules.has_capacity_for(after, tokens)) == (True, False)
    assert (
        budget_rules.has_capacity_for(after, cost),
        budget_rules.has_capacity_for(budget_rules.with_reserved(after, cost), cost),
    ) == (
        True,
        False,
    )
    assert budget_rules.has_capacity_for(after, budget_rules.BudgetNeed(B, "never heard of", 9))
