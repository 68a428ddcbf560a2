"""Mailboxes: messages to an execution are kept in order until its function receives them."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.model.gate import GateOutcome
from flowfabric.rules.durable import mailbox
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from tests.scenarios.functions import Function, closed
from tests.scenarios.play import Play
from tests.scenarios.waits import Waits


async def test_messages_are_kept_before_between_and_after_receives(play: Play, waits: Waits) -> None:
    e = await play.create()
    function = Function(play, waits, e)
    assert (await function.send(b"0")) != await function.send(b"1")  # before the first claim
    await play.grant(e)
    function.held = await play.claim(e)

    got = [closed(await function.receive(f"r{n}")).payload for n in range(2)]
    await function.receive("r2")
    assert isinstance(await function.park("r2"), ParkResult)
    await function.send(b"2")
    await function.send(b"3")
    await function.go_on()
    got += [(closed(await function.receive(f"r{n}"))).payload for n in (2, 3)]

    assert got == [b"0", b"1", b"2", b"3"]
    assert (await play.everything())["ff_mail"] == []


async def test_a_message_received_once_is_the_answer_for_ever(function: Function, play: Play) -> None:
    await function.send(b"first", sender="ana")
    memo = closed(await function.receive("r0"))
    await function.send(b"second")
    await function.killed()

    assert closed(await function.receive("r0")) == memo
    assert (memo.payload, memo.sender) == (b"first", "ana")
    assert closed(await function.receive("r1")).payload == b"second"


async def test_mailboxes_have_names(function: Function) -> None:
    await function.send(b"a", mailbox="one")
    await function.send(b"b", mailbox="two")

    assert closed(await function.receive("r0", "two")).payload == b"b"
    assert closed(await function.receive("r1", "one")).payload == b"a"


async def test_a_message_reaches_only_those_who_wait_for_its_name_in_their_time(function: Function, play: Play) -> None:
    await function.approval()
    await function.receive("late", "steer", expires_in_ms=10)
    await function.receive("other", "other")
    await function.receive("own", "steer")
    play.clock.advance_ms(10)

    await function.send(b"go")

    left = await function.engine.read_waits(function.e)
    assert sorted(left.open) == ["approve", "late", "other"]
    assert {name: memo.payload for name, memo in left.memos.items()} == {"own": b"go"}


async def test_what_became_of_a_message_is_told(function: Function, play: Play, waits: Waits) -> None:
    first = await function.send(b"a", sender="ana", idempotency_key="i")
    assert isinstance(first, Accepted)
    await function.send(b"a", sender="bo", idempotency_key="i")
    assert closed(await function.receive("r0")).message_id == first.signal_id
    await function.receive("r1")
    await function.send(b"b")

    told = await waits.signals_told(function.e)

    assert [news.effect for news in told] == ["Other(appended_to_mailbox)", "Deduped", "Satisfied"]
    assert [news.source_identity for news in told] == ["ana", "bo", None]
    assert told[0].signal_id == told[1].signal_id != told[2].signal_id


async def test_there_is_a_limit_to_what_nobody_reads(
    function: Function, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "MAX_UNREAD", 3)
    for name in ("one", "two", "two"):
        await function.send(b"x", mailbox=name)

    async with play.refused(errors.SignalLimitExceeded):
        await function.send(b"y", mailbox="three")
    await function.receive("waits", "three")
    await function.send(b"y", mailbox="three")
    assert (await function.memo("waits")).payload == b"y", "what is awaited is not kept"
    await function.receive("r0", "two")
    await function.send(b"z", mailbox="two")
    assert [closed(await function.receive(f"r{n}", "two")).payload for n in (1, 2)] == [b"x", b"z"]


async def test_two_receivers_of_one_name_are_served_in_turn(function: Function, play: Play) -> None:
    await function.receive("r0")
    await function.receive("r1")
    await function.send(b"a")
    await function.send(b"b")

    assert [(await function.memo(name)).payload for name in ("r0", "r1")] == [b"a", b"b"]


async def test_a_message_with_a_key_is_kept_once(function: Function) -> None:
    first = await function.send(b"a", idempotency_key="i")
    assert isinstance(first, Accepted)
    assert await function.send(b"a", idempotency_key="i") == DuplicateDelivery(first.signal_id)
    assert isinstance(await function.send(b"a", mailbox="other", idempotency_key="i"), Accepted)

    assert closed(await function.receive("r0")).payload == b"a"
    assert isinstance(await function.receive("r1"), OpenedGate)


async def test_a_key_is_remembered_for_its_time(function: Function, play: Play) -> None:
    first = await function.send(b"a", idempotency_key="i", dedup_ttl_ms=1000)
    assert isinstance(first, Accepted)
    play.clock.advance_ms(999)
    assert await function.send(b"a", idempotency_key="i", dedup_ttl_ms=1000) == DuplicateDelivery(first.signal_id)
    assert isinstance(await function.send(b"a"), Accepted), "without a key nothing is the same"
    play.clock.advance_ms(1)

    assert isinstance(await function.send(b"a", idempotency_key="i"), Accepted)


async def test_messages_to_the_missing_and_the_ended_are_refused(function: Function, play: Play) -> None:
    async with play.refused(errors.NotFound, entity="execution"):
        await function.send(b"a", execution_id=play.engine.new_execution_id())
    async with play.refused(errors.PayloadTooLarge):
        await function.send(b"x" * 65_537)
    await function.engine.complete(function.held.handle)
    async with play.refused(errors.TargetNotSignalable):
        await function.send(b"a")


async def test_a_message_that_nobody_receives_in_time_stays(function: Function, play: Play, waits: Waits) -> None:
    await function.receive("r0", expires_in_ms=1000)
    await function.park("r0")
    await waits.time_out(play.now + 1000)
    assert (await function.memo("r0")).ended_as is GateOutcome.TIMED_OUT

    await function.send(b"late")
    await function.go_on()
    assert closed(await function.receive("r1")).payload == b"late"
