"""JSON schema validation for votes, limited to what approval schemas use.

A vote is validated before it counts, because a vote that the function cannot decode would fail the run. Keywords beyond
this page are ignored. So is `pattern`: it comes from outside, and a pattern can keep Python's engine busy for hours.
The run itself checks it.

The work is bounded: neither a schema of another release nor a large value costs more than `MAX_STEPS`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from flowfabric import json_limits
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
    """The check was aborted at its limits; the message is shown to the person."""


def find_payload_violation(payload: bytes | None, schema: Schema) -> str | None:
    """Return what is wrong with a JSON text, in words for the person who sent it; None if it is valid."""
    try:
        return find_violation(json_limits.decode(payload or b"null"), schema)
    except json_limits.NumberTooLong as fault:
        return f"value: {fault}"
    except msgspec.DecodeError:
        return "value: not JSON"
    except RecursionError:
        return "value: nested too deeply"


def find_violation(value: Any, schema: Schema, root: Schema | None = None, name: str = "value") -> str | None:
    """Return what is wrong with a value, in words for the person who sent it; None if it is valid."""
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
        """Return the first violation. Raises `SchemaCheckTooCostly` at the limits."""
        if self._depth >= MAX_DEPTH:
            raise SchemaCheckTooCostly("nested too deeply")
        self._depth += 1
        try:
            return next(self._violations(value, schema, name), None)
        finally:
            self._depth -= 1

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self._max_steps:
            raise SchemaCheckTooCostly("too large to be checked; send less")

    def _violation_per_schema(self, value: Any, schemas: Any, name: str) -> Iterator[str | None]:
        for schema in _as_list(schemas):
            if isinstance(schema, dict):
                yield self.find_violation(value, schema, name)

    def _violations(self, value: Any, schema: Schema, name: str) -> Iterator[str]:
        self._count(1)
        schema = resolve_reference(schema, self.root)
        yield from filter(None, self._violation_per_schema(value, schema.get("allOf"), name))
        if choices := _as_list(schema.get("anyOf")) or _as_list(schema.get("oneOf")):
            first: str | None = None
            for violation in self._violation_per_schema(value, choices, name):
                if violation is None:
                    return
                first = first or violation
            if first is not None:
                yield first
            return
        yield from self._enum_violations(value, schema, name)
        declared = schema.get("type")
        kinds = [
            kind for kind in ([declared] if isinstance(declared, str) else _as_list(declared)) if isinstance(kind, str)
        ]
        self._count(len(kinds))
        if kinds and not any(_has_type(value, kind) for kind in kinds):
            yield f"{name}: {' or '.join(_KINDS.get(kind, (object, kind))[1] for kind in kinds)} is needed"
            return
        yield from _bound_violations(value, schema, name)
        if isinstance(value, str):
            self._count(len(value) // 1000)
            yield from _format_violations(value, schema, name)
        if isinstance(value, list):
            yield from self._item_violations(value, schema, name)
        if isinstance(value, dict):
            yield from self._property_violations(value, schema)

    def _enum_violations(self, value: Any, schema: Schema, name: str) -> Iterator[str]:
        options = [schema["const"]] if "const" in schema and "enum" not in schema else schema.get("enum")
        if isinstance(options, list):
            self._count(len(options))
            if not any(type(option) is type(value) and option == value for option in options):
                yield f"{name}: choose one of the options"

    def _item_violations(self, value: list[Any], schema: Schema, name: str) -> Iterator[str]:
        self._count(len(value))
        prefix, rest = _as_list(schema.get("prefixItems")), schema.get("items")
        for index, item in enumerate(value):
            spec = prefix[index] if index < len(prefix) else rest
            if isinstance(spec, dict) and (violation := self.find_violation(item, spec, f"{name} {index + 1}")):
                yield violation

    def _property_violations(self, value: dict[str, Any], schema: Schema) -> Iterator[str]:
        properties, required = schema.get("properties"), _as_list(schema.get("required"))
        known: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._count(len(value) + len(required))
        yield from (f"{key} is missing" for key in required if isinstance(key, str) and key not in value)
        for key, item in value.items():
            spec = known.get(key, schema.get("additionalProperties"))
            if isinstance(spec, dict) and (violation := self.find_violation(item, spec, key)):
                yield violation


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return kind not in _KINDS or isinstance(value, _KINDS[kind][0])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bound_violations(value: Any, schema: Schema, name: str) -> Iterator[str]:
    if _is_number(value):
        yield from (
            f"{name}: {words} {schema[bound]} is needed"
            for bound, holds, words in _BOUNDS
            if _is_number(schema.get(bound)) and not holds(value, schema[bound])
        )
    for least, most, kind, unit in _LENGTHS:
        if not isinstance(value, kind):
            continue
        if _is_number(schema.get(least)) and len(value) < schema[least]:
            yield f"{name}: at least {schema[least]} {unit} are needed"
        if _is_number(schema.get(most)) and len(value) > schema[most]:
            yield f"{name}: at most {schema[most]} {unit} are taken"


def _format_violations(text: str, schema: Schema, name: str) -> Iterator[str]:
    format_name = schema.get("format")
    if isinstance(format_name, str) and (kind := _FORMATS.get(format_name)) is not None:
        try:
            msgspec.convert(text, kind)
        except msgspec.ValidationError:
            yield f"{name}: a {format_name} is needed"
