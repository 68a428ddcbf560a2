"""Fairness: the order in which waiting executions are claimed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.execution import Execution
from flowfabric.rules.execution.policy import Terms, encode_terms
from flowfabric.rules.scheduling import queue
from flowfabric.rules.scheduling.fairness import effective_priority, fair_order
from tests.stores.sample_rows import execution

NOW = 1_700_000_000_000


def row(
    name: str, key: str = "", *, weight: int = 1, priority: int = 0, age: int = 0, ageing: int | None = None
) -> Any:
    """Return a waiting row."""
    terms = Terms(fairness_key=key or None, fairness_weight=weight, ageing=ageing)
    created = NOW - age
    return execution(
        name,
        priority=priority,
        created_at=created,
        terms=encode_terms(terms),
        rank=created + queue.position_offset(priority, terms),
        line=queue.queue_for("mail", None, terms),
    )


def names(rows: list[Execution]) -> list[str]:
    return [one.execution_id for one in rows]


def test_without_keys_the_order_is_priority_then_age_then_id() -> None:
    rows = [row("c", age=1), row("a", age=1), row("old", age=9), row("urgent", priority=1)]

    picks, _ = fair_order(rows, {}, NOW, 9)

    assert names(picks) == ["urgent", "old", "a", "c"]


def test_a_flood_of_one_key_does_not_delay_another() -> None:
    flood = [row(f"a{n:03}", "a", age=1000 - n) for n in range(100)]
    late = [row(f"b{n}", "b") for n in range(3)]

    picks, _ = fair_order([*flood, *late], {}, NOW, 6)

    assert names(picks) == ["a000", "b0", "a001", "b1", "a002", "b2"]


def test_weights_share_the_claims() -> None:
    rows = [row(f"{key}{n:03}", key, weight=weight) for key, weight in (("a", 3), ("b", 1)) for n in range(100)]

    picks, _ = fair_order(rows, {}, NOW, 40)

    assert Counter(one.execution_id[0] for one in picks) == {"a": 30, "b": 10}
    assert "bb" not in "".join(one.execution_id[0] for one in picks), "the turns are spread evenly"


def test_turns_continue_where_the_last_claim_stopped() -> None:
    rows = [row(f"{key}{n:03}", key, weight=weight) for key, weight in (("a", 3), ("b", 1)) for n in range(100)]
    turns: dict[str, int] = {}
    picked = []
    for _ in range(40):
        [one], turns = fair_order(rows, turns, NOW, 1)
        rows.remove(one)
        picked.append(one.execution_id[0])

    assert Counter(picked) == {"a": 30, "b": 10}


def test_priority_takes_precedence_over_turns() -> None:
    rows = [row(f"a{n}", "a", priority=5) for n in range(3)] + [row(f"b{n}", "b", priority=4) for n in range(3)]

    picks, _ = fair_order(rows, {}, NOW, 6)

    assert [one.execution_id[0] for one in picks] == ["a", "a", "a", "b", "b", "b"]


def test_ageing_raises_a_priority_by_one_step_per_interval_of_waiting() -> None:
    assert [effective_priority(row("x", priority=2, age=age, ageing=100), NOW) for age in (0, 99, 100, 250)] == [
        2,
        2,
        3,
        4,
    ]
    assert effective_priority(row("x", priority=2, age=10**9), NOW) == 2
    assert effective_priority(row("x", priority=2, age=-5, ageing=1), NOW) == 2, (
        "a clock that is behind takes nothing away"
    )


def test_a_plan_stops_where_an_unloaded_row_might_be_next() -> None:
    rows = [row(f"{key}{n}", key) for key in "abc" for n in range(2)]

    picks, turns = fair_order(rows, {}, NOW, 9, truncated={"b"})
    assert names(picks) == ["a0", "b0", "c0", "a1", "b1", "c1"], "b may have more, and is not next before that"
    assert names(fair_order(rows[:-1], {}, NOW, 9, truncated={"c"})[0]) == ["a0", "b0", "c0", "a1", "b1"]

    urgent = row("u", "urgent", priority=1)
    picks, turns = fair_order([*rows, urgent], {}, NOW, 9, truncated={"urgent"})
    assert names(picks) == ["u"], "another one may be as urgent"
    assert names(fair_order(rows, turns, NOW, 2)[0]) == ["a0", "b0"]


KEYS = st.sampled_from(["", "a", "b", "c"])
ROWS = st.lists(st.tuples(KEYS, st.integers(1, 4), st.integers(0, 2), st.integers(0, 50)), max_size=40)


@given(ROWS, st.integers(0, 50))
def test_a_plan_is_a_selection_in_order_within_each_key(given: list[tuple[str, int, int, int]], limit: int) -> None:
    rows = [
        row(f"{key}{n:03}", key, weight=weight, priority=priority, age=age)
        for n, (key, weight, priority, age) in enumerate(given)
    ]

    picks, _ = fair_order(rows, {}, NOW, limit)

    assert len(picks) == min(limit, len(rows))
    assert len(set(names(picks))) == len(picks)
    for key in ("", "a", "b", "c"):
        mine = sorted(
            (one for one in rows if one.line.fairness_key == key), key=lambda one: (one.rank, one.execution_id)
        )
        chosen = [one for one in picks if one.line is not None and one.line.fairness_key == key]
        assert names(chosen) == names(mine[: len(chosen)])
    priorities = [one.priority for one in picks]
    assert priorities == sorted(priorities, reverse=True), (
        "nothing of lower priority is claimed before something higher"
    )


def naive_plan(rows: list[Any], turns: dict[str, int], limit: int) -> tuple[list[str], dict[str, int]]:
    """Return the same as a plan, computed one turn after the other for all keys."""
    left = sorted(rows, key=lambda one: (one.rank, one.execution_id))
    in_hand = {one.line.fairness_key: turns.get(one.line.fairness_key, 0) for one in left}
    picks: list[str] = []
    while left and len(picks) < limit:
        heads = {one.line.fairness_key: one for one in reversed(left)}
        highest = max(effective_priority(one, NOW) for one in heads.values())
        equals = {key: one for key, one in heads.items() if effective_priority(one, NOW) == highest}
        if len(equals) > 1:
            for key, one in equals.items():
                in_hand[key] += one.line.fairness_weight
        chosen = min(equals, key=lambda key: (-in_hand[key], equals[key].rank, equals[key].execution_id))
        if len(equals) > 1:
            in_hand[chosen] -= sum(one.line.fairness_weight for one in equals.values())
        picks.append(equals[chosen].execution_id)
        left.remove(equals[chosen])
    return picks, in_hand


AGED = st.tuples(KEYS, st.integers(1, 4), st.integers(0, 2), st.integers(0, 50), st.none() | st.integers(1, 20))


@given(st.lists(AGED, max_size=30), st.dictionaries(KEYS, st.integers(-9, 9)), st.integers(0, 40))
def test_a_plan_equals_one_turn_at_a_time(
    given: list[tuple[str, int, int, int, int | None]], turns: dict[str, int], limit: int
) -> None:
    rows = [
        row(f"{key}{n:03}", key, weight=weight, priority=priority, age=age, ageing=ageing)
        for n, (key, weight, priority, age, ageing) in enumerate(given)
    ]

    picks, after = fair_order(rows, turns, NOW, limit)

    assert (names(picks), after) == naive_plan(rows, turns, limit)
