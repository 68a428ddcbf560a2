"""What people write when they declare a task, a worker or a limit, looked at where they wrote it.

A mistake in a decorator would otherwise be found by the first submit, or by nobody: a text is also a list of its
letters.
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


def validate_handler(given: object) -> Callable[..., Any]:
    """A function that can be a task."""
    if isinstance(given, str):
        raise InvalidInput(f"task: {given!r} is no function; a task is named with @app.task(name={given!r})")
    if not callable(given) or isinstance(given, type) or not hasattr(given, "__qualname__"):
        raise InvalidInput(f"task: {given!r} is no function; write a def or an async def")
    if inspect.isgeneratorfunction(given) or inspect.isasyncgenfunction(given):
        raise InvalidInput(
            f"task {given.__qualname__}: it yields; return one result, and write what comes before it to ctx.stream(…)"
        )
    return given


def validate_keyword_parameters(function: Callable[..., Any]) -> None:
    """Refuse parameters that a worker, which has them by their names, could not hand over."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            task = f"task {function.__qualname__}"
            raise InvalidInput(
                f"{task}: {parameter.name} is kept by its name and cannot be positional-only; drop the /"
            )


def validate_name(given: object) -> str:
    """The name of a task or a flow."""
    if not isinstance(given, str) or not given or not given.isprintable():
        raise InvalidInput(f"name: {given!r} is not a text of printable characters")
    return given


def validate_each(what: str, kind: type[T], given: object, example: str) -> tuple[T, ...]:
    """Several of a kind; one alone, or a text in the place of a list, is a mistake."""
    if isinstance(given, str | bytes | Mapping | kind) or not isinstance(given, Iterable):
        raise InvalidInput(f"{what}: {given!r} is not a list; write {what}={example}")
    several = tuple(given)
    for one in several:
        if not isinstance(one, kind):
            raise InvalidInput(f"{what}: {one!r} is no {kind.__name__}; write {what}={example}")
    return several


def validate_capabilities(what: str, given: object) -> frozenset[str]:
    """Capabilities that a task needs, or a worker has."""
    return validate.validate_capabilities(validate_each(what, str, given, '{"smtp"}'))


def validate_lanes(given: object) -> tuple[str, ...]:
    """The lanes of a worker."""
    several = tuple(validate.validate_lane_id(one) for one in validate_each("lanes", str, given, '["mail"]'))
    if not several:
        raise InvalidInput("lanes: none are named; leave it out to serve the lanes of the app's tasks")
    return several


def validate_tags(given: object) -> dict[str, str]:
    """The tags of a task or a submit."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f'tags: {given!r} is no mapping; write tags={{"app.order": "7"}}')
    tags = validate.validate_tags(given)
    if refused := next(filter(None, map(check_not_reserved, tags)), None):
        raise refused
    return tags


def validate_int(what: str, given: object, *, minimum: int | None = None) -> int:
    """A whole number."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise InvalidInput(f"{what}: {given!r} is not a whole number")
    if minimum is not None and given < minimum:
        raise InvalidInput(f"{what}: at least {minimum}, not {given}")
    return given


def validate_amount(what: str, given: object) -> int | float:
    """A number that is not below zero, and finite."""
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given < math.inf:
        raise InvalidInput(f"{what}={given!r} is no amount")
    return given
