"""A wait that the function left is closed for good; a message that it has received goes back to its mailbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.engine.types import GateArgs
from flowfabric.model.gate import GateKind, GateOutcome, StepMemo, StepState
from flowfabric.rules.durable.leave import LeftOperation
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.scenarios.durable_function import DurableFunction, closed, opened
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine

RACE = MemoArgs(name="race:first", result=b'"late"', number=9)


async def leave(function: DurableFunction, *names: str, memo: MemoArgs | None = None) -> StepMemo | None:
    return await function.engine.leave_gates(
        function.claim.handle, [LeftOperation(name=name) for name in names], memo=memo
    )


async def names_of_left(function: DurableFunction) -> list[str]:
    memos = await function.engine.read_steps(function.e)
    return [memo.step for memo in memos if memo.state is StepState.LEFT]


async def test_a_left_receive_swallows_no_later_message(function: DurableFunction) -> None:
    await function.receive("r0")
    await leave(function, "r0")

    await function.send(b"one")
    await function.send(b"two")

    assert (await function.engine.read_waits(function.e)).open == {}
    assert [closed(await function.receive(name)).payload for name in ("r1", "r2")] == [b"one", b"two"]
    assert await names_of_left(function) == ["r0"]


async def test_a_gate_that_was_left_before_it_was_opened_stays_closed(function: DurableFunction) -> None:
    """The call that opens it may still be under way when the function leaves it."""
    late = GateArgs(name="r0", kind=GateKind.MAILBOX, mailbox="inbox")
    await leave(function, "r0")

    for open_late in (
        lambda: function.engine.open_gate(function.claim.handle, late),
        lambda: function.engine.open_gates(function.claim.handle, (late,)),
        lambda: function.engine.open_gates_and_park(function.claim.handle, (late,)),
    ):
        with pytest.raises(errors.InvalidInput, match="left before"):
            await open_late()

    assert (await function.engine.read_waits(function.e)).open == {}


async def test_leaving_a_gate_that_is_about_to_be_opened_refuses_the_open(function: DurableFunction) -> None:
    late = GateArgs(name="r0", kind=GateKind.MAILBOX, mailbox="inbox")

    outcomes = await asyncio.gather(
        function.engine.open_gates(function.claim.handle, (late,)), leave(function, "r0"), return_exceptions=True
    )

    assert outcomes[1] is None
    assert (await function.engine.read_waits(function.e)).open == {}


async def test_a_message_that_came_before_the_leave_goes_back_to_the_head_of_its_mailbox(
    function: DurableFunction, env: Env
) -> None:
    await function.receive("r0")
    await function.send(b"one", sender="ana")
    await function.send(b"two")
    before = await function.memo("r0")
    await leave(function, "r0")

    again = closed(await function.receive("r1"))

    assert (again.payload, again.sender, again.message_id) == (b"one", "ana", before.message_id)
    assert closed(await function.receive("r2")).payload == b"two"
    assert (await env.dump())["ff_mail"] == []


async def test_several_messages_go_back_in_the_order_in_which_they_were_received(
    function: DurableFunction, env: Env
) -> None:
    for number, name in enumerate(("r0", "r1")):
        await function.receive(name, number=number)
    for text in (b"one", b"two", b"three"):
        await function.send(text)
    await leave(function, "r1", "r0")

    assert [closed(await function.receive(name)).payload for name in ("r2", "r3", "r4")] == [b"one", b"two", b"three"]
    assert (await env.dump())["ff_mail"] == []


async def test_a_message_goes_back_to_its_own_mailbox_only(function: DurableFunction) -> None:
    await function.receive("a0", "a")
    await function.receive("b0", "b")
    await function.send(b"for a", "a")
    await function.send(b"for b", "b")
    await leave(function, "a0")

    assert (await function.memo("b0")).payload == b"for b"
    assert closed(await function.receive("a1", "a")).payload == b"for a"
    opened(await function.receive("b1", "b"))


async def test_a_message_that_goes_back_is_received_by_the_next_open_gate(function: DurableFunction, env: Env) -> None:
    await function.receive("r0")
    await function.receive("r1")
    await function.send(b"one")
    await leave(function, "r0")

    assert (await function.memo("r1")).payload == b"one"
    assert await function.park("r1") == GatesReady(("r1",))
    assert (await env.dump())["ff_mail"] == []


async def test_an_expired_gate_receives_no_message_that_goes_back(function: DurableFunction, env: Env) -> None:
    await function.receive("r0")
    await function.receive("r1", expires_in_ms=10)
    await function.send(b"one")
    env.clock.advance_ms(10)
    await leave(function, "r0")

    assert await function.park("r1") == GatesReady(("r1",))
    assert (await function.memo("r1")).ended_as is GateOutcome.TIMED_OUT
    assert closed(await function.receive("r2")).payload == b"one"


async def test_a_message_that_came_back_is_received_after_a_takeover(function: DurableFunction) -> None:
    await function.receive("r0")
    await function.send(b"one")
    await leave(function, "r0")
    await function.reclaim()

    found = await function.engine.remembered(function.claim.handle)

    assert [memo.step for memo in found.steps] == ["r0"]
    assert (found.open, found.memos) == ({}, {})
    assert closed(await function.receive("r1")).payload == b"one"


async def test_a_left_timer_and_left_children_are_closed(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.timer("nap", 1000)
    await function.children("one", child.execution_id)
    await function.receive("r0")
    await leave(function, "nap", "one", "never opened")
    assert isinstance(await function.park("r0"), ParkResult)

    await function.complete_child(child)
    env.clock.advance_ms(1000)
    await function.engine.sweep_once("suspension_timeout")

    waits = await function.engine.read_waits(function.e)
    assert (sorted(waits.open), waits.memos) == (["r0"], {})
    assert await names_of_left(function) == ["nap", "never opened", "one"]


async def test_a_left_approval_keeps_its_question_and_its_votes(function: DurableFunction) -> None:
    gate = opened(await function.approval())
    await leave(function, "approve")

    for voter in ("ana", "bo"):
        await function.vote(gate, voter)

    assert (await function.memo("approve")).ended_as is GateOutcome.SATISFIED
    assert await names_of_left(function) == ["approve"]


async def test_a_left_step_is_recorded_by_name_and_occurrence(function: DurableFunction) -> None:
    left = [LeftOperation(name="pay", occurrence=2, is_gate=False, number=5)]
    await function.engine.leave_gates(function.claim.handle, left)

    [memo] = await function.engine.read_steps(function.e)
    assert (memo.state, memo.step, memo.occurrence, memo.number) == (StepState.LEFT, "pay", 2, 5)


async def test_a_race_records_its_winner_and_leaves_the_losers_in_one_change(function: DurableFunction) -> None:
    await function.receive("r0")
    await function.timer("nap", 60_000)
    won = await leave(function, "nap", memo=RACE)

    assert won is not None
    assert (won.name, won.result, won.number) == ("race:first", b'"late"', 9)
    await function.send(b"kept")
    another = await leave(function, "r0", memo=MemoArgs(name="race:first", result=b'"other"'))
    assert another == won, "the first winner stands"
    assert await names_of_left(function) == ["nap"], "and nothing else is left"
    assert (await function.memo("r0")).payload == b"kept"


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("memo", [None, RACE], ids=["left", "race"])
async def test_a_leave_with_a_lost_message_happens_once(
    function: DurableFunction, store: Store, loss: Loss, memo: MemoArgs | None
) -> None:
    await function.receive("r0")
    await function.send(b"one")
    won = await lossy_engine(store, loss).leave_gates(function.claim.handle, [LeftOperation(name="r0")], memo=memo)

    assert (None if won is None else won.result) == (None if memo is None else memo.result)
    assert [closed(await function.receive("r1")).payload] == [b"one"]
    opened(await function.receive("r2"))


async def test_leaving_twice_returns_a_message_once(function: DurableFunction, env: Env) -> None:
    await function.receive("r0")
    await function.send(b"one")
    await leave(function, "r0")
    async with env.unchanged():
        assert await leave(function, "r0") is None

    assert closed(await function.receive("r1")).payload == b"one"


async def test_a_message_that_is_sent_during_the_leave_is_not_lost(
    function: DurableFunction, env: Env, store: Store
) -> None:
    await function.receive("r0")
    message = MessageArgs(execution_id=function.e, mailbox="steer", message_id=function.waits.new_id(), payload=b"one")

    left, _ = await env.race(leave(function, "r0"), lambda: Engine(store).send_message(message))

    assert left is None
    assert closed(await function.receive("r1")).payload == b"one"


async def test_a_worker_that_lost_its_lease_leaves_nothing(function: DurableFunction, env: Env) -> None:
    await function.receive("r0")
    zombie = function.claim.handle
    await function.reclaim()
    async with env.refused(errors.StaleLease):
        await function.engine.leave_gates(zombie, [LeftOperation(name="r0")], memo=RACE)
    await function.engine.complete(function.claim.handle)
    async with env.refused(errors.ExecutionNotActive):
        await leave(function, "r0")


@pytest.mark.parametrize(
    ("operations", "memo"),
    [
        ([LeftOperation(name="")], None),
        ([LeftOperation(name="r0", occurrence=-1)], None),
        ([LeftOperation(name="r0"), LeftOperation(name="r0")], None),
        (["r0"], None),
        (None, None),
        ([], MemoArgs(name="left:x")),
        ([], MemoArgs(name="race:x", result="text")),  # type: ignore[arg-type]
        ([], "race:x"),
    ],
)
async def test_invalid_operations_and_memos_are_refused(function: DurableFunction, operations: Any, memo: Any) -> None:
    async with function.env.unchanged():
        with pytest.raises(errors.InvalidInput):
            await function.engine.leave_gates(function.claim.handle, operations, memo=memo)


async def test_an_open_suspension_of_a_later_park_is_not_affected_by_what_was_left_before(
    function: DurableFunction, env: Env
) -> None:
    await function.receive("r0")
    await function.timer("nap", 60_000)
    await leave(function, "r0")
    assert isinstance(await function.park("nap"), ParkResult)
    await function.send(b"kept")

    assert await env.engine.read_execution_state(function.e) == "suspended"
    assert [row.payload for row in (await env.dump())["ff_mail"]] == [b"kept"]
