"""Steps of a durable function are recorded once and purged with the execution."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.gate import StepState
from flowfabric.rules.durable.park import GatesReady
from tests.scenarios.durable_function import HOUR, DurableFunction, opened
from tests.scenarios.env import LEASE_MS, Env
from tests.scenarios.waits import Waits


async def test_the_first_record_of_a_step_is_kept(function: DurableFunction, env: Env) -> None:
    first = await function.engine.record_step(function.claim.handle, "pay", 0, b"receipt", digest="d")
    again = await function.engine.record_step(function.claim.handle, "pay", 0, b"another")
    other = await function.engine.record_step(function.claim.handle, "pay", 1, b"another")

    assert (first.result, first.recorded_at) == (b"receipt", env.now)
    assert again == first
    assert other.result == b"another"
    assert await function.engine.read_steps(function.e) == [first, other]


async def test_steps_are_listed_in_the_order_in_which_they_began(function: DurableFunction, env: Env) -> None:
    began = env.now
    env.clock.advance_ms(50)
    record, handle = function.engine.record_step, function.claim.handle
    quick = await record(handle, "zip", 0, b"1", started_at=began + 20, number=1)
    older = await record(handle, "old", 0, b"2", number=2)  # by a release that does not know when it began
    slow = await record(handle, "pay", 0, b"3", started_at=began, number=3)
    failed = await record(handle, "abc", 0, b"4", started_at=began + 10, state=StepState.FAILED, number=4)

    assert (slow.started_at, slow.recorded_at, older.started_at) == (began, env.now, None)
    assert (await record(handle, "pay", 0, b"3", started_at=began + 1)).started_at == began
    assert await function.engine.read_steps(function.e) == [slow, failed, quick, older]


@pytest.mark.parametrize("started_at", [-1, 2**63, True, 1.5, "1"])
async def test_a_start_that_is_no_instant_is_refused(function: DurableFunction, started_at: object) -> None:
    with pytest.raises(errors.InvalidInput):
        await function.engine.record_step(
            function.claim.handle,
            "pay",
            0,
            b"receipt",
            started_at=started_at,  # type: ignore[arg-type]
        )
    assert await function.engine.read_steps(function.e) == []


async def test_steps_survive_takeovers_and_failures_but_not_the_replay_of_a_success(
    function: DurableFunction, env: Env
) -> None:
    memo = await function.engine.record_step(function.claim.handle, "pay", 0, b"receipt")
    await function.reclaim()
    assert await function.engine.read_steps(function.e) == [memo]
    await function.timer("nap", 0)
    assert await function.park("nap") == GatesReady(("nap",))
    await function.engine.fail(function.claim.handle, reason="no", category="permanent")
    await function.engine.replay_execution(function.e)
    assert await function.engine.read_steps(function.e) == [memo]
    assert "nap" in (await function.engine.read_waits(function.e)).memos

    function.claim = await env.grant_and_claim(function.e, "wx")
    gate = opened(await function.approval())
    await function.engine.complete(function.claim.handle)
    await function.engine.replay_execution(function.e)

    assert await function.engine.read_steps(function.e) == []
    left = await function.engine.read_waits(function.e)
    assert (left.open, left.memos) == ({}, {})
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")


async def test_a_replay_deletes_no_steps_of_other_executions(function: DurableFunction, env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    other = DurableFunction(env, waits, claim.execution_id, claim)
    for one in (function, other):
        await one.engine.record_step(one.claim.handle, "pay", 0, b"receipt")
        await one.timer("nap", 0)
        await one.park("nap")
        await one.approval()
        await one.engine.complete(one.claim.handle, result=one.e.encode())
    steps, left = await env.engine.read_steps(other.e), await env.engine.read_waits(other.e)
    assert (len(steps), list(left.open), list(left.memos)) == (1, ["approve"], ["nap"])

    await env.engine.replay_execution(function.e)

    assert await env.engine.read_steps(other.e) == steps
    assert await env.engine.read_waits(other.e) == left
    assert await env.engine.get_execution_result(other.e) == other.e.encode()


async def test_a_step_is_not_recorded_under_an_expired_lease(function: DurableFunction, env: Env) -> None:
    env.clock.advance_ms(LEASE_MS)

    with pytest.raises(errors.LeaseExpired):
        await function.engine.record_step(function.claim.handle, "pay", 0, b"late")

    assert await function.engine.read_steps(function.e) == []


async def test_a_purge_deletes_steps_gates_messages_and_children(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.engine.append_frame(function.claim.handle, b"{}", mode="summary")
    await function.engine.record_step(function.claim.handle, "pay", 0, b"receipt")
    gate = opened(await function.approval())
    await function.vote(gate, "ana", idempotency_key="i")
    await function.send(b"unread", idempotency_key="i")
    await function.receive("r0")
    await function.complete_child(child)
    await function.engine.complete(function.claim.handle)

    env.clock.advance_ms(25 * HOUR)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 2

    kept = await env.dump()
    left = {name for name, rows in kept.items() if rows and name.startswith("ff_")}
    assert left <= {"ff_keystore", "ff_waitpoint_hmac", "ff_idempotency", "ff_lane", "ff_line", "ff_sweep"}
