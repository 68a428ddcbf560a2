"""Metrics: gauges per lane, and counters of outcomes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.metrics import queue_depth
from flowfabric.engine.metrics.recorder import Metrics
from flowfabric.rules.scheduling.queue_depth import CountedIndex
from tests.scenarios.env import Env
from tests.scenarios.flow_env import FlowEnv
from tests.scenarios.waits import Waits

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}}


async def gauge(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    """Return a gauge by its labels, without zeros."""
    await engine.gauges.refresh_gauges(max_age_s=0)
    found = {labels: level for (metric, labels), level in engine.metrics.gauges.items() if metric == name}
    return {tuple(value for _, value in labels): level for labels, level in found.items() if level}


def counter(engine: Engine, name: str) -> dict[tuple[str, ...], int]:
    """Return a counter by its labels."""
    found = {labels: count for (metric, labels), count in engine.metrics.counters.items() if metric == name}
    return {tuple(value for _, value in labels): count for labels, count in found.items()}


async def test_every_unfinished_execution_is_counted_once(env: Env, waits: Waits) -> None:
    engine = env.engine
    for _ in range(3):
        await env.create()
    await env.create(lane="mail", policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    await env.create(lane="mail", delay_until=env.now + 60_000)
    blocked = await env.create()
    await engine.block_execution_for_admission(blocked, reason="waiting_for_budget", detail="d")
    await waits.create_suspended()
    await env.create_and_claim(lane="mail", ttl=600_000)
    await env.revoke_lease(await env.create_and_claim())
    await env.delay(await env.create_and_claim(), 1000)
    await engine.complete((await env.create_and_claim()).handle)
    await env.expire_lease(await env.create_and_claim(ttl=100))

    assert await gauge(engine, "ff_queue_depth") == {
        ("default", "waiting"): 3,
        ("mail", "waiting"): 1,
        ("mail", "delayed"): 1,
        ("default", "rate_limited"): 1,
        ("default", "delayed"): 1,
    }
    assert await gauge(engine, "ff_active_executions") == {("mail",): 1, ("default",): 2}
    assert await gauge(engine, "ff_suspended_executions") == {("default",): 1}


async def test_members_waiting_for_dependencies_are_counted_by_lane(flow: FlowEnv) -> None:
    await flow.begin_join("ab", "c")

    assert await gauge(flow.engine, "ff_queue_depth") == {("default", "waiting"): 2, ("default", "waiting_children"): 1}


async def test_live_workers_are_counted_in_each_of_their_lanes(env: Env) -> None:
    async def register(instance: str, *lanes: str, ttl: int) -> None:
        await env.engine.register_worker(
            worker_instance_id=instance, worker_id="w", lanes=lanes, liveness_ttl_ms=ttl, namespace=f"of {instance}"
        )

    await register("w1", "mail", "sms", ttl=60_000)
    await register("w2", "mail", ttl=1_000)
    assert await gauge(env.engine, "ff_workers") == {("mail",): 2, ("sms",): 1}

    env.clock.advance_ms(1_000)
    assert await gauge(env.engine, "ff_workers") == {("mail",): 1, ("sms",): 1}


async def test_gauges_of_an_empty_lane_are_zero(env: Env) -> None:
    await env.engine.complete((await env.create_and_claim(lane="mail")).handle)
    await env.engine.gauges.refresh_gauges()

    mail = {name: level for (name, labels), level in env.engine.metrics.gauges.items() if ("lane", "mail") in labels}
    assert mail == dict.fromkeys(("ff_queue_depth", "ff_active_executions", "ff_suspended_executions", "ff_workers"), 0)


async def test_concurrent_gauge_refreshes_share_one_read(env: Env) -> None:
    await env.create()
    await asyncio.gather(*(env.engine.gauges.refresh_gauges() for _ in range(5)))
    await env.engine.gauges.refresh_gauges()

    assert env.store.calls["count_grouped"] == len(CountedIndex)


async def test_counts_of_deep_queues_are_capped_and_hide_no_other_lane(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_depth, "MAX_COUNTED", 6)
    monkeypatch.setattr(queue_depth, "MIN_COUNTED_PER_QUEUE", 2)
    for lane in ("mail", "mail", "mail", "mail", "sms", "sms"):
        await env.create(lane=lane)

    assert await gauge(env.engine, "ff_queue_depth") == {("mail", "waiting"): 3, ("sms", "waiting"): 2}


async def test_gauges_are_empty_while_the_store_is_unavailable(env: Env) -> None:
    await env.create()
    await env.engine.gauges.refresh_gauges()

    async def away(*args: Any) -> Any:
        raise errors.StoreUnavailable("gone", source="transport")

    env.store.count_grouped = away  # type: ignore[attr-defined]
    with pytest.raises(errors.StoreUnavailable):
        await env.engine.gauges.refresh_gauges(max_age_s=0)
    assert env.engine.metrics.gauges == {}


async def test_outcomes_of_attempts_and_executions_are_counted_by_lane(env: Env) -> None:
    engine = env.engine
    await engine.complete((await env.create_and_claim()).handle, result=b"r")
    await engine.fail((await env.create_and_claim(lane="mail")).handle, reason="no", category="permanent")
    await engine.fail((await env.create_and_claim(policy=RETRY)).handle, reason="no")
    await engine.fail((await env.create_and_claim()).handle, reason="late", category="timeout")
    await engine.expire_execution((await env.create_and_claim()).execution_id, reason="attempt_timeout")
    await engine.cancel((await env.create_and_claim()).handle, reason="r")
    await engine.cancel_execution(await env.create(lane="mail"))  # no attempt started
    await env.delay(await env.create_and_claim())  # the attempt continues
    lost = await env.create_and_claim()
    await env.expire_lease(lost)
    await env.grant_and_reclaim(lost.execution_id)  # it was taken over

    assert counter(engine, "ff_attempt_outcome") == {
        ("default", "ok"): 1,
        ("mail", "error"): 1,
        ("default", "retry"): 1,
        ("default", "timeout"): 2,
        ("default", "cancelled"): 1,
    }
    assert counter(engine, "ff_completions") == {
        ("default", "success"): 1,
        ("mail", "failed"): 1,
        ("default", "failed"): 1,
        ("default", "expired"): 1,
        ("default", "cancelled"): 1,
        ("mail", "cancelled"): 1,
    }


async def test_completions_of_flow_members_are_counted(flow: FlowEnv) -> None:
    await flow.begin("abc", edges=("ab",))
    await flow.succeed("c", result=b"r")
    await flow.fail_and_cascade("a")

    assert counter(flow.engine, "ff_completions") == {
        ("default", "success"): 1,
        ("default", "failed"): 1,
        ("default", "skipped"): 1,
    }


async def test_cancelled_members_are_counted_with_their_attempts(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.claim("a")
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    await flow.sweep("cancel_reconciler", after_ms=30_000)

    assert counter(flow.engine, "ff_completions") == {("default", "cancelled"): 2}
    assert counter(flow.engine, "ff_attempt_outcome") == {("default", "cancelled"): 1}


async def test_execution_duration_is_measured_from_submission(env: Env) -> None:
    claim = await env.create_and_claim()
    env.clock.advance_ms(2_000)
    await env.engine.complete(claim.handle)
    many = [await env.create_and_claim(lane="mail") for _ in range(2)]
    env.clock.advance_ms(300)
    await env.engine.complete_many([(one.handle, b"") for one in many])

    timings = env.engine.metrics.histograms
    one, two = (timings["ff_execution_e2e_duration", (("lane", lane),)] for lane in ("default", "mail"))
    assert (one.count, round(one.total_s, 3)) == (1, 2.0)
    assert (two.count, round(two.total_s, 3)) == (2, 0.6)


async def test_lease_renewals_are_counted_by_result(env: Env) -> None:
    claim, ended = await env.create_and_claim(), await env.create_and_claim()
    await env.engine.complete(ended.handle)
    await env.engine.renew(claim.handle)
    await env.engine.renew_many([claim.handle, ended.handle])

    assert counter(env.engine, "ff_lease_renewal") == {("ok",): 2, ("error",): 1}


def test_lanes_beyond_a_hundred_share_one_metric_label() -> None:
    meters = Metrics()
    names = [meters.lane_label(f"l{number}") for number in range(150)]

    assert names[:100] == [f"l{number}" for number in range(100)]
    assert set(names[100:]) == {"other"}
    assert meters.lane_label("l7") == "l7"
