"""Tags: which keys are keys."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput, InvalidTagKey
from flowfabric.rules.tags import check_not_empty, check_tag_key, check_tags, is_tag_key

ACCEPTED = ["cairn.session_id", "a.b", "a1_2.x", "app.sub.field", "x.y_z", "x.1", "x._", "x.y..z", "a_.b."]
REJECTED = [
    "",
    "Cairn.x",
    "1cairn.x",
    "cairn",
    "cairn.",
    "cairn..x",
    ".cairn",
    "cair n.x",
    "ca-irn.x",
    "cairn.Foo",
    "cairn.foo bar",
    "cairn.foo-bar",
    'cairn."x',
    "cairn.x'",
    "cairn.x\\",
    "ca\\irn.x",
    "ca'irn.\"x",
    "cairn.x\n",
    "_a.b",
    "é.b",
    "a.٣",
]


@pytest.mark.parametrize("key", ACCEPTED)
def test_ex_015_a_namespace_a_dot_and_a_field_make_a_key(key: str) -> None:
    assert is_tag_key(key)
    assert check_tag_key(key) is None
    assert check_tags({key: "any value at all: \n\t\0 é"}) is None


@pytest.mark.parametrize("key", REJECTED)
def test_ex_015_everything_else_is_refused_with_the_key_in_the_detail(key: str) -> None:
    single = check_tag_key(key)

    assert type(single) is InvalidInput
    assert key in single.detail
    assert check_tags({"good.key": "v", key: "v"}) == InvalidTagKey(key)


def test_the_first_bad_key_of_a_batch_is_the_one_that_is_named() -> None:
    assert check_tags({"a.b": "", "Bad": "", "Worse": ""}) == InvalidTagKey("Bad")


def test_a_batch_needs_a_tag_and_a_create_does_not() -> None:
    assert isinstance(check_not_empty({}), InvalidInput)
    assert check_not_empty({"a.b": ""}) is None
    assert check_tags({}) is None


def test_half_a_character_is_no_value() -> None:
    assert isinstance(check_tags({"a.b": "x\ud800"}), InvalidInput)


@given(st.text(alphabet="ab1_.- A\n", max_size=8))
def test_keys_are_exactly_those_of_the_published_grammar(key: str) -> None:
    assert is_tag_key(key) == bool(re.match(r"^[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*\Z", key))
