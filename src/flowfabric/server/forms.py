"""Forms for people: an approval's schema as fields, and what was filled in as a value again.

Nothing here needs JavaScript, and every text of others is escaped where it meets the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import isfinite
from typing import Any

import msgspec

Schema = dict[str, Any]


class NotFilledIn(Exception):
    """A field is missing or holds something else; the text says so to the person."""


def resolved(schema: Schema, root: Schema) -> Schema:
    """A schema without its reference, and without the way out that optional types have."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        found = root.get("$defs", {}).get(name, {})
        return resolved(found, root) if isinstance(found, dict) else {}
    choices = schema.get("anyOf")
    if isinstance(choices, list):
        real = [one for one in choices if isinstance(one, dict) and one.get("type") != "null"]
        if len(real) == 1:
            return resolved({**real[0], "x-optional": len(real) < len(choices)}, root)
    return schema


def fields(schema: Schema, root: Schema | None = None, name: str = "value") -> str:
    """The fields for a value of this schema."""
    root = schema if root is None else root
    schema = resolved(schema, root)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        required = set(schema.get("required", ()))
        return "".join(
            fields(one if key in required else {**one, "x-optional": True}, root, f"{name}.{key}")
            for key, one in properties.items()
            if isinstance(one, dict)
        )
    title = str(schema.get("title") or name.rpartition(".")[2].replace("_", " "))
    return f"<label>{escape(title)}{_input(schema, name)}</label>\n"


def _input(schema: Schema, name: str) -> str:
    known = escape(name, quote=True)
    must = "" if schema.get("x-optional") or "default" in schema else " required"
    default = schema.get("default")
    options = _options(schema)
    if options is not None:
        shown = "".join(
            f'<option value="{place}"{" selected" if option == default else ""}>{escape(_words(option))}</option>'
            for place, option in enumerate(options)
        )
        return f'<select name="{known}"{must}>{"" if must else "<option></option>"}{shown}</select>'
    filled = "" if default is None else f' value="{escape(str(default), quote=True)}"'
    match schema.get("type"):
        case "integer":
            return f'<input type="number" step="1" name="{known}"{_bounds(schema)}{filled}{must}>'
        case "number":
            return f'<input type="number" step="any" name="{known}"{_bounds(schema)}{filled}{must}>'
        case "string":
            length = schema.get("maxLength")
            most = f' maxlength="{length}"' if isinstance(length, int) else ""
            return f'<input type="text" name="{known}"{most}{filled}{must}>'
        case _:
            return f'<textarea name="{known}" rows="4" placeholder="JSON"{must}></textarea>'


def _bounds(schema: Schema) -> str:
    given = ((name, schema.get(key)) for name, key in (("min", "minimum"), ("max", "maximum")))
    return "".join(f' {name}="{bound}"' for name, bound in given if isinstance(bound, int | float))


def _options(schema: Schema) -> list[Any] | None:
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    return [True, False] if schema.get("type") == "boolean" else None


def _words(option: Any) -> str:
    return {True: "yes", False: "no"}[option] if isinstance(option, bool) else str(option)


def value(given: Mapping[str, str], schema: Schema, root: Schema | None = None, name: str = "value") -> Any:
    """The value that was filled in; `NotFilledIn` names the field that is wrong."""
    root = schema if root is None else root
    schema = resolved(schema, root)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        required = set(schema.get("required", ()))
        found = {}
        for key, one in properties.items():
            spec = one if key in required else {**one, "x-optional": True}
            filled = value(given, spec, root, f"{name}.{key}")
            if filled is not None or key in required:
                found[key] = filled
        return found
    text = given.get(name, "").strip()
    if not text:
        if schema.get("x-optional") or "default" in schema:
            return schema.get("default")
        raise NotFilledIn(f"{name.rpartition('.')[2]} is missing")
    return _read(text, schema, name)


def _read(text: str, schema: Schema, name: str) -> Any:
    label = name.rpartition(".")[2]
    options = _options(schema)
    if options is not None:
        if not text.isascii() or not text.isdecimal() or int(text) >= len(options):
            raise NotFilledIn(f"{label}: choose one of the options")
        return options[int(text)]
    try:
        match schema.get("type"):
            case "integer":
                return int(text)
            case "number":
                return _finite(text)
            case "string":
                return text
            case _:
                return _json(text)
    except ValueError:
        needed = {"integer": "a whole number", "number": "a number"}.get(schema.get("type", ""), "JSON")
        raise NotFilledIn(f"{label}: {needed} is needed") from None


def _finite(text: str) -> float:
    """A number that JSON can write."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as fault:
        raise ValueError(str(fault)) from None


def facts(shown: Any) -> str:
    """What is decided, as a list of facts."""
    if not isinstance(shown, dict) or not shown:
        return ""
    rows = "".join(
        f"<dt>{escape(str(key))}</dt><dd>{escape(one if isinstance(one, str) else repr(one))}</dd>"
        for key, one in shown.items()
    )
    return f"<dl>{rows}</dl>\n"
