"""Mailboxes store messages in order until the function receives them."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.model.gate import GateOutcome
from flowfabric.rules.durable import mailbox
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from tests.scenarios.durable_function import DurableFunction, closed
from tests.scenarios.env import Env
from tests.scenarios.waits import Waits


async def test_messages_are_stored_in_order_until_they_are_received(env: Env, waits: Waits) -> None:
    e = await env.create()
    function = DurableFunction(env, waits, e)
    assert (await function.send(b"0")) != await function.send(b"1")  # before the first claim
    await env.grant(e)
    function.claim = await env.claim(e)

    got = [closed(await function.receive(f"r{n}")).payload for n in range(2)]
    await function.receive("r2")
    assert isinstance(await function.park("r2"), ParkResult)
    await function.send(b"2")
    await function.send(b"3")
    await function.resume()
    got += [(closed(await function.receive(f"r{n}"))).payload for n in (2, 3)]

    assert got == [b"0", b"1", b"2", b"3"]
    assert (await env.dump())["ff_mail"] == []


async def test_a_received_message_is_returned_again_after_a_takeover(function: DurableFunction, env: Env) -> None:
    await function.send(b"first", sender="ana")
    memo = closed(await function.receive("r0"))
    await function.send(b"second")
    await function.reclaim()

    assert closed(await function.receive("r0")) == memo
    assert (memo.payload, memo.sender) == (b"first", "ana")
    assert closed(await function.receive("r1")).payload == b"second"


async def test_messages_are_received_by_mailbox_name(function: DurableFunction) -> None:
    await function.send(b"a", mailbox="one")
    await function.send(b"b", mailbox="two")

    assert closed(await function.receive("r0", "two")).payload == b"b"
    assert closed(await function.receive("r1", "one")).payload == b"a"


async def test_a_message_reaches_only_an_open_gate_of_its_mailbox(function: DurableFunction, env: Env) -> None:
    await function.approval()
    await function.receive("late", "steer", expires_in_ms=10)
    await function.receive("other", "other")
    await function.receive("own", "steer")
    env.clock.advance_ms(10)

    await function.send(b"go")

    left = await function.engine.read_waits(function.e)
    assert sorted(left.open) == ["approve", "late", "other"]
    assert {name: memo.payload for name, memo in left.memos.items()} == {"own": b"go"}


async def test_messages_emit_events_with_their_effect(function: DurableFunction, env: Env, waits: Waits) -> None:
    first = await function.send(b"a", sender="ana", idempotency_key="i")
    assert isinstance(first, Accepted)
    await function.send(b"a", sender="bo", idempotency_key="i")
    assert closed(await function.receive("r0")).message_id == first.signal_id
    await function.receive("r1")
    await function.send(b"b")

    events = await waits.signal_events(function.e)

    assert [event.effect for event in events] == ["Other(appended_to_mailbox)", "Deduped", "Satisfied"]
    assert [event.source_identity for event in events] == ["ana", "bo", None]
    assert events[0].signal_id == events[1].signal_id != events[2].signal_id


async def test_unread_messages_are_limited(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "MAX_UNREAD", 3)
    for name in ("one", "two", "two"):
        await function.send(b"x", mailbox=name)

    async with env.refused(errors.SignalLimitExceeded):
        await function.send(b"y", mailbox="three")
    await function.receive("waits", "three")
    await function.send(b"y", mailbox="three")
    assert (await function.memo("waits")).payload == b"y", "an awaited message is not stored"
    await function.receive("r0", "two")
    await function.send(b"z", mailbox="two")
    assert [closed(await function.receive(f"r{n}", "two")).payload for n in (1, 2)] == [b"x", b"z"]


async def test_two_receives_of_one_mailbox_are_served_in_order(function: DurableFunction, env: Env) -> None:
    await function.receive("r0")
    await function.receive("r1")
    await function.send(b"a")
    await function.send(b"b")

    assert [(await function.memo(name)).payload for name in ("r0", "r1")] == [b"a", b"b"]


async def test_a_message_with_an_idempotency_key_is_stored_once(function: DurableFunction) -> None:
    first = await function.send(b"a", idempotency_key="i")
    assert isinstance(first, Accepted)
    assert await function.send(b"a", idempotency_key="i") == DuplicateDelivery(first.signal_id)
    assert isinstance(await function.send(b"a", mailbox="other", idempotency_key="i"), Accepted)

    assert closed(await function.receive("r0")).payload == b"a"
    assert isinstance(await function.receive("r1"), OpenedGate)


async def test_a_message_key_expires_with_its_ttl(function: DurableFunction, env: Env) -> None:
    first = await function.send(b"a", idempotency_key="i", dedup_ttl_ms=1000)
    assert isinstance(first, Accepted)
    env.clock.advance_ms(999)
    assert await function.send(b"a", idempotency_key="i", dedup_ttl_ms=1000) == DuplicateDelivery(first.signal_id)
    assert isinstance(await function.send(b"a"), Accepted), "without a key it is no duplicate"
    env.clock.advance_ms(1)

    assert isinstance(await function.send(b"a", idempotency_key="i"), Accepted)


async def test_messages_to_unknown_and_terminal_executions_are_refused(function: DurableFunction, env: Env) -> None:
    async with env.refused(errors.NotFound, entity="execution"):
        await function.send(b"a", execution_id=env.engine.new_execution_id())
    async with env.refused(errors.PayloadTooLarge):
        await function.send(b"x" * 65_537)
    await function.engine.complete(function.claim.handle)
    async with env.refused(errors.TargetNotSignalable):
        await function.send(b"a")


async def test_a_message_after_a_receive_timeout_is_kept_for_the_next_receive(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    await function.receive("r0", expires_in_ms=1000)
    await function.park("r0")
    await waits.time_out(env.now + 1000)
    assert (await function.memo("r0")).ended_as is GateOutcome.TIMED_OUT

    await function.send(b"late")
    await function.resume()
    assert closed(await function.receive("r1")).payload == b"late"
