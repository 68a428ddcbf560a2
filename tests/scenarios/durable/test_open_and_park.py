"""A park opens the new gates of a function in its own change; if one closes at once, the function continues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.model.change import Change
from flowfabric.model.condition import Single
from flowfabric.model.gate import GateKind, GateOutcome
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesClosed
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.scenarios.durable_function import WAITS, DurableFunction
from tests.scenarios.env import RESUMABLE, Env
from tests.scenarios.lossy_engine import lossy_engine


def receive(name: str, mailbox: str = "steer", **options: Any) -> GateArgs:
    return GateArgs(name=name, kind=GateKind.MAILBOX, mailbox=mailbox, **options)


def nap(name: str = "nap", length: int = 60_000) -> GateArgs:
    return GateArgs(name=name, kind=GateKind.TIMER, expires_in_ms=length)


def children(name: str, *ids: str, **options: Any) -> GateArgs:
    return GateArgs(name=name, kind=GateKind.CHILDREN, children=ids, **options)


async def park(function: DurableFunction, *gates: GateArgs, names: tuple[str, ...] = ()) -> ParkResult | GatesClosed:
    return await function.engine.open_gates_and_park(function.claim.handle, gates, names=names)


def payloads(answer: ParkResult | GatesClosed) -> dict[str, bytes | None]:
    assert isinstance(answer, GatesClosed)
    return {name: memo.payload for name, memo in answer.memos.items()}


async def test_a_park_opens_its_gates_and_releases_the_lease(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.approval()
    gates = (receive("r0", number=4), nap(), children("one", child.execution_id))

    assert isinstance(await park(function, *gates, names=("approve",)), ParkResult)

    assert await env.vector(function.e) == WAITS
    waits = await function.engine.read_waits(function.e)
    assert sorted(waits.open) == ["approve", "nap", "one", "r0"]
    assert waits.open["r0"].number == 4
    await function.send(b"go")
    assert await env.vector(function.e) == RESUMABLE


async def test_a_function_that_never_waited_parks_in_one_commit(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[Change] = []
    add = env.engine.runtime.commit_queue.add

    def count(change: Change) -> asyncio.Future[int | None]:
        commits.append(change)
        return add(change)

    monkeypatch.setattr(env.engine.runtime.commit_queue, "add", count)

    assert isinstance(await park(function, *(nap(f"n{number}") for number in range(100))), ParkResult)
    assert len(commits) == 1
    assert len((await function.engine.read_waits(function.e)).open) == 100
    [row] = [row for row in (await env.dump())["ff_exec_core"] if row.execution_id == function.e]
    assert row.blocking_text.endswith("or 95 more")


async def test_gates_whose_messages_have_arrived_receive_them_in_order_and_nothing_is_parked(
    function: DurableFunction, env: Env
) -> None:
    for text in (b"a", b"b", b"c"):
        await function.send(text)
    await function.send(b"other", "other")

    answer = await park(function, receive("r0"), receive("r1"), receive("o", "other"), nap())

    assert payloads(answer) == {"r0": b"a", "r1": b"b", "o": b"other"}
    waits = await function.engine.read_waits(function.e)
    assert list(waits.open) == ["nap"], "the others are open"
    assert waits.memos == answer.memos if isinstance(answer, GatesClosed) else False
    assert [row.payload for row in (await env.dump())["ff_mail"]] == [b"c"]


async def test_a_gate_of_children_that_have_ended_closes_as_it_is_opened(function: DurableFunction) -> None:
    first, second = await function.create_child(), await function.create_child()
    await function.complete_child(first)

    answer = await park(function, children("one", first.execution_id), children("two", second.execution_id))

    assert isinstance(answer, GatesClosed)
    assert {name: memo.ended_as for name, memo in answer.memos.items()} == {"one": GateOutcome.SATISFIED}
    assert list((await function.engine.read_waits(function.e)).open) == ["two"]


async def test_a_child_that_ends_between_the_load_and_the_commit_of_the_park_is_counted(
    function: DurableFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await function.create_child()
    function.complete_before_the_next_commit(child, monkeypatch)
    answer = await park(function, children("one", child.execution_id), nap())

    assert isinstance(answer, GatesClosed)
    assert list(answer.memos) == ["one"]


async def test_a_message_that_is_sent_during_the_park_is_received(
    function: DurableFunction, env: Env, store: Store
) -> None:
    message = MessageArgs(execution_id=function.e, mailbox="steer", message_id=function.waits.new_id(), payload=b"now")

    answer, _ = await env.race(park(function, receive("r0")), lambda: Engine(store).send_message(message))

    assert payloads(answer) == {"r0": b"now"}


async def test_a_gate_that_has_closed_or_expired_keeps_the_lease(function: DurableFunction, env: Env) -> None:
    await function.timer("old", 10)
    env.clock.advance_ms(10)
    answer = await park(function, nap(), names=("old",))
    assert isinstance(answer, GatesClosed)
    assert list(answer.memos) == ["old"]
    assert answer.memos == (await function.engine.read_waits(function.e)).memos

    async with env.unchanged():
        assert await park(function, nap(), names=("old",)) == answer
    assert await park(function, nap("over", 0)) == GatesClosed({"over": await function.memo("over")})


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_park_with_a_lost_message_parks_once(function: DurableFunction, store: Store, loss: Loss) -> None:
    answer = await lossy_engine(store, loss).open_gates_and_park(function.claim.handle, (receive("r0"), nap()))

    assert isinstance(answer, ParkResult)
    assert await function.env.vector(function.e) == WAITS


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_received_message_is_kept_when_the_reply_of_the_park_is_lost(
    function: DurableFunction, store: Store, loss: Loss
) -> None:
    await function.send(b"one")
    await function.send(b"two")
    answer = await lossy_engine(store, loss).open_gates_and_park(function.claim.handle, (receive("r0"), nap()))

    assert payloads(answer) == {"r0": b"one"}
    assert payloads(await park(function, receive("r0"), receive("r1"))) == {"r0": b"one", "r1": b"two"}


async def test_a_worker_that_lost_its_lease_opens_nothing(function: DurableFunction, env: Env) -> None:
    zombie = function.claim.handle
    await function.reclaim()

    async with env.refused(errors.StaleLease):
        await function.engine.open_gates_and_park(zombie, (nap(),))


@pytest.mark.parametrize(
    ("gates", "names"),
    [
        ((), ()),
        ((), ("unknown",)),
        ((nap(), nap()), ()),
        (("nap",), ()),
        ((nap(),), ("unknown",)),
        ((GateArgs(name="nap", kind=GateKind.TIMER),), ()),
        ((GateArgs(name="ask", kind=GateKind.SIGNALS, condition=Single("k"), waitpoints=((str(0), "k"),)),), ()),
        (
            (
                GateArgs(
                    name="ask",
                    kind=GateKind.SIGNALS,
                    condition=Single("k"),
                    waitpoints=(("550e8400-e29b-41d4-a716-446655440000", "k"),),
                ),
            ),
            (),
        ),
    ],
)
async def test_invalid_gates_are_refused(function: DurableFunction, gates: Any, names: Any) -> None:
    async with function.env.unchanged():
        with pytest.raises(errors.InvalidInput):
            await function.engine.open_gates_and_park(function.claim.handle, gates, names=names)


async def test_a_gate_of_another_kind_under_the_same_name_is_refused(function: DurableFunction) -> None:
    await function.receive("x")
    async with function.env.unchanged():
        with pytest.raises(errors.InvalidInput, match="mailbox gate"):
            await park(function, nap("x"))
