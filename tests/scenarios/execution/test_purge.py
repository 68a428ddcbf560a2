"""Purging an execution: which rows are deleted and which are kept."""

from __future__ import annotations

from flowfabric.model.answers.execution import Duplicate
from flowfabric.model.stream import FrameMode
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from tests.scenarios.env import Env
from tests.scenarios.limits.test_budgets import B, budget
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.limits.test_slots import claim_admitted_one
from tests.scenarios.waits import ANY, SATISFIED, Waits

KEPT_TABLES = {"ff_idempotency", "ff_budget_usage_by_exec", "ff_quota_window", "events"}
RETRY = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 1}}}
SOON = {"stream_policy": {"retention_ttl_ms": 100}}


async def test_a_purge_deletes_every_row_of_the_execution(env: Env, waits: Waits) -> None:
    engine = env.engine
    await policy(env, cap=5)
    await budget(env, tokens=100)
    terms = {"quota_policy_id": Q, "budget_ids": [B]} | RETRY | SOON
    e = await env.create(policy=terms, idempotency_key="once", tags={"app.x": "1"}, input_payload=b"in")
    claim = await claim_admitted_one(env)
    await engine.record_spend(B, e, {"tokens": 4})
    await engine.record_step(claim.handle, "step", 0, b"done")
    await engine.append_frame(claim.handle, b"out")
    await engine.append_frame(claim.handle, b'{"sum":1}', mode=FrameMode.SUMMARY)
    details = await waits.suspend(claim)
    await waits.send(e, "go", details)
    await engine.fail((await claim_admitted_one(env)).handle, reason="once more")
    await env.promote(e)
    await env.expire_lease(await claim_admitted_one(env))
    await engine.complete((await env.grant_and_reclaim(e)).handle, result=b"result")
    await engine.outbox.wait_for_deliveries()
    owned = {table for table, rows in (await env.dump()).items() if any(e in repr(row) for row in rows)}
    assert owned > KEPT_TABLES

    env.clock.advance_ms(100)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    left = {table for table, rows in (await env.dump()).items() if any(e in repr(row) for row in rows)}
    assert left == KEPT_TABLES
    assert (await engine.describe_execution(e), await engine.read_state_vector(e)) == (None, None)
    assert (await engine.lease_history(e), await engine.attempt_history(e)) == ([], [])
    assert (await engine.get_budget_status(B)).usage == {"tokens": 4}
    again = await engine.create_execution(execution_id=engine.new_execution_id(), idempotency_key="once")
    assert again == Duplicate(e)


async def test_a_purge_keeps_a_waitpoint_of_the_same_id_on_another_execution(env: Env, waits: Waits) -> None:
    purged, kept = await env.create_and_claim(policy=SOON), await env.create_and_claim(lane="other")
    fresh = FreshWaitpoint(waits.new_id(), "k")
    await waits.suspend(purged, ANY, fresh)
    details = await waits.suspend(kept, ANY, fresh)
    await env.engine.cancel_execution(purged.execution_id)
    env.clock.advance_ms(100)
    assert (await env.engine.sweep_once("retention_trimmer")).processed == 1

    assert await waits.effect(kept.execution_id, "go", details) == SATISFIED


async def test_a_purge_of_the_parent_deletes_child_completions_that_no_gate_awaited(env: Env) -> None:
    engine = env.engine
    e = await env.create(policy=SOON)
    parent = await env.grant_and_claim(e, "wa")
    child = await env.grant_and_claim(await env.create(parent_id=e), "wc")
    await engine.complete(child.handle)
    await engine.child_completions.drain()
    await engine.complete(parent.handle)
    env.clock.advance_ms(100)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    assert (await env.dump())["ff_child_end"] == []
