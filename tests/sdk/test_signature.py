"""Parameters of a handler are encoded to JSON and decoded; the fast paths equal the general ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from flowfabric import Context
from flowfabric.errors import InvalidInput
from flowfabric.sdk.serialization.values import Signature, json_bytes


class Model(pydantic.BaseModel):
    n: int


class Point(msgspec.Struct):
    x: int


async def plain(ctx: Context, n: int, day: date, names: dict[int, str], more: list[str] | None = None) -> None: ...


async def with_model(ctx: Context, n: int, day: date, names: dict[int, str], model: Model | None = None) -> None: ...


async def by_place(n: int, /) -> None: ...


async def by_name(n: int, *, m: int = 2) -> None: ...


def signature(handler: Callable[..., Any]) -> Signature:
    return Signature(handler, Context)


async def with_point(point: Point, other: Point | None = None, *, when: date = date(2026, 1, 2)) -> None: ...


async def with_unknown(what: Callable[[], int]) -> None: ...


def test_the_schema_of_the_input_has_each_parameter_with_its_default() -> None:
    document = msgspec.json.decode(signature(plain).input_schema() or "")
    assert document["required"] == ["day", "n", "names"]
    assert document["properties"]["n"] == {"type": "integer"}
    assert document["properties"]["more"]["default"] is None
    document = msgspec.json.decode(signature(with_point).input_schema() or "")
    assert list(document["$defs"]) == ["Point"]
    assert document["properties"]["point"] == {"$ref": "#/$defs/Point"}
    assert document["properties"]["when"]["default"] == "2026-01-02"
    document = msgspec.json.decode(signature(with_model).input_schema() or "")
    assert document["$defs"]["Model"]["properties"]["n"]["type"] == "integer"


def test_an_input_that_no_schema_describes_has_none() -> None:
    assert signature(with_unknown).input_schema() is None


def test_encoded_arguments_are_decoded() -> None:
    short = signature(plain)
    given = {"n": 1, "day": date(2026, 1, 2), "names": {3: "c"}}
    payload = b'{"n":1,"day":"2026-01-02","names":{"3":"c"}}'
    assert short.load(payload) == given, "what was left out is left to its default"
    assert short.load(payload[:-1] + b',"more":["x"],"gone":1}') == {**given, "more": ["x"]}


@pytest.mark.parametrize("handler", [plain, with_model])
@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"{", "input: Input data was truncated"),
        (b"[1]", "input: not a JSON object of parameters"),
        (b"", "input: missing a required argument: 'n'"),
        (b'{"day":"2026-01-02","names":{}}', "input: missing a required argument: 'n'"),
        (b'{"n":"one","day":"2026-01-02","names":{}}', "n: Expected `int`, got `str`"),
        (b'{"n":1,"day":"soon","names":{}}', "day: Invalid RFC3339 encoded date"),
    ],
)
def test_both_decoders_name_what_is_invalid(handler: Callable[..., Any], payload: bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        signature(handler).load(payload)


@pytest.mark.parametrize(
    ("handler", "args", "kwargs", "arguments"),
    [
        (plain, (1,), {"names": {}, "day": 2}, {"n": 1, "day": 2, "names": {}}),
        (by_place, (1,), {}, {"n": 1}),
        (by_name, (1,), {"m": 3}, {"n": 1, "m": 3}),
        (by_name, (), {"n": 1}, {"n": 1}),
    ],
)
def test_arguments_get_the_names_of_their_parameters_in_order(
    handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert list(signature(handler).bind(args, kwargs).items()) == list(arguments.items())


@pytest.mark.parametrize(
    ("handler", "args", "kwargs", "words"),
    [
        (plain, (1,), {}, "missing a required argument: 'day'"),
        (plain, (1, 2, 3, 4, 5), {}, "too many positional arguments"),
        (plain, (1, 2, 3), {"n": 4}, "multiple values for argument 'n'"),
        (plain, (1, 2, 3), {"ctx": 4}, "got an unexpected keyword argument 'ctx'"),
        (by_place, (), {"n": 1}, "positional"),
        (by_name, (1, 2), {}, "too many positional arguments"),
    ],
)
def test_a_call_that_does_not_match_the_signature_is_refused_with_pythons_message(
    handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        signature(handler).bind(args, kwargs)


Positive = Annotated[int, msgspec.Meta(ge=1)]
Short = Annotated[str, pydantic.Field(max_length=3)]


def bounded(
    ctx: Annotated[Context, "the attempt"], n: Positive, names: list[Short], m: Positive | None = None
) -> Positive:
    return n


def counted(n: Positive, m: list[Annotated[int, ["words"]]] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("handler", "given", "message"),
    [
        (bounded, {"n": 0, "names": []}, "n: "),
        (bounded, {"n": 1, "names": ["long name"]}, "names: "),
        (bounded, {"n": 1, "names": [], "m": 0}, "m: "),
        (counted, {"n": 0}, "n: "),
    ],
)
def test_constraints_of_an_annotation_are_checked(
    handler: Callable[..., Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^invalid_input: {message}"):
        signature(handler).to_json(given)
    with pytest.raises(InvalidInput, match=f"^invalid_input: {message}"):
        signature(handler).load(json_bytes(given))


def test_values_that_match_their_annotations_are_read_back() -> None:
    given = {"n": 1, "names": ["ana"], "m": 2}

    assert signature(bounded).context_name == "ctx"
    assert signature(bounded).load(signature(bounded).to_json(given)) == given
    assert signature(counted).load(b'{"n": 1}') == {"n": 1}
    with pytest.raises(InvalidInput, match="^invalid_input: result: "):
        signature(bounded).result_codec.to_json(0, "result")
