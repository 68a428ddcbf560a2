"""Claims limited to namespaces return only their executions, in claim order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.claiming import claimer, ready_queues
from flowfabric.engine.claiming.ready_queues import LOOKAHEAD_ROWS
from flowfabric.model.answers.execution import Claimed
from tests.scenarios.env import LEASE_MS, Env

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}


async def claim_from(env: Env, *namespaces: str, limit: int = 10, worker: str = "wa", **options: Any) -> list[Claimed]:
    """Claim executions of these namespaces."""
    return await env.engine.claim_from_lanes(
        ["default"],
        limit,
        worker_id=worker,
        worker_instance_id=f"{worker}-1",
        lease_ttl_ms=LEASE_MS,
        namespaces=namespaces,
        **options,
    )


def execution_ids(claimed: list[Claimed]) -> list[str]:
    return [one.execution_id for one in claimed]


async def test_a_claim_returns_executions_of_its_namespaces_in_claim_order(env: Env) -> None:
    low = await env.create(namespace="mine")
    await env.create(namespace="theirs", priority=9000)
    high = await env.create(namespace="mine", priority=5)
    also = await env.create(namespace="ours", priority=7)

    assert execution_ids(await claim_from(env, "mine", "ours", limit=2)) == [also, high]
    assert execution_ids(await claim_from(env, "mine", "ours")) == [low]
    assert await claim_from(env, "mine", "ours") == []
    assert await claim_from(env) == [], "no namespaces, no executions"


async def test_the_first_execution_of_a_namespace_is_claimed_first_across_many_queues(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 3)
    mine = {
        n: await env.create(namespace="mine", priority=n, policy={"fairness_key": f"t{n}"}) for n in (4, 1, 3, 0, 2)
    }
    for n in range(5):
        await env.create(namespace="theirs", priority=9 - n, policy={"fairness_key": f"t{n}"})

    got = [execution_ids(await claim_from(env, "mine", limit=1)) for _ in mine]

    assert got == [[mine[n]] for n in reversed(range(5))]


async def test_executions_of_a_namespace_are_found_behind_many_others(env: Env) -> None:
    for _ in range(3 * LOOKAHEAD_ROWS):
        await env.create(namespace="theirs", priority=9)
    mine = await env.create(namespace="mine")

    assert execution_ids(await claim_from(env, "mine", limit=1)) == [mine]
    assert len(await env.eligible()) == 3 * LOOKAHEAD_ROWS


async def test_a_namespaced_claim_returns_retries_resumed_attempts_and_takeovers(env: Env) -> None:
    failed = await env.create_and_claim(namespace="mine", policy=RETRY)
    await env.engine.fail(failed.handle, reason="r")
    delayed = await env.create_and_claim(namespace="mine")
    await env.delay(delayed, 1)
    lost, revoked = await env.create_and_claim(namespace="mine", ttl=1), await env.create_and_claim(namespace="mine")
    theirs = await env.create_and_claim(namespace="theirs", ttl=1)
    await env.revoke_lease(revoked)
    env.clock.advance_ms(10)
    for one in (failed, delayed):
        await env.engine.promote_delayed(one.execution_id)

    got = {one.execution_id: (one.attempt_index, one.attempt_type.value) for one in await claim_from(env, "mine")}

    assert got == {
        failed.execution_id: (1, "retry"),
        delayed.execution_id: (0, "initial"),
        lost.execution_id: (1, "reclaim"),
        revoked.execution_id: (1, "reclaim"),
    }
    assert execution_ids(await claim_from(env, "theirs")) == [theirs.execution_id]


async def test_a_namespaced_claim_respects_capabilities_and_quotas(env: Env) -> None:
    quota = "550e8400-e29b-41d4-a716-446655440000"
    await env.engine.create_quota_policy(quota, window_seconds=0, max_requests_per_window=0, max_concurrent=1)
    await env.create(namespace="mine", policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    for _ in range(2):
        await env.create(namespace="mine", policy={"quota_policy_ids": [quota]})

    [first] = await claim_from(env, "mine")
    assert await claim_from(env, "mine") == []
    await env.engine.complete(first.handle)
    assert len(await claim_from(env, "mine", limit=1, max_wait_ms=10_000)) == 1, "the slot is free again"
    assert len(await claim_from(env, "mine", capabilities=["gpu"])) == 1


async def test_concurrent_workers_of_one_namespace_claim_each_execution_once(env: Env) -> None:
    mine = {await env.create(namespace="mine") for _ in range(20)}
    await env.create(namespace="theirs")
    got = await asyncio.gather(*(claim_from(env, "mine", limit=5, worker=f"w{number}") for number in range(6)))
    rest = await claim_from(env, "mine", limit=20)

    claimed = [name for part in (*got, rest) for name in execution_ids(part)]
    assert (len(claimed), set(claimed)) == (20, mine)


async def test_a_claim_waits_until_its_namespace_has_work(env: Env) -> None:
    waiting = asyncio.create_task(claim_from(env, "mine", max_wait_ms=20_000))
    await asyncio.sleep(0)
    await env.create(namespace="theirs")
    mine = await env.create(namespace="mine")

    async with asyncio.timeout(10):
        assert execution_ids(await waiting) == [mine]


async def test_the_scheduler_grants_within_the_given_namespaces(env: Env) -> None:
    await env.create(namespace="theirs", priority=9)
    mine = await env.create(namespace="mine")

    async def granted() -> Any:
        return await env.engine.claim_for_worker(
            "default", worker_id="w", worker_instance_id="w-1", namespaces=["mine"]
        )

    assert (await granted()).execution_id == mine
    assert await granted() is None


async def test_a_slow_empty_scan_is_not_repeated_at_once(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimer, "CHEAP_SCAN_S", 0.0)
    scans: list[float] = []
    clock, heads = asyncio.get_running_loop().time, env.engine.queues.queue_heads

    async def slow(queues: Any, *args: Any, **kwargs: Any) -> Any:
        if queues:
            scans.append(clock())
            await asyncio.sleep(0.02)
        return await heads(queues, *args, **kwargs)

    monkeypatch.setattr(env.engine.queues, "queue_heads", slow)
    await env.create(namespace="theirs")
    for _ in range(2):
        assert await claim_from(env, "mine") == []

    assert scans[1] - scans[0] > 0.02 * claimer.PAUSE_FACTOR
    mine = await env.create(namespace="other")
    assert execution_ids(await claim_from(env, "other")) == [mine], "other namespaces are not delayed"


async def test_claimed_executions_are_returned_when_the_store_fails_on_the_next_scan(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, heads, scans = await env.create(namespace="mine"), env.engine.queues.queue_heads, list[int]()

    async def failing(*args: Any, **kwargs: Any) -> Any:
        scans.append(len(scans))
        if len(scans) > 1:
            raise errors.StoreUnavailable("gone", source="transport")
        return await heads(*args, **kwargs)

    monkeypatch.setattr(env.engine.queues, "queue_heads", failing)
    assert execution_ids(await claim_from(env, "mine")) == [mine]
    assert len(scans) == 2
    with pytest.raises(errors.StoreUnavailable):
        await claim_from(env, "mine")


@pytest.mark.parametrize("namespaces", ["mine", [7], [None], 3])
async def test_invalid_namespaces_are_refused(env: Env, namespaces: Any) -> None:
    async with env.refused(errors.InvalidInput):
        await env.engine.claim_admitted("default", worker_id="w", worker_instance_id="w-1", namespaces=namespaces)
