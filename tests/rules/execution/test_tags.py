"""Tags: which keys are valid."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput, InvalidTagKey
from flowfabric.rules.execution.tags import (
    MAX_TAG_BYTES,
    TRACE_TAG,
    check_created_tags,
    check_not_empty,
    check_not_reserved,
    check_tag_key,
    check_tags,
    check_tags_size,
    is_tag_key,
)

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


@pytest.mark.spec("EX-015")
@pytest.mark.parametrize("key", ACCEPTED)
def test_a_namespace_a_dot_and_a_field_make_a_key(key: str) -> None:
    assert is_tag_key(key)
    assert check_tag_key(key) is None
    assert check_tags({key: "any value at all: \n\t\0 é"}) is None


@pytest.mark.spec("EX-015")
@pytest.mark.parametrize("key", REJECTED)
def test_any_other_key_is_refused_with_the_key_in_the_detail(key: str) -> None:
    single = check_tag_key(key)

    assert type(single) is InvalidInput
    assert key in single.detail
    assert check_tags({"good.key": "v", key: "v"}) == InvalidTagKey(key)


def test_the_first_invalid_key_of_a_batch_is_reported() -> None:
    assert check_tags({"a.b": "", "Bad": "", "Worse": ""}) == InvalidTagKey("Bad")


def test_set_tags_needs_a_tag_and_a_create_does_not() -> None:
    assert isinstance(check_not_empty({}), InvalidInput)
    assert check_not_empty({"a.b": ""}) is None
    assert check_tags({}) is None


def test_a_lone_surrogate_is_no_value() -> None:
    assert isinstance(check_tags({"a.b": "x\ud800"}), InvalidInput)


@given(st.text(alphabet="ab1_.- A\n", max_size=8))
def test_keys_are_exactly_those_of_the_published_grammar(key: str) -> None:
    assert is_tag_key(key) == bool(re.match(r"^[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*\Z", key))


@pytest.mark.parametrize("key", ["ff.show", "ff.ask.0123", "ff.x", TRACE_TAG])
def test_reserved_keys_are_for_the_lease_holder_only(key: str) -> None:
    assert type(check_not_reserved(key)) is InvalidTagKey
    refused = check_tags({"a.b": "", key: ""})
    assert type(refused) is InvalidTagKey
    assert key in refused.detail
    assert check_tags({key: ""}, allow_reserved=True) is None


@pytest.mark.parametrize("key", ["f.f", "fff.x", "ff_x.y", "aff.x"])
def test_keys_that_only_resemble_reserved_ones_are_allowed(key: str) -> None:
    assert check_not_reserved(key) is None
    assert check_created_tags({key: ""}) is None


def test_a_create_may_carry_the_servers_trace_and_no_other_reserved_key() -> None:
    assert check_created_tags({TRACE_TAG: "00-1", "a.b": ""}) is None
    assert type(check_created_tags({TRACE_TAG: "00-1", "ff.show": ""})) is InvalidTagKey


@pytest.mark.parametrize("key", ["a.b", "ff.b"])
def test_tags_are_bounded_in_bytes_of_keys_and_values(key: str) -> None:
    room = MAX_TAG_BYTES - len(key)

    assert check_tags_size({key: "x" * room}) is None
    assert check_tags_size({key: "é" * (room // 2)}) is None
    assert type(check_tags_size({key: "x" * (room + 1)})) is InvalidInput
    assert type(check_tags_size({key: "é" * (room // 2 + 1)})) is InvalidInput


def test_reserved_tags_have_a_separate_limit() -> None:
    full = {"a.b": "x" * (MAX_TAG_BYTES - 3)}

    assert check_tags_size(full | {"ff.ask.1": "x" * 1000}) is None
