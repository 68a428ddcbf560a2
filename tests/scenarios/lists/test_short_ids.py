"""Short ids: a unique prefix identifies an execution."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.pages import IdMatches
from tests.scenarios.env import Env

ONE = "0197aaaa-0000-7000-8000-000000000001"
TWO = "0197aaaa-1111-7000-8000-000000000002"
OTHER = "0197bbbb-0000-7000-8000-000000000003"


async def create_with_uuid(env: Env, partition: int, uuid: str, **options: Any) -> str:
    execution = f"{{fp:{partition}}}:{uuid}"
    await env.engine.create_execution(execution_id=execution, lane_id="default", **options)
    return execution


async def find(env: Env, prefix: str, **options: object) -> list[str]:
    matches = await env.engine.find_executions(prefix, **options)  # type: ignore[arg-type]
    assert not matches.more
    return matches.execution_ids


async def test_an_id_is_found_by_its_prefix_with_or_without_the_partition(env: Env) -> None:
    one, two = await create_with_uuid(env, 86, ONE), await create_with_uuid(env, 7, TWO)

    async with env.unchanged():
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
            assert await find(env, short) == [one], short
        assert await find(env, "0197aaaa") == [two, one]  # in id order
        assert await find(env, "0197bbbb") == []
        assert await find(env, "8:0197") == []


async def test_matches_beyond_the_limit_are_reported_as_more(env: Env) -> None:
    many = [await create_with_uuid(env, 86, f"0197aaaa-0000-7000-8000-{n:012x}") for n in range(4)]

    assert await env.engine.find_executions("0197", limit=3) == IdMatches(many[:3], more=True)
    assert await env.engine.find_executions("0197", limit=4) == IdMatches(many)


async def test_prefix_matches_are_limited_to_the_given_namespaces(env: Env) -> None:
    one, two = await create_with_uuid(env, 86, ONE, namespace="a"), await create_with_uuid(env, 86, TWO, namespace="b")

    async with env.unchanged():
        assert await find(env, "0197", namespaces=["b"]) == [two]
        assert await find(env, "0197", namespaces=["a", "b"]) == [one, two]
        assert await find(env, "0197", namespaces=["c"]) == []


async def test_matches_are_found_behind_those_of_other_namespaces(env: Env) -> None:
    for n in range(3):
        await create_with_uuid(env, 86, f"0197aaaa-0000-7000-8000-{n:012x}", namespace="b")
    own = await create_with_uuid(env, 86, OTHER, namespace="a")

    async with env.unchanged():
        assert await find(env, "0197", namespaces=["a"], limit=1) == [own]


@pytest.mark.parametrize(
    "text", ["", "xyz", "86:xyz", "{fp:86", "{b:1}:01", "0" * 33, "86:86:01", "{fp:70000}:01", "%"]
)
async def test_an_invalid_id_prefix_is_refused(env: Env, text: str) -> None:
    with pytest.raises(errors.InvalidInput):
        await env.engine.find_executions(text)
