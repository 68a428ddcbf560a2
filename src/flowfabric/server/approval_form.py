"""HTML forms for approvals: renders a JSON schema as fields and parses the submitted form back into a value.

The forms need no JavaScript, and every foreign text is escaped when it is rendered. A schema with too many fields,
options or characters becomes a single field for JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from math import isfinite
from typing import Any, Final

import msgspec
from markupsafe import Markup

from flowfabric import json_limits
from flowfabric.engine.types import resolve_reference

Schema = Mapping[str, Any]

MAX_FIELDS: Final = 100
MAX_OPTIONS: Final = 500
MAX_CHARACTERS: Final = 64 * 1024
MAX_NESTED: Final = 16
MAX_LABEL_CHARS: Final = 200
DISABLED_SUBMIT = '<button type="submit" disabled hidden></button>'
"""Comes first in a form with several buttons, so that Enter in a text field presses none of them."""


class InvalidFormInput(Exception):
    """A field is missing or invalid; the text is shown to the person."""


class FormTooLarge(Exception):
    """The schema exceeds the limits of a form."""


class FormNode(msgspec.Struct, frozen=True):
    """A field of the form, or a group of fields."""

    name: str
    label: str
    schema: Schema
    is_optional: bool
    options: list[Any] | None = None
    children: dict[str, FormNode] | None = None

    @property
    def fields(self) -> Iterator[FormNode]:
        """The fields, in order."""
        if self.children is None:
            yield self
        else:
            for node in self.children.values():
                yield from node.fields


class _FormBuilder:
    """Builds the nodes of one form within its limits."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._fields = self._options = self._characters = 0

    def build(self, schema: Schema, name: str, *, optional: bool, ancestors: tuple[int, ...] = ()) -> FormNode:
        schema, may_be_null = _resolve(schema, self._root)
        if id(schema) in ancestors or len(ancestors) >= MAX_NESTED:  # a recursive type, or one nested too deep
            schema = {}
        properties = schema.get("properties")
        if isinstance(properties, dict):
            listed = schema.get("required")
            required = [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []
            children = {
                key: self.build(
                    value, f"{name}.{key}", optional=key not in required, ancestors=(*ancestors, id(schema))
                )
                for key, value in properties.items()
                if isinstance(value, dict)
            }
            return FormNode(name, "", schema, optional, children=children)
        title = schema.get("title")
        label = title if isinstance(title, str) and title else name.rpartition(".")[2].replace("_", " ")
        options = _options(schema)
        self._count(len(name) + len(label), options or [])
        is_optional = optional or may_be_null or "default" in schema
        return FormNode(name, label[:MAX_LABEL_CHARS], schema, is_optional, options)

    def _count(self, characters: int, options: list[Any]) -> None:
        self._fields += 1
        self._options += len(options)
        if self._fields > MAX_FIELDS or self._options > MAX_OPTIONS:
            raise FormTooLarge()
        self._characters += characters + sum(len(_option_text(option)) for option in options)
        if self._characters > MAX_CHARACTERS:
            raise FormTooLarge()


def _resolve(schema: Schema, root: Schema) -> tuple[Schema, bool]:
    """Return a schema without references and without its null alternative, and whether it had that alternative."""
    may_be_null = False
    for _ in range(MAX_NESTED):
        schema = resolve_reference(schema, root)
        choices = schema.get("anyOf")
        if not isinstance(choices, list):
            return schema, may_be_null
        non_null = [value for value in choices if isinstance(value, dict) and value.get("type") != "null"]
        if len(non_null) != 1:
            return schema, may_be_null
        may_be_null = may_be_null or len(non_null) < len(choices)
        schema = non_null[0]
    return {}, may_be_null


def _build_form(schema: Schema) -> FormNode:
    """Build the form of a schema; a single JSON field if it would be too large."""
    try:
        return _FormBuilder(schema).build(schema, "value", optional=False)
    except FormTooLarge:
        return FormNode("value", "value", {}, False)


def _is_yes_or_no(node: FormNode) -> bool:
    return node.children is None and node.schema.get("type") == "boolean" and node.options == [True, False]


def _value_at(values: Any, name: str) -> Any:
    """Return the part of a value that a field shows; None if there is none."""
    for key in name.split(".")[1:]:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _input(node: FormNode, given: Any = None) -> str:
    schema, name = node.schema, escape(node.name, quote=True)
    required = "" if node.is_optional else " required"
    default = schema.get("default") if given is None else given
    if node.options is not None:
        # An empty option comes first, so that nothing is preselected.
        empty_label = escape(f"({_option_text(schema['default'])})" if "default" in schema else "")
        options = "".join(
            f'<option value="{index}"{_selected(option, given)}>{escape(_option_text(option))}</option>'
            for index, option in enumerate(node.options)
        )
        return f'<select name="{name}"{required}><option value="">{empty_label}</option>{options}</select>'
    is_text = isinstance(default, str | int | float) and not isinstance(default, bool)
    value = f' value="{escape(_option_text(default), quote=True)}"' if is_text else ""
    match schema.get("type"):
        case "integer":
            return f'<input type="number" step="1" name="{name}"{_bounds(schema)}{value}{required}>'
        case "number":
            return f'<input type="number" step="any" name="{name}"{_bounds(schema)}{value}{required}>'
        case "string" if isinstance(given, str) and "\n" in given:
            return f'<textarea name="{name}" rows="4"{required}>\n{escape(given)}</textarea>'
        case "string":
            length = schema.get("maxLength")
            max_length = f' maxlength="{length}"' if isinstance(length, int) and not isinstance(length, bool) else ""
            return f'<input type="text" name="{name}"{max_length}{value}{required}>'
        case _:
            text = "" if given is None else escape(json_text(given))
            return f'<textarea name="{name}" rows="4" placeholder="JSON"{required}>{text}</textarea>'


def json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _selected(option: Any, given: Any) -> str:
    is_given = given is not None and type(option) is type(given) and option == given
    return " selected" if is_given else ""


def _bounds(schema: Schema) -> str:
    bounds = ((name, schema.get(key)) for name, key in (("min", "minimum"), ("max", "maximum")))
    return "".join(
        f' {name}="{bound}"' for name, bound in bounds if isinstance(bound, int | float) and not isinstance(bound, bool)
    )


def _options(schema: Schema) -> list[Any] | None:
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    return [True, False] if schema.get("type") == "boolean" else None


def _option_text(option: Any) -> str:
    if isinstance(option, bool):
        return "yes" if option else "no"
    try:
        return option if isinstance(option, str) else str(option)
    except (RecursionError, ValueError):
        return "…"


def parse_form(fields: Mapping[str, str], schema: Schema) -> Any:
    """Parse a submitted form; InvalidFormInput names the invalid field."""
    return _parse_node(fields, _build_form(schema))


def can_show(schema: Schema, value: Any) -> bool:
    """True if the form of a schema, filled with this value and sent unchanged, returns all of the value."""
    form = _build_form(schema)
    fields = {node.name: _field_text(node, _value_at(value, node.name)) for node in form.fields}
    try:
        parsed = _parse_node(fields, form)
    except InvalidFormInput:
        return False
    return bool(parsed | value == parsed) if isinstance(parsed, dict) and isinstance(value, dict) else parsed == value


def _field_text(node: FormNode, value: Any) -> str:
    if value is None:
        return ""
    if node.options is not None:
        return next((str(index) for index, option in enumerate(node.options) if _selected(option, value)), "")
    match node.schema.get("type"):
        case "integer" | "number" | "string":
            return str(value)
        case _:
            return json_text(value)


def _parse_node(fields: Mapping[str, str], node: FormNode) -> Any:
    if node.children is not None:
        values = {key: _parse_node(fields, value) for key, value in node.children.items()}
        return {key: value for key, value in values.items() if value is not None or not node.children[key].is_optional}
    text = fields.get(node.name, "").strip()
    if not text:
        if node.is_optional:
            return node.schema.get("default")
        raise InvalidFormInput(f"{node.name.rpartition('.')[2]} is missing")
    return _parse_field(text, node)


def _parse_field(text: str, node: FormNode) -> Any:
    schema, label = node.schema, node.name.rpartition(".")[2]
    if node.options is not None:
        if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) >= len(node.options):
            raise InvalidFormInput(f"{label}: choose one of the options")
        return node.options[int(text)]
    kind = schema.get("type")
    needed = {"integer": "a whole number", "number": "a number"}.get(kind, "JSON") if isinstance(kind, str) else "JSON"
    try:
        match kind:
            case "integer":
                return _integer(text)
            case "number":
                return _finite(text)
            case "string":
                return text
            case _:
                return json_limits.decode(text)
    except (ValueError, RecursionError):
        raise InvalidFormInput(f"{label}: {needed} is needed") from None


