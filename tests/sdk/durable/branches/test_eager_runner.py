"""Handlers that share asyncio tasks behave as if each had its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from flowfabric.sdk.worker.eager_runner import EagerRunner
from tests.sdk.conftest import wait_until_true

Handler = Callable[[], Awaitable[None]]

around: contextvars.ContextVar[str] = contextvars.ContextVar("around", default="nothing")


class Handlers:
    """Handlers by their number, with the tasks in which they ran."""

    def __init__(self, *handlers: Handler) -> None:
        self.handlers = handlers
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.over: list[int] = []
        self.turns = EagerRunner(self._call)

    def start(self) -> None:
        self.turns.add(range(len(self.handlers)))

    async def finish_all(self) -> None:
        await wait_until_true(lambda: len(self.over) == len(self.handlers))

    async def _call(self, number: int, task: asyncio.Task[None]) -> None:
        assert asyncio.current_task() is task
        self.tasks[number] = task
        try:
            await self.handlers[number]()
        finally:
            self.over.append(number)


async def passes() -> None: ...


async def test_handlers_that_do_not_wait_share_a_task_in_order() -> None:
    handlers = Handlers(*[passes] * 5)
    handlers.start()
    await handlers.finish_all()
    assert handlers.over == [0, 1, 2, 3, 4]
    assert len(set(handlers.tasks.values())) == 1


async def test_a_context_variable_of_one_handler_is_invisible_to_the_next() -> None:
    seen: list[str] = []

    async def sets() -> None:
        seen.append(around.get())
        around.set("mine")
        seen.append(around.get())

    async def sets_and_waits() -> None:
        await sets()
        await asyncio.sleep(0)
        seen.append(around.get())

    around.set("the worker's")
    handlers = Handlers(sets, sets_and_waits, sets)
    handlers.start()
    await handlers.finish_all()
    assert sorted(seen) == ["mine"] * 4 + ["the worker's"] * 3
    assert around.get() == "the worker's"


async def test_a_waiting_handler_is_alone_in_its_task_until_it_finishes() -> None:
    go = asyncio.Event()

    async def waits() -> None:
        await go.wait()

    handlers = Handlers(passes, waits, passes, waits, passes)
    handlers.start()
    await wait_until_true(lambda: len(handlers.over) == 3)
    assert handlers.over == [0, 2, 4]
    assert handlers.tasks[1] is handlers.tasks[0], "it found out that it waits when it had begun"
    assert handlers.tasks[1] not in {handlers.tasks[number] for number in (2, 3, 4)}
    assert handlers.tasks[3] is not handlers.tasks[4]
    go.set()
    await handlers.finish_all()


async def test_many_waiting_handlers_have_all_started_after_a_few_loop_iterations() -> None:
    go = asyncio.Event()

    async def waits() -> None:
        await go.wait()

    handlers = Handlers(*[waits] * 100)
    handlers.start()
    for _ in range(8):
        await asyncio.sleep(0)
    assert len(handlers.tasks) == 100
    assert len(set(handlers.tasks.values())) == 100
    go.set()
    await handlers.finish_all()


async def test_handlers_after_one_that_waited_get_a_task_each_at_once() -> None:
    go = asyncio.Event()

    async def waits() -> None:
        await go.wait()

    handlers = Handlers(*[waits] * 7)
    before = asyncio.all_tasks()
    for items in ([0], range(1, 7)):
        handlers.turns.add(items)
        for _ in range(2):  # their tasks are created in the next iteration of the loop, and run in the one after it
            await asyncio.sleep(0)
    assert len(handlers.tasks) == 7
    assert len(asyncio.all_tasks() - before) == 7, "and nobody else does"
    go.set()
    await handlers.finish_all()


async def test_what_is_sent_right_after_handlers_were_queued_leaves_before_they_run() -> None:
    """A claim for the other slots is sent at the end of an iteration of the loop; handlers may occupy it for long."""
    handlers = Handlers(passes)
    started_before: list[int] = []
    handlers.start()
    asyncio.get_running_loop().call_soon(lambda: started_before.append(len(handlers.tasks)))
    await handlers.finish_all()
    assert started_before == [0]


async def test_handlers_share_a_task_again_after_one_that_did_not_wait() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    handlers = Handlers(waits, passes, passes, passes)
    for some in ([0], [1], [2, 3]):
        handlers.turns.add(some)
        await wait_until_true(partial(handlers.over.__contains__, some[-1]))
    assert handlers.tasks[2] is handlers.tasks[3]


async def test_cancelling_a_waiting_handler_affects_no_other() -> None:
    async def waits() -> None:
        await asyncio.sleep(3600)

    handlers = Handlers(passes, waits, passes)
    handlers.start()
    await wait_until_true(lambda: handlers.over == [0, 2])
    handlers.tasks[1].cancel("that is enough")
    await handlers.finish_all()
    with pytest.raises(asyncio.CancelledError):
        await handlers.tasks[1]


async def test_a_handler_that_cancels_itself_without_waiting_affects_no_other() -> None:
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def waits() -> None:
        await asyncio.sleep(0)

    handlers = Handlers(cancels_itself, waits, cancels_itself, passes)
    handlers.start()
    await handlers.finish_all()
    assert not handlers.tasks[1].cancelled()
    assert not handlers.tasks[3].cancelled()


async def test_the_other_handlers_continue_when_one_raises_a_base_exception() -> None:
    class Torn(BaseException): ...

    async def tears() -> None:
        raise Torn

    async def waits_and_tears() -> None:
        await asyncio.sleep(0)
        raise Torn

    handlers = Handlers(tears, passes, waits_and_tears, tears, passes)
    handlers.start()
    await handlers.finish_all()
    for number in (0, 2, 3):
        with pytest.raises(Torn):
            await handlers.tasks[number]


async def test_a_handler_that_is_dropped_before_its_turn_never_starts() -> None:
    handlers = Handlers(passes, passes, passes)
    handlers.start()
    handlers.turns.discard(1)
    await wait_until_true(lambda: len(handlers.over) == 2)
    await asyncio.sleep(0)
    assert handlers.over == [0, 2]


async def test_errors_of_an_awaited_future_reach_the_waiting_handler() -> None:
    caught: list[str] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits() -> None:
        try:
            await future
        except ValueError as error:
            caught.append(str(error))
            await asyncio.sleep(0)
            caught.append("and went on")

    handlers = Handlers(waits)
    handlers.start()
    await asyncio.sleep(0)
    future.set_exception(ValueError("no"))
    await handlers.finish_all()
    assert caught == ["no", "and went on"]
