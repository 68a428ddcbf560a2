"""Shortened ids: the beginning of an execution id stands for it where only one begins so."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.pages import IdMatches
from tests.scenarios.play import Play

ONE = "0197aaaa-0000-7000-8000-000000000001"
TWO = "0197aaaa-1111-7000-8000-000000000002"
OTHER = "0197bbbb-0000-7000-8000-000000000003"


async def made(play: Play, partition: int, uuid: str, **given: Any) -> str:
    execution = f"{{fp:{partition}}}:{uuid}"
    await play.engine.create_execution(execution_id=execution, lane_id="default", **given)
    return execution


async def found(play: Play, prefix: str, **given: object) -> list[str]:
    async with play.untouched():
        matches = await play.engine.find_executions(prefix, **given)  # type: ignore[arg-type]
    assert not matches.more
    return matches.execution_ids


async def test_an_id_is_found_by_its_beginning_with_or_without_its_partition(play: Play) -> None:
    one, two = await made(play, 86, ONE), await made(play, 7, TWO)

    for short in (
        one,
        one[:-1],
        "{fp:86}:0197",
        "{fp:86}:",
        "fp:86:0197aaaa",
        "86:0197",
        ONE,
        "0197AAAA-0",
        "0197aaaa0",
    ):
        assert await found(play, short) == [one], short
    assert await found(play, "0197aaaa") == [two, one]  # in the order of ids, as lists are
    assert await found(play, "0197bbbb") == []
    assert await found(play, "8:0197") == []


async def test_of_many_some_are_told_and_that_there_are_more(play: Play) -> None:
    many = [await made(play, 86, f"0197aaaa-0000-7000-8000-{n:012x}") for n in range(4)]

    assert await play.engine.find_executions("0197", limit=3) == IdMatches(many[:3], more=True)
    assert await play.engine.find_executions("0197", limit=4) == IdMatches(many)


async def test_only_some_namespaces_are_looked_at_when_asked_to(play: Play) -> None:
    one, two = await made(play, 86, ONE, namespace="a"), await made(play, 86, TWO, namespace="b")

    assert await found(play, "0197", namespaces=["b"]) == [two]
    assert await found(play, "0197", namespaces=["a", "b"]) == [one, two]
    assert await found(play, "0197", namespaces=["c"]) == []


async def test_own_executions_are_found_behind_those_of_others(play: Play) -> None:
    for n in range(3):
        await made(play, 86, f"0197aaaa-0000-7000-8000-{n:012x}", namespace="b")
    own = await made(play, 86, OTHER, namespace="a")

    assert await found(play, "0197", namespaces=["a"], limit=1) == [own]


@pytest.mark.parametrize(
    "text", ["", "xyz", "86:xyz", "{fp:86", "{b:1}:01", "0" * 33, "86:86:01", "{fp:70000}:01", "%"]
)
async def test_what_is_no_beginning_of_an_id_is_refused(play: Play, text: str) -> None:
    with pytest.raises(errors.InvalidInput):
        await play.engine.find_executions(text)
