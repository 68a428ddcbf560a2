"""Facts: the last value stands, the number never falls, and a set that was counted is skipped however late it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.gate import Fact
from flowfabric.rules.durable.facts import MAX_FACT_BYTES, FactArgs
from flowfabric.testing.flaky_store import FlakyStore, Loss
from tests.scenarios.durable_function import DurableFunction
from tests.scenarios.env import Env


def args(value: bytes, count: int = 1, *, name: str = "total", place: str = "") -> FactArgs:
    return FactArgs(name=name, value=value, encoding="json", place=place or name, count=count)


async def put(function: DurableFunction, value: bytes, count: int = 1, **options: Any) -> Fact:
    return await function.engine.set_fact(function.claim.handle, args(value, count, **options))


async def shown(function: DurableFunction) -> list[tuple[str, int, bytes]]:
    return [(fact.name, fact.number, fact.value) for fact in await function.engine.list_facts(function.e)]


async def test_the_last_value_is_kept_and_its_number_grows(function: DurableFunction) -> None:
    for count, value in enumerate((b"1", b"2", b"3"), 1):
        assert (await put(function, value, count)).number == count
    await put(function, b'"yes"', name="paid")

    assert await shown(function) == [("paid", 1, b'"yes"'), ("total", 3, b"3")]


async def test_a_set_that_was_counted_changes_nothing(function: DurableFunction, env: Env) -> None:
    await put(function, b"1", 1)
    await put(function, b"2", 2)
    await function.reclaim()

    async with env.unchanged():
        for count, value in ((1, b"1"), (2, b"2")):
            assert (await put(function, value, count)).value == b"2"
    assert (await put(function, b"3", 3)).number == 3


async def test_each_place_counts_its_own_sets(function: DurableFunction) -> None:
    for place in ("total", "gather#0.1/total"):
        for count in (1, 2):
            await put(function, f"{count}".encode(), count, place=place)

    assert await shown(function) == [("total", 4, b"2")]


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_set_whose_reply_is_lost_is_made_once(function: DurableFunction, env: Env, loss: Loss) -> None:
    flaky = FlakyStore(env.engine.store)
    engine = Engine(flaky, minter=SeededMinter(5))
    flaky.lose("commit", loss)

    assert (await engine.set_fact(function.claim.handle, args(b"1"))).number == 1
    assert (await engine.set_fact(function.claim.handle, args(b"2", 2))).number == 2
    assert await shown(function) == [("total", 2, b"2")]
    assert [one for _, one in flaky.losses] == [loss]


async def test_a_request_that_arrives_after_the_next_set_changes_nothing(function: DurableFunction, env: Env) -> None:
    async def repeat_and_go_on() -> Fact:
        await Engine(env.engine.store).set_fact(function.claim.handle, args(b"1", 1))
        return await Engine(env.engine.store).set_fact(function.claim.handle, args(b"2", 2))

    late, _ = await env.race(put(function, b"1", 1), repeat_and_go_on)

    assert (late.number, late.value) == (2, b"2")
    assert await shown(function) == [("total", 2, b"2")]


async def test_sets_of_two_branches_at_once_are_both_counted(function: DurableFunction) -> None:
    places = [f"gather#0.{member}/total" for member in range(5)]

    facts = await asyncio.gather(*(put(function, b"1", place=place) for place in places))

    assert sorted(fact.number for fact in facts) == [1, 2, 3, 4, 5]


async def test_a_worker_that_lost_its_lease_sets_nothing(function: DurableFunction, env: Env) -> None:
    zombie = function.claim.handle
    await put(function, b"1")
    await function.reclaim()

    async with env.refused(errors.StaleLease):
        await function.engine.set_fact(zombie, args(b"9", 9))


async def test_a_zombie_that_is_late_in_its_commit_sets_nothing(function: DurableFunction, env: Env) -> None:
    await put(function, b"1")
    operator = Env(Engine(env.engine.store), env.clock)
    late, _ = await env.race(put(function, b"9", 2), lambda: operator.revoke_lease(function.claim))

    assert isinstance(late, errors.LeaseRevoked)
    assert await shown(function) == [("total", 1, b"1")]


async def test_a_fact_that_is_too_large_names_the_way_out(function: DurableFunction, env: Env) -> None:
    await put(function, b"x" * MAX_FACT_BYTES)
    async with env.refused(errors.FactTooLarge):
        with pytest.raises(errors.FactTooLarge, match="set a reference to it") as refused:
            await put(function, b"x" * (MAX_FACT_BYTES + 1), 2)
        assert "total: 65537 bytes, the limit is 65536" in str(refused.value)
        raise refused.value


async def test_a_fact_is_read_when_it_is_newer_than_what_was_seen(function: DurableFunction) -> None:
    assert (await function.engine.read_fact(function.e, "total")).fact is None
    await put(function, b"1")

    [first] = await function.engine.list_facts(function.e)
    assert (await function.engine.read_fact(function.e, "total")).fact == first
    assert (await function.engine.read_fact(function.e, "total", after=1)).fact is None


async def test_a_reader_waits_for_the_next_value_or_for_the_end(function: DurableFunction) -> None:
    await put(function, b"1")
    reading = asyncio.ensure_future(function.engine.read_fact(function.e, "total", after=1, max_wait_ms=20_000))
    await asyncio.sleep(0)
    await put(function, b"2", 2)
    assert (await reading).fact == (await function.engine.list_facts(function.e))[0]

    end = asyncio.ensure_future(function.engine.read_fact(function.e, "total", after=2, max_wait_ms=20_000))
    await asyncio.sleep(0)
    await function.engine.complete(function.claim.handle)
    assert ((await end).fact, (await end).has_ended) == (None, True)


async def test_a_new_life_counts_sets_from_zero_and_the_number_rises(function: DurableFunction, env: Env) -> None:
    await put(function, b"1")
    await function.engine.complete(function.claim.handle)
    await function.engine.replay_execution(function.e)
    function.claim = await env.grant_and_claim(function.e)

    assert await shown(function) == [("total", 1, b"1")]
    assert (await put(function, b"2")).number == 2


async def test_facts_are_kept_as_long_as_the_run(function: DurableFunction, env: Env) -> None:
    await put(function, b"1")
    await function.engine.complete(function.claim.handle)
    assert await shown(function) == [("total", 1, b"1")]

    env.clock.advance_ms(25 * 3_600_000)
    await function.engine.sweep_once("retention_trimmer")

    assert (await env.dump())["ff_fact"] == []
    with pytest.raises(errors.NotFound):
        await function.engine.list_facts(function.e)
