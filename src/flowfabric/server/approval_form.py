"""Forms for people: an approval's schema as fields, and what was filled in as a value again.

Nothing here needs JavaScript, and every text of others is escaped where it meets the page. A schema that would need
more fields, options or text than a person fills in is asked for as JSON, in one field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from math import isfinite
from typing import Any, Final

import msgspec

from flowfabric import json_limits
from flowfabric.engine.types import resolve_reference

Schema = Mapping[str, Any]

MAX_FIELDS: Final = 100
MAX_OPTIONS: Final = 500
MAX_CHARACTERS: Final = 64 * 1024
MAX_NESTED: Final = 16
MAX_LABEL_CHARS: Final = 200
DISABLED_SUBMIT = '<button type="submit" disabled hidden></button>'
"""Stands first in a form with several buttons, so that Enter in a text field presses none of them."""


class InvalidFormInput(Exception):
    """A field is missing or holds something else; the text says so to the person."""


class FormTooLarge(Exception):
    """The schema needs a larger form than a person fills in."""


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
        """The fields in their order."""
        if self.children is None:
            yield self
        else:
            for part in self.children.values():
                yield from part.fields


class _Outline:
    """Makes the parts of one form within its limits."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._fields = self._options = self._characters = 0

    def part(self, schema: Schema, name: str, *, optional: bool, around: tuple[int, ...] = ()) -> FormNode:
        schema, may_be_null = _resolved(schema, self._root)
        if id(schema) in around or len(around) >= MAX_NESTED:  # a type that holds itself, or nearly so
            schema = {}
        properties = schema.get("properties")
        if isinstance(properties, dict):
            given = schema.get("required")
            required = [key for key in given if isinstance(key, str)] if isinstance(given, list) else []
            parts = {
                key: self.part(one, f"{name}.{key}", optional=key not in required, around=(*around, id(schema)))
                for key, one in properties.items()
                if isinstance(one, dict)
            }
            return FormNode(name, "", schema, optional, children=parts)
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
        self._characters += characters + sum(len(_words(option)) for option in options)
        if self._characters > MAX_CHARACTERS:
            raise FormTooLarge()


def _resolved(schema: Schema, root: Schema) -> tuple[Schema, bool]:
    """A schema without its reference and without the way out that optional types have, and whether it had one."""
    may_be_null = False
    for _ in range(MAX_NESTED):
        schema = resolve_reference(schema, root)
        choices = schema.get("anyOf")
        if not isinstance(choices, list):
            return schema, may_be_null
        real = [one for one in choices if isinstance(one, dict) and one.get("type") != "null"]
        if len(real) != 1:
            return schema, may_be_null
        may_be_null = may_be_null or len(real) < len(choices)
        schema = real[0]
    return {}, may_be_null


def _whole(schema: Schema) -> FormNode:
    """The form for a value of this schema; one field of JSON when that would be too large."""
    try:
        return _Outline(schema).part(schema, "value", optional=False)
    except FormTooLarge:
        return FormNode("value", "value", {}, False)


def form_fields(schema: Schema) -> list[FormNode]:
    """The fields of the form for a value of this schema."""
    return list(_whole(schema).fields)


def _is_yes_or_no(part: FormNode) -> bool:
    return part.children is None and part.schema.get("type") == "boolean" and part.options == [True, False]


def render_fields(schema: Schema) -> str:
    """The fields for a value of this schema; a question of yes or no has none, its buttons are the answer."""
    whole = _whole(schema)
    if _is_yes_or_no(whole):
        return f"<p>{escape(whole.label)}</p>\n"
    return "".join(f"<label>{escape(part.label)}{_input(part)}</label>\n" for part in whole.fields)


def render_buttons(schema: Schema) -> str:
    """What sends the form: one button, or one for each answer to a question of yes or no."""
    whole = _whole(schema)
    if not _is_yes_or_no(whole):
        return '<button type="submit">Send</button>'
    known = escape(whole.name, quote=True)
    return "\n".join(
        f'<button type="submit" name="{known}" value="{place}">{_words(option)}</button>'
        for place, option in enumerate((True, False))
    )


def render_prefix(schema: Schema) -> str:
    """What stands before everything else in the form."""
    return DISABLED_SUBMIT if _is_yes_or_no(_whole(schema)) else ""


def _input(part: FormNode) -> str:
    schema, known = part.schema, escape(part.name, quote=True)
    must = "" if part.is_optional else " required"
    default = schema.get("default")
    if part.options is not None:
        # An empty option comes first, so that nothing is chosen before a person chooses.
        unchosen = escape(f"({_words(default)})" if "default" in schema else "")
        shown = "".join(
            f'<option value="{place}">{escape(_words(option))}</option>' for place, option in enumerate(part.options)
        )
        return f'<select name="{known}"{must}><option value="">{unchosen}</option>{shown}</select>'
    is_text = isinstance(default, str | int | float) and not isinstance(default, bool)
    filled = f' value="{escape(_words(default), quote=True)}"' if is_text else ""
    match schema.get("type"):
        case "integer":
            return f'<input type="number" step="1" name="{known}"{_bounds(schema)}{filled}{must}>'
        case "number":
            return f'<input type="number" step="any" name="{known}"{_bounds(schema)}{filled}{must}>'
        case "string":
            length = schema.get("maxLength")
            most = f' maxlength="{length}"' if isinstance(length, int) and not isinstance(length, bool) else ""
            return f'<input type="text" name="{known}"{most}{filled}{must}>'
        case _:
            return f'<textarea name="{known}" rows="4" placeholder="JSON"{must}></textarea>'


def _bounds(schema: Schema) -> str:
    given = ((name, schema.get(key)) for name, key in (("min", "minimum"), ("max", "maximum")))
    return "".join(
        f' {name}="{bound}"' for name, bound in given if isinstance(bound, int | float) and not isinstance(bound, bool)
    )


def _options(schema: Schema) -> list[Any] | None:
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    return [True, False] if schema.get("type") == "boolean" else None


def _words(option: Any) -> str:
    if isinstance(option, bool):
        return "yes" if option else "no"
    try:
        return option if isinstance(option, str) else str(option)
    except (RecursionError, ValueError):
        return "…"


def parse_form(given: Mapping[str, str], schema: Schema) -> Any:
    """The value that was filled in; `NotFilledIn` names the field that is wrong."""
    return _value(given, _whole(schema))


def _value(given: Mapping[str, str], part: FormNode) -> Any:
    if part.children is not None:
        filled = {key: _value(given, one) for key, one in part.children.items()}
        return {key: one for key, one in filled.items() if one is not None or not part.children[key].is_optional}
    text = given.get(part.name, "").strip()
    if not text:
        if part.is_optional:
            return part.schema.get("default")
        raise InvalidFormInput(f"{part.name.rpartition('.')[2]} is missing")
    return _read(text, part)


def _read(text: str, part: FormNode) -> Any:
    schema, label = part.schema, part.name.rpartition(".")[2]
    if part.options is not None:
        if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) >= len(part.options):
            raise InvalidFormInput(f"{label}: choose one of the options")
        return part.options[int(text)]
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
    """A whole number of as many digits as one in JSON may have."""
    if len(text) > json_limits.MAX_DIGITS:
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    """A number that JSON can write."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


def render_facts(shown: Any) -> str:
    """What is decided, as a list of facts."""
    if not isinstance(shown, dict) or not shown:
        return ""
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_fact(one))}</dd>" for key, one in shown.items())
    return f"<dl>{rows}</dl>\n"


def _fact(one: Any) -> str:
    try:
        return one if isinstance(one, str) else repr(one)
    except (RecursionError, ValueError):
        return "…"
