"""Explain: each obstacle and its sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.types import GateArgs, Single
from flowfabric.model import obstacles
from flowfabric.model.gate import GateKind
from flowfabric.model.obstacles import Obstacle
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.text import format_instant
from tests.executions import suspend_args
from tests.scenarios.durable_function import DurableFunction
from tests.scenarios.env import GRANT_MS, LEASE_MS, Env
from tests.scenarios.flow_env import FlowEnv
from tests.scenarios.limits.test_budget_suspension import RESET_MS, suspend_on_budget
from tests.scenarios.limits.test_budgets import B, budget, report
from tests.scenarios.limits.test_quotas import Q, check, policy
from tests.scenarios.limits.test_reservations import reserve
from tests.scenarios.scheduling.test_claims import claim_admitted
from tests.scenarios.scheduling.test_grants import MISSING, requires
from tests.scenarios.scheduling.test_workers import register

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}


async def obstacle_of(env: Env, e: str) -> Obstacle:
    async with env.unchanged():
        explanation = await env.engine.explain(e)
    assert explanation.execution_id == e
    assert explanation.public_state == (await env.row(e)).public_state
    assert explanation.sentence == explanation.obstacle.sentence()
    assert explanation.sentence.endswith(".")
    sentence = explanation.sentence.replace(e, "")
    assert re.search(r"(?<![-\d])\d{13}(?!\d)|\w_\w|\n", sentence) is None, "no milliseconds, codes or tracebacks"
    return explanation.obstacle


async def register_live(env: Env, instance: str = "i1", **options: Any) -> None:
    """Register a live worker."""
    await register(env, instance, liveness_ttl_ms=10**9, **options)


async def test_explain_reports_a_failed_execution(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.fail(claim.handle, reason="no luck", category="permanent")

    obstacle = await obstacle_of(env, claim.execution_id)
    assert obstacle == obstacles.EndedObstacle(TerminalOutcome.FAILED, env.now, "no luck")
    assert obstacle.sentence() == f"It failed at {format_instant(env.now)}: no luck."


async def test_explain_shows_the_first_line_of_a_failure(env: Env) -> None:
    traceback = "ValueError: no luck\n  File app.py, line 3, in send"
    ended, waits = await env.create_and_claim(), await env.create_and_claim(policy=RETRY)
    await env.engine.fail(ended.handle, reason=traceback, category="permanent")
    await env.engine.fail(waits.handle, reason=traceback)

    obstacle = [await obstacle_of(env, claim.execution_id) for claim in (ended, waits)]
    assert [one.sentence() for one in obstacle] == [
        f"It failed at {format_instant(env.now)}: ValueError: no luck.",
        f"It failed and is tried again at {format_instant(env.now + 500)}: ValueError: no luck.",
    ]
    # The obstacle has the whole text.
    assert obstacles.DelayedObstacle(env.now + 500, "waiting_for_retry_backoff", traceback) in obstacle


async def test_explain_reports_a_running_execution(env: Env) -> None:
    claim = await env.create_and_claim()

    assert await obstacle_of(env, claim.execution_id) == obstacles.Running("wa", "wa-1", env.now, env.now + LEASE_MS)


async def test_explain_reports_a_lost_lease(env: Env) -> None:
    expired, revoked = await env.create_and_claim(), await env.create_and_claim()
    await env.revoke_lease(revoked, "drained")
    at = env.now
    env.clock.advance_ms(LEASE_MS + 5)

    assert await obstacle_of(env, expired.execution_id) == obstacles.LeaseLost("wa-1", "expired", at + LEASE_MS)
    assert await obstacle_of(env, revoked.execution_id) == obstacles.LeaseLost("wa-1", "revoked", at, "drained")


async def test_explain_reports_a_delay(env: Env) -> None:
    later = await env.create(delay_until=env.now + 70)
    claim = await env.create_and_claim(policy=RETRY)
    await env.engine.fail(claim.handle, reason="flaky")

    assert await obstacle_of(env, later) == obstacles.DelayedObstacle(env.now + 70, "waiting_for_delay")
    again = obstacles.DelayedObstacle(env.now + 500, "waiting_for_retry_backoff", "flaky")
    assert await obstacle_of(env, claim.execution_id) == again


async def test_explain_reports_the_reason_of_a_delay(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.delay_for(claim.handle, 70, reason="the oven is hot")

    obstacle = await obstacle_of(env, claim.execution_id)
    assert obstacle == obstacles.DelayedObstacle(env.now + 70, "waiting_for_delay", None, "the oven is hot")
    assert obstacle.sentence() == f"It is delayed until {format_instant(env.now + 70)}: the oven is hot."
    env.clock.advance_ms(70)
    await env.engine.promote_delayed(claim.execution_id)
    assert "oven" not in (await obstacle_of(env, claim.execution_id)).sentence()


async def test_explain_reports_that_no_worker_notices_that_a_delay_or_sleep_is_over(
    function: DurableFunction, env: Env
) -> None:
    delayed = await env.create(delay_until=env.now + 70)
    await function.timer("sleep", 70)
    await function.park("sleep")
    over = env.now + 70
    waits = [await obstacle_of(env, e) for e in (delayed, function.e)]
    assert [one.sentence() for one in waits] == [
        f"It is delayed until {format_instant(over)}.",
        f"It sleeps until {format_instant(over)}.",
    ]

    env.clock.advance_ms(70)
    for e in (delayed, function.e):
        assert await obstacle_of(env, e) == obstacles.NoWorker("default", "default")

    await register_live(env)
    assert [await obstacle_of(env, e) for e in (delayed, function.e)] == waits


@pytest.mark.parametrize("reason", ["paused_by_operator", "paused_by_policy"])
async def test_explain_reports_a_pause(env: Env, reason: str) -> None:
    e = await env.create()
    await env.engine.block_execution_for_admission(e, reason=reason, detail="audit")

    assert await obstacle_of(env, e) == obstacles.Paused(reason, "audit", env.now)


async def test_explain_reports_a_live_grant(env: Env) -> None:
    e = await env.create()
    await env.grant(e, "wa")
    assert await obstacle_of(env, e) == obstacles.Offered("wa", env.now + GRANT_MS)

    env.clock.advance_ms(GRANT_MS)
    assert await obstacle_of(env, e) == obstacles.NoWorker("default", "default")


async def test_explain_reports_a_lane_without_workers(env: Env) -> None:
    e = await env.create()
    await register_live(env, lanes=["mail"])
    await register_live(env, "i2", namespace="n2")

    assert await obstacle_of(env, e) == obstacles.NoWorker("default", "default")


@pytest.mark.parametrize("blocked", [True, False])
async def test_explain_reports_missing_capabilities(env: Env, blocked: bool) -> None:
    e = await env.create(policy=requires("gpu", "cuda"))
    if blocked:
        await env.engine.block_route(e)
    await register_live(env, "i1", capabilities=["gpu"])
    await register_live(env, "i2", capabilities=["cpu"])

    lacking = (obstacles.IncapableWorker("i1", "cuda"), obstacles.IncapableWorker("i2", "cuda,gpu"))
    assert await obstacle_of(env, e) == obstacles.NoCapableWorker("cuda,gpu", "default", lacking)


@pytest.mark.parametrize("blocked", [True, False])
async def test_explain_reports_an_exhausted_budget(env: Env, blocked: bool) -> None:
    await register_live(env)
    await budget(env, reset=60_000, calls=50, tokens=100)
    await report(env, tokens=70)
    e = await env.create(policy={"budget_ids": [B]})
    await reserve(env, e, tokens=30)
    if blocked:
        assert await claim_admitted(env) == []

    assert await obstacle_of(env, e) == obstacles.BudgetExhausted(B, "tokens", 70, 30, 100, env.now + 60_000)


@pytest.mark.parametrize("blocked", [True, False])
async def test_explain_reports_an_exhausted_rate_quota(env: Env, blocked: bool) -> None:
    await register_live(env)
    await policy(env, rate=1)
    await check(env, env.engine.new_execution_id(), rate_limit=1)
    env.clock.advance_ms(20_000)
    e = await env.create(policy={"quota_policy_ids": [Q]})
    if blocked:
        assert await claim_admitted(env) == []

    assert await obstacle_of(env, e) == obstacles.QuotaFull(Q, "rate", 1, 1, env.now + 40_000)


async def test_explain_reports_a_full_concurrency_quota(env: Env) -> None:
    await register_live(env)
    await policy(env, cap=1)
    for _ in range(2):
        await env.create(policy={"quota_policy_ids": [Q]})
        env.clock.advance_ms(1)
    e = await env.create(policy={"quota_policy_ids": [Q]})
    assert len(await claim_admitted(env, 3)) == 1

    assert await obstacle_of(env, e) == obstacles.QuotaFull(Q, "concurrency", 1, 1)


async def test_explain_reports_the_queue_position(env: Env) -> None:
    await register_live(env, "wa-1")
    await register_live(env, "wb-1", capabilities=["gpu"])
    await env.create_and_claim("wa")
    await env.create(priority=5, policy=requires("gpu"))
    await env.create(priority=1)
    env.clock.advance_ms(1)
    e = await env.create(priority=1)
    await env.create(priority=0)

    assert await obstacle_of(env, e) == obstacles.Queued(ahead=2, workers=("wa-1", "wb-1"), running=1)


async def test_explain_reports_unfinished_dependencies(env: Env) -> None:
    flow = await FlowEnv(env.engine, env.clock).begin("abc")
    for upstream in "ab":
        await flow.stage(upstream, "c")
        await flow.apply(upstream, "c")
    both = tuple(sorted(flow.names[name] for name in "ab"))

    assert await obstacle_of(env, flow.names["c"]) == obstacles.Dependencies(both)


async def test_explain_reports_a_suspension(env: Env) -> None:
    claim = await env.create_and_claim()
    wait = suspend_args(env.now, Single("ok"), key="ok", reason_code="waiting_for_approval", timeout_at=env.now + 500)
    await env.engine.suspend(claim.handle, wait)

    assert await obstacle_of(env, claim.execution_id) == obstacles.SuspendedObstacle(
        "waiting_for_approval", ("ok",), env.now + 500
    )


async def test_explain_reports_gates(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.open_gate(claim.handle, GateArgs(name="nap", kind=GateKind.TIMER, expires_in_ms=700))
    await env.engine.open_gate(claim.handle, GateArgs(name="word", kind=GateKind.MAILBOX, mailbox="steer"))
    await env.engine.park(claim.handle, ("nap", "word"))

    what = ("time to pass", "a message to steer")
    waits = obstacles.SuspendedObstacle("waiting_for_signal", ("nap", "word"), env.now + 700, what)
    assert await obstacle_of(env, claim.execution_id) == waits
    assert waits.sentence() == f"It waits until {format_instant(env.now + 700)} for time to pass or a message to steer."


async def test_explain_reports_a_sleep(function: DurableFunction, env: Env) -> None:
    await function.timer("nap", 700)
    await function.park("nap")

    waits = obstacles.SuspendedObstacle("waiting_for_signal", ("nap",), env.now + 700, (obstacles.TIMER_WAIT,))
    assert await obstacle_of(env, function.e) == waits
    assert waits.sentence() == f"It sleeps until {format_instant(env.now + 700)}."


async def test_explain_reports_children_and_approvals(function: DurableFunction, env: Env) -> None:
    children = [await function.create_child() for _ in range(7)]
    ids = [child.execution_id for child in children]
    await function.children("all", *ids)
    await function.approval("approval:ship#0")
    await function.park("all", "approval:ship#0")
    await function.engine.complete(children[0].handle)
    await function.engine.child_completions.drain()

    what = (f"the end of {', '.join(ids[1:6])} and 1 more", "an answer to ship")
    waits = obstacles.SuspendedObstacle("waiting_for_signal", ("all", "approval:ship#0"), None, what)
    assert await obstacle_of(env, function.e) == waits
    assert waits.sentence() == f"It waits for {what[0]} or {what[1]}."


async def test_explain_reports_what_holds_a_run_and_since_when(env: Env, function: DurableFunction) -> None:
    why = "step 'bill' would run for the first time although 'charge' ran before: was it renamed or moved?"
    hold = GateArgs(name="hold:bill#0.0", kind=GateKind.MAILBOX, mailbox="ff.hold", task="order", version="2", note=why)
    since = env.now
    await function.engine.open_gates_and_park(function.claim.handle, (hold,))
    env.clock.advance_ms(5)

    held = obstacles.Held("order", "2", since, why)
    assert await obstacle_of(env, function.e) == held
    assert held.sentence().startswith(f"It is held since {format_instant(since)} by version 2: {why} It continues ")
    assert f"ff release {function.e} --accept   takes the new way, once" in held.remedies(function.e)
    assert await env.engine.count_held() == {"order": 1}
    assert await env.engine.count_held(namespaces=["n2"]) == {}


async def test_explain_reports_a_version_that_no_worker_has(env: Env) -> None:
    e = await env.create(policy=requires("gpu", "ff.version=1"))
    pinned = obstacles.Pinned("1", "default")
    assert await obstacle_of(env, e) == pinned
    await register_live(env, "i1", capabilities=["gpu", "ff.version=2"])
    assert await obstacle_of(env, e) == pinned
    assert pinned.sentence() == "It is pinned to 1, which no worker of lane default has; start one, or ff unpin."
    assert any(remedy.startswith(f"ff unpin {e}") for remedy in pinned.remedies(e))

    await register_live(env, "i2", capabilities=["ff.version=1"])
    assert isinstance(await obstacle_of(env, e), obstacles.NoCapableWorker)


def test_every_obstacle_has_a_test() -> None:
    lost_queues = Path(__file__).parents[2] / "engine" / "claiming" / "test_missing_queues.py"  # memory cannot lose one
    text = Path(__file__).read_text() + lost_queues.read_text()

    kinds = {kind.__name__ for kind in obstacles.Obstacle.__subclasses__()}
    assert {name for name in kinds if f"obstacles.{name}(" not in text} == set()


async def test_explain_reports_a_suspension_on_a_budget(env: Env) -> None:
    claim = await suspend_on_budget(env, used=95, wanted=10)

    resets_at = env.now + RESET_MS
    assert await obstacle_of(env, claim.execution_id) == obstacles.BudgetExhausted(
        B, "tokens", 90, 5, 100, resets_at, 10
    )


async def test_explain_refuses_an_unknown_execution(env: Env) -> None:
    async with env.refused(errors.NotFound, entity="execution"):
        await env.engine.explain(MISSING)
