"""Capabilities: which may be required and offered, and which workers match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidCapabilities, InvalidInput, InvalidPolicyJson
from flowfabric.rules.scheduling.capabilities import (
    check_offer,
    check_presented,
    covers,
    missing,
    required_capabilities,
    tokens_of,
)

TOKENS = st.text(st.characters(min_codepoint=0x21, exclude_characters=",\x7f", exclude_categories=["Cs"]), min_size=1)


def policy(required: object) -> dict[str, object]:
    return {"routing_requirements": {"required_capabilities": required}}


def tokens(count: int, length: int) -> list[str]:
    return [f"{number:0{length}d}" for number in range(count)]


# Requirements of an execution


@pytest.mark.spec("EX-014")
@pytest.mark.parametrize(
    ("required", "detail"),
    [
        ("gpu", "required:not_array"),
        (7, "required:not_array"),
        ({"gpu": True}, "required:not_array"),
        (["gpu", 42], "required:non_string_token"),
        ([None], "required:non_string_token"),
        ([""], "required:empty_token"),
        (["a,b"], "required:comma_in_token"),
        (["has space"], "required:control_or_whitespace"),
        (["bell\x07"], "required:control_or_whitespace"),
        (["del\x7f"], "required:control_or_whitespace"),
        (["\x00"], "required:control_or_whitespace"),
        (["half\ud800"], "required:not_utf8"),
    ],
)
def test_capability_requirement_validation_table(required: object, detail: str) -> None:
    with pytest.raises(InvalidCapabilities) as caught:
        required_capabilities(policy(required))

    assert caught.value == InvalidCapabilities(detail)


@pytest.mark.spec("EX-014")
@pytest.mark.parametrize("routing", [7, "gpu", ["gpu"], True])
def test_routing_requirements_must_be_an_object(routing: object) -> None:
    with pytest.raises(InvalidPolicyJson) as caught:
        required_capabilities({"routing_requirements": routing})

    assert caught.value.detail == "routing_requirements:not_object"


@pytest.mark.spec("EX-014")
def test_tokens_of_other_alphabets_are_allowed() -> None:
    assert required_capabilities(policy(["东京-gpu"])) == "东京-gpu"


def test_elements_are_validated_one_by_one_before_the_size_of_the_list() -> None:
    with pytest.raises(InvalidCapabilities, match="required:empty_token"):
        required_capabilities(policy([*tokens(300, 3), "", "a,b"]))


def test_256_tokens_and_4096_bytes_are_still_allowed() -> None:
    assert required_capabilities(policy(tokens(256, 15))).count(",") == 255  # 256 × 16 - 1 = 4095 bytes
    assert required_capabilities(policy(["x" * 4096]))

    with pytest.raises(InvalidCapabilities, match="required:too_many_tokens"):
        required_capabilities(policy(tokens(257, 3)))
    with pytest.raises(InvalidCapabilities, match="required:too_many_bytes"):
        required_capabilities(policy(["x" * 4097]))
    with pytest.raises(InvalidCapabilities, match="required:too_many_bytes"):
        required_capabilities(policy(["é" * 2049]))


@pytest.mark.parametrize("nothing", [{}, policy([]), policy(None), {"routing_requirements": None}])
def test_no_requirement_stores_nothing(nothing: dict[str, object]) -> None:
    assert required_capabilities(nothing) == ""


@given(st.lists(TOKENS, max_size=20))
def test_a_requirement_is_stored_sorted_by_bytes_without_duplicates(required: list[str]) -> None:
    kept = required_capabilities(policy(required))

    assert kept.encode() == b",".join(sorted({token.encode() for token in required}))


# Offers of a worker


@pytest.mark.parametrize("offer", [[], ["gpu"], ["东京-gpu", "GPU"], tokens(256, 15), ["x" * 4096]])
def test_a_worker_may_offer_any_valid_tokens(offer: list[str]) -> None:
    assert check_offer(offer) is None


@pytest.mark.parametrize(
    "offer",
    [[""], ["a,b"], ["a b"], ["a\u00a0b"], ["a\u2003"], ["\x07"], ["\x85"], tokens(257, 3), ["x" * 4097], ["\ud800"]],
)
def test_blank_control_or_overlong_offers_are_invalid_input(offer: list[str]) -> None:
    assert isinstance(check_offer(offer), InvalidInput)


def test_a_list_presented_for_a_grant_is_measured_without_stray_commas() -> None:
    assert check_presented("") is None
    assert check_presented(",,gpu,, ,cuda,") is None
    assert check_presented(",".join(tokens(256, 3)) + ",,,") is None
    assert check_presented(tokens(256, 15)) is None
    assert check_presented(tokens(257, 3)) == InvalidCapabilities("worker:too_many_tokens")
    assert check_presented(",".join(tokens(257, 3))) == InvalidCapabilities("worker:too_many_tokens")
    assert check_presented("x" * 4096) is None
    assert check_presented("x" * 4097) == InvalidCapabilities("worker:too_many_bytes")
    assert tokens_of(",gpu,, ,cuda,") == {"gpu", "cuda"}


# Matching


@pytest.mark.spec("EX-018")
@pytest.mark.parametrize(
    ("required", "offered", "lacking"),
    [
        ("cuda,gpu", {"gpu", "cuda"}, ""),
        ("cuda,gpu", {"cuda", "gpu", "x"}, ""),
        ("cuda,gpu", {"GPU", "cuda"}, "gpu"),
        ("cuda,gpu", set(), "cuda,gpu"),
        ("", set(), ""),
        (None, set(), ""),
    ],
)
def test_a_worker_matches_if_it_offers_all_requirements(required: str | None, offered: set[str], lacking: str) -> None:
    assert missing(required, offered) == lacking
    assert covers(required, offered) is (lacking == "")


def test_a_token_with_an_unusual_space_is_still_a_requirement() -> None:
    kept = required_capabilities(policy(["\u2003"]))

    assert not covers(kept, frozenset())
    assert missing(kept, frozenset()) == "\u2003"


@given(st.sets(TOKENS, max_size=6), st.sets(TOKENS, max_size=6), st.sets(TOKENS, max_size=6))
def test_matching_is_set_inclusion(shared: set[str], only_required: set[str], only_offered: set[str]) -> None:
    required, offered = shared | only_required, shared | only_offered
    kept = required_capabilities(policy(sorted(required)))

    assert covers(kept, offered) is (required <= offered)
    assert missing(kept, offered) == ",".join(sorted(required - offered))
