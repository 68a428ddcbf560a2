"""A value matches a schema exactly when it can be decoded as the type from which the schema was made."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from msgspec import Meta

from flowfabric.rules.durable.json_schema import find_violation


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Part(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=5)]
    count: Annotated[int, Meta(ge=1, le=9)] = 1


class Order(msgspec.Struct):
    parts: Annotated[list[Part], Meta(min_length=1, max_length=2)]
    colour: Colour
    day: date | None = None
    notes: dict[str, int] = {}


TYPES = [
    bool,
    int,
    float,
    str,
    None,
    int | None,
    int | str,
    Annotated[float, Meta(gt=0, lt=1)],
    Colour,
    Level,
    Literal["a", 1],
    Annotated[datetime, Meta(tz=True)],
    date,
    timedelta,
    UUID,
    list[int],
    tuple[int, str],
    dict[str, bool],
    Part,
    Order,
    list[Order],
    Any,
]
VALUES = [
    None,
    True,
    0,
    1,
    2,
    7.5,
    0.5,
    "",
    "red",
    "a",
    "2026-11-16",
    "2026-11-16T12:00:00Z",
    "550e8400-e29b-41d4-a716-446655440000",
    "P1D",
    [],
    [1, 2],
    [1, "a"],
    ["a"],
    {},
    {"x": True},
    {"name": "bolt"},
    {"name": ""},
    {"name": "Bolt"},
    {"name": "screws"},
    {"name": "nut", "count": 0},
    {"name": "nut", "count": 10},
    {"count": 1},
    {"parts": [{"name": "nut"}], "colour": "red"},
    {"parts": [{"name": "nut"}], "colour": "red", "day": "tomorrow"},
    {"parts": [{"name": "nut"}], "colour": "red", "day": "2026-11-16", "notes": {"a": 1}},
    {"parts": [{"name": "nut"}], "colour": "red", "notes": {"a": "b"}},
    {"parts": [{"name": "nut"}], "colour": "green"},
    {"parts": [], "colour": "red"},
    {"parts": [{"name": "nut"}] * 3, "colour": "red"},
    [{"parts": [{"name": "nut", "count": "many"}], "colour": "red"}],
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_matching_values_decode_and_values_that_do_not_decode_do_not_match(kind: Any) -> None:
    schema = msgspec.json.schema(kind)
    for value in VALUES:
        wrong = find_violation(value, schema)
        assert (wrong is None) == is_readable(value, kind), (value, wrong)


def is_readable(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"colour": "red"}, "parts is missing"),
        ({"parts": [{"name": "nut", "count": 10}], "colour": "red"}, "count: at most 9 is needed"),
        ({"parts": [{"name": ""}], "colour": "red"}, "name: at least 1 characters are needed"),
        ({"parts": [{"name": "nut"}], "colour": "green"}, "colour: choose one of the options"),
        ({"parts": "many", "colour": "red"}, "parts: a list is needed"),
        ({"parts": [5], "colour": "red"}, "parts 1: an object is needed"),
    ],
)
def test_a_mismatch_is_explained_to_the_user(value: object, words: str) -> None:
    assert find_violation(value, msgspec.json.schema(Order)) == words
