"""Values are encoded and decoded by their annotation; the fast path equals the general one."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest

from flowfabric.errors import InvalidInput
from flowfabric.sdk.serialization.values import ValueCodec, from_json, json_bytes


class Colour(enum.Enum):
    RED = "red"


class Text(str):
    __slots__ = ()


@dataclass
class Point:
    x: int
    y: float = 1.0


class Pair(NamedTuple):
    left: int
    right: str


class Named(TypedDict):
    n: int


class Row(msgspec.Struct, rename="camel", omit_defaults=True):
    first_one: int
    other_one: int = 3


class Model(pydantic.BaseModel):
    n: int


class Stranger: ...


def outcome_of(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its error message."""
    try:
        return call()
    except InvalidInput as refused:
        return str(refused)


FITTING: list[tuple[Any, Any]] = [
    (1, int),
    (1, float),
    ("null", str),
    (None, type(None)),
    (None, int | None),
    ([1, None], list[int | None]),
    ({1: "a"}, dict[int, str]),
    ({"a": {"b": (1, 2)}}, dict[str, dict[str, tuple[int, int]]]),
    ({1, 2}, set[int]),
    (b"bytes", bytes),
    (date(2026, 1, 2), date),
    (timedelta(seconds=3.5), timedelta),
    (Decimal("1.50"), Decimal),
    (UUID(int=5), UUID),
    (Colour.RED, Colour),
    (Point(1), Point),
    (Pair(1, "x"), Pair),
    ({"n": 1}, Named),
    (Row(1), Row),
    (Row(1, 4), Row),
    (Model(n=1), Model),
    ([{"any": Model(n=1)}], Any),
    (10**30, int),
]
WRONG: list[tuple[Any, Any]] = [
    ("a", int),
    (Text("a"), str),
    (1.0, int),
    (1.5, int),
    (True, int),
    (math.nan, float),
    ([1.0, math.inf], list[float]),
    (math.nan, float | None),
    ({"n": "x"}, Named),
    (Point("x"), Point),  # type: ignore[arg-type]
    ("b", Literal["a"]),
    (Stranger(), Stranger),
    (Stranger(), Any),
    ({(1, 2): 3}, dict[str, int]),
    (msgspec.Raw(b"[1"), list[int]),
    (None, int),
    ("half a character \ud800", str),
]


@pytest.mark.parametrize(("value", "annotation"), FITTING + WRONG)
def test_both_encoders_write_the_same_json(value: Any, annotation: Any) -> None:
    shape = ValueCodec(annotation)
    assert outcome_of(lambda: shape.to_json(value, "it")) == outcome_of(lambda: json_bytes(shape.dump(value, "it")))


@pytest.mark.parametrize(("value", "annotation"), FITTING)
def test_both_decoders_read_a_value_back(value: Any, annotation: Any) -> None:
    shape = ValueCodec(annotation)
    data = shape.to_json(value, "it")
    assert shape.from_json(data, "it") == shape.load(from_json(data), "it")


@pytest.mark.parametrize(("data", "annotation"), [(b'"a"', int), (b"null", int), (b"1.5", int), (b'{"n":[]}', Named)])
def test_both_decoders_refuse_invalid_json_with_the_same_message(data: bytes, annotation: Any) -> None:
    shape = ValueCodec(annotation)
    with pytest.raises(InvalidInput, match="it: Expected") as refused:
        shape.from_json(data, "it")
    assert str(refused.value) == outcome_of(lambda: shape.load(from_json(data), "it"))


def test_missing_json_is_null() -> None:
    assert ValueCodec(int | None).from_json(None, "it") is None
    assert ValueCodec(Any).from_json(b"", "it") is None
