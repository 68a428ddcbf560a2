"""Whether a value fits a JSON schema, as far as the schemas of approvals go.

What a person sends is looked at before it counts: a vote that its run cannot read would be the end of that run. What a
schema says beyond this page is not looked at, and fits. So does a `pattern`: it came from outside, and a pattern can
keep Python's engine busy for hours. The run itself checks it.

The work is counted: neither a schema of another release nor a large value makes it more than `MAX_STEPS`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from flowfabric.rules.durable.schema_limits import resolve_reference

Schema = Mapping[str, Any]

MAX_STEPS: Final = 50_000
MAX_DEPTH: Final = 100

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


class SchemaCheckTooCostly(Exception):
    """The check was given up; the text says so to the person."""


def find_violation(value: Any, schema: Schema, root: Schema | None = None, name: str = "value") -> str | None:
    """What is wrong with a value, in words for the person who gave it; None when it fits."""
    try:
        return SchemaChecker(schema if root is None else root).find_violation(value, schema, name)
    except SchemaCheckTooCostly as fault:
        return f"{name}: {fault}"


class SchemaChecker:
    """One check of one value; it counts its steps."""

    def __init__(self, root: Schema, max_steps: int = MAX_STEPS) -> None:
        self.root = root
        self.steps = 0
        self._max_steps = max_steps
        self._depth = 0

    def find_violation(self, value: Any, schema: Schema, name: str) -> str | None:
        """The first thing that is wrong; `TooMuchWork` when it cannot be told within the limits."""
        if self._depth >= MAX_DEPTH:
            raise SchemaCheckTooCostly("nested too deeply")
        self._depth += 1
        try:
            return next(self._misfits(value, schema, name), None)
        finally:
            self._depth -= 1

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self._max_steps:
            raise SchemaCheckTooCostly("too large to be checked; send less")

    def _each(self, value: Any, schemas: Any, name: str) -> Iterator[str | None]:
        for one in _list(schemas):
            if isinstance(one, dict):
                yield self.find_violation(value, one, name)

    def _misfits(self, value: Any, schema: Schema, name: str) -> Iterator[str]:
        self._count(1)
        schema = resolve_reference(schema, self.root)
        yield from filter(None, self._each(value, schema.get("allOf"), name))
        if choices := _list(schema.get("anyOf")) or _list(schema.get("oneOf")):
            wrong: str | None = None
            for found in self._each(value, choices, name):
                if found is None:
                    return
                wrong = wrong or found
            if wrong is not None:
                yield wrong
            return
        yield from self._other_option(value, schema, name)
        given = schema.get("type")
        kinds = [kind for kind in ([given] if isinstance(given, str) else _list(given)) if isinstance(kind, str)]
        self._count(len(kinds))
        if kinds and not any(_is(value, kind) for kind in kinds):
            yield f"{name}: {' or '.join(_KINDS.get(kind, (object, kind))[1] for kind in kinds)} is needed"
            return
        yield from _beyond(value, schema, name)
        if isinstance(value, str):
            self._count(len(value) // 1000)
            yield from _unreadable(value, schema, name)
        if isinstance(value, list):
            yield from self._entries(value, schema, name)
        if isinstance(value, dict):
            yield from self._fields(value, schema)

    def _other_option(self, value: Any, schema: Schema, name: str) -> Iterator[str]:
        options = [schema["const"]] if "const" in schema and "enum" not in schema else schema.get("enum")
        if isinstance(options, list):
            self._count(len(options))
            if not any(type(one) is type(value) and one == value for one in options):
                yield f"{name}: choose one of the options"

    def _entries(self, value: list[Any], schema: Schema, name: str) -> Iterator[str]:
        self._count(len(value))
        firsts, others = _list(schema.get("prefixItems")), schema.get("items")
        for place, one in enumerate(value):
            spec = firsts[place] if place < len(firsts) else others
            if isinstance(spec, dict) and (wrong := self.find_violation(one, spec, f"{name} {place + 1}")):
                yield wrong

    def _fields(self, value: dict[str, Any], schema: Schema) -> Iterator[str]:
        given, required = schema.get("properties"), _list(schema.get("required"))
        known: dict[str, Any] = given if isinstance(given, dict) else {}
        self._count(len(value) + len(required))
        yield from (f"{key} is missing" for key in required if isinstance(key, str) and key not in value)
        for key, one in value.items():
            spec = known.get(key, schema.get("additionalProperties"))
            if isinstance(spec, dict) and (wrong := self.find_violation(one, spec, key)):
                yield wrong


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return kind not in _KINDS or isinstance(value, _KINDS[kind][0])


def _number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _beyond(value: Any, schema: Schema, name: str) -> Iterator[str]:
    if _number(value):
        yield from (
            f"{name}: {words} {schema[bound]} is needed"
            for bound, holds, words in _BOUNDS
            if _number(schema.get(bound)) and not holds(value, schema[bound])
        )
    for least, most, kind, what in _LENGTHS:
        if not isinstance(value, kind):
            continue
        if _number(schema.get(least)) and len(value) < schema[least]:
            yield f"{name}: at least {schema[least]} {what} are needed"
        if _number(schema.get(most)) and len(value) > schema[most]:
            yield f"{name}: at most {schema[most]} {what} are taken"


def _unreadable(text: str, schema: Schema, name: str) -> Iterator[str]:
    given = schema.get("format")
    if isinstance(given, str) and (kind := _FORMATS.get(given)) is not None:
        try:
            msgspec.convert(text, kind)
        except msgspec.ValidationError:
            yield f"{name}: a {given} is needed"
