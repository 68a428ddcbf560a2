"""Explain: for each obstacle, the answer that names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.types import FreshWaitpoint, GateArgs, Single, SuspendArgs
from flowfabric.model import obstacles
from flowfabric.model.gate import GateKind
from flowfabric.model.obstacles import Obstacle
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.text import format_instant
from tests.scenarios.flowing import Flowing
from tests.scenarios.functions import Function
from tests.scenarios.limits.test_budget_suspension import RESET_MS, asleep
from tests.scenarios.limits.test_budgets import B, budget, report
from tests.scenarios.limits.test_quotas import Q, check, policy
from tests.scenarios.limits.test_reservations import R1, R2, reserve
from tests.scenarios.play import GRANT_MS, LEASE_MS, Play
from tests.scenarios.scheduling.test_claims import pull
from tests.scenarios.scheduling.test_grants import MISSING, requires
from tests.scenarios.scheduling.test_workers import register

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}


async def why(play: Play, e: str) -> Obstacle:
    async with play.untouched():
        explanation = await play.engine.explain(e)
    assert explanation.execution_id == e
    assert explanation.public_state == (await play.sheet(e)).public_state
    assert explanation.sentence == explanation.obstacle.sentence()
    assert explanation.sentence.endswith(".")
    said = explanation.sentence.replace(e, "")
    assert re.search(r"(?<![-\d])\d{13}(?!\d)|\w_\w|\n", said) is None, "milliseconds, a code or a traceback"
    return explanation.obstacle


async def serving(play: Play, instance: str = "i1", **given: Any) -> None:
    """A live worker of the lane."""
    await register(play, instance, liveness_ttl_ms=10**9, **given)


async def test_it_ended(play: Play) -> None:
    held = await play.claimed()
    await play.engine.fail(held.handle, reason="no luck", category="permanent")

    told = await why(play, held.execution_id)
    assert told == obstacles.EndedObstacle(TerminalOutcome.FAILED, play.now, "no luck")
    assert told.sentence() == f"It failed at {format_instant(play.now)}: no luck."


async def test_of_a_failure_a_sentence_has_the_first_line(play: Play) -> None:
    traceback = "ValueError: no luck\n  File app.py, line 3, in send"
    ended, waits = await play.claimed(), await play.claimed(policy=RETRY)
    await play.engine.fail(ended.handle, reason=traceback, category="permanent")
    await play.engine.fail(waits.handle, reason=traceback)

    told = [await why(play, held.execution_id) for held in (ended, waits)]
    assert [one.sentence() for one in told] == [
        f"It failed at {format_instant(play.now)}: ValueError: no luck.",
        f"It failed and is tried again at {format_instant(play.now + 500)}: ValueError: no luck.",
    ]
    assert (
        obstacles.DelayedObstacle(play.now + 500, "waiting_for_retry_backoff", traceback) in told
    )  # the facts have all of it


async def test_it_is_running(play: Play) -> None:
    held = await play.claimed()

    assert await why(play, held.execution_id) == obstacles.Running("wa", "wa-1", play.now, play.now + LEASE_MS)


async def test_its_worker_is_gone(play: Play) -> None:
    lapsed, revoked = await play.claimed(), await play.claimed()
    await play.revoked(revoked, "drained")
    at = play.now
    play.clock.advance_ms(LEASE_MS + 5)

    assert await why(play, lapsed.execution_id) == obstacles.LeaseLost("wa-1", "expired", at + LEASE_MS)
    assert await why(play, revoked.execution_id) == obstacles.LeaseLost("wa-1", "revoked", at, "drained")


async def test_it_is_delayed(play: Play) -> None:
    later = await play.create(delay_until=play.now + 70)
    held = await play.claimed(policy=RETRY)
    await play.engine.fail(held.handle, reason="flaky")

    assert await why(play, later) == obstacles.DelayedObstacle(play.now + 70, "waiting_for_delay")
    again = obstacles.DelayedObstacle(play.now + 500, "waiting_for_retry_backoff", "flaky")
    assert await why(play, held.execution_id) == again


async def test_it_was_put_away_with_a_reason(play: Play) -> None:
    held = await play.claimed()
    await play.engine.delay_for(held.handle, 70, reason="the oven is hot")

    told = await why(play, held.execution_id)
    assert told == obstacles.DelayedObstacle(play.now + 70, "waiting_for_delay", None, "the oven is hot")
    assert told.sentence() == f"It is delayed until {format_instant(play.now + 70)}: the oven is hot."
    play.clock.advance_ms(70)
    await play.engine.promote_delayed(held.execution_id)
    assert "oven" not in (await why(play, held.execution_id)).sentence()


@pytest.mark.parametrize("reason", ["paused_by_operator", "paused_by_policy"])
async def test_it_is_paused(play: Play, reason: str) -> None:
    e = await play.create()
    await play.engine.block_execution_for_admission(e, reason=reason, detail="audit")

    assert await why(play, e) == obstacles.Paused(reason, "audit", play.now)


async def test_it_is_offered_to_somebody(play: Play) -> None:
    e = await play.create()
    await play.grant(e, "wa")
    assert await why(play, e) == obstacles.Offered("wa", play.now + GRANT_MS)

    play.clock.advance_ms(GRANT_MS)
    assert await why(play, e) == obstacles.NoWorker("default", "default")


async def test_nobody_serves_its_lane(play: Play) -> None:
    e = await play.create()
    await serving(play, lanes=["mail"])
    await serving(play, "i2", namespace="n2")

    assert await why(play, e) == obstacles.NoWorker("default", "default")


@pytest.mark.parametrize("blocked", [True, False])
async def test_nobody_has_what_it_requires(play: Play, blocked: bool) -> None:
    e = await play.create(policy=requires("gpu", "cuda"))
    if blocked:
        await play.engine.block_route(e)
    await serving(play, "i1", capabilities=["gpu"])
    await serving(play, "i2", capabilities=["cpu"])

    lacking = (obstacles.IncapableWorker("i1", "cuda"), obstacles.IncapableWorker("i2", "cuda,gpu"))
    assert await why(play, e) == obstacles.NoCapableWorker("cuda,gpu", "default", lacking)


@pytest.mark.parametrize("blocked", [True, False])
async def test_its_budget_is_exhausted(play: Play, blocked: bool) -> None:
    await serving(play)
    await budget(play, reset=60_000, calls=50, tokens=100)
    await report(play, tokens=70)
    e = await play.create(policy={"budget_ids": [B]})
    await reserve(play, e, tokens=30)
    if blocked:
        assert await pull(play) == []

    assert await why(play, e) == obstacles.BudgetExhausted(B, "tokens", 70, 30, 100, play.now + 60_000)


@pytest.mark.parametrize("blocked", [True, False])
async def test_its_quota_is_used_up(play: Play, blocked: bool) -> None:
    await serving(play)
    await policy(play, rate=1)
    await check(play, play.engine.new_execution_id(), rate_limit=1)
    play.clock.advance_ms(20_000)
    e = await play.create(policy={"quota_policy_ids": [Q]})
    if blocked:
        assert await pull(play) == []

    assert await why(play, e) == obstacles.QuotaFull(Q, "rate", 1, 1, play.now + 40_000)


async def test_all_its_slots_are_taken(play: Play) -> None:
    await serving(play)
    await policy(play, cap=1)
    for _ in range(2):
        await play.create(policy={"quota_policy_ids": [Q]})
        play.clock.advance_ms(1)
    e = await play.create(policy={"quota_policy_ids": [Q]})
    assert len(await pull(play, 3)) == 1

    assert await why(play, e) == obstacles.QuotaFull(Q, "concurrency", 1, 1)


async def test_it_waits_for_a_free_slot_behind_others(play: Play) -> None:
    await serving(play, "wa-1")
    await serving(play, "wb-1", capabilities=["gpu"])
    await play.claimed("wa")
    await play.create(priority=5, policy=requires("gpu"))
    await play.create(priority=1)
    play.clock.advance_ms(1)
    e = await play.create(priority=1)
    await play.create(priority=0)

    assert await why(play, e) == obstacles.Queued(ahead=2, workers=("wa-1", "wb-1"), running=1)


async def test_it_waits_for_others_to_end(play: Play) -> None:
    flow = await Flowing(play.engine, play.clock).begin("abc")
    for upstream in "ab":
        await flow.stage(upstream, "c")
        await flow.apply(upstream, "c")
    both = tuple(sorted(flow.names[name] for name in "ab"))

    assert await why(play, flow.names["c"]) == obstacles.Dependencies(both)


async def test_it_is_suspended(play: Play) -> None:
    held = await play.claimed()
    await play.engine.suspend(
        held.handle,
        SuspendArgs(
            suspension_id=R1,
            waitpoints=(FreshWaitpoint(R2, "ok"),),
            resume_condition=Single("ok"),
            reason_code="waiting_for_approval",
            now=play.now,
            timeout_at=play.now + 500,
        ),
    )

    assert await why(play, held.execution_id) == obstacles.SuspendedObstacle(
        "waiting_for_approval", ("ok",), play.now + 500
    )


async def test_it_is_parked_on_gates(play: Play) -> None:
    held = await play.claimed()
    await play.engine.open_gate(held.handle, GateArgs(name="nap", kind=GateKind.TIMER, expires_in_ms=700))
    await play.engine.open_gate(held.handle, GateArgs(name="word", kind=GateKind.MAILBOX, mailbox="steer"))
    await play.engine.park(held.handle, ("nap", "word"))

    what = ("time to pass", "a message to steer")
    waits = obstacles.SuspendedObstacle("waiting_for_signal", ("nap", "word"), play.now + 700, what)
    assert await why(play, held.execution_id) == waits
    assert (
        waits.sentence() == f"It waits until {format_instant(play.now + 700)} for time to pass or a message to steer."
    )


async def test_it_sleeps(function: Function, play: Play) -> None:
    await function.timer("nap", 700)
    await function.park("nap")

    waits = obstacles.SuspendedObstacle("waiting_for_signal", ("nap",), play.now + 700, (obstacles.TIMER_WAIT,))
    assert await why(play, function.e) == waits
    assert waits.sentence() == f"It sleeps until {format_instant(play.now + 700)}."


async def test_it_waits_for_children_or_an_answer(function: Function, play: Play) -> None:
    children = [await function.child() for _ in range(7)]
    ids = [child.execution_id for child in children]
    await function.children("all", *ids)
    await function.approval("approval:ship#0")
    await function.park("all", "approval:ship#0")
    await function.engine.complete(children[0].handle)
    await function.engine.child_completions.drain()

    what = (f"the end of {', '.join(ids[1:6])} and 1 more", "an answer to ship")
    waits = obstacles.SuspendedObstacle("waiting_for_signal", ("all", "approval:ship#0"), None, what)
    assert await why(play, function.e) == waits
    assert waits.sentence() == f"It waits for {what[0]} or {what[1]}."


def test_every_obstacle_there_is_has_a_test() -> None:
    lost_queues = Path(__file__).parents[2] / "engine" / "claiming" / "test_missing_queues.py"  # memory cannot lose one
    text = Path(__file__).read_text() + lost_queues.read_text()

    kinds = {kind.__name__ for kind in obstacles.Obstacle.__subclasses__()}
    assert {name for name in kinds if f"obstacles.{name}(" not in text} == set()


async def test_it_sleeps_on_a_budget(play: Play) -> None:
    held = await asleep(play, used=95, wanted=10)

    resets_at = play.now + RESET_MS
    assert await why(play, held.execution_id) == obstacles.BudgetExhausted(B, "tokens", 90, 5, 100, resets_at, 10)


async def test_there_is_no_such_execution(play: Play) -> None:
    async with play.refused(errors.NotFound, entity="execution"):
        await play.engine.explain(MISSING)
