"""Steps: what a durable function did is remembered, and goes with its execution."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.rules.durable.park import GatesReady
from tests.scenarios.functions import HOUR, Function, opened
from tests.scenarios.play import LEASE_MS, Play
from tests.scenarios.waits import Waits


async def test_the_first_record_of_a_step_stands(function: Function, play: Play) -> None:
    first = await function.engine.record_step(function.held.handle, "pay", 0, b"receipt", digest="d")
    again = await function.engine.record_step(function.held.handle, "pay", 0, b"another")
    other = await function.engine.record_step(function.held.handle, "pay", 1, b"another")

    assert (first.result, first.recorded_at) == (b"receipt", play.now)
    assert again == first
    assert other.result == b"another"
    assert await function.engine.read_steps(function.e) == [first, other]


async def test_steps_survive_everything_but_the_replay_of_a_success(function: Function, play: Play) -> None:
    memo = await function.engine.record_step(function.held.handle, "pay", 0, b"receipt")
    await function.killed()
    assert await function.engine.read_steps(function.e) == [memo]
    await function.timer("nap", 0)
    assert await function.park("nap") == GatesReady(("nap",))
    await function.engine.fail(function.held.handle, reason="no", category="permanent")
    await function.engine.replay_execution(function.e)
    assert await function.engine.read_steps(function.e) == [memo]
    assert "nap" in (await function.engine.read_waits(function.e)).memos

    function.held = await play.claimed_again(function.e, "wx")
    gate = opened(await function.approval())
    await function.engine.complete(function.held.handle)
    await function.engine.replay_execution(function.e)

    assert await function.engine.read_steps(function.e) == []
    left = await function.engine.read_waits(function.e)
    assert (left.open, left.memos) == ({}, {})
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "ana")


async def test_a_replay_forgets_nothing_of_others(function: Function, play: Play, waits: Waits) -> None:
    held = await play.claimed()
    other = Function(play, waits, held.execution_id, held)
    for one in (function, other):
        await one.engine.record_step(one.held.handle, "pay", 0, b"receipt")
        await one.timer("nap", 0)
        await one.park("nap")
        await one.approval()
        await one.engine.complete(one.held.handle, result=one.e.encode())
    steps, left = await play.engine.read_steps(other.e), await play.engine.read_waits(other.e)
    assert (len(steps), list(left.open), list(left.memos)) == (1, ["approve"], ["nap"])

    await play.engine.replay_execution(function.e)

    assert await play.engine.read_steps(other.e) == steps
    assert await play.engine.read_waits(other.e) == left
    assert await play.engine.get_execution_result(other.e) == other.e.encode()


async def test_a_lapsed_lease_records_nothing(function: Function, play: Play) -> None:
    play.clock.advance_ms(LEASE_MS)

    with pytest.raises(errors.LeaseExpired):
        await function.engine.record_step(function.held.handle, "pay", 0, b"late")

    assert await function.engine.read_steps(function.e) == []


async def test_everything_goes_with_the_execution(function: Function, play: Play) -> None:
    child = await function.child()
    await function.engine.append_frame(function.held.handle, b"{}", mode="summary")
    await function.engine.record_step(function.held.handle, "pay", 0, b"receipt")
    gate = opened(await function.approval())
    await function.vote(gate, "ana", idempotency_key="i")
    await function.send(b"unread", idempotency_key="i")
    await function.receive("r0")
    await function.engine.complete(child.handle)
    await function.engine.child_completions.drain()
    await function.engine.complete(function.held.handle)

    play.clock.advance_ms(25 * HOUR)
    assert (await function.engine.sweep_once("retention_trimmer")).processed == 2

    kept = await play.everything()
    left = {name for name, rows in kept.items() if rows and name.startswith("ff_")}
    assert left <= {"ff_keystore", "ff_waitpoint_hmac", "ff_idempotency", "ff_lane", "ff_line", "ff_sweep"}
