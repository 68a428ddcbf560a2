"""Messages from several processes, and callers that block: on every store that others can open."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import ExitStack

from flowfabric import Context, Fabric
from tests.sdk.conftest import running_worker
from tests.sdk.processes import process

NAMES, EACH = ("add", "remove", "note"), 10


async def test_messages_of_three_names_keep_their_order(shared_app: Fabric) -> None:
    @shared_app.task(name="listening", inbox=dict.fromkeys(NAMES, int))
    async def listening(ctx: Context) -> list[tuple[str, int]]:
        inbox, got = ctx.inbox(), list[tuple[str, int]]()
        while len(got) < len(NAMES) * EACH:
            message = await inbox.next()
            assert message is not None
            got.append((message.name, message.value))
        return got

    run = await listening.submit()
    with ExitStack() as stack:
        senders = [
            stack.enter_context(process(shared_app.url, run.id, name, EACH, module="tests.sdk.sender"))
            for name in NAMES
        ]
        async with running_worker(shared_app):
            got = await run.result(90)
        assert [await asyncio.to_thread(sender.join) for sender in senders] == [0, 0, 0]

    by_name = defaultdict[str, list[int]](list)
    for name, number in got:
        by_name[name].append(number)
    assert by_name == {name: list(range(EACH)) for name in NAMES}, "what one process sent comes in its order"
    memos = (await (await shared_app.engine()).read_waits(run.id)).memos
    numbers = [memos[f"inbox#{place}"].message_number for place in range(len(got))]
    assert numbers == list(range(1, len(got) + 1)), "and all of it in the order in which it was stored"


async def test_a_blocking_caller_asks_gets_and_watches(shared_app: Fabric) -> None:
    @shared_app.task(name="adding", inbox={"add": int, "close": None})
    async def adding(ctx: Context) -> int:
        inbox, total = ctx.inbox(), 0
        while message := await inbox.next():
            if message.name == "close":
                break
            total += message.value
            await ctx.set("total", total)
            await message.reply(total)
        return total

    def use(run_id: str) -> list[object]:
        run = adding.sync.run(run_id)
        asked = [run.ask("add", 2, int, timeout="60s"), run.ask("add", 3, int, timeout="60s", key="k")]
        seen = [run.get("total", int, wait="60s")]
        run.signal("close")
        return [*asked, *seen, list(run.watch("total", int)), run.result(60)]

    run = await adding.submit()
    async with running_worker(shared_app):
        assert await asyncio.to_thread(use, run.id) == [2, 5, 5, [5], 5]
