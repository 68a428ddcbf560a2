"""Checks of what is declared for a task, a worker or a limit, made where it is declared.

A mistake in a decorator would otherwise be found by the first submit, or never: a `str` where a list of names belongs
is also an iterable of its letters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flowfabric.engine.types import check_not_reserved
from flowfabric.engine.validation import execution as validate
from flowfabric.errors import InvalidInput

T = TypeVar("T")


def validate_handler(value: object) -> Callable[..., Any]:
    """Return a function that can be a task."""
    if isinstance(value, str):
        raise InvalidInput(f"task: {value!r} is no function; a task is named with @app.task(name={value!r})")
    if not callable(value) or isinstance(value, type) or not hasattr(value, "__qualname__"):
        raise InvalidInput(f"task: {value!r} is no function; write a def or an async def")
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise InvalidInput(
            f"task {value.__qualname__}: it yields; return one result, and write what comes before it to ctx.stream(…)"
        )
    return value


def validate_keyword_parameters(function: Callable[..., Any]) -> None:
    """Refuse positional-only parameters: workers pass all arguments by name."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            task = f"task {function.__qualname__}"
            raise InvalidInput(
                f"{task}: {parameter.name} is stored by its name and cannot be positional-only; drop the /"
            )


def validate_name(value: object) -> str:
    """Return the name of a task, a flow or an approval."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InvalidInput(f"name: {value!r} is not a text of printable characters")
    return value


def validate_each(name: str, kind: type[T], value: object, example: str) -> tuple[T, ...]:
    """Return the items of a list as a tuple; refuse a single item, or a `str` in place of a list."""
    is_item = kind is not object and isinstance(value, kind)
    if is_item or isinstance(value, str | bytes | Mapping | type) or not isinstance(value, Iterable):
        raise InvalidInput(f"{name}: {value!r} is not a list; write {name}={example}")
    items = tuple(value)
    for item in items:
        if not isinstance(item, kind):
            raise InvalidInput(f"{name}: {item!r} is no {kind.__name__}; write {name}={example}")
    return items


def validate_capabilities(name: str, value: object) -> frozenset[str]:
    """Return the capabilities that a task needs or a worker has."""
    return validate.validate_capabilities(validate_each(name, str, value, '{"smtp"}'))


def validate_lanes(value: object) -> tuple[str, ...]:
    """Return the lanes of a worker."""
    lanes = tuple(validate.validate_lane_id(lane) for lane in validate_each("lanes", str, value, '["mail"]'))
    if not lanes:
        raise InvalidInput("lanes: none are named; leave it out to serve the lanes of the app's tasks")
    return lanes


def validate_tags(value: object) -> dict[str, str]:
    """Return the tags of a task or a submit; reserved names are refused."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f'tags: {value!r} is no mapping; write tags={{"app.order": "7"}}')
    tags = validate.validate_tags(value)
    if refused := next(filter(None, map(check_not_reserved, tags)), None):
        raise refused
    return tags


def validate_int(name: str, value: object, *, minimum: int | None = None) -> int:
    """Return a whole number of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{name}: {value!r} is not a whole number")
    if minimum is not None and value < minimum:
        raise InvalidInput(f"{name}: at least {minimum}, not {value}")
    return value


def validate_amount(name: str, value: object) -> int | float:
    """Return a finite number that is not negative."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise InvalidInput(f"{name}={value!r} is no amount")
    return value
