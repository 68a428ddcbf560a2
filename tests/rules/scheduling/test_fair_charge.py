"""What a claim costs its fairness key, in turn or out of turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.rules.scheduling.fairness import charge, fair_order
from tests.rules.scheduling.test_fairness import NOW, row

ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 50)), max_size=12)
WEIGHTS = {"a": 1, "b": 2, "c": 5}


@given(ROWS, st.integers(0, 12), st.sets(st.sampled_from("abc")))
def test_claims_in_turn_cost_what_the_plan_says(
    given_rows: list[tuple[str, int, int]], count: int, cut: set[str]
) -> None:
    rows = [
        row(f"{number}", key, weight=WEIGHTS[key], priority=priority, age=age)
        for number, (key, priority, age) in enumerate(given_rows)
    ]
    turns = {"a": 2, "b": -2}

    picks, after = fair_order(rows, turns, NOW, count, truncated=cut)

    assert charge(rows, turns, NOW, picks, cut=cut) == after


def test_a_key_that_was_skipped_is_next() -> None:
    rows = [row("a1", "a", age=9), row("a2", "a", age=8), row("b1", "b", age=7)]

    turns = charge(rows, {}, NOW, [rows[2]], cut={"b"})

    assert turns == {"a": 1, "b": -1}
    assert [one.execution_id for one in fair_order([*rows[:2], row("b2", "b", age=6)], turns, NOW, 3)[0]] == [
        "a1",
        "a2",
        "b2",
    ]


def test_a_single_key_is_charged_nothing() -> None:
    only = row("a1", "a")
    assert charge([only], {"a": 3}, NOW, [only]) == {"a": 3}


def test_a_claim_of_higher_priority_costs_keys_of_lower_priority_nothing() -> None:
    urgent, other = row("a1", "a", priority=1), row("b1", "b")
    assert charge([urgent, other], {}, NOW, [urgent]) == {"a": 0, "b": 0}
