"""`ff send`, `ff facts`, and facts and unread messages in `ff show`, on a store with a worker."""

from __future__ import annotations

import pytest

from flowfabric import Context
from tests.cli.runs.test_waits import Shop
from tests.cli.terminal import Terminal


class Bakery(Shop):
    """An actor that adds up what it is sent."""

    def __init__(self, store: str) -> None:
        super().__init__(store)

        @self.app.task(name="adding", inbox={"add": int, "later": str, "close": None})
        async def adding(ctx: Context) -> int:
            inbox, total = ctx.inbox(add=int, close=None), 0
            while (message := await inbox.next()) and message.name == "add":
                if message.value <= 0:
                    await message.refuse("too little")
                    continue
                total += message.value
                await ctx.set("total", total)
                await message.reply({"total": total})
            return total

        self.adding = adding


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    return ff_or_server


def test_a_message_is_sent_and_its_reply_is_printed(ff: Terminal) -> None:
    shop = Bakery(ff.store)
    run = shop.submit(shop.adding.submit)
    assert ff.stdout("facts", run) == "It shows no facts.\n"
    late = ff.run("send", run, "add", "2", "--timeout", "10ms", "--key", "k")
    assert (late.exit_code, "not answered: there is no reply yet" in late.stderr) == (5, True)
    ff.run("send", run, "add", "0", "--timeout", "10ms", "--key", "low")
    assert ff.stdout("send", run, "later", '"bread"') == "✓ sent\n"
    shop.work_until(run, "suspended")

    assert ff.stdout("send", run, "add", "2", "--wait", "--key", "k") == '{"total":2}\n'
    refused = ff.run("send", run, "add", "0", "--wait", "--key", "low")
    assert (refused.exit_code, refused.stderr) == (1, "ff: refused: too little\n")
    document = ff.document("send", run, "add", "2", "--wait", "--key", "k")
    assert (document["state"], document["reply"]["text"]) == ("answered", '{"total":2}')


def test_facts_and_unread_messages_are_shown(ff: Terminal) -> None:
    shop = Bakery(ff.store)
    run = shop.submit(shop.adding.submit)
    for name, value in (("add", "2"), ("add", "3"), ("later", '"bread"')):
        ff.stdout("send", run, name, value)
    shop.work_until(run, "suspended")

    [fact] = ff.document("facts", run)["facts"]
    assert (fact["name"], fact["number"], fact["value"]["text"]) == ("total", 2, "5")
    assert "total" in ff.stdout("facts", run)
    shown = ff.stdout("show", run)
    assert "later: 1" in shown
    assert "Facts" in shown
    [same] = ff.document("show", run)["facts"]
    assert same == fact
    assert "a message to add or close" in ff.stdout("explain", run)


def test_a_message_that_the_run_does_not_take_is_refused(ff: Terminal) -> None:
    shop = Bakery(ff.store)
    run = shop.submit(shop.adding.submit)

    assert "the run takes no 'ad'; its inbox has add, close, later" in ff.refuses("send", run, "ad", "1")
    assert "add: value: a whole number is needed" in ff.refuses("send", run, "add", '"one"')
