"""Gates: what a durable function waits for survives the worker that waited."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.model.gate import GateOutcome
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.suspension.resume import Resumed, SuspensionExpiry
from tests.scenarios.functions import HOUR, WAITS, Function, closed, opened
from tests.scenarios.play import ACTIVE, DEFAULT_PARTITION, RESUMABLE, Play
from tests.scenarios.waits import APPENDED, REPEATED, SATISFIED, Waits


async def test_votes_resume_a_parked_function_and_are_remembered(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    assert isinstance(await function.park("approve"), ParkResult)
    assert await play.vector(function.e) == WAITS

    assert await function.vote(gate, "ana", payload=b"yes") == APPENDED
    assert await function.vote(gate, "ana") == "appended_to_waitpoint_duplicate"
    assert await function.vote(gate, "bo", payload=b"no") == SATISFIED

    assert await play.vector(function.e) == RESUMABLE
    await function.go_on()
    memo = closed(await function.approval())
    assert memo.ended_as is GateOutcome.SATISFIED
    votes = await function.engine.read_votes(memo)
    assert [(vote.source_identity, vote.payload) for vote in votes] == [("ana", b"yes"), ("bo", b"no")]


async def test_a_gate_that_closes_closes_the_suspension_on_it(function: Function, play: Play, waits: Waits) -> None:
    gate = opened(await function.approval())
    await function.timer("nap", HOUR)
    await function.park("approve", "nap")
    play.clock.advance_ms(5)
    await function.vote(gate, "ana")
    await function.vote(gate, "bo")

    record = await play.engine.describe_suspension(function.e)
    assert record is not None
    assert (record.satisfied_at, record.closed_at, record.close_reason) == (play.now, play.now, "resumed")
    assert (await play.engine.list_suspended(DEFAULT_PARTITION)).entries == []
    await function.go_on()
    play.clock.advance_ms(HOUR)
    async with play.untouched():
        assert (await play.engine.sweep_once("suspension_timeout")).processed == 0
    await play.expired(function.held)
    function.held = await play.reclaimed(function.e)
    await waits.suspend(function.held)


async def test_links_stay_valid_when_the_worker_dies_after_mailing_them(function: Function, play: Play) -> None:
    gate = opened(await function.approval(expires_in_ms=10 * HOUR))
    assert await function.vote(gate, "ana") == APPENDED
    await function.killed()

    again = opened(await function.approval(expires_in_ms=10 * HOUR))

    assert [link.token.reveal() for link in again.links] == [link.token.reveal() for link in gate.links]
    assert again.gate.expires_at == gate.gate.expires_at
    assert isinstance(await function.park("approve"), ParkResult)
    assert await function.vote(gate, "bo") == SATISFIED


async def test_votes_survive_the_death_of_the_worker_that_they_resumed(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    await function.park("approve")
    for key in ("ana", "bo"):
        await function.vote(gate, key)
    await function.go_on()
    await function.killed("wd")

    memo = closed(await function.approval())

    assert len(await function.engine.read_votes(memo)) == 2
    assert await function.park("approve") == GatesReady(("approve",))
    assert await play.vector(function.e) == ACTIVE


async def test_votes_before_the_wait_count(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    for key in ("ana", "bo"):
        await function.vote(gate, key)
    assert await play.vector(function.e) == ACTIVE

    assert await function.park("approve") == GatesReady(("approve",))


async def test_votes_stay_in_a_log_that_is_full_and_what_does_not_count_leaves_it(
    function: Function, play: Play
) -> None:
    gate = opened(await function.approval())
    for _ in range(3):
        await function.vote(gate, "ana", signal_maxlen=1)
    kept = [(row.seq, row.observed_effect) for row in (await play.everything())["ff_signal"]]
    assert kept == [(1, APPENDED), (3, REPEATED)]

    await function.vote(gate, "bo", signal_maxlen=1)

    votes = await function.engine.read_votes(await function.memo("approve"))
    assert [vote.source_identity for vote in votes] == ["ana", "bo"]


async def test_a_gate_that_nobody_passes_in_time_says_so(function: Function, play: Play, waits: Waits) -> None:
    gate = opened(await function.approval(expires_in_ms=1000))
    assert isinstance(await function.park("approve"), ParkResult)
    await waits.time_out(play.now + 1000)

    assert await play.vector(function.e) == RESUMABLE
    assert (await function.memo("approve")).ended_as is GateOutcome.TIMED_OUT
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")


async def test_a_vote_after_the_time_is_refused_swept_or_not(function: Function, play: Play) -> None:
    gate = opened(await function.approval(expires_in_ms=1000))
    play.clock.advance_ms(1000)

    async with play.refused(errors.TargetNotSignalable):
        await function.vote(gate, "ana")
    assert await function.park("approve") == GatesReady(("approve",))
    assert (await function.memo("approve")).ended_as is GateOutcome.TIMED_OUT


async def test_different_waits_are_awaited_together_and_again(function: Function, play: Play, waits: Waits) -> None:
    gate = opened(await function.approval())
    await function.timer("nap", 500)
    await function.receive("steer-0")
    names = ("approve", "nap", "steer-0")
    assert isinstance(await function.park(*names), ParkResult)

    await waits.time_out(play.now + 500)
    await function.go_on()
    assert (await function.memo("nap")).ended_as is GateOutcome.SATISFIED
    assert isinstance(await function.park("approve", "steer-0"), ParkResult)
    await function.send(b"left")
    await function.go_on("wd")
    assert (await function.memo("steer-0")).payload == b"left"
    assert isinstance(await function.park("approve"), ParkResult)
    await function.vote(gate, "ana")
    assert await function.vote(gate, "bo") == SATISFIED
    assert (await function.engine.read_waits(function.e)).open == {}


async def test_parking_takes_the_place_of_the_suspension_before_and_leaves_what_is_the_execution_s(
    function: Function, play: Play, waits: Waits
) -> None:
    await function.killed()
    e, t = function.e, play.now
    await function.send(b"hello")
    first = await waits.suspend(function.held)
    assert await waits.effect(e, "go", first) == SATISFIED
    play.clock.advance_ms(7)
    await function.go_on()
    gate = opened(await function.approval())
    await function.timer("nap", HOUR)

    await function.engine.park(function.held.handle, ("approve",), reason_code="waiting_for_approval")

    record = await play.engine.describe_suspension(e)
    assert record is not None
    assert (record.attempt_index, record.created_at, record.timeout_at) == (1, t + 7, None)
    assert (record.gates, record.reason_code, record.last_signal_at) == (["approve"], "waiting_for_approval", None)
    assert (record.satisfied_at, record.closed_at, record.closer_signal_id) == (None, None, None)
    assert (await play.core(e))["blocking_detail"] == "suspended: waiting for an answer to approve"
    assert [one.execution_id for one in (await play.engine.list_suspended(DEFAULT_PARTITION)).entries] == [e]
    assert (await play.told(e))[-1] == "released suspend"
    before = await waits.record(e, first.waitpoint_id)
    assert (before.closed_at, before.close_reason) == (t, "resumed")
    with pytest.raises(errors.SignalLimitExceeded):
        await function.vote(gate, "ana", max_signals_per_execution=1)
    assert await function.vote(gate, "ana", max_signals_per_execution=2) == APPENDED
    assert await function.vote(gate, "bo") == SATISFIED
    await function.go_on()
    assert closed(await function.receive("r0")).payload == b"hello"
    assert list((await function.engine.read_waits(e)).open) == ["nap"]


async def test_an_operator_nudges_a_parked_function_without_closing_its_gates(function: Function, play: Play) -> None:
    await function.approval()
    await function.park("approve")

    assert await function.engine.resume_execution(function.e) == Resumed(PublicState.WAITING)

    await function.go_on()
    assert list((await function.engine.read_waits(function.e)).open) == ["approve"]
    assert isinstance(await function.park("approve"), ParkResult)


async def test_parking_on_what_does_not_exist_is_refused(function: Function, play: Play) -> None:
    async with play.refused(errors.InvalidInput):
        await function.park("nothing")
    async with play.refused(errors.InvalidInput):
        await function.park()
    await function.approval()
    async with play.refused(errors.InvalidInput):
        await function.receive("approve")


async def test_a_worker_that_lost_its_lease_neither_opens_nor_parks(function: Function, play: Play) -> None:
    await function.approval()
    stale = function.held
    await function.killed()
    function.held, live = stale, function.held

    async with play.refused(errors.StaleLease):
        await function.approval("other")
    async with play.refused(errors.StaleLease):
        await function.park("approve")
    async with play.refused(errors.StaleLease):
        await function.engine.record_step(stale.handle, "pay", 0, b"late")
    function.held = live
    assert isinstance(await function.park("approve"), ParkResult)


async def test_waitpoints_of_a_gate_are_listed_and_their_tokens_read(function: Function, play: Play) -> None:
    gate = opened(await function.approval(expires_in_ms=HOUR))

    page = await function.engine.list_pending_waitpoints(function.e)

    assert {entry.waitpoint_key for entry in page.entries} == {"ana", "bo"}
    assert {entry.expires_at for entry in page.entries} == {play.now + HOUR}
    for link in gate.links:
        assert await function.engine.read_waitpoint_token(86, link.waitpoint_id) == link.token


async def test_cancelling_a_parked_function_ends_its_waits(function: Function, play: Play) -> None:
    gate = opened(await function.approval())
    await function.park("approve")
    await function.engine.cancel_execution(function.e)

    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")
    assert await function.engine.expire_suspension(function.e) is SuspensionExpiry.NOT_SUSPENDED
