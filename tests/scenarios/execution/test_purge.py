"""What retention takes with it, and what it leaves."""

from __future__ import annotations

from flowfabric.model.answers.execution import Duplicate
from flowfabric.model.stream import FrameMode
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from tests.scenarios.limits.test_budgets import B, budget
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.limits.test_slots import take
from tests.scenarios.play import Play
from tests.scenarios.waits import ANY, SATISFIED, Waits

LEFT = {"ff_idempotency", "ff_budget_usage_by_exec", "ff_quota_window", "events"}
RETRY = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 1}}}
SOON = {"stream_policy": {"retention_ttl_ms": 100}}


async def test_everything_that_an_execution_owned_goes_with_it(play: Play, waits: Waits) -> None:
    engine = play.engine
    await policy(play, cap=5)
    await budget(play, tokens=100)
    terms = {"quota_policy_id": Q, "budget_ids": [B]} | RETRY | SOON
    e = await play.create(policy=terms, idempotency_key="once", tags={"app.x": "1"}, input_payload=b"in")
    held = await take(play)
    await engine.record_spend(B, e, {"tokens": 4})
    await engine.record_step(held.handle, "step", 0, b"done")
    await engine.append_frame(held.handle, b"out")
    await engine.append_frame(held.handle, b'{"sum":1}', mode=FrameMode.SUMMARY)
    details = await waits.suspend(held)
    await waits.send(e, "go", details)
    await engine.fail((await take(play)).handle, reason="once more")
    await play.promoted(e)
    await play.expired(await take(play))
    await engine.complete((await play.reclaimed(e)).handle, result=b"result")
    await engine.outbox.wait_for_deliveries()
    owned = {table for table, rows in (await play.everything()).items() if any(e in repr(row) for row in rows)}
    assert owned > LEFT

    play.clock.advance_ms(100)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    left = {table for table, rows in (await play.everything()).items() if any(e in repr(row) for row in rows)}
    assert left == LEFT
    assert (await engine.describe_execution(e), await engine.read_state_vector(e)) == (None, None)
    assert (await engine.lease_history(e), await engine.attempt_history(e)) == ([], [])
    assert (await engine.get_budget_status(B)).usage == {"tokens": 4}
    again = await engine.create_execution(execution_id=engine.new_execution_id(), idempotency_key="once")
    assert again == Duplicate(e)


async def test_a_waitpoint_of_the_same_name_elsewhere_stays(play: Play, waits: Waits) -> None:
    goes, stays = await play.claimed(policy=SOON), await play.claimed(lane="other")
    fresh = FreshWaitpoint(waits.id(), "k")
    await waits.suspend(goes, ANY, fresh)
    details = await waits.suspend(stays, ANY, fresh)
    await play.engine.cancel_execution(goes.execution_id)
    play.clock.advance_ms(100)
    assert (await play.engine.sweep_once("retention_trimmer")).processed == 1

    assert await waits.effect(stays.execution_id, "go", details) == SATISFIED


async def test_the_ends_of_children_that_nobody_waited_for_go_with_their_parent(play: Play) -> None:
    engine = play.engine
    e = await play.create(policy=SOON)
    parent = await play.claimed_again(e, "wa")
    child = await play.claimed_again(await play.create(parent_id=e), "wc")
    await engine.complete(child.handle)
    await engine.child_completions.drain()
    await engine.complete(parent.handle)
    play.clock.advance_ms(100)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    assert (await play.everything())["ff_child_end"] == []
