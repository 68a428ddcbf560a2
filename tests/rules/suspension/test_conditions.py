"""Conditions: their encoding, and which signals satisfy them, compared with a naive model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput
from flowfabric.model.condition import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    UnknownCondition,
    Wildcard,
)
from flowfabric.rules.suspension.conditions import (
    IncomingSignal,
    Progress,
    SignalEffect,
    apply_signal,
    check_structure,
    condition_to_builtins,
    decode_condition,
    encode_condition,
    is_satisfied,
    parse_condition,
    referenced_keys,
    required_names,
)
from flowfabric.rules.suspension.signals import Accepted

KEYS = st.sampled_from(["k", "l", "m"])
NAMES = st.sampled_from(["go", "ok", "stop"])
matchers = st.one_of(st.builds(Wildcard), st.builds(ByName, NAMES))
leaves = st.one_of(
    st.builds(Single, KEYS, matchers),
    st.builds(
        Count,
        st.integers(1, 3),
        st.sampled_from(CountKind),
        st.lists(KEYS, min_size=1, max_size=3, unique=True).map(tuple),
        st.one_of(st.none(), matchers),
    ),
    st.builds(OperatorOnly),
    st.builds(TimeoutOnly),
)
conditions: st.SearchStrategy[Condition] = st.recursive(
    leaves, lambda below: st.builds(AllConditions, st.lists(below, min_size=1, max_size=3).map(tuple)), max_leaves=6
)
arrivals = st.builds(
    IncomingSignal, KEYS, KEYS, st.uuids().map(str), NAMES, st.sampled_from("ub"), st.sampled_from("ab")
)


def at_waitpoint(arrival: IncomingSignal) -> IncomingSignal:
    """Return the arrival at the one waitpoint of its key."""
    return msgspec.structs.replace(arrival, waitpoint_id=f"wp-{arrival.waitpoint_key}")


def met_by(condition: Condition, arrivals: list[IncomingSignal]) -> bool:
    """Return True if all these arrivals together satisfy the condition, by sets and without order or state."""
    match condition:
        case Single(waitpoint_key=key, matcher=matcher):
            return any(one.waitpoint_key == key and fits(matcher, one) for one in arrivals)
        case Count(n=n, count_kind=kind, waitpoints=keys, matcher=matcher):
            fitting = [one for one in arrivals if one.waitpoint_key in keys and fits(matcher, one)]
            return len({identity(kind, one) for one in fitting}) >= n
        case AllConditions(members=members):
            return all(met_by(member, arrivals) for member in members)
        case _:
            return False


def fits(matcher: Any, arrival: IncomingSignal) -> bool:
    return not isinstance(matcher, ByName) or matcher.name == arrival.signal_name


def identity(kind: CountKind, arrival: IncomingSignal) -> object:
    return {
        CountKind.DISTINCT_WAITPOINTS: arrival.waitpoint_id,
        CountKind.DISTINCT_SIGNALS: arrival.signal_id,
        CountKind.DISTINCT_SOURCES: (arrival.source_type, arrival.source_identity),
    }[kind]


@given(conditions, st.lists(arrivals.map(at_waitpoint), max_size=8))
def test_a_condition_is_satisfied_by_the_signal_that_completes_it(
    condition: Condition, arrived: list[IncomingSignal]
) -> None:
    progress: dict[str, list[str]] = {}
    for number, arrival in enumerate(arrived, start=1):
        before = met_by(condition, arrived[: number - 1])
        effect, progress = apply_signal(condition, progress, arrival)
        now = met_by(condition, arrived[:number])
        assert is_satisfied(condition, progress) == now
        if effect == SignalEffect.SATISFIED:
            assert now
        if now and not before:
            assert effect == SignalEffect.SATISFIED


@given(conditions, st.permutations(range(4)), st.lists(arrivals.map(at_waitpoint), min_size=4, max_size=4))
def test_the_order_of_signals_does_not_matter(
    condition: Condition, order: list[int], arrived: list[IncomingSignal]
) -> None:
    def after(signals: list[IncomingSignal]) -> bool:
        progress: dict[str, list[str]] = {}
        for signal in signals:
            _, progress = apply_signal(condition, progress, signal)
        return is_satisfied(condition, progress)

    assert after(arrived) == after([arrived[place] for place in order])


@given(conditions, arrivals.map(at_waitpoint))
def test_the_same_signal_twice_changes_nothing(condition: Condition, arrival: IncomingSignal) -> None:
    first, progress = apply_signal(condition, {}, arrival)
    second, after = apply_signal(condition, progress, arrival)

    assert after == progress
    ignored = {SignalEffect.NO_OP, SignalEffect.MATCHER_FAILED, SignalEffect.NOT_IN_CONDITION}
    assert second == (first if first in ignored else SignalEffect.DUPLICATE)


@given(conditions)
def test_an_encoded_condition_is_read_back(condition: Condition) -> None:
    assert decode_condition(encode_condition(condition)) == condition
    plain = msgspec.json.decode(encode_condition(condition))
    assert condition_to_builtins(condition) == plain
    if check_structure(condition) is None:
        assert parse_condition(plain) == condition == parse_condition(condition)


def test_the_encodings_are_those_of_the_specification() -> None:
    count = Count(2, CountKind.DISTINCT_SOURCES, ("k",), ByName("approve"))
    assert condition_to_builtins(Single("k", ByName("go"))) == {
        "Single": {"waitpoint_key": "k", "matcher": {"ByName": "go"}}
    }
    assert condition_to_builtins(OperatorOnly()) == "OperatorOnly"
    assert condition_to_builtins(count) == {
        "Composite": {
            "kind": "Count",
            "n": 2,
            "count_kind": "DistinctSources",
            "matcher": {"ByName": "approve"},
            "waitpoints": ["k"],
        }
    }
    bare = condition_to_builtins(Count(1, CountKind.DISTINCT_SIGNALS, ("k",)))
    assert "matcher" not in bare["Composite"]
    assert condition_to_builtins(Single("k"))["Single"]["matcher"] == "Wildcard"


@pytest.mark.parametrize("stored", ['{"AnyOf":[]}', '"Later"', '{"Composite":{"kind":"Count","n":1}}', "7", "null"])
def test_a_node_of_a_later_release_is_kept_and_never_true(stored: str) -> None:
    condition = decode_condition(stored)
    arrival = IncomingSignal("w", "k", "s", "go", "u", "a")

    assert isinstance(condition, UnknownCondition)
    assert msgspec.json.decode(encode_condition(condition)) == msgspec.json.decode(stored)
    assert not is_satisfied(condition, {"<root>": ["met"]})
    assert apply_signal(AllConditions((condition, Single("k"))), {}, arrival)[0] == SignalEffect.APPENDED
    with pytest.raises(InvalidInput):
        parse_condition(msgspec.json.decode(stored))


@pytest.mark.parametrize(
    "changed",
    [
        {"n": -1},
        {"n": True},
        {"n": "1"},
        {"count_kind": "DistinctMoods"},
        {"matcher": "Nobody"},
        {"matcher": None},
        {"waitpoints": ["k", 1]},
        {"waitpoints": "k"},
        {"kind": "AnyOf"},
    ],
    ids=str,
)
def test_a_count_with_an_invalid_part_is_no_condition(changed: dict[str, Any]) -> None:
    sound = {"kind": "Count", "n": 1, "count_kind": "DistinctSignals", "matcher": "Wildcard", "waitpoints": ["k"]}
    assert isinstance(parse_condition({"Composite": sound}), Count)
    stored = {"Composite": sound | changed}

    with pytest.raises(InvalidInput):
        parse_condition(stored)
    assert decode_condition(msgspec.json.encode(stored).decode()) == UnknownCondition(stored)


def test_a_signal_has_an_effect_if_it_was_stored_for_a_wait_or_advanced_one() -> None:
    effects = [value for name, value in vars(SignalEffect).items() if name.isupper()]

    counted = {effect for effect in effects if Accepted("s", effect).is_useful}

    assert counted == {SignalEffect.SATISFIED, SignalEffect.APPENDED, SignalEffect.BUFFERED}


@pytest.mark.parametrize("levels", [5, 17, 18, 400])
def test_a_condition_of_any_depth_is_parsed_and_refused_as_too_deep(levels: int) -> None:
    plain: Any = condition_to_builtins(Single("k"))
    for _ in range(levels):
        plain = {"Composite": {"kind": "AllOf", "members": [plain]}}

    refused = check_structure(parse_condition(plain))

    assert refused is not None
    assert refused.detail == f"depth 5 exceeds cap 4 at path {'.'.join(['members[0]'] * 4)}"


def test_names_and_keys_are_listed_in_order_of_occurrence() -> None:
    tree = AllConditions(
        (
            Single("k", ByName("b")),
            AllConditions((Single("l", ByName("c")), Count(1, CountKind.DISTINCT_SIGNALS, ("m", "k"), ByName("a")))),
            Single("k", ByName("b")),
            Single("k", Wildcard()),
            OperatorOnly(),
            TimeoutOnly(),
        )
    )

    assert referenced_keys(tree) == ["k", "l", "m"]
    assert required_names(tree, "k") == ["b", "a", "__operator_only__", "__timeout_only__"]
    assert required_names(Single("k"), "k") == []


def test_sources_with_long_names_are_distinguished_at_low_cost() -> None:
    condition, long = Count(3, CountKind.DISTINCT_SOURCES, ("k",)), "x" * 60_000
    progress: Progress = {}
    effects = []
    for source in (long + "a", long + "b", long + "a", long[:50], long + "c"):
        effect, progress = apply_signal(condition, progress, IncomingSignal("wp-k", "k", "s", "go", "user", source))
        effects.append(effect)

    appended, repeated = SignalEffect.APPENDED, SignalEffect.DUPLICATE
    assert effects == [appended, appended, repeated, SignalEffect.SATISFIED, SignalEffect.SATISFIED]
    assert sum(map(len, progress["<root>"])) < 500
