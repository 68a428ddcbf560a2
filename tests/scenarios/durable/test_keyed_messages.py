"""Messages by key: the inbox is checked, an ask is one question, and the next life answers what nobody has read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.durable import lives
from flowfabric.engine.engine import Engine
from flowfabric.engine.types import (
    BATCH_MAILBOX,
    HOLD_MAILBOX,
    FactArgs,
    KeyMode,
    KeyPolicy,
    KeyUntil,
    MessageArgs,
    ReplyArgs,
)
from flowfabric.model.answers.execution import Submitted
from flowfabric.model.gate import ReplyState
from flowfabric.rules.durable import mailbox as mailbox_rules
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.executions import create_request
from tests.scenarios.durable_function import DurableFunction, closed
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine

DAY = 24 * 3_600_000
ACTOR = KeyPolicy(until=KeyUntil.ENDED)
KEPT = KeyPolicy()
BATCH = KeyPolicy(mode=KeyMode.BATCH, until=KeyUntil.STARTED, wait_ms=2_000, most=3)
INBOX = '{"inbox":{"add":{"type":"integer"}}}'


def message(env: Env, mailbox: str = "add", payload: bytes = b"1", **fields: Any) -> MessageArgs:
    given: dict[str, Any] = {"mailbox": mailbox, "message_id": env.engine.minter.uuid(), "payload": payload} | fields
    return MessageArgs(**({"execution_id": ""} | given))


def question(function: DurableFunction, env: Env) -> MessageArgs:
    return msgspec.structs.replace(message(env), execution_id=function.e, wants_reply=True)


async def start(
    env: Env,
    mail: MessageArgs | None = None,
    policy: KeyPolicy = ACTOR,
    *,
    engine: Engine | None = None,
    inbox: str | None = INBOX,
    namespace: str = "default",
) -> Submitted:
    ask = create_request(
        env.engine.new_execution_id("default", "cart|k"),
        namespace=namespace,
        execution_kind="cart",
        idempotency_key="cart|k",
        policy=inbox,
    )
    return await (engine or env.engine).start_by_key(ask, policy, message=mail)


async def answer(function: DurableFunction, message_id: str, payload: bytes = b"3", occurrence: int = 0) -> ReplyState:
    memo = MemoArgs(name="reply:add", occurrence=occurrence, digest=message_id)
    args = ReplyArgs(message_id=message_id, payload=payload)
    return (await function.engine.reply(function.claim.handle, args, memo)).state


async def state_of(function: DurableFunction, message_id: str) -> ReplyState:
    return (await function.engine.read_reply(function.e, message_id)).state


@pytest.mark.parametrize("taken", [False, True], ids=["new run", "run that has the key"])
@pytest.mark.parametrize(("mailbox", "payload"), [("remove", b"1"), ("add", b'"milk"')], ids=["name", "type"])
async def test_the_inbox_is_checked_by_key(env: Env, mailbox: str, payload: bytes, *, taken: bool) -> None:
    if taken:
        await start(env)
    async with env.refused(errors.InvalidInput):
        await start(env, message(env, mailbox, payload))
    assert (await start(env, message(env))).is_new is not taken


async def test_a_closed_inbox_refuses_messages_by_key(env: Env) -> None:
    claim = await env.grant_and_claim((await start(env)).execution_id)
    assert await env.engine.close_inbox(claim.handle, MemoArgs(name="close:inbox"))
    async with env.refused(errors.InboxClosed):
        await start(env, message(env))
    assert not (await start(env)).is_new


@pytest.mark.parametrize("taken", [False, True], ids=["new run", "run that has the key"])
@pytest.mark.parametrize("loss", list(Loss))
async def test_an_ask_by_key_whose_reply_is_lost_is_one_question(
    env: Env, store: Store, loss: Loss, *, taken: bool
) -> None:
    if taken:
        await start(env)
    mail = message(env, wants_reply=True)

    first = await start(env, mail, engine=lossy_engine(store, loss))
    again = await start(env, mail)

    assert (first.execution_id, again.is_new) == (again.execution_id, False)
    dump = await env.dump()
    assert [one.message_id for one in dump["ff_mail"]] == [one.message_id for one in dump["ff_reply"]]
    assert [one.message_id for one in dump["ff_mail"]] == [mail.message_id]


async def test_an_ask_that_is_sent_again_after_the_end_is_still_the_same_question(env: Env) -> None:
    """The run that has the key has ended, but is kept: the question stands, and nobody gets it twice."""
    mail = message(env, wants_reply=True)
    first = await start(env, mail, KEPT)
    claim = await env.grant_and_claim(first.execution_id)
    await env.engine.complete(claim.handle)

    assert (await start(env, mail, KEPT)).execution_id == first.execution_id
    found = await env.engine.read_reply(first.execution_id, mail.message_id)
    assert found.state is ReplyState.NOT_ANSWERED


@pytest.mark.parametrize("moment", ["ended", "purged"])
async def test_a_message_to_a_key_whose_run_has_ended_is_refused_and_not_lost(env: Env, moment: str) -> None:
    policy = KeyPolicy(ttl_ms=30 * DAY)
    claim = await env.grant_and_claim((await start(env, None, policy)).execution_id)
    await env.engine.complete(claim.handle)
    if moment == "purged":
        await env.sweep("retention_trimmer", after_ms=DAY + 3_600_000)
        assert await env.engine.describe_execution(claim.execution_id) is None
    async with env.refused(errors.TargetNotSignalable):
        await start(env, message(env), policy)
    assert not (await start(env, None, policy)).is_new


async def test_keys_of_two_namespaces_are_two_runs(env: Env) -> None:
    one, two = await start(env, message(env)), await start(env, message(env, payload=b"2"), namespace="other")
    assert one.is_new
    assert two.is_new
    assert await env.engine.find_by_key("cart|k", namespace="other") == two.execution_id


async def test_the_first_message_of_a_run_is_reported_if_it_stays_unread(env: Env) -> None:
    claim = await env.grant_and_claim((await start(env, message(env))).execution_id)
    assert (await env.row(claim.execution_id)).has_mail
    assert (await env.engine.complete(claim.handle)).unread == {"add": 1}


async def test_the_inputs_of_a_batch_are_no_mail(env: Env) -> None:
    first = await start(env, message(env, BATCH_MAILBOX), BATCH, inbox=None)
    await start(env, message(env, BATCH_MAILBOX), BATCH, inbox=None)
    env.clock.advance_ms(2_000)
    await env.promote(first.execution_id)
    claim = await env.grant_and_claim(first.execution_id)
    assert not (await env.row(first.execution_id)).has_mail
    assert not (await env.engine.complete(claim.handle)).unread


async def test_two_questions_never_share_an_id(function: DurableFunction) -> None:
    """The name of a message and its key are free text: whatever both contain, other pairs are other questions."""
    pairs = [("a|b", "c"), ("a", "b|c"), ("a|b|c", "")]
    asked = [
        await function.engine.ask(
            MessageArgs(
                execution_id=function.e,
                mailbox=mailbox,
                message_id=function.waits.new_id(),
                idempotency_key=key or None,
            )
        )
        for mailbox, key in pairs
    ]
    assert len({one.message_id for one in asked}) == len(pairs)


@pytest.mark.parametrize("remembered", [0, 3], ids=["in one change", "in many changes"])
async def test_continue_as_new_ends_asks_that_were_received_and_keeps_the_others(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """A question that a branch has not seen goes back to the inbox, and the next life answers it."""
    if remembered:
        monkeypatch.setattr(lives, "MAX_FORGOTTEN", 2)
    for number in range(remembered):
        await function.engine.record_step(function.claim.handle, f"step{number}", 0, b"1")
    seen, given_back, unread = [(await function.engine.ask(question(function, env))).message_id for _ in range(3)]
    closed(await function.receive("r0", "add"))
    closed(await function.receive("r1", "add"))

    await function.engine.continue_as_new(function.claim.handle, b"2", encoding="json", unmet=("r1",))

    states = [await state_of(function, one) for one in (seen, given_back, unread)]
    assert states == [ReplyState.NOT_ANSWERED, ReplyState.OPEN, ReplyState.OPEN]
    function.claim = await env.grant_and_claim(function.e, "wb")
    for number, one in enumerate((given_back, unread)):
        assert closed(await function.receive(f"r{number}", "add")).message_id == one
        assert await answer(function, one, occurrence=number) is ReplyState.ANSWERED
    assert await answer(function, seen, occurrence=2) is ReplyState.NOT_ANSWERED


async def test_the_inbox_is_open_in_the_next_life(function: DurableFunction, env: Env) -> None:
    assert await function.engine.close_inbox(function.claim.handle, MemoArgs(name="close:inbox"))
    async with env.refused(errors.InboxClosed):
        await function.send(b"1")
    await function.engine.continue_as_new(function.claim.handle, b"2", encoding="json")
    await function.send(b"1")


@pytest.mark.parametrize("continues", [1, 2])
async def test_facts_of_every_life_are_purged_with_the_run(function: DurableFunction, env: Env, continues: int) -> None:
    args = FactArgs(name="total", value=b"1", encoding="json", place="fact:total", count=1)
    await function.engine.set_fact(function.claim.handle, args)
    for _ in range(continues):
        await function.engine.continue_as_new(function.claim.handle, b"2", encoding="json")
        function.claim = await env.grant_and_claim(function.e, "wb")
    assert [one.number for one in await function.engine.list_facts(function.e)] == [1]
    await function.engine.complete(function.claim.handle)
    env.clock.advance_ms(DAY + 3_600_000)
    await function.engine.sweep_once("retention_trimmer")
    assert (await env.dump())["ff_fact"] == []


async def test_a_set_of_the_next_life_counts_from_zero_and_one_of_the_former_life_is_refused(
    function: DurableFunction, env: Env
) -> None:
    args = FactArgs(name="total", value=b"1", encoding="json", place="fact:total", count=1)
    await function.engine.set_fact(function.claim.handle, args)
    former = function.claim
    await function.engine.continue_as_new(former.handle, b"2", encoding="json")
    async with env.refused(errors.ExecutionNotActive):
        await function.engine.set_fact(former.handle, msgspec.structs.replace(args, count=2))
    function.claim = await env.grant_and_claim(function.e, "wb")
    async with env.refused(errors.StaleLease):
        await function.engine.set_fact(former.handle, msgspec.structs.replace(args, count=2))
    fact = await function.engine.set_fact(function.claim.handle, msgspec.structs.replace(args, value=b"2"))
    assert (fact.number, fact.value) == (2, b"2")


@pytest.mark.parametrize("field", ["mailbox", "execution_id"])
async def test_bad_input_of_a_question_with_a_key_is_a_typed_error(
    function: DurableFunction, env: Env, field: str
) -> None:
    wrong: dict[str, Any] = {field: 7}
    async with env.refused(errors.InvalidInput):
        await function.engine.ask(msgspec.structs.replace(question(function, env), idempotency_key="k", **wrong))


async def test_a_sender_names_no_internal_mailbox(function: DurableFunction, env: Env) -> None:
    """Such a message would pass by the inbox, add an input to a batch, or release a run that is held."""
    batch = (await start(env, message(env, BATCH_MAILBOX), BATCH, inbox=None)).execution_id
    for mail in (BATCH_MAILBOX, HOLD_MAILBOX):
        async with env.refused(errors.InvalidInput):
            await function.send(b"1", mail)
        async with env.refused(errors.InvalidInput):
            await function.engine.ask(message(env, mail, execution_id=batch))
        async with env.refused(errors.InvalidInput):
            await start(env, message(env, mail), ACTOR)
    async with env.refused(errors.InvalidInput):
        await start(env, message(env, "add"), BATCH, inbox=None)


async def test_mailboxes_with_unread_messages_are_limited(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their counters are one column, which every message writes."""
    monkeypatch.setattr(mailbox_rules, "MAX_UNREAD_MAILBOXES", 2)
    for name in ("a", "b", "a"):
        await function.send(b"1", name)
    async with env.refused(errors.SignalLimitExceeded):
        await function.send(b"1", "c")
    closed(await function.receive("r0", "b"))
    await function.send(b"1", "c")


async def test_a_run_that_is_replayed_after_a_failure_may_answer_what_it_had_received(
    function: DurableFunction, env: Env
) -> None:
    mail = msgspec.structs.replace(question(function, env), idempotency_key="click-7")
    asked = await function.engine.ask(mail)
    closed(await function.receive("r0", "add"))
    await function.engine.fail(function.claim.handle, reason="broken")
    assert await state_of(function, asked.message_id) is ReplyState.NOT_ANSWERED

    await function.engine.replay_execution(function.e)
    assert await state_of(function, asked.message_id) is ReplyState.OPEN
    function.claim = await env.grant_and_claim(function.e)

    assert await answer(function, asked.message_id) is ReplyState.ANSWERED
    assert (await function.engine.ask(mail)).payload == b"3"
