"""Gates survive the worker that opened them."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.model.gate import GateOutcome
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.suspension.resume import Resumed, SuspensionExpiry
from tests.scenarios.durable_function import HOUR, WAITS, DurableFunction, closed, opened
from tests.scenarios.env import ACTIVE, DEFAULT_PARTITION, RESUMABLE, Env
from tests.scenarios.waits import APPENDED, REPEATED, SATISFIED, Waits


async def test_votes_resume_a_parked_function_and_are_stored(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval())
    assert isinstance(await function.park("approve"), ParkResult)
    assert await env.vector(function.e) == WAITS

    assert await function.vote(gate, "ana", payload=b"yes") == APPENDED
    assert await function.vote(gate, "ana") == "appended_to_waitpoint_duplicate"
    assert await function.vote(gate, "bo", payload=b"no") == SATISFIED

    assert await env.vector(function.e) == RESUMABLE
    await function.resume()
    memo = closed(await function.approval())
    assert memo.ended_as is GateOutcome.SATISFIED
    votes = await function.engine.read_votes(memo)
    assert [(vote.source_identity, vote.payload) for vote in votes] == [("ana", b"yes"), ("bo", b"no")]


async def test_a_gate_that_closes_closes_the_suspension_on_it(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    gate = opened(await function.approval())
    await function.timer("nap", HOUR)
    await function.park("approve", "nap")
    env.clock.advance_ms(5)
    await function.vote(gate, "ana")
    await function.vote(gate, "bo")

    record = await env.suspension(function.e)
    assert (record.satisfied_at, record.closed_at, record.close_reason) == (env.now, env.now, "resumed")
    assert (await env.engine.list_suspended(DEFAULT_PARTITION)).entries == []
    await function.resume()
    env.clock.advance_ms(HOUR)
    async with env.unchanged():
        assert await env.sweep("suspension_timeout") == 0
    await env.expire_lease(function.claim)
    function.claim = await env.grant_and_reclaim(function.e)
    await waits.suspend(function.claim)


async def test_approval_links_survive_the_death_of_the_worker(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval(expires_in_ms=10 * HOUR))
    assert await function.vote(gate, "ana") == APPENDED
    await function.reclaim()

    again = opened(await function.approval(expires_in_ms=10 * HOUR))

    assert [link.token.reveal() for link in again.links] == [link.token.reveal() for link in gate.links]
    assert again.gate.expires_at == gate.gate.expires_at
    assert isinstance(await function.park("approve"), ParkResult)
    assert await function.vote(gate, "bo") == SATISFIED


async def test_votes_survive_the_death_of_the_resumed_worker(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval())
    await function.park("approve")
    for key in ("ana", "bo"):
        await function.vote(gate, key)
    await function.resume()
    await function.reclaim("wd")

    memo = closed(await function.approval())

    assert len(await function.engine.read_votes(memo)) == 2
    assert await function.park("approve") == GatesReady(("approve",))
    assert await env.vector(function.e) == ACTIVE


async def test_votes_before_park_count(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval())
    for key in ("ana", "bo"):
        await function.vote(gate, key)
    assert await env.vector(function.e) == ACTIVE

    assert await function.park("approve") == GatesReady(("approve",))


async def test_a_full_signal_log_keeps_votes_and_drops_duplicates(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval())
    for _ in range(3):
        await function.vote(gate, "ana", signal_maxlen=1)
    kept = [(row.seq, row.observed_effect) for row in (await env.dump())["ff_signal"]]
    assert kept == [(1, APPENDED), (3, REPEATED)]

    await function.vote(gate, "bo", signal_maxlen=1)

    votes = await function.engine.read_votes(await function.memo("approve"))
    assert [vote.source_identity for vote in votes] == ["ana", "bo"]


async def test_a_gate_times_out(function: DurableFunction, env: Env, waits: Waits) -> None:
    gate = opened(await function.approval(expires_in_ms=1000))
    assert isinstance(await function.park("approve"), ParkResult)
    await waits.time_out(env.now + 1000)

    assert await env.vector(function.e) == RESUMABLE
    assert (await function.memo("approve")).ended_as is GateOutcome.TIMED_OUT
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")


async def test_a_vote_after_the_timeout_is_refused_before_the_sweep(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval(expires_in_ms=1000))
    env.clock.advance_ms(1000)

    async with env.refused(errors.TargetNotSignalable):
        await function.vote(gate, "ana")
    assert await function.park("approve") == GatesReady(("approve",))
    assert (await function.memo("approve")).ended_as is GateOutcome.TIMED_OUT


async def test_a_function_parks_on_several_gates_and_again_on_the_rest(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    gate = opened(await function.approval())
    await function.timer("nap", 500)
    await function.receive("steer-0")
    names = ("approve", "nap", "steer-0")
    assert isinstance(await function.park(*names), ParkResult)

    await waits.time_out(env.now + 500)
    await function.resume()
    assert (await function.memo("nap")).ended_as is GateOutcome.SATISFIED
    assert isinstance(await function.park("approve", "steer-0"), ParkResult)
    await function.send(b"left")
    await function.resume("wd")
    assert (await function.memo("steer-0")).payload == b"left"
    assert isinstance(await function.park("approve"), ParkResult)
    await function.vote(gate, "ana")
    assert await function.vote(gate, "bo") == SATISFIED
    assert (await function.engine.read_waits(function.e)).open == {}


async def test_park_replaces_the_previous_suspension_and_keeps_gates_and_messages(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    await function.reclaim()
    e, t = function.e, env.now
    await function.send(b"hello")
    first = await waits.suspend(function.claim)
    assert await waits.effect(e, "go", first) == SATISFIED
    env.clock.advance_ms(7)
    await function.resume()
    gate = opened(await function.approval())
    await function.timer("nap", HOUR)

    await function.engine.park(function.claim.handle, ("approve",), reason_code="waiting_for_approval")

    record = await env.suspension(e)
    assert (record.attempt_index, record.created_at, record.timeout_at) == (1, t + 7, None)
    assert (record.gates, record.reason_code, record.last_signal_at) == (["approve"], "waiting_for_approval", None)
    assert (record.satisfied_at, record.closed_at, record.closer_signal_id) == (None, None, None)
    assert (await env.core(e))["blocking_detail"] == "suspended: waiting for an answer to approve"
    assert [one.execution_id for one in (await env.engine.list_suspended(DEFAULT_PARTITION)).entries] == [e]
    assert (await env.lease_events(e))[-1] == "released suspend"
    before = await waits.record(e, first.waitpoint_id)
    assert (before.closed_at, before.close_reason) == (t, "resumed")
    with pytest.raises(errors.SignalLimitExceeded):
        await function.vote(gate, "ana", max_signals_per_execution=1)
    assert await function.vote(gate, "ana", max_signals_per_execution=2) == APPENDED
    assert await function.vote(gate, "bo") == SATISFIED
    await function.resume()
    assert closed(await function.receive("r0")).payload == b"hello"
    assert list((await function.engine.read_waits(e)).open) == ["nap"]


async def test_an_operator_resume_of_a_parked_function_keeps_its_gates_open(
    function: DurableFunction, env: Env
) -> None:
    await function.approval()
    await function.park("approve")

    assert await function.engine.resume_execution(function.e) == Resumed(PublicState.WAITING)

    await function.resume()
    assert list((await function.engine.read_waits(function.e)).open) == ["approve"]
    assert isinstance(await function.park("approve"), ParkResult)


async def test_park_on_an_unknown_gate_is_refused(function: DurableFunction, env: Env) -> None:
    async with env.refused(errors.InvalidInput):
        await function.park("nothing")
    async with env.refused(errors.InvalidInput):
        await function.park()
    await function.approval()
    async with env.refused(errors.InvalidInput):
        await function.receive("approve")


async def test_a_worker_that_lost_its_lease_cannot_open_gates_or_park(function: DurableFunction, env: Env) -> None:
    await function.approval()
    stale = function.claim
    await function.reclaim()
    function.claim, live = stale, function.claim

    async with env.refused(errors.StaleLease):
        await function.approval("other")
    async with env.refused(errors.StaleLease):
        await function.park("approve")
    async with env.refused(errors.StaleLease):
        await function.engine.record_step(stale.handle, "pay", 0, b"late")
    function.claim = live
    assert isinstance(await function.park("approve"), ParkResult)


async def test_the_waitpoints_of_a_gate_are_listed_with_readable_tokens(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval(expires_in_ms=HOUR))

    page = await function.engine.list_pending_waitpoints(function.e)

    assert {entry.waitpoint_key for entry in page.entries} == {"ana", "bo"}
    assert {entry.expires_at for entry in page.entries} == {env.now + HOUR}
    for link in gate.links:
        assert await function.engine.read_waitpoint_token(86, link.waitpoint_id) == link.token


async def test_cancelling_a_parked_function_closes_its_gates(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval())
    await function.park("approve")
    await function.engine.cancel_execution(function.e)

    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")
    assert await function.engine.expire_suspension(function.e) is SuspensionExpiry.NOT_SUSPENDED
