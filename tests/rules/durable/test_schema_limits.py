"""Bounds of schemas: a schema beyond them is refused at the edge, and a stored one costs bounded work."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from flowfabric.rules.durable import schema_limits
from flowfabric.rules.durable.json_schema import MAX_STEPS, SchemaChecker, SchemaCheckTooCostly, find_violation
from flowfabric.rules.execution.tags import check_tags
from flowfabric.server import approval_form


def doubling(levels: int) -> dict[str, Any]:
    """Return a small schema with 2^levels fields once its references are followed."""
    definitions: dict[str, Any] = {
        f"d{level}": {"properties": {side: {"$ref": f"#/$defs/d{level + 1}"} for side in "ab"}}
        for level in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def choosing(levels: int) -> dict[str, Any]:
    """Return a small schema with 2^levels alternatives that a value may fail."""
    definitions: dict[str, Any] = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}, {"$ref": f"#/$defs/d{level + 1}"}]}
        for level in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "null"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def nested(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(levels - 1)} if levels else {"type": "string"}


BAD = {
    "bytes": {"title": "x" * schema_limits.MAX_BYTES},
    "nodes": {"anyOf": [{}] * schema_limits.MAX_NODES},
    "depth": nested(schema_limits.MAX_DEPTH),
    "references": doubling(16),
    "choices": choosing(16),
    "options": {"properties": {str(n): {"$ref": "#/$defs/o"} for n in range(50)}, "$defs": {"o": {"enum": [1] * 1000}}},
}
CIRCLES: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}}},
]
ODD: list[Any] = [
    {"$ref": 5, "$defs": []},
    {"$ref": {}, "$defs": {"a": 1}},
    {"anyOf": 5, "oneOf": "x", "allOf": {"a": 1}},
    {"anyOf": [5, None], "allOf": ["x"]},
    {"type": {"a": 1}, "enum": 5, "required": 7, "properties": []},
    {"type": ["integer", {}, []], "minimum": "low", "maximum": [], "minLength": "a", "maxItems": {}},
    {"properties": {"a": 5, "b": None, "c": {"type": 3}}, "required": [["a"], {}, 4]},
    {"prefixItems": 5, "items": [1], "additionalProperties": "no"},
    {"format": ["date"], "pattern": "(", "type": "string", "maxLength": True, "default": {"a": [1]}},
    {"title": {"a": 1}, "type": "boolean", "default": "yes"},
    {"enum": [[1], {"a": 2}, None], "default": 4},
    {"const": {"a": [1]}},
]
VALUES: list[Any] = [None, True, 5, 0.5, "", "2026-11-16", [], [1, "a", {}], {}, {"a": 1, "b": [None]}]


@pytest.mark.parametrize("schema", BAD.values(), ids=BAD)
def test_a_schema_beyond_the_bounds_is_refused_in_a_tag(schema: dict[str, Any]) -> None:
    text = msgspec.json.encode(schema).decode()
    refused = check_tags({"ff.ask.00000000": text}, allow_reserved=True)

    assert refused is not None
    assert refused.kind == "invalid_input"
    assert "schema: " in refused.detail
    assert check_tags({"shop.note": text}, allow_reserved=True) is None


def test_a_schema_that_nests_too_deep_or_is_too_large_is_refused() -> None:
    assert check_tags({"ff.ask.0": "[" * 20_000}, allow_reserved=True) is not None
    assert check_tags({"ff.ask.0": '{"minimum":' + "9" * 310 + "}"}, allow_reserved=True) is not None


@pytest.mark.parametrize("schema", [*CIRCLES, *ODD, doubling(5), nested(20)], ids=str)
def test_an_unusual_schema_within_the_bounds_is_accepted(schema: Any) -> None:
    assert check_tags({"ff.ask.00000000": msgspec.json.encode(schema).decode()}, allow_reserved=True) is None


@pytest.mark.parametrize("schema", [*BAD.values(), *CIRCLES, *ODD], ids=lambda schema: str(schema)[:60])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_stored_schema_costs_a_bounded_number_of_steps(schema: Any, value: Any) -> None:
    checker = SchemaChecker(schema)
    with suppress(SchemaCheckTooCostly):
        checker.find_violation(value, schema, "value")
    assert checker.steps <= MAX_STEPS + len(msgspec.json.encode(schema)) + 1
    assert isinstance(find_violation(value, schema), str | None)


def test_alternatives_that_double_stop_at_the_step_limit() -> None:
    wrong = find_violation("x", choosing(60))

    assert wrong == "value: too large to be checked; send less"


def test_a_large_value_is_refused_rather_than_checked_for_long() -> None:
    schema = {"type": "array", "items": {"enum": list(range(1000))}}

    assert find_violation([999] * 10, schema) is None
    assert find_violation([999] * 10_000, schema) == "value: too large to be checked; send less"


def test_a_pattern_is_left_to_the_run() -> None:
    schema = {"type": "string", "pattern": "^(a+)+$"}

    assert find_violation("a" * 64 + "!", schema) is None
    assert find_violation("x", {"type": "string", "pattern": "("}) is None
    assert find_violation(5, schema) == "value: a text is needed"


@pytest.mark.parametrize("schema", [*BAD.values(), *CIRCLES, *ODD, choosing(60)], ids=lambda schema: str(schema)[:60])
def test_a_form_stays_small_whatever_the_schema(schema: Any) -> None:
    html = approval_form.render_form(schema).fields

    assert len(html) < 64 * 1024
    assert html.count("<label>") <= approval_form.MAX_FIELDS
    with suppress(approval_form.InvalidFormInput):
        approval_form.parse_form({"value": "1"}, schema)


def test_a_recursive_type_is_asked_for_field_by_field_and_then_as_json() -> None:
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": {"properties": {
        "name": {"type": "string"}, "below": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
        "required": ["name"]}}}  # fmt: skip
    html = approval_form.render_form(schema).fields

    assert '<input type="text" name="value.name" required>' in html
    assert '<textarea name="value.below" rows="4" placeholder="JSON"></textarea>' in html
    assert approval_form.parse_form({"value.name": "a", "value.below": '{"name":"b"}'}, schema) == {
        "name": "a",
        "below": {"name": "b"},
    }
    assert approval_form.parse_form({"value.name": "a"}, schema) == {"name": "a"}
