"""Handlers that share tasks: nobody notices, except by the time that it saves."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from flowfabric.sdk.worker.eager_runner import EagerRunner
from tests.sdk.conftest import until_so

Handler = Callable[[], Awaitable[None]]

around: contextvars.ContextVar[str] = contextvars.ContextVar("around", default="nothing")


class Stage:
    """Handlers by their number, with the tasks that they got."""

    def __init__(self, *handlers: Handler) -> None:
        self.handlers = handlers
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.over: list[int] = []
        self.turns = EagerRunner(self._call)

    def begin(self) -> None:
        self.turns.add(range(len(self.handlers)))

    async def all_over(self) -> None:
        await until_so(lambda: len(self.over) == len(self.handlers))

    async def _call(self, number: int, task: asyncio.Task[None]) -> None:
        assert asyncio.current_task() is task
        self.tasks[number] = task
        try:
            await self.handlers[number]()
        finally:
            self.over.append(number)


async def passes() -> None: ...


async def test_those_that_wait_for_nothing_share_a_task_in_their_order() -> None:
    stage = Stage(*[passes] * 5)
    stage.begin()
    await stage.all_over()
    assert stage.over == [0, 1, 2, 3, 4]
    assert len(set(stage.tasks.values())) == 1


async def test_what_one_sets_around_itself_the_next_does_not_see() -> None:
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
    stage = Stage(sets, sets_and_waits, sets)
    stage.begin()
    await stage.all_over()
    assert sorted(seen) == ["mine"] * 4 + ["the worker's"] * 3
    assert around.get() == "the worker's"


async def test_one_that_waits_is_alone_in_its_task_until_it_is_over() -> None:
    go = asyncio.Event()

    async def waits() -> None:
        await go.wait()

    stage = Stage(passes, waits, passes, waits, passes)
    stage.begin()
    await until_so(lambda: len(stage.over) == 3)
    assert stage.over == [0, 2, 4]
    assert stage.tasks[1] is stage.tasks[0], "it found out that it waits when it had begun"
    assert stage.tasks[1] not in {stage.tasks[number] for number in (2, 3, 4)}
    assert stage.tasks[3] is not stage.tasks[4]
    go.set()
    await stage.all_over()


async def test_many_that_wait_have_all_begun_after_a_few_turns_of_the_loop() -> None:
    go = asyncio.Event()

    async def waits() -> None:
        await go.wait()

    stage = Stage(*[waits] * 100)
    stage.begin()
    for _ in range(8):
        await asyncio.sleep(0)
    assert len(stage.tasks) == 100
    assert len(set(stage.tasks.values())) == 100
    go.set()
    await stage.all_over()


async def test_those_that_come_after_one_that_waited_get_a_task_each_at_once() -> None:
    go = asyncio.Event()

    async def waits() -> None:
        await go.wait()

    stage = Stage(*[waits] * 7)
    before = asyncio.all_tasks()
    stage.turns.add([0])
    await asyncio.sleep(0)
    stage.turns.add(range(1, 7))
    await asyncio.sleep(0)
    assert len(stage.tasks) == 7
    assert len(asyncio.all_tasks() - before) == 7, "and nobody else does"
    go.set()
    await stage.all_over()


async def test_they_share_again_after_one_that_did_not_wait() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    stage = Stage(waits, passes, passes, passes)
    for some in ([0], [1], [2, 3]):
        stage.turns.add(some)
        await until_so(partial(stage.over.__contains__, some[-1]))
    assert stage.tasks[2] is stage.tasks[3]


async def test_one_that_is_cancelled_while_it_waits_is_the_only_one() -> None:
    async def waits() -> None:
        await asyncio.sleep(3600)

    stage = Stage(passes, waits, passes)
    stage.begin()
    await until_so(lambda: stage.over == [0, 2])
    stage.tasks[1].cancel("that is enough")
    await stage.all_over()
    with pytest.raises(asyncio.CancelledError):
        await stage.tasks[1]


async def test_one_that_cancels_itself_and_does_not_wait_hits_nobody_else() -> None:
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def waits() -> None:
        await asyncio.sleep(0)

    stage = Stage(cancels_itself, waits, cancels_itself, passes)
    stage.begin()
    await stage.all_over()
    assert not stage.tasks[1].cancelled()
    assert not stage.tasks[3].cancelled()


async def test_the_others_go_on_when_one_is_torn_down() -> None:
    class Torn(BaseException): ...

    async def tears() -> None:
        raise Torn

    async def waits_and_tears() -> None:
        await asyncio.sleep(0)
        raise Torn

    stage = Stage(tears, passes, waits_and_tears, tears, passes)
    stage.begin()
    await stage.all_over()
    for number in (0, 2, 3):
        with pytest.raises(Torn):
            await stage.tasks[number]


async def test_one_that_is_dropped_before_its_turn_never_begins() -> None:
    stage = Stage(passes, passes, passes)
    stage.begin()
    stage.turns.discard(1)
    await until_so(lambda: len(stage.over) == 2)
    await asyncio.sleep(0)
    assert stage.over == [0, 2]


async def test_errors_that_come_from_what_is_awaited_reach_the_one_that_waits() -> None:
    caught: list[str] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits() -> None:
        try:
            await future
        except ValueError as error:
            caught.append(str(error))
            await asyncio.sleep(0)
            caught.append("and went on")

    stage = Stage(waits)
    stage.begin()
    await asyncio.sleep(0)
    future.set_exception(ValueError("no"))
    await stage.all_over()
    assert caught == ["no", "and went on"]
