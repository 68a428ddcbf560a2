"""Policy: how it is parsed, what is refused, and what its terms decide."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import FabricError, InvalidCapabilities, InvalidPolicyJson
from flowfabric.rules.execution import policy as rules
from flowfabric.rules.execution.policy import Terms, decode_terms, encode_terms, parse_policy, parse_retry, read_policy
from flowfabric.rules.execution.retry import ExponentialBackoff, FixedBackoff, RetryPolicy, backoff_ms, may_retry

UUID = "550e8400-e29b-41d4-a716-446655440000"
OTHER = "11111111-1111-4111-8111-111111111111"


def refusal(document: dict[str, Any]) -> FabricError:
    with pytest.raises(InvalidPolicyJson) as caught:
        read_policy(document)
    return caught.value


# Parsing


@pytest.mark.parametrize("nothing", [None, "", b"", "{}", {}, '{"unknown": {"x": 1}}', {"priority": "ignored"}])
def test_an_empty_policy_gives_the_defaults(nothing: Any) -> None:
    assert read_policy(nothing) == Terms()
    assert parse_policy(nothing) == (Terms(), None)


def test_the_defaults_are_those_of_the_specification() -> None:
    terms = Terms()

    assert (terms.retry, terms.max_reclaim_count, terms.max_replay_count) == (None, None, 10)
    assert (terms.dedup_window_ms, terms.fairness_weight, terms.ageing) == (86_400_000, 1, None)
    assert RetryPolicy() == RetryPolicy(max_retries=3, backoff=FixedBackoff(1000), retryable_categories=())
    assert ExponentialBackoff() == ExponentialBackoff(1000, 60_000, 2.0, False)


def test_every_term_is_read() -> None:
    document = {
        "delay_until": 5,
        "retry_policy": {
            "max_retries": 2,
            "backoff": {"type": "exponential", "initial_delay_ms": 10, "max_delay_ms": 20, "multiplier": 3},
            "retryable_categories": ["rate_limit"],
        },
        "timeout_policy": {"attempt_timeout_ms": 7, "execution_deadline_ms": 8, "max_reclaim_count": 9},
        "max_reclaim_count": 4,
        "max_replay_count": 1,
        "budget_ids": [UUID.upper(), UUID, OTHER],
        "quota_policy_ids": [OTHER],
        "fairness_key": "tenant-1",
        "fairness_weight": 3,
        "ageing": 1000,
        "routing_requirements": {"required_capabilities": ["gpu", "cuda"]},
        "dedup_window_ms": 0,
        "stream_policy": {"retention_ttl_ms": 60_000},
        "kept_for_successors": True,
        "suspension_policy": {"default_timeout_ms": "another area's business"},
    }

    terms = read_policy(document)

    assert terms == read_policy(json.dumps(document)) == read_policy(json.dumps(document).encode())
    assert terms == Terms(
        retry=RetryPolicy(2, ExponentialBackoff(10, 20, 3.0), ("rate_limit",)),
        attempt_timeout_ms=7,
        execution_deadline_ms=8,
        max_reclaim_count=4,
        max_replay_count=1,
        budget_ids=(UUID, OTHER),
        quota_policy_ids=(OTHER,),
        fairness_key="tenant-1",
        fairness_weight=3,
        ageing=1000,
        required_capabilities="cuda,gpu",
        dedup_window_ms=0,
        retention_ttl_ms=60_000,
        delay_until=5,
        kept_for_successors=True,
    )


def test_a_reclaim_count_inside_the_timeout_policy_is_ignored() -> None:
    assert read_policy({"timeout_policy": {"max_reclaim_count": 5}}).max_reclaim_count is None
    assert read_policy({"max_reclaim_count": 0}).max_reclaim_count == 0


def test_a_single_quota_policy_is_a_list_of_one() -> None:
    assert read_policy({"quota_policy_id": UUID.upper()}).quota_policy_ids == (UUID,)
    assert read_policy({"quota_policy_id": UUID, "quota_policy_ids": [OTHER, UUID]}).quota_policy_ids == (OTHER, UUID)


def test_a_duration_of_zero_sets_no_timer() -> None:
    terms = read_policy({"timeout_policy": {"attempt_timeout_ms": 0, "execution_deadline_ms": 0}, "ageing": 0})

    assert (terms.attempt_timeout_ms, terms.execution_deadline_ms, terms.ageing) == (None, None, None)


@pytest.mark.spec("EX-013")
@pytest.mark.parametrize("text", ["{not json", " ", "[", "\x00", '{"a": NaN}', "[" * 100_000, "\ud800", b"\xff"])
def test_text_that_is_not_json_is_malformed(text: str | bytes) -> None:
    assert parse_policy(text) == (InvalidPolicyJson("malformed"), None)


@pytest.mark.parametrize("text", ["7", "[]", '"policy"', "null", "true"])
def test_a_policy_must_be_an_object(text: str) -> None:
    assert parse_policy(text) == (InvalidPolicyJson("not_object"), None)


@pytest.mark.spec("EX-014")
def test_capabilities_are_checked_before_everything_else() -> None:
    document = {"max_replay_count": -1, "routing_requirements": {"required_capabilities": "gpu"}}

    assert parse_policy(document) == (InvalidCapabilities("required:not_array"), None)


NUMBERS = [
    ("max_reclaim_count", ()),
    ("max_replay_count", ()),
    ("fairness_weight", ()),
    ("ageing", ()),
    ("dedup_window_ms", ()),
    ("delay_until", ()),
    ("attempt_timeout_ms", ("timeout_policy",)),
    ("execution_deadline_ms", ("timeout_policy",)),
    ("max_retries", ("retry_policy",)),
    ("delay_ms", ("retry_policy", "backoff")),
    ("initial_delay_ms", ("retry_policy", "backoff")),
    ("max_delay_ms", ("retry_policy", "backoff")),
]


def nested(field: str, parts: tuple[str, ...], value: object) -> dict[str, Any]:
    inner: dict[str, Any] = {field: value}
    if parts[-1:] == ("backoff",):
        inner["type"] = "fixed" if field == "delay_ms" else "exponential"
    for part in reversed(parts):
        inner = {part: inner}
    return inner


@pytest.mark.parametrize(("field", "parts"), NUMBERS)
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (-1, "negative"),
        (-(2**70), "negative"),
        (2**63, "too_large"),
        (10**400, "too_large"),
        (1.5, "not_an_integer"),
        (1.0, "not_an_integer"),
        (float("nan"), "not_an_integer"),
        (float("inf"), "not_an_integer"),
        (True, "not_an_integer"),
        ("5", "not_an_integer"),
        ([5], "not_an_integer"),
    ],
)
def test_an_invalid_number_is_refused_with_its_field_named(
    field: str, parts: tuple[str, ...], value: object, fault: str
) -> None:
    assert refusal(nested(field, parts, value)).detail == f"{'.'.join((*parts, field))}:{fault}"


@pytest.mark.parametrize(("field", "parts"), NUMBERS)
def test_the_largest_number_of_a_column_is_accepted(field: str, parts: tuple[str, ...]) -> None:
    text = encode_terms(read_policy(nested(field, parts, 2**63 - 1)))

    assert text is not None
    assert decode_terms(text) == read_policy(nested(field, parts, 2**63 - 1))


def test_durations_are_limited_so_that_a_sum_with_now_fits() -> None:
    terms = read_policy({"timeout_policy": {"execution_deadline_ms": 2**63 - 1}, "ageing": 2**63 - 1})

    assert terms.execution_deadline_ms == 2**53 - 1
    assert terms.ageing is not None
    assert 9000 * terms.ageing + 2**53 < 2**63


@pytest.mark.parametrize(
    ("document", "detail"),
    [
        ({"retry_policy": 3}, "retry_policy:not_object"),
        ({"timeout_policy": []}, "timeout_policy:not_object"),
        ({"stream_policy": "x"}, "stream_policy:not_object"),
        ({"retry_policy": {"backoff": 5}}, "retry_policy.backoff:not_object"),
        ({"retry_policy": {"retryable_categories": "x"}}, "retry_policy.retryable_categories:not_array"),
        ({"retry_policy": {"retryable_categories": [1]}}, "retry_policy.retryable_categories:not_a_string"),
        ({"budget_ids": UUID}, "budget_ids:not_array"),
        ({"budget_ids": ["x"]}, "budget_ids:not_a_uuid"),
        ({"budget_ids": [1]}, "budget_ids:not_a_string"),
        ({"quota_policy_id": "x"}, "quota_policy_id:not_a_uuid"),
        ({"quota_policy_ids": ["a,b"]}, "quota_policy_ids:not_a_uuid"),
        ({"fairness_key": 5}, "fairness_key:not_a_string"),
        ({"fairness_key": "a\0b"}, "fairness_key:not_text"),
        ({"fairness_key": "\udfff"}, "fairness_key:not_text"),
        ({"fairness_weight": 0}, "fairness_weight:not_positive"),
    ],
)
def test_a_part_of_the_wrong_type_is_refused_with_its_field_named(document: dict[str, Any], detail: str) -> None:
    assert refusal(document).detail == detail


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (-0.5, "negative"),
        (float("nan"), "not_finite"),
        (float("inf"), "not_finite"),
        (10**400, "too_large"),
        ("2", "not_a_number"),
        (True, "not_a_number"),
    ],
)
def test_a_multiplier_is_a_finite_number_that_is_not_negative(value: object, fault: str) -> None:
    document = {"retry_policy": {"backoff": {"type": "exponential", "multiplier": value}}}

    assert refusal(document).detail == f"retry_policy.backoff.multiplier:{fault}"


def test_jitter_is_a_boolean() -> None:
    document = {"retry_policy": {"backoff": {"type": "exponential", "jitter": 1}}}

    assert refusal(document).detail == "retry_policy.backoff.jitter:not_a_boolean"


@pytest.mark.parametrize("value", [-1, 1.5, "x", 2**63, None])
def test_an_invalid_retention_leaves_the_default_in_force(value: object) -> None:
    assert read_policy({"stream_policy": {"retention_ttl_ms": value}}).retention_ttl_ms is None


def test_null_is_the_same_as_absent() -> None:
    document: dict[str, Any] = dict.fromkeys(
        ["retry_policy", "timeout_policy", "stream_policy", "budget_ids", "quota_policy_id", "fairness_key", "ageing"]
    )

    assert read_policy(document) == Terms()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(
    """retry_policy timeout_policy stream_policy routing_requirements max_retries backoff type delay_ms multiplier
    initial_delay_ms max_delay_ms jitter retryable_categories attempt_timeout_ms execution_deadline_ms budget_ids
    quota_policy_ids quota_policy_id fairness_key fairness_weight ageing dedup_window_ms retention_ttl_ms delay_until
    max_reclaim_count max_replay_count required_capabilities kept_for_successors""".split()  # noqa: SIM905
)
documents = st.dictionaries(
    fields,
    st.recursive(json_values, lambda inner: st.dictionaries(fields, inner, max_size=4), max_leaves=8),
    max_size=5,
)


@given(documents)
def test_any_document_gives_terms_that_fit_every_store_or_a_typed_refusal(document: dict[str, Any]) -> None:
    terms, text = parse_policy(document)
    if isinstance(terms, FabricError):
        assert terms.kind in {"invalid_policy_json", "invalid_capabilities"}
        assert text is None
        return
    assert decode_terms(text) == terms
    numbers = [value for value in json.loads(text or "{}").values() if isinstance(value, int)]
    assert all(0 <= number < 2**63 for number in numbers)
    if terms.retry:
        assert 0 <= backoff_ms(terms.retry, 10**6, 0.999) <= rules.MAX_LENGTH_MS


# Storing


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    """Equal terms share one cached text; a generated one may spell out defaults that others omit."""
    encode_terms.cache_clear()


def test_default_terms_are_stored_as_null() -> None:
    assert encode_terms(Terms()) is None
    assert decode_terms(None) == Terms()


def test_stored_terms_hold_only_what_differs_from_the_defaults() -> None:
    text = encode_terms(Terms(retry=RetryPolicy(max_retries=5), fairness_key="a"))

    assert text == '{"retry":{"max_retries":5},"fairness_key":"a"}'
    assert decode_terms(text) is decode_terms(text)


def test_a_retry_policy_of_defaults_differs_from_no_retry_policy() -> None:
    text = encode_terms(Terms(retry=RetryPolicy()))

    assert text == '{"retry":{}}'
    assert decode_terms(text).retry == RetryPolicy()


# Retrying


@pytest.mark.spec("EX-047")
def test_exponential_backoff_arithmetic() -> None:
    retry = RetryPolicy(
        max_retries=4, backoff=ExponentialBackoff(initial_delay_ms=1000, max_delay_ms=3000, multiplier=2)
    )

    assert [backoff_ms(retry, count, 0.5) for count in range(4)] == [1000, 2000, 3000, 3000]


@pytest.mark.spec("EX-047")
@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        ({"type": "exponential"}, [1000, 2000, 4000]),
        ({"type": "fixed", "delay_ms": 500}, [500, 500, 500]),
        ({"type": "fixed", "delay_ms": 0}, [0, 0, 0]),
        ({"type": "fixed"}, [1000, 1000, 1000]),
        ({"type": "fibonacci", "delay_ms": 7}, [1000, 1000, 1000]),
        ({"type": 7}, [1000, 1000, 1000]),
        ({"delay_ms": -1}, [1000, 1000, 1000]),
        ({}, [1000, 1000, 1000]),
        (None, [1000, 1000, 1000]),
        ({"type": "exponential", "initial_delay_ms": 100, "multiplier": 1.5}, [100, 150, 225]),
        ({"type": "exponential", "initial_delay_ms": 3, "multiplier": 0.5}, [3, 1, 0]),
        ({"type": "exponential", "initial_delay_ms": 100, "multiplier": 0}, [100, 0, 0]),
        ({"type": "exponential", "initial_delay_ms": 0}, [0, 0, 0]),
        ({"type": "exponential", "initial_delay_ms": 90_000}, [60_000, 60_000, 60_000]),
    ],
)
def test_backoff_of_every_form(backoff: object, delays: list[int]) -> None:
    retry = read_policy({"retry_policy": {"backoff": backoff}}).retry

    assert retry is not None
    assert [backoff_ms(retry, count, 0.0) for count in range(3)] == delays


@pytest.mark.spec("EX-047")
@given(st.floats(0, 1, exclude_max=True))
def test_jitter_stays_between_half_and_the_whole_backoff(chance: float) -> None:
    retry = RetryPolicy(backoff=ExponentialBackoff(jitter=True))

    assert 500 <= backoff_ms(retry, 0, chance) <= 1000


def test_jitter_reaches_both_bounds() -> None:
    retry = RetryPolicy(backoff=ExponentialBackoff(initial_delay_ms=5, jitter=True))

    assert {backoff_ms(retry, 0, chance / 100) for chance in range(100)} == {3, 4, 5}


@given(
    st.integers(0, 2**53 - 1),
    st.integers(0, 2**53 - 1),
    st.floats(0, allow_infinity=False),
    st.integers(0, 10**9),
    st.floats(0, 1, exclude_max=True),
)
def test_no_backoff_overflows(initial: int, longest: int, multiplier: float, count: int, chance: float) -> None:
    plain = backoff_ms(RetryPolicy(backoff=ExponentialBackoff(initial, longest, multiplier)), count, chance)
    spread = backoff_ms(
        RetryPolicy(backoff=ExponentialBackoff(initial, longest, multiplier, jitter=True)), count, chance
    )

    assert 0 <= plain <= longest
    assert plain / 2 <= spread <= plain


@pytest.mark.spec("EX-048")
def test_retryable_categories_filter() -> None:
    picky = RetryPolicy(max_retries=5, retryable_categories=("rate_limit",))

    assert may_retry(picky, 0, "rate_limit")
    assert not may_retry(picky, 1, "bad_output")
    assert may_retry(RetryPolicy(max_retries=5), 1, "bad_output")


@pytest.mark.spec("EX-044")
def test_nothing_is_retried_without_a_policy_or_beyond_its_limit() -> None:
    assert not may_retry(None, 0, "transient")
    assert not may_retry(RetryPolicy(max_retries=0), 0, "transient")
    assert may_retry(RetryPolicy(max_retries=1), 0, "transient")
    assert not may_retry(RetryPolicy(max_retries=1), 1, "transient")


@pytest.mark.parametrize("category", ["transient", "infra_crash", "timeout", "anything else", ""])
def test_a_failure_is_retried_unless_its_class_forbids_it(category: str) -> None:
    assert may_retry(RetryPolicy(), 0, category)
    assert not may_retry(RetryPolicy(), 0, category, "permanent")
    assert not may_retry(RetryPolicy(), 0, category, "cancelled")


@pytest.mark.parametrize("category", ["permanent", "cancelled"])
def test_a_category_that_names_a_class_is_treated_as_that_class(category: str) -> None:
    assert not may_retry(RetryPolicy(), 0, category)
    assert may_retry(RetryPolicy(), 0, category, "transient")


@pytest.mark.spec("EX-044")
@pytest.mark.parametrize(
    "text", [None, "", "{oops", "7", "[]", "null", '{"max_retries": -1}', '{"backoff": 5}', '{"max_retries": 1e99}']
)
def test_an_unparsable_retry_policy_text_means_never(text: str | None) -> None:
    assert parse_retry(text) is None


def test_a_retry_policy_text_is_parsed_like_the_one_in_a_policy() -> None:
    text = '{"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 5}}'

    assert parse_retry(text) == RetryPolicy(2, FixedBackoff(5))
    assert parse_retry("{}") == RetryPolicy()
