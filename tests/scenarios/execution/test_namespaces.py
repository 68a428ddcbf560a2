"""Claims of some namespaces: their work and nothing else, in the order in which anybody would get it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.claiming import claimer, ready_queues
from flowfabric.engine.claiming.ready_queues import LOOKAHEAD_ROWS
from flowfabric.model.answers.execution import Claimed
from tests.scenarios.play import LEASE_MS, Play

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}


async def claims(play: Play, *namespaces: str, limit: int = 10, worker: str = "wa", **given: Any) -> list[Claimed]:
    """What a worker of these namespaces gets."""
    return await play.engine.claim_from_lanes(
        ["default"],
        limit,
        worker_id=worker,
        worker_instance_id=f"{worker}-1",
        lease_ttl_ms=LEASE_MS,
        namespaces=namespaces,
        **given,
    )


def names(claimed: list[Claimed]) -> list[str]:
    return [one.execution_id for one in claimed]


async def test_a_claim_brings_work_of_its_namespaces_in_claim_order(play: Play) -> None:
    low = await play.create(namespace="mine")
    await play.create(namespace="theirs", priority=9000)
    high = await play.create(namespace="mine", priority=5)
    also = await play.create(namespace="ours", priority=7)

    assert names(await claims(play, "mine", "ours", limit=2)) == [also, high]
    assert names(await claims(play, "mine", "ours")) == [low]
    assert await claims(play, "mine", "ours") == []
    assert await claims(play) == [], "of no namespace there is no work"


async def test_however_many_kinds_of_work_there_are_the_best_of_a_namespace_comes_first(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 3)
    mine = {
        n: await play.create(namespace="mine", priority=n, policy={"fairness_key": f"t{n}"}) for n in (4, 1, 3, 0, 2)
    }
    for n in range(5):
        await play.create(namespace="theirs", priority=9 - n, policy={"fairness_key": f"t{n}"})

    got = [names(await claims(play, "mine", limit=1)) for _ in mine]

    assert got == [[mine[n]] for n in reversed(range(5))]


async def test_work_is_found_behind_any_amount_of_others(play: Play) -> None:
    for _ in range(3 * LOOKAHEAD_ROWS):
        await play.create(namespace="theirs", priority=9)
    mine = await play.create(namespace="mine")

    assert names(await claims(play, "mine", limit=1)) == [mine]
    assert len(await play.eligible()) == 3 * LOOKAHEAD_ROWS


async def test_retries_delays_and_lost_leases_come_this_way_too(play: Play) -> None:
    failed = await play.claimed(namespace="mine", policy=RETRY)
    await play.engine.fail(failed.handle, reason="r")
    delayed = await play.claimed(namespace="mine")
    await play.delayed(delayed, 1)
    lost, revoked = await play.claimed(namespace="mine", ttl=1), await play.claimed(namespace="mine")
    theirs = await play.claimed(namespace="theirs", ttl=1)
    await play.revoked(revoked)
    play.clock.advance_ms(10)
    for one in (failed, delayed):
        await play.engine.promote_delayed(one.execution_id)

    got = {one.execution_id: (one.attempt_index, one.attempt_type.value) for one in await claims(play, "mine")}

    assert got == {
        failed.execution_id: (1, "retry"),
        delayed.execution_id: (0, "initial"),
        lost.execution_id: (1, "reclaim"),
        revoked.execution_id: (1, "reclaim"),
    }
    assert names(await claims(play, "theirs")) == [theirs.execution_id]


async def test_capabilities_and_limits_are_asked(play: Play) -> None:
    quota = "550e8400-e29b-41d4-a716-446655440000"
    await play.engine.create_quota_policy(quota, window_seconds=0, max_requests_per_window=0, max_concurrent=1)
    await play.create(namespace="mine", policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    for _ in range(2):
        await play.create(namespace="mine", policy={"quota_policy_ids": [quota]})

    [first] = await claims(play, "mine")
    assert await claims(play, "mine") == []
    await play.engine.complete(first.handle)
    assert len(await claims(play, "mine", limit=1, max_wait_ms=10_000)) == 1, "there is room for it again"
    assert len(await claims(play, "mine", capabilities=["gpu"])) == 1


async def test_workers_of_one_namespace_share_its_work(play: Play) -> None:
    mine = {await play.create(namespace="mine") for _ in range(20)}
    await play.create(namespace="theirs")
    got = await asyncio.gather(*(claims(play, "mine", limit=5, worker=f"w{number}") for number in range(6)))
    rest = await claims(play, "mine", limit=20)

    claimed = [name for part in (*got, rest) for name in names(part)]
    assert (len(claimed), set(claimed)) == (20, mine)


async def test_a_claim_waits_for_work_of_its_namespaces(play: Play) -> None:
    waiting = asyncio.create_task(claims(play, "mine", max_wait_ms=20_000))
    await asyncio.sleep(0)
    await play.create(namespace="theirs")
    mine = await play.create(namespace="mine")

    async with asyncio.timeout(10):
        assert names(await waiting) == [mine]


async def test_grants_are_given_within_namespaces(play: Play) -> None:
    await play.create(namespace="theirs", priority=9)
    mine = await play.create(namespace="mine")

    async def granted() -> Any:
        return await play.engine.claim_for_worker(
            "default", worker_id="w", worker_instance_id="w-1", namespaces=["mine"]
        )

    assert (await granted()).execution_id == mine
    assert await granted() is None


async def test_a_look_that_took_long_and_found_nothing_is_not_repeated_at_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "CHEAP_SCAN_S", 0.0)
    looks: list[float] = []
    clock, heads = asyncio.get_running_loop().time, play.engine.queues.queue_heads

    async def slow(lines: Any, *given: Any, **named: Any) -> Any:
        if lines:
            looks.append(clock())
            await asyncio.sleep(0.02)
        return await heads(lines, *given, **named)

    monkeypatch.setattr(play.engine.queues, "queue_heads", slow)
    await play.create(namespace="theirs")
    for _ in range(2):
        assert await claims(play, "mine") == []

    assert looks[1] - looks[0] > 0.02 * claimer.PAUSE_FACTOR
    mine = await play.create(namespace="other")
    assert names(await claims(play, "other")) == [mine], "others need not wait for that"


async def test_what_is_claimed_is_not_lost_because_the_store_is_away_for_the_next(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, heads, looks = await play.create(namespace="mine"), play.engine.queues.queue_heads, list[int]()

    async def failing(*given: Any, **named: Any) -> Any:
        looks.append(len(looks))
        if len(looks) > 1:
            raise errors.StoreUnavailable("gone", source="transport")
        return await heads(*given, **named)

    monkeypatch.setattr(play.engine.queues, "queue_heads", failing)
    assert names(await claims(play, "mine")) == [mine]
    assert len(looks) == 2
    with pytest.raises(errors.StoreUnavailable):
        await claims(play, "mine")


@pytest.mark.parametrize("names", ["mine", [7], [None], 3])
async def test_namespaces_that_are_none_are_refused(play: Play, names: Any) -> None:
    async with play.refused(errors.InvalidInput):
        await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w-1", namespaces=names)
