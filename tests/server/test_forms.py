"""Forms from schemas, filled with a value: what is shown and sent unchanged is the value."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from flowfabric.server import approval_form

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer", "default": 3},
        "ship": {"type": "boolean"},
        "size": {"enum": ["s", "m"]},
        "more": {"type": "array", "items": {"type": "integer"}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "ship", "size", "more", "place"],
}
VALUE = {"name": 'a "b" <i>\nc', "ship": False, "size": "m", "more": [1, 2], "place": {"x": 1.5}}


def sent_fields(html: str) -> dict[str, str]:
    """Return what a browser sends of a form that nobody changed."""
    fields = {
        name: unescape(value) for name, value in re.findall(r'<input [^>]*name="([^"]+)"[^>]* value="([^"]*)"', html)
    }
    for name, text in re.findall(r'<textarea name="([^"]+)"[^>]*>(.*?)</textarea>', html, re.DOTALL):
        fields[name] = unescape(text).removeprefix("\n")
    for name, options in re.findall(r'<select name="([^"]+)"[^>]*>(.*?)</select>', html, re.DOTALL):
        chosen = re.findall(r'<option value="(\d+)" selected>', options)
        fields[name] = chosen[0] if chosen else ""
    return fields


def test_a_form_that_is_filled_with_a_value_and_sent_unchanged_returns_it() -> None:
    html = str(approval_form.render_form(SCHEMA, VALUE).fields)
    assert "<i>" not in html
    assert approval_form.can_show(SCHEMA, VALUE)
    assert approval_form.parse_form(sent_fields(html), SCHEMA) == VALUE | {"count": 3}


@pytest.mark.parametrize(
    "value",
    [
        VALUE | {"unknown": 1},
        VALUE | {"name": " blank "},
        VALUE | {"size": "xl"},
        VALUE | {"place": {"x": 1.5, "y": 2}},
        VALUE | {"count": "many"},
        [1],
        None,
        "text",
    ],
)
def test_a_value_that_a_form_would_change_cannot_be_shown(value: Any) -> None:
    assert not approval_form.can_show(SCHEMA, value)
