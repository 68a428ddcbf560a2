"""Asks: the reply is fenced, the first one stays, and a run that ends leaves none of those who ask waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.gate import Reply, ReplyState
from flowfabric.rules.durable.asks import ReplyArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.testing.flaky_store import FlakyStore, Loss
from tests.scenarios.durable_function import DurableFunction, closed
from tests.scenarios.env import Env


def question(function: DurableFunction, **options: Any) -> MessageArgs:
    fields = {"execution_id": function.e, "mailbox": "add", "message_id": function.waits.new_id(), "payload": b"1"}
    return MessageArgs(**fields | options)


async def ask(function: DurableFunction, args: MessageArgs | None = None) -> Reply:
    return await function.engine.ask(args or question(function))


async def answer(
    function: DurableFunction, message_id: str, payload: bytes | None = b"3", *, occurrence: int = 0, **options: Any
) -> Reply:
    memo = MemoArgs(name="reply:add", occurrence=occurrence, digest=message_id)
    args = ReplyArgs(message_id=message_id, payload=payload, payload_encoding="json", **options)
    return await function.engine.reply(function.claim.handle, args, memo)


async def test_an_ask_gets_its_reply(function: DurableFunction) -> None:
    asked = await ask(function)
    assert asked.state is ReplyState.OPEN
    received = closed(await function.receive("r0", "add"))
    assert (received.message_id, received.wants_reply) == (asked.message_id, True)

    reading = asyncio.ensure_future(function.engine.read_reply(function.e, asked.message_id, max_wait_ms=20_000))
    await asyncio.sleep(0)
    await answer(function, asked.message_id)

    assert ((await reading).state, (await reading).payload) == (ReplyState.ANSWERED, b"3")


async def test_a_refusal_names_its_reason(function: DurableFunction) -> None:
    asked = await ask(function)
    await answer(function, asked.message_id, None, reason="the cart is full")

    stands = await function.engine.read_reply(function.e, asked.message_id)
    assert (stands.state, stands.reason) == (ReplyState.REFUSED, "the cart is full")


async def test_the_same_question_is_sent_once_and_has_one_answer(function: DurableFunction, env: Env) -> None:
    asked = await ask(function, question(function, idempotency_key="click-7"))
    closed(await function.receive("r0", "add"))
    await answer(function, asked.message_id)
    env.clock.advance_ms(30 * 24 * 3_600_000)

    async with env.unchanged():
        again = await ask(function, question(function, idempotency_key="click-7", payload=b"other"))
    assert (again.message_id, again.payload) == (asked.message_id, b"3")
    assert (await env.dump())["ff_mail"] == []


@pytest.mark.parametrize("loss", list(Loss))
async def test_the_reply_is_lost_and_asked_again(function: DurableFunction, env: Env, loss: Loss) -> None:
    flaky = FlakyStore(env.engine.store)
    engine = Engine(flaky, minter=SeededMinter(5))
    question_ = question(function)
    flaky.lose("commit", loss)
    asked = await engine.ask(question_)
    flaky.lose("commit", loss)
    memo = MemoArgs(name="reply:add", digest=asked.message_id)
    args = ReplyArgs(message_id=asked.message_id, payload=b"3")
    assert (await engine.reply(function.claim.handle, args, memo)).payload == b"3"

    assert (await ask(function, question_)).payload == b"3"
    assert [one.message_id for one in (await env.dump())["ff_mail"]] == [asked.message_id], "it was sent once"
    assert [one.name for one in await function.engine.read_steps(function.e)] == ["reply:add"]


async def test_the_first_reply_is_kept(function: DurableFunction) -> None:
    asked = await ask(function)
    first = await answer(function, asked.message_id)

    assert await answer(function, asked.message_id, b"4", occurrence=1) == await function.engine.read_reply(
        function.e, asked.message_id
    )
    assert (await function.engine.read_reply(function.e, asked.message_id)).payload == first.payload


async def test_two_replies_at_once_are_one(function: DurableFunction, env: Env) -> None:
    await answer(function, (await ask(function)).message_id)  # from now on a record does not write the run's row
    asked = await ask(function)
    other = DurableFunction(env, function.waits, function.e, function.claim)
    other.engine = Engine(env.engine.store, minter=SeededMinter(5))
    slow, fast = await env.race(
        answer(function, asked.message_id, b"slow", occurrence=1),
        lambda: answer(other, asked.message_id, b"fast", occurrence=2),
    )

    assert (slow.payload, fast.payload) == (b"fast", b"fast")


async def test_only_the_holder_of_the_lease_can_reply(function: DurableFunction, env: Env) -> None:
    asked = await ask(function)
    zombie = function.claim.handle
    await function.reclaim()
    async with env.refused(errors.StaleLease):
        args = ReplyArgs(message_id=asked.message_id, payload=b"late")
        await function.engine.reply(zombie, args, MemoArgs(name="reply:add"))

    assert (await answer(function, asked.message_id, b"new")).payload == b"new"


async def test_a_zombie_that_is_late_in_its_commit_replies_nothing(function: DurableFunction, env: Env) -> None:
    asked = await ask(function)
    operator = Env(Engine(env.engine.store), env.clock)
    late, _ = await env.race(answer(function, asked.message_id), lambda: operator.revoke_lease(function.claim))

    assert isinstance(late, errors.LeaseRevoked)
    assert (await function.engine.read_reply(function.e, asked.message_id)).state is ReplyState.OPEN


async def test_a_reply_to_nobody_is_refused(function: DurableFunction, env: Env) -> None:
    async with env.refused(errors.InvalidInput):
        await answer(function, function.waits.new_id())


@pytest.mark.parametrize("moment", ["before the message is read", "before the reply"])
async def test_an_ask_of_a_run_that_ends_is_not_answered(function: DurableFunction, moment: str) -> None:
    asked = await ask(function)
    if moment == "before the reply":
        closed(await function.receive("r0", "add"))
    reading = asyncio.ensure_future(function.engine.read_reply(function.e, asked.message_id, max_wait_ms=20_000))
    await asyncio.sleep(0)
    await function.engine.complete(function.claim.handle)

    found = await reading
    assert (found.state, found.reason) == (ReplyState.NOT_ANSWERED, "ended as success")


async def test_an_ask_meets_the_end_before_it_is_sent(function: DurableFunction, env: Env) -> None:
    await function.engine.complete(function.claim.handle)
    async with env.refused(errors.TargetNotSignalable):
        await ask(function)


async def test_an_answer_outlives_the_end_of_the_run(function: DurableFunction) -> None:
    asked = await ask(function, question(function, idempotency_key="k"))
    await answer(function, asked.message_id)
    await function.engine.complete(function.claim.handle)

    assert (await ask(function, question(function, idempotency_key="k"))).payload == b"3"


async def test_a_run_that_is_replayed_after_a_success_never_answers_what_it_had_received(
    function: DurableFunction, env: Env
) -> None:
    received, unread = await ask(function), await ask(function)
    closed(await function.receive("r0", "add"))
    await function.engine.complete(function.claim.handle)
    await function.engine.replay_execution(function.e)

    states = [(await function.engine.read_reply(function.e, one.message_id)).state for one in (received, unread)]
    assert states == [ReplyState.NOT_ANSWERED, ReplyState.OPEN]
    function.claim = await env.grant_and_claim(function.e)
    assert closed(await function.receive("r0", "add")).message_id == unread.message_id


async def test_a_message_that_went_back_is_still_an_ask(function: DurableFunction) -> None:
    from flowfabric.rules.durable.leave import LeftOperation

    await function.receive("r0", "add")
    asked = await ask(function)
    await function.engine.leave_gates(function.claim.handle, [LeftOperation(name="r0")])

    again = closed(await function.receive("r1", "add"))
    assert (again.message_id, again.wants_reply) == (asked.message_id, True)


async def test_replies_are_purged_with_their_run(function: DurableFunction, env: Env) -> None:
    asked = await ask(function)
    await answer(function, asked.message_id)
    await function.engine.complete(function.claim.handle)
    env.clock.advance_ms(25 * 3_600_000)
    await function.engine.sweep_once("retention_trimmer")

    assert (await env.dump())["ff_reply"] == []
