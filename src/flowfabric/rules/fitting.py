"""Whether a value fits a JSON schema, as far as the schemas of approvals go.

What a person sends is looked at before it counts: a vote that its run cannot read would be the end of that run. What a
schema says beyond this page is not looked at, and fits.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any
from uuid import UUID

import msgspec

Schema = Mapping[str, Any]

_KINDS: dict[str, tuple[Any, str]] = {
    "boolean": (bool, "true or false"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "string": (str, "a text"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
    "null": (type(None), "nothing"),
}
_FORMATS = {"date-time": datetime, "date": date, "time": time, "duration": timedelta, "uuid": UUID, "byte": bytes}
_BOUNDS = (
    ("minimum", operator.ge, "at least"),
    ("maximum", operator.le, "at most"),
    ("exclusiveMinimum", operator.gt, "more than"),
    ("exclusiveMaximum", operator.lt, "less than"),
)
_LENGTHS = (
    ("minLength", "maxLength", str, "characters"),
    ("minItems", "maxItems", list, "entries"),
    ("minProperties", "maxProperties", dict, "fields"),
)


def misfit(value: Any, schema: Schema, root: Schema | None = None, name: str = "value") -> str | None:
    """What is wrong with a value, in words for the person who gave it; None when it fits."""
    return next(_misfits(value, schema, schema if root is None else root, name), None)


def _misfits(value: Any, schema: Schema, root: Schema, name: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = root.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2], {})
    for part in schema.get("allOf", ()):
        yield from _misfits(value, part, root, name)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        wrongs = [misfit(value, choice, root, name) for choice in choices]
        if all(wrongs):
            yield str(wrongs[0])
        return
    options = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if options is not None and not any(type(one) is type(value) and one == value for one in options):
        yield f"{name}: choose one of the options"
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{name}: {' or '.join(_KINDS.get(kind, (object, kind))[1] for kind in kinds)} is needed"
        return
    yield from _beyond(value, schema, name)
    if isinstance(value, str):
        yield from _unreadable(value, schema, name)
    if isinstance(value, list):
        firsts = schema.get("prefixItems", ())
        for place, one in enumerate(value):
            spec = firsts[place] if place < len(firsts) else schema.get("items")
            if isinstance(spec, dict):
                yield from _misfits(one, spec, root, f"{name} {place + 1}")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, one in value.items():
            spec = known.get(key, schema.get("additionalProperties"))
            if isinstance(spec, dict):
                yield from _misfits(one, spec, root, key)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return kind not in _KINDS or isinstance(value, _KINDS[kind][0])


def _beyond(value: Any, schema: Schema, name: str) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (
            f"{name}: {words} {schema[bound]} is needed"
            for bound, holds, words in _BOUNDS
            if bound in schema and not holds(value, schema[bound])
        )
    for least, most, kind, what in _LENGTHS:
        if isinstance(value, kind) and len(value) < schema.get(least, 0):
            yield f"{name}: at least {schema[least]} {what} are needed"
        if isinstance(value, kind) and len(value) > schema.get(most, len(value)):
            yield f"{name}: at most {schema[most]} {what} are taken"


def _unreadable(text: str, schema: Schema, name: str) -> Iterator[str]:
    if "pattern" in schema and not re.search(schema["pattern"], text):
        yield f"{name}: it does not look like {schema['pattern']}"
    if (kind := _FORMATS.get(schema.get("format", ""))) is not None:
        try:
            msgspec.convert(text, kind)
        except msgspec.ValidationError:
            yield f"{name}: a {schema['format']} is needed"
