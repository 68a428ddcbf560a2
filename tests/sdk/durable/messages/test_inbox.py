"""Messages to a durable function: its inbox, asks and their replies, and how it closes the inbox."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from flowfabric import (
    Context,
    Fabric,
    FabricError,
    InvalidInput,
    Message,
    NotAnswered,
    Refused,
    Retry,
)
from flowfabric.errors import InboxClosed
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

app = Fabric("sqlite:////nowhere/at/all.db")
RETRY = Retry(max=5, base="10ms", jitter=False)
MOST = 3


class Item(msgspec.Struct):
    price: int


@app.task(inbox={"add": Item, "remove": str, "close": None}, retry=RETRY)
async def cart(ctx: Context, owner: str) -> list[int]:
    inbox, prices = ctx.inbox(), list[int]()
    while True:
        await ctx.set("total", sum(prices))
        match await inbox.next(timeout="30d"):
            case Message("add", item) as ask:
                if len(prices) >= MOST:
                    await ask.refuse("the cart is full")
                else:
                    prices.append(item.price)
                    await ask.reply(len(prices))
            case Message("close") | None:
                if await inbox.close():
                    return prices


async def test_an_actor_answers_refuses_and_closes() -> None:
    async with World(app) as world:
        run = await cart.submit("ana")
        assert [await run.ask("add", Item(price), int, timeout="10s") for price in (1, 2, 3)] == [1, 2, 3]
        with pytest.raises(Refused, match="the cart is full"):
            await run.ask("add", Item(4), int)
        assert await run.get("total", int) == 6
        await run.signal("close")

        assert await run.result() == [1, 2, 3]
        assert await run.get("total", int) == 6
        with pytest.raises(NotAnswered, match="ended as success"):
            await run.ask("add", Item(4), int)
        world.assert_invariants()


async def test_the_same_question_has_the_same_answer() -> None:
    async with World(app):
        run = await cart.submit("ana")
        first = [await run.ask("add", Item(1), int, key="click-7") for _ in range(3)]
        assert first == [1, 1, 1]
        await run.signal("close")
        assert await run.result() == [1]
        assert await run.ask("add", Item(1), int, key="click-7") == 1


async def test_a_message_of_another_type_or_name_is_refused_at_the_sender() -> None:
    async with World(app):
        run = await cart.submit("ana")
        anonymous = app.find(run.id)
        for sender in (run, anonymous):
            for name, value in (("add", {"price": "much"}), ("buy", None), ("close", 1)):
                with pytest.raises(InvalidInput, match=name):
                    await sender.signal(name, value)
                with pytest.raises(InvalidInput, match=name):
                    await sender.ask(name, value)
        await run.signal("close")
        assert await run.result() == []
        assert (await run.describe()).unread == {}


@pytest.mark.parametrize("moment", ["before_effect", "after_effect", "after_commit"])
@pytest.mark.parametrize("point", ["reply:add", "close:inbox", "fact:total"])
async def test_an_actor_that_dies_replies_once_and_loses_nothing(app: Fabric, point: str, moment: str) -> None:
    served = app.task(name="cart", inbox={"add": Item, "remove": str, "close": None}, retry=RETRY)(cart.handler)
    crashes = Crashes(app, [(point, moment)])
    async with running_worker(app):
        run = await served.submit("ana")
        answers = await asyncio.gather(*(run.ask("add", Item(1), int, timeout="20s") for _ in range(MOST)))
        await run.signal("close")
        assert await run.result(20) == [1, 1, 1]
    assert sorted(answers) == [1, 2, 3]
    assert not crashes.left


@pytest.mark.parametrize("point", ["reply:add", "close:inbox", "fact:total"])
async def test_a_zombie_leaves_no_trace(point: str) -> None:
    async with World(app, workers=2) as world:
        world.crash_at(point, "lease_expired")
        run = await cart.submit("ana")
        assert await run.ask("add", Item(1), int) == 1
        await run.signal("close")
        assert await run.result() == [1]
        assert await run.get("total", int) == 1
        world.assert_invariants()


@pytest.mark.parametrize("point", ["reply:add", "close:inbox", "fact:total"])
async def test_a_store_that_is_down_for_a_while_loses_nothing(point: str) -> None:
    async with World(app) as world:
        world.crash_at(point, "store_down", lasts="3s")
        run = await cart.submit("ana")
        assert await run.ask("add", Item(1), int) == 1
        await run.signal("close")
        assert await run.result() == [1]


@app.task
async def careless(ctx: Context) -> str:
    first: str = await ctx.receive("go", str)
    return first


async def test_unread_messages_are_reported_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with World(app) as world:
        run = await careless.options(delay="1s").submit()
        await run.signal("go", "now")
        await run.signal("more", 1)
        asked = asyncio.create_task(run.ask("more", 2))
        await world.advance("2s")

        with pytest.raises(NotAnswered, match="ended as success"):
            await asked
        assert await run.result() == "now"
        assert (await run.describe()).unread == {"more": 2}
    assert "has ended with unread messages (more: 2)" in caplog.text


@app.task
async def forgetful(ctx: Context) -> None:
    await ctx.inbox(add=int).next()


async def test_an_ask_meets_the_end_after_its_message_was_read() -> None:
    async with World(app):
        run = await forgetful.submit()
        with pytest.raises(NotAnswered, match="ended as success"):
            await run.ask("add", 1, int)


@app.task
async def curious(ctx: Context) -> list[str]:
    inbox = ctx.inbox(add=int)
    return [message.sender for _ in range(3) if (message := await inbox.next()) is not None]


async def test_a_message_names_the_process_that_sent_it() -> None:
    async with World(app):
        run = await curious.at("c").or_start().signal("add", 1)
        await run.signal("add", 2)
        with pytest.raises(NotAnswered):
            await run.ask("add", 3)
        assert await run.result() == [app.identity] * 3


@app.task
async def slow(ctx: Context) -> None:
    message = await ctx.inbox(add=int).next()
    assert message is not None
    await ctx.sleep("1h")
    await message.reply("at last")


async def test_an_ask_that_times_out_says_what_the_run_does_and_can_be_asked_again() -> None:
    async with World(app) as world:
        run = await slow.submit()
        with pytest.raises(TimeoutError, match="has not answered 'add' within 5 s") as late:
            await run.ask("add", 1, str, timeout="5s", key="k")
        assert "it sleeps until" in "".join(late.value.__notes__)
        await world.advance("1h")
        assert await run.ask("add", 1, str, timeout="5s", key="k") == "at last"


@app.task
async def stubborn(ctx: Context) -> str:
    inbox = ctx.inbox(stop=None)
    assert await inbox.close()
    await ctx.sleep("1h")
    try:
        await inbox.next()
    except InvalidInput as refused:
        return str(refused)
    return "?"


async def test_a_closed_inbox_refuses_senders_and_readers() -> None:
    async with World(app) as world:
        run = await stubborn.submit()
        await world.settle()
        with pytest.raises(InboxClosed):
            await run.signal("stop")
        with pytest.raises(InboxClosed):
            await run.ask("stop")
        assert "it is closed" in await run.result()


@app.task
async def choosing(ctx: Context) -> list[Any]:
    got: list[Any] = []
    inbox = ctx.inbox(a=int, b=int)
    won = await ctx.race(news=inbox.next(), late=ctx.sleep("1s"))
    if isinstance(news := won.value, Message):
        got.append((news.name, news.value))
    await ctx.sleep("1s")
    for _ in range(3):
        message = await inbox.next(timeout="1s")
        got.append(None if message is None else (message.name, message.value))
    return got


@pytest.mark.parametrize("after", ["0.5s", "1s", "1.5s"])
async def test_a_left_receive_swallows_nothing(after: str) -> None:
    """A message before, at and after the moment at which the receive is left, to two mailboxes."""
    async with World(app) as world:
        run = await choosing.submit()
        await world.advance(after)
        await run.signal("b", 1)
        await run.signal("a", 2)

        assert [one for one in await run.result() if one] == [["b", 1], ["a", 2]]
        world.assert_invariants()


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_crash_as_a_receive_is_left_swallows_nothing(moment: Any) -> None:
    async with World(app) as world:
        world.crash_at("left:race#0.news/inbox#0", moment)
        run = await choosing.submit()
        await world.advance("1.5s")
        await run.signal("b", 1)
        await run.signal("a", 2)

        assert [one for one in await run.result() if one] == [["b", 1], ["a", 2]]
        world.assert_invariants()


@app.task
async def replying_beside(ctx: Context) -> int:
    """Messages are answered by branches of their own, in another order than they came."""
    inbox = ctx.inbox(add=int)

    async def answer(message: Message) -> None:
        await ctx.sleep("2s" if message.value == 1 else "1s")
        await message.reply(message.value * 10)

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            message = await inbox.next()
            assert message is not None
            group.create_task(answer(message))
    return await ctx.options(name="after").step(lambda: 1)


async def test_replies_of_other_branches_hold_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with World(app):
        run = await replying_beside.submit()
        answers = await asyncio.gather(run.ask("add", 1, int), run.ask("add", 2, int))
        assert list(answers) == [10, 20]
        assert await run.result() == 1
    assert "held" not in caplog.text


@app.task(inbox={"add": int, "close": None})
def plain(ctx: Context) -> int:
    inbox, total = ctx.sync.inbox(), 0
    while True:
        message = inbox.next()
        assert message is not None
        if message.name == "close" and inbox.close():
            return total
        if message.name == "add":
            total += message.value
            ctx.sync.set("total", total)
            message.reply(total)


async def test_a_plain_function_has_an_inbox() -> None:
    async with World(app) as world:
        run = await plain.submit()
        assert await run.ask("add", 2, int) == 2
        assert await run.ask("add", 3, int) == 5
        await run.signal("close")
        assert await run.result() == 5
        await world.settle()


async def test_the_timeline_shows_messages_replies_and_facts() -> None:
    async with World(app) as world:
        run = await cart.submit("ana")
        await run.ask("add", Item(1), int)
        await run.signal("close")
        await run.result()
        shown = [(entry.kind, entry.name) for entry in await world.timeline(run)]
    assert shown == [
        ("receive", "inbox#0"),
        ("reply", "add"),
        ("set", "total"),
        ("receive", "inbox#1"),
        ("close", "inbox"),
    ]


def test_an_inbox_is_declared_by_names_and_types() -> None:
    with pytest.raises(InvalidInput, match="no mapping"):
        app.task(inbox=["add"])(lambda ctx: None)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="the limit is 16"):
        app.task(inbox={f"m{number}": int for number in range(17)})
    with pytest.raises(InvalidInput, match="cannot be asked for"):
        app.task(inbox={"add": asyncio.Task})


@app.task(inbox={"add": int})
async def misusing(ctx: Context) -> list[str]:
    said = []
    for names in ({"ad": int},):
        try:
            ctx.inbox(**names)
        except FabricError as refused:
            said.append(str(refused))
    return said


async def test_a_name_that_the_task_does_not_declare_is_refused() -> None:
    async with World(app):
        [refused] = await (await misusing.submit()).result()
    assert "the task declares no 'ad'; it has add" in refused


async def test_a_run_explains_that_it_waits_for_a_message() -> None:
    async with World(app) as world:
        run = await cart.submit("ana")
        await world.settle()
        assert "a message to add or remove or close" in (await run.explain()).sentence
