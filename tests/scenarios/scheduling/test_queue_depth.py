"""What people watch: levels of each lane, and what became of attempts and executions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.metrics import queue_depth
from flowfabric.engine.metrics.registry import Metrics
from flowfabric.rules.scheduling.queue_depth import CountedIndex
from tests.scenarios.flowing import Flowing
from tests.scenarios.play import Play
from tests.scenarios.waits import Waits

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}}


async def shown(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    """A level by its labels, as it is now; zeros left out."""
    await engine.gauges.refresh_gauges(max_age_s=0)
    found = {labels: level for (known, labels), level in engine.metrics.gauges.items() if known == name}
    return {tuple(value for _, value in labels): level for labels, level in found.items() if level}


def counted(engine: Engine, name: str) -> dict[tuple[str, ...], int]:
    """A counter by its labels."""
    found = {labels: count for (known, labels), count in engine.metrics.counters.items() if known == name}
    return {tuple(value for _, value in labels): count for labels, count in found.items()}


async def test_every_execution_that_has_not_ended_is_counted_once(play: Play, waits: Waits) -> None:
    engine = play.engine
    for _ in range(3):
        await play.create()
    await play.create(lane="mail", policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    await play.create(lane="mail", delay_until=play.now + 60_000)
    blocked = await play.create()
    await engine.block_execution_for_admission(blocked, reason="waiting_for_budget", detail="d")
    await waits.suspended()
    await play.claimed(lane="mail", ttl=600_000)
    await play.revoked(await play.claimed())
    await play.delayed(await play.claimed(), 1000)
    await engine.complete((await play.claimed()).handle)
    await play.expired(await play.claimed(ttl=100))

    assert await shown(engine, "ff_queue_depth") == {
        ("default", "waiting"): 3,
        ("mail", "waiting"): 1,
        ("mail", "delayed"): 1,
        ("default", "rate_limited"): 1,
        ("default", "delayed"): 1,
    }
    assert await shown(engine, "ff_active_executions") == {("mail",): 1, ("default",): 2}
    assert await shown(engine, "ff_suspended_executions") == {("default",): 1}


async def test_members_that_wait_for_others_are_counted_by_their_lane(flow: Flowing) -> None:
    await flow.begin("abc")
    await flow.join("ab", "c")

    assert await shown(flow.engine, "ff_queue_depth") == {("default", "waiting"): 2, ("default", "waiting_children"): 1}


async def test_workers_are_counted_in_each_of_their_lanes_while_they_live(play: Play) -> None:
    async def register(instance: str, *lanes: str, ttl: int) -> None:
        await play.engine.register_worker(
            worker_instance_id=instance, worker_id="w", lanes=lanes, liveness_ttl_ms=ttl, namespace=f"of {instance}"
        )

    await register("w1", "mail", "sms", ttl=60_000)
    await register("w2", "mail", ttl=1_000)
    assert await shown(play.engine, "ff_workers") == {("mail",): 2, ("sms",): 1}

    play.clock.advance_ms(1_000)
    assert await shown(play.engine, "ff_workers") == {("mail",): 1, ("sms",): 1}


async def test_a_lane_that_is_empty_stands_at_zero(play: Play) -> None:
    await play.engine.complete((await play.claimed(lane="mail")).handle)
    await play.engine.gauges.refresh_gauges()

    mail = {name: level for (name, labels), level in play.engine.metrics.gauges.items() if ("lane", "mail") in labels}
    assert mail == dict.fromkeys(("ff_queue_depth", "ff_active_executions", "ff_suspended_executions", "ff_workers"), 0)


async def test_levels_are_read_seldom_and_together(play: Play) -> None:
    await play.create()
    await asyncio.gather(*(play.engine.gauges.refresh_gauges() for _ in range(5)))
    await play.engine.gauges.refresh_gauges()

    assert play.store.calls["count_grouped"] == len(CountedIndex)


async def test_deep_lines_stand_at_their_bound_and_hide_no_other_lane(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_depth, "MAX_COUNTED", 6)
    monkeypatch.setattr(queue_depth, "MIN_COUNTED_PER_QUEUE", 2)
    for lane in ("mail", "mail", "mail", "mail", "sms", "sms"):
        await play.create(lane=lane)

    assert await shown(play.engine, "ff_queue_depth") == {("mail", "waiting"): 3, ("sms", "waiting"): 2}


async def test_no_levels_are_shown_while_the_store_is_away(play: Play) -> None:
    await play.create()
    await play.engine.gauges.refresh_gauges()

    async def away(*given: Any) -> Any:
        raise errors.StoreUnavailable("gone", source="transport")

    play.store.count_grouped = away  # type: ignore[attr-defined]
    with pytest.raises(errors.StoreUnavailable):
        await play.engine.gauges.refresh_gauges(max_age_s=0)
    assert play.engine.metrics.gauges == {}


async def test_what_became_of_attempts_and_executions_is_counted_by_lane(play: Play) -> None:
    engine = play.engine
    await engine.complete((await play.claimed()).handle, result=b"r")
    await engine.fail((await play.claimed(lane="mail")).handle, reason="no", category="permanent")
    await engine.fail((await play.claimed(policy=RETRY)).handle, reason="no")
    await engine.fail((await play.claimed()).handle, reason="late", category="timeout")
    await engine.expire_execution((await play.claimed()).execution_id, reason="attempt_timeout")
    await engine.cancel((await play.claimed()).handle, reason="r")
    await engine.cancel_execution(await play.create(lane="mail"))  # no attempt ever began
    await play.delayed(await play.claimed())  # the attempt goes on
    lost = await play.claimed()
    await play.expired(lost)
    await play.reclaimed(lost.execution_id)  # it was taken over

    assert counted(engine, "ff_attempt_outcome") == {
        ("default", "ok"): 1,
        ("mail", "error"): 1,
        ("default", "retry"): 1,
        ("default", "timeout"): 2,
        ("default", "cancelled"): 1,
    }
    assert counted(engine, "ff_completions") == {
        ("default", "success"): 1,
        ("mail", "failed"): 1,
        ("default", "failed"): 1,
        ("default", "expired"): 1,
        ("default", "cancelled"): 1,
        ("mail", "cancelled"): 1,
    }


async def test_ends_of_members_are_counted_too(flow: Flowing) -> None:
    await flow.begin("abc")
    await flow.chain("ab")
    await flow.succeed("c", result=b"r")
    await flow.fail("a")
    await flow.cascade("a")

    assert counted(flow.engine, "ff_completions") == {
        ("default", "success"): 1,
        ("default", "failed"): 1,
        ("default", "skipped"): 1,
    }


async def test_cancelled_members_are_counted_with_their_attempts(flow: Flowing) -> None:
    await flow.begin("ab")
    await flow.run("a")
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    flow.clock.advance_ms(30_000)
    await flow.sweep("cancel_reconciler")

    assert counted(flow.engine, "ff_completions") == {("default", "cancelled"): 2}
    assert counted(flow.engine, "ff_attempt_outcome") == {("default", "cancelled"): 1}


async def test_how_long_executions_took_is_measured_from_their_submit(play: Play) -> None:
    held = await play.claimed()
    play.clock.advance_ms(2_000)
    await play.engine.complete(held.handle)
    many = [await play.claimed(lane="mail") for _ in range(2)]
    play.clock.advance_ms(300)
    await play.engine.complete_many([(one.handle, b"") for one in many])

    timings = play.engine.metrics.histograms
    one, two = (timings["ff_execution_e2e_duration", (("lane", lane),)] for lane in ("default", "mail"))
    assert (one.count, round(one.total_s, 3)) == (1, 2.0)
    assert (two.count, round(two.total_s, 3)) == (2, 0.6)


async def test_renewals_are_counted_where_they_are_made(play: Play) -> None:
    held, ended = await play.claimed(), await play.claimed()
    await play.engine.complete(ended.handle)
    await play.engine.renew(held.handle)
    await play.engine.renew_many([held.handle, ended.handle])

    assert counted(play.engine, "ff_lease_renewal") == {("ok",): 2, ("error",): 1}


def test_lanes_beyond_a_hundred_have_no_name_of_their_own() -> None:
    meters = Metrics()
    names = [meters.lane_label(f"l{number}") for number in range(150)]

    assert names[:100] == [f"l{number}" for number in range(100)]
    assert set(names[100:]) == {"other"}
    assert meters.lane_label("l7") == "l7"
