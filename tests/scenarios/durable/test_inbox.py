"""The inbox: messages of several names in the order sent, closed when nothing is unread, reported if something is."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.ids import SeededMinter
from flowfabric.model.gate import GateKind, GateMemo, GateOutcome
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.leave import LeftOperation
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.suspension.signals import Accepted
from flowfabric.testing.flaky_store import Loss
from tests.scenarios.durable_function import DurableFunction, closed, opened
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine
from tests.scenarios.waits import Waits

NAMES = ("add", "remove", "close")


def memo(occurrence: int = 0) -> MemoArgs:
    return MemoArgs(name="close:inbox", occurrence=occurrence, encoding="json")


def gate(name: str, *mailboxes: str, **options: Any) -> GateArgs:
    return GateArgs(name=name, kind=GateKind.MAILBOX, mailboxes=mailboxes or NAMES, **options)


async def following(function: DurableFunction, name: str, *mailboxes: str, **options: Any) -> OpenedGate | GateMemo:
    return await function.engine.open_gate(function.claim.handle, gate(name, *mailboxes, **options))


async def read_all(function: DurableFunction, count: int) -> list[tuple[str | None, bytes | None]]:
    memos = [closed(await following(function, f"inbox#{number}")) for number in range(count)]
    return [(one.mailbox, one.payload) for one in memos]


async def test_messages_of_three_names_keep_their_order(function: DurableFunction) -> None:
    sent = [("add", b"1"), ("remove", b"2"), ("add", b"3"), ("close", b"4"), ("add", b"5"), ("remove", b"6")]
    for mailbox, text in sent:
        await function.send(text, mailbox)

    assert await read_all(function, 6) == sent


async def test_messages_of_three_senders_keep_the_order_of_their_commits(function: DurableFunction, env: Env) -> None:
    """Each sender has an engine of its own, as a process has."""
    engines = [Engine(env.engine.store, minter=SeededMinter(seed)) for seed in (7, 8, 9)]
    order: list[bytes] = []

    async def send_some(number: int) -> None:
        for count in range(5):
            text = f"{number}.{count}".encode()
            sender = DurableFunction(env, function.waits, function.e)
            sender.engine = engines[number]
            await sender.send(text, NAMES[number])

    await asyncio.gather(*map(send_some, range(3)))

    order = [text or b"" for _, text in await read_all(function, 15)]
    assert sorted(order) == sorted(f"{number}.{count}".encode() for number in range(3) for count in range(5))
    for number in range(3):
        own = [text for text in order if text.startswith(f"{number}.".encode())]
        assert own == sorted(own), "what one sender sent comes in its order"


async def test_a_parked_function_is_resumed_by_a_message_of_any_name(function: DurableFunction) -> None:
    opened(await following(function, "inbox#0"))
    assert isinstance(await function.park("inbox#0"), ParkResult)
    await function.send(b"1", "remove")
    await function.send(b"2", "add")
    await function.resume()

    assert await read_all(function, 2) == [("remove", b"1"), ("add", b"2")]


async def test_gates_that_are_opened_together_receive_in_the_order_sent(function: DurableFunction) -> None:
    for mailbox, text in (("b", b"1"), ("a", b"2"), ("b", b"3")):
        await function.send(text, mailbox)

    gates = (gate("both#0", "a", "b"), gate("only b", "b"), gate("both#1", "a", "b"))
    memos = (await function.engine.open_gates(function.claim.handle, gates)).memos

    assert {name: one.payload for name, one in memos.items()} == {"both#0": b"1", "only b": b"3", "both#1": b"2"}


async def test_a_short_receive_and_the_inbox_share_an_order(function: DurableFunction) -> None:
    await function.send(b"1", "add")
    await function.send(b"2", "remove")
    await function.send(b"3", "add")

    assert closed(await function.receive("receive:remove#0", "remove")).payload == b"2"
    assert await read_all(function, 2) == [("add", b"1"), ("add", b"3")]


async def test_a_gate_with_too_many_mailboxes_is_refused(function: DurableFunction, env: Env) -> None:
    async with env.refused(errors.InvalidInput, "mailboxes: 17 of them, the limit is 16"):
        await following(function, "inbox#0", *(f"m{number}" for number in range(17)))


# -- left ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [False, True])
async def test_a_left_receive_swallows_nothing(function: DurableFunction, received: bool) -> None:
    opened(await following(function, "inbox#0"))
    if received:
        await function.send(b"1", "remove")
    left = [LeftOperation(name="inbox#0")]
    await function.engine.leave_gates(function.claim.handle, left)
    if not received:
        await function.send(b"1", "remove")
    await function.send(b"2", "add")
    await function.reclaim()

    memos = [closed(await following(function, f"inbox#{number}")) for number in (1, 2)]
    assert [(one.mailbox, one.payload, one.message_number) for one in memos] == [("remove", b"1", 1), ("add", b"2", 2)]


async def test_messages_of_several_names_go_back_in_the_order_sent(function: DurableFunction) -> None:
    for number in range(3):
        opened(await following(function, f"inbox#{number}", number=number))
    for mailbox, text in (("add", b"1"), ("remove", b"2"), ("add", b"3")):
        await function.send(text, mailbox)
    await function.send(b"4", "close")
    left = [LeftOperation(name=f"inbox#{number}") for number in (2, 0, 1)]
    await function.engine.leave_gates(function.claim.handle, left)

    memos = [closed(await following(function, f"inbox#{number}")) for number in (3, 4, 5, 6)]
    assert [one.payload for one in memos] == [b"1", b"2", b"3", b"4"]


async def test_a_message_that_goes_back_is_received_by_an_open_gate_that_names_it(function: DurableFunction) -> None:
    opened(await following(function, "inbox#0"))
    opened(await following(function, "other", "other"))
    await function.send(b"1", "add")
    opened(await following(function, "inbox#1"))
    await function.engine.leave_gates(function.claim.handle, [LeftOperation(name="inbox#0")])

    assert (await function.memo("inbox#1")).payload == b"1"
    assert list((await function.engine.read_waits(function.e)).open) == ["other"]


# -- close --------------------------------------------------------------------------------------------------------


async def test_an_inbox_with_an_unread_message_stays_open_and_the_answer_is_remembered(
    function: DurableFunction,
) -> None:
    await function.send(b"1", "add")
    assert await function.engine.close_inbox(function.claim.handle, memo()) is False
    closed(await following(function, "inbox#0"))
    await function.reclaim()

    assert await function.engine.close_inbox(function.claim.handle, memo()) is False, "a replay gets the same answer"
    await function.send(b"2", "add")
    assert await function.engine.close_inbox(function.claim.handle, memo(1)) is False


async def test_a_closed_inbox_refuses_senders(function: DurableFunction, env: Env) -> None:
    assert await function.engine.close_inbox(function.claim.handle, memo()) is True
    async with env.refused(errors.InboxClosed):
        await function.send(b"1", "add")
    await function.reclaim()

    assert await function.engine.close_inbox(function.claim.handle, memo()) is True


@pytest.mark.parametrize("first", ["close", "send"])
async def test_close_and_send_race_and_exactly_one_wins(function: DurableFunction, env: Env, first: str) -> None:
    other = DurableFunction(env, function.waits, function.e, function.claim)
    other.engine = Engine(env.engine.store, minter=SeededMinter(5))
    by_engine = {True: function, False: other}  # the first one to commit works in another process

    async def close() -> bool:
        return await by_engine[first == "send"].engine.close_inbox(function.claim.handle, memo())

    async def send() -> Any:
        return await by_engine[first == "close"].send(b"1", "add")

    slow, fast = (send, close) if first == "close" else (close, send)
    outcomes = dict(zip((slow.__name__, fast.__name__), await env.race(slow(), fast), strict=True))

    if first == "close":
        assert outcomes["close"] is True
        assert isinstance(outcomes["send"], errors.InboxClosed)
    else:
        assert outcomes["close"] is False
        assert isinstance(outcomes["send"], Accepted)


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_close_whose_reply_is_lost_has_one_answer(function: DurableFunction, env: Env, loss: Loss) -> None:

    assert await lossy_engine(env.engine.store, loss).close_inbox(function.claim.handle, memo()) is True
    with pytest.raises(errors.InboxClosed):
        await function.send(b"1", "add")


async def test_a_worker_that_lost_its_lease_closes_nothing(function: DurableFunction, env: Env) -> None:
    zombie = function.claim.handle
    await function.reclaim()
    async with env.refused(errors.StaleLease):
        await function.engine.close_inbox(zombie, memo())


async def test_a_new_life_takes_messages_again(function: DurableFunction, env: Env) -> None:
    assert await function.engine.close_inbox(function.claim.handle, memo())
    await function.engine.complete(function.claim.handle)
    await function.engine.replay_execution(function.e)
    function.claim = await env.grant_and_claim(function.e)

    await function.send(b"1", "add")
    assert await read_all(function, 1) == [("add", b"1")]


# -- the end ------------------------------------------------------------------------------------------------------


async def test_unread_messages_are_reported_at_the_end(function: DurableFunction, env: Env) -> None:
    for mailbox in ("add", "add", "remove"):
        await function.send(b"1", mailbox)
    closed(await following(function, "inbox#0"))

    [answer] = await function.engine.complete_many([(function.claim.handle, b"done")])

    assert not isinstance(answer, errors.FabricError)
    assert answer.unread == {"add": 1, "remove": 1}
    described = await function.engine.describe_execution(function.e)
    assert described is not None
    assert described.unread == {"add": 1, "remove": 1}
    [completion] = await env.completions(function.e)
    assert completion.unread == {"add": 1, "remove": 1}
    assert (await env.lease_history(function.e))[-1].fields["unread"] == {"add": 1, "remove": 1}


async def test_a_run_that_read_everything_reports_nothing(function: DurableFunction) -> None:
    await function.send(b"1", "add")
    closed(await following(function, "inbox#0"))

    assert (await function.engine.complete(function.claim.handle)).unread is msgspec.UNSET
    described = await function.engine.describe_execution(function.e)
    assert described is not None
    assert described.unread == {}


async def test_a_message_that_is_sent_as_the_run_ends_is_reported_or_refused(
    function: DurableFunction, env: Env
) -> None:
    await function.send(b"1", "add")
    closed(await following(function, "inbox#0"))

    other = DurableFunction(env, function.waits, function.e)
    other.engine = Engine(env.engine.store, minter=SeededMinter(5))

    ended, sent = await env.race(function.engine.complete(function.claim.handle), lambda: other.send(b"2", "remove"))

    assert isinstance(sent, Accepted)
    assert ended.unread == {"remove": 1}


# -- what a run declares to take ------------------------------------------------------------------------------------


async def test_a_message_that_a_run_does_not_declare_is_refused(env: Env, waits: Waits) -> None:
    e = await env.create(policy={"inbox": {"add": {"type": "integer"}, "close": {"type": "null"}}})
    function = DurableFunction(env, waits, e)

    async with env.refused(errors.InvalidInput, "mailbox: the run takes no 'ad'; its inbox has add, close"):
        await function.send(b"1", "ad")
    async with env.refused(errors.InvalidInput):
        await function.send(b'"one"', "add")
    assert isinstance(await function.send(b"1", "add"), Accepted)
    assert isinstance(await function.send(b"null", "close"), Accepted)


async def test_an_inbox_that_is_no_schema_is_refused(env: Env) -> None:
    async with env.refused(errors.InvalidPolicyJson, "inbox.add:not_object"):
        await env.create(policy={"inbox": {"add": 1}})


async def test_an_expired_gate_on_several_mailboxes_receives_nothing(function: DurableFunction, env: Env) -> None:
    opened(await following(function, "inbox#0", expires_in_ms=10))
    env.clock.advance_ms(10)
    await function.send(b"1", "add")
    await function.park("inbox#0")

    assert (await function.memo("inbox#0")).ended_as is GateOutcome.TIMED_OUT
    assert closed(await following(function, "inbox#1")).payload == b"1"
