"""Merge patches, compared with the pseudo-code of RFC 7396."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import FabricError
from flowfabric.merge_patch import decode_document, decode_patch, encode_document, merge

names = st.sampled_from("abc")
values = st.recursive(
    st.one_of(st.none(), st.integers(), st.booleans(), st.text(max_size=3)),
    lambda below: st.one_of(st.lists(below, max_size=2), st.dictionaries(names, below, max_size=3)),
    max_leaves=8,
)
objects = st.dictionaries(names, values, max_size=4)


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merge_patch(target.get(name), value)
    return target


@given(objects, objects)
def test_a_patch_has_the_effect_defined_by_the_rfc(document: dict[str, Any], patch: dict[str, Any]) -> None:
    start = merge({}, document)

    assert merge(start, patch) == merge_patch(start, patch)
    assert start == merge({}, document)


@given(objects)
def test_documents_are_read_back_as_they_were_written(document: dict[str, Any]) -> None:
    assert decode_document(encode_document(document)) == document


@given(st.binary(max_size=60))
def test_any_bytes_are_a_patch_or_refused(payload: bytes) -> None:
    assert isinstance(decode_patch(payload), dict | FabricError)


def test_numbers_keep_their_notation() -> None:
    text = '{"a":1.10,"b":123456789012345678901234567890,"c":-0.0,"d":1E+400,"e":[0.1]}'
    found = decode_patch(text.encode())

    assert isinstance(found, dict)
    assert encode_document(merge({}, found)) == text


def test_unreadable_documents_are_distinguished_from_empty_ones() -> None:
    for text in ("", "{", "[]", "null", '"x"', "[" * 100_000):
        assert isinstance(decode_document(text), FabricError)
    assert decode_document("{}") == {}
