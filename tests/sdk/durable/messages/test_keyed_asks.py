"""Asks by key: the first one starts the run, and the next life answers those that are unread."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Context, Fabric, InvalidInput, Key, Message, NotAnswered, Refused
from flowfabric.errors import NotFound
from tests.sdk.conftest import running_worker


def cart_of(app: Fabric, key: Key | None = None) -> Any:
    @app.task(name="cart", key=key, inbox={"add": int, "next_life": None, "close": None})
    async def cart(ctx: Context, owner: str, total: int = 0) -> int:
        inbox = ctx.inbox()
        while message := await inbox.next():
            match message:
                case Message("add", 0):
                    await message.refuse("nothing to add")
                case Message("add", price):
                    total += price
                    await ctx.set("total", total)
                    await message.reply(total)
                case Message("next_life"):
                    await ctx.continue_as_new(owner, total)
                case Message("close") if await inbox.close():
                    break
        return total

    return cart


async def test_the_first_question_starts_the_run_and_the_next_ones_reach_it(app: Fabric) -> None:
    cart = cart_of(app)
    async with running_worker(app):
        starter = cart.at("c").or_start("ana")
        assert [await starter.ask("add", price, int, timeout="20s") for price in (1, 2)] == [1, 3]
        assert await cart.at("c").ask("add", 3, int, timeout="20s", key="click-7") == 6
        assert await cart.at("c").ask("add", 3, int, timeout="20s", key="click-7") == 6
        with pytest.raises(Refused, match="nothing to add"):
            await starter.ask("add", 0, timeout="20s")
        assert await cart.at("c").get("total", int) == 6
        await cart.at("c").signal("close")
        assert await cart.at("c").result(20) == 6
        assert [value async for value in cart.at("c").watch("total", int)] == [6]


async def test_an_ask_without_a_run_is_not_found(app: Fabric) -> None:
    keyed = cart_of(app).at("c")
    for call in (keyed.ask("add", 1), keyed.get("total"), anext(aiter(keyed.watch("total")))):
        with pytest.raises(NotFound, match="has no run under 'c'"):
            await call


@pytest.mark.parametrize(("name", "value"), [("add", "milk"), ("remove", 1)])
async def test_a_message_that_the_inbox_does_not_take_starts_nothing(app: Fabric, name: str, value: Any) -> None:
    cart = cart_of(app)
    starter = cart.at("c").or_start("ana")
    for call in (starter.ask(name, value), starter.signal(name, value)):
        with pytest.raises(InvalidInput, match=name):
            await call
    assert await cart.find("c") is None


async def test_questions_from_many_start_one_run_and_each_has_its_answer(app: Fabric) -> None:
    cart = cart_of(app)
    async with running_worker(app):
        starter = cart.at("c").or_start("ana")
        answers = await asyncio.gather(*(starter.ask("add", 1, int, timeout="30s") for _ in range(10)))
        assert sorted(answers) == list(range(1, 11))


async def test_a_question_to_a_key_whose_run_has_ended_is_not_answered(app: Fabric) -> None:
    cart = cart_of(app, Key("owner"))
    async with running_worker(app):
        starter = cart.at("ana").or_start("ana")
        run = await starter.signal("close")
        assert await run.result(20) == 0
        for question in (run.ask("add", 1), cart.at("ana").ask("add", 1), starter.ask("add", 1)):
            with pytest.raises(NotAnswered, match="ended as success") as raised:
                await question
            assert raised.value.run_id == run.id


async def test_a_question_that_the_former_life_received_is_not_answered_and_the_next_one_answers_the_rest(
    app: Fabric,
) -> None:
    @app.task(name="cart", inbox={"add": int, "close": None})
    async def cart(ctx: Context, total: int = 0) -> int:
        inbox = ctx.inbox()
        while (message := await inbox.next()) and message.name == "add":
            if message.value == 0:
                await ctx.continue_as_new(total)
            total += message.value
            await message.reply(total)
        return total

    starter = cart.at("c").or_start()
    async with running_worker(app):
        with pytest.raises(NotAnswered, match="its run continued as new"):
            await starter.ask("add", 0, timeout="30s")
        assert await starter.ask("add", 5, int, timeout="30s") == 5
        await cart.at("c").signal("close")
        assert await cart.at("c").result(20) == 5


async def test_plain_code_asks_gets_and_watches_by_key(app: Fabric) -> None:
    cart = cart_of(app)

    def shop() -> list[Any]:
        first = cart.sync.at("c").or_start("ana").ask("add", 2, int, timeout="30s")
        keyed = cart.sync.at("c")
        second = keyed.ask("add", 3, int, timeout="30s", key="k")
        fact = keyed.get("total", int, wait="30s")
        keyed.signal("close")
        return [first, second, fact, keyed.result(30), list(keyed.watch("total", int))]

    async with running_worker(app):
        assert await asyncio.to_thread(shop) == [2, 5, 5, 5, [5]]