def _integer(text: str) -> int:
    """Parse an integer with at most as many digits as JSON may have."""
    if len(text) > json_limits.MAX_DIGITS:
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    """Parse a number that JSON can represent."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


class RenderedForm(msgspec.Struct, frozen=True):
    """The parts of a form as markup."""

    prefix: Markup
    fields: Markup
    buttons: Markup


def render_form(schema: Schema, values: Any = None) -> RenderedForm:
    """Render the parts of the form of a schema, filled with a value; every foreign text in them is escaped.

    A yes/no question has a button for each answer instead of a field.
    """
    form = _build_form(schema)
    if not _is_yes_or_no(form):
        fields = "".join(
            f"<label>{escape(node.label)}{_input(node, _value_at(values, node.name))}</label>\n" for node in form.fields
        )
        return RenderedForm(Markup(""), Markup(fields), Markup('<button type="submit">Send</button>'))
    name = escape(form.name, quote=True)
    buttons = "\n".join(
        f'<button type="submit" name="{name}" value="{index}">{_option_text(option)}</button>'
        for index, option in enumerate((True, False))
    )
    return RenderedForm(Markup(DISABLED_SUBMIT), Markup(f"<p>{escape(form.label)}</p>\n"), Markup(buttons))


def fact_texts(facts: Any) -> list[tuple[str, str]]:
    """Return the facts of the question as names and texts; nothing if they are no object."""
    return [(str(key), _fact_text(value)) for key, value in facts.items()] if isinstance(facts, dict) else []


def _fact_text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):
        return "…"
