"""Steps that fail: a failure that the function moves past is remembered; one that ends the attempt is not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from flowfabric import Context, Fabric, Fatal, Retry, RetryAfter, RunFailed, StepFailed
from flowfabric.errors import FabricError
from flowfabric.model.gate import StepState
from flowfabric.sdk.durable.sync_context import SyncContext
from flowfabric.sdk.worker.worker import Worker
from tests.sdk.conftest import running_worker, wait_until_suspended, wait_until_true
from tests.sdk.durable.crashes import Crashes

calls: Counter[str] = Counter()
RETRY = Retry(max=3, base="10ms", jitter=False)


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


class Declined(Exception):
    """A failure with a field of its own."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


async def book(what: str) -> str:
    calls[f"book {what}"] += 1
    if what == "hotel":
        raise Declined("no room", 7)
    return what


async def undo(what: str) -> None:
    calls[f"undo {what}"] += 1


async def tell() -> None:
    calls["tell"] += 1
    if calls["tell"] == 1:
        raise ConnectionError("busy")


async def replays(app: Fabric, run: Any, times: int, mailbox: str = "go") -> None:
    for _ in range(times):
        await wait_until_suspended(run)
        await run.signal(mailbox, "x")


@pytest.mark.parametrize(
    ("point", "moment", "hotels", "undos"),
    [
        ("none", "", 1, 1),
        ("failed:book", "before_effect", 2, 1),  # the process dies before the failure is recorded
        ("failed:book", "after_commit", 1, 1),
        ("step:undo", "after_effect", 1, 2),
        ("step:undo", "after_commit", 1, 1),
    ],
)
async def test_a_saga_that_rolled_back_never_books_again(
    app: Fabric, point: str, moment: str, hotels: int, undos: int
) -> None:
    @app.task(retry=RETRY)
    async def trip(ctx: Context) -> str:
        await ctx.step(book, "flight")
        try:
            await ctx.step(book, "hotel")
        except Declined as why:
            await ctx.step(undo, "flight")
            await ctx.step(tell)
            return f"rolled back: {why} {why.code}"
        return "booked"

    crashes = Crashes(app, [(point, moment)] if moment else [])
    async with running_worker(app):
        assert await (await trip.submit()).result(20) == "rolled back: no room 7"
    assert not crashes.left
    assert calls == {"book flight": 1, "book hotel": hotels, "undo flight": undos, "tell": 2}


async def test_a_saga_that_raises_on_fails_the_run_without_a_retry(app: Fabric) -> None:
    @app.task(retry=RETRY)
    async def trip(ctx: Context, wrap: bool) -> None:
        try:
            await ctx.step(book, "hotel")
        except Declined as why:
            await ctx.step(undo, "flight")
            if wrap:
                raise LookupError("no trip") from why
            raise

    async with running_worker(app):
        for wrap, category in ((False, "Declined"), (True, "LookupError")):
            calls.clear()
            run = await trip.submit(wrap)
            with pytest.raises(RunFailed) as failed:
                await run.result(20)
            assert failed.value.category == category
            assert len(await run.attempts()) == 1
            assert calls == {"book hotel": 1, "undo flight": 1}


async def test_an_uncaught_failure_is_tried_again_as_the_task_says(app: Fabric) -> None:
    @app.task(retry=RETRY)
    async def telling(ctx: Context) -> str:
        await ctx.step(tell)
        return "told"

    async with running_worker(app):
        assert await (await telling.submit()).result(20) == "told"
    assert calls["tell"] == 2


async def test_a_declined_card_is_charged_once(app: Fabric) -> None:
    async def charge(card: str) -> str:
        calls[card] += 1
        if card == "bad":
            raise Declined(card, 51)
        return card

    @app.task
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step(charge, "bad")
        except Declined:
            for _ in range(2):
                await ctx.receive("go")
            return await ctx.step(charge, await ctx.receive("card", str))

    async with running_worker(app):
        run = await pay.submit()
        await replays(app, run, 2)
        await replays(app, run, 1, "card")
        assert await run.result(20) == "x"
    assert calls == {"bad": 1, "x": 1}


async def test_a_failure_is_recorded_once_although_the_process_dies_before_the_next_step(app: Fabric) -> None:
    @app.task
    async def trip(ctx: Context) -> str:
        try:
            await ctx.step(book, "hotel")
        except Declined:
            await ctx.step(undo, "a")
            await ctx.step(undo, "b")
        return "done"

    crashes = Crashes(app, [("failed:book", "after_commit"), ("step:undo", "before_effect")])
    async with running_worker(app):
        run = await trip.submit()
        assert await run.result(20) == "done"
        steps = await (await app.engine()).read_steps(run.id)
    assert not crashes.left
    assert calls == {"book hotel": 1, "undo a": 1, "undo b": 1}
    assert sorted(memo.name for memo in steps) == ["failed:book", "undo", "undo"]
    assert len({memo.number for memo in steps}) == 3


async def test_the_first_record_of_a_step_is_kept_and_a_former_holder_records_nothing(app: Fabric) -> None:
    held: list[Context] = []
    ready, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def holding(ctx: Context) -> str:
        held.append(ctx)
        if len(held) == 1:
            await asyncio.sleep(60)
        ready.set()
        await go_on.wait()
        return "done"

    async with running_worker(app, grace="0s"):
        run = await holding.submit()
        engine = await app.engine()
        await wait_until_true(lambda: len(held) == 1)
        await engine.revoke_lease(run.id)
        with pytest.raises(FabricError):
            await engine.record_step(held[0].handle, "charge", 0, b"0")
        async with asyncio.timeout(20):
            await ready.wait()
        second = held[1].handle
        failed = await engine.record_step(second, "charge", 0, b'{"type":"E","text":""}', state=StepState.FAILED)
        with pytest.raises(FabricError):  # after the new holder, as before it
            await engine.record_step(held[0].handle, "charge", 0, b"0")
        for state in (StepState.DONE, StepState.FAILED):
            assert (await engine.record_step(second, "charge", 0, b"1", state=state)).name == failed.name
        done = await engine.record_step(second, "book", 0, b"1")
        answer = await engine.record_step(second, "book", 0, b'{"type":"E","text":""}', state=StepState.FAILED)
        assert (answer.name, answer.result) == (done.name, done.result)
        go_on.set()
        assert await run.result(20) == "done"


@pytest.mark.parametrize("turns", range(7))
async def test_a_member_of_a_task_group_that_fails_uncaught_is_retried(app: Fabric, turns: int) -> None:
    async def fail_once() -> str:
        calls["fail"] += 1
        if calls["fail"] == 1:
            raise Declined("once", 1)
        return "good"

    async def sibling_step() -> str:
        return "step"

    @app.task(retry=RETRY)
    async def grouped(ctx: Context) -> list[str]:
        failing = asyncio.Event()

        async def member() -> str:
            try:
                return await ctx.step(fail_once)
            finally:
                failing.set()

        async def sibling() -> str:
            await failing.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            return await ctx.step(sibling_step)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member()), group.create_task(sibling())]
        return [task.result() for task in tasks]

    async with running_worker(app):
        assert await (await grouped.submit()).result(20) == ["good", "step"]
    assert calls["fail"] == 2


async def test_a_failure_of_a_task_of_a_task_is_remembered_when_its_maker_compensates(app: Fabric) -> None:
    @app.task
    async def outer(ctx: Context) -> str:
        async def inner() -> str:
            return await ctx.step(book, "hotel")

        async def maker() -> str:
            try:
                return await asyncio.create_task(inner())
            except Declined as why:
                await ctx.step(undo, "flight")
                await ctx.receive("go")
                return f"caught {why.code}"

        return await asyncio.create_task(maker())

    async with running_worker(app):
        run = await outer.submit()
        await replays(app, run, 1)
        assert await run.result(20) == "caught 7"
    assert calls == {"book hotel": 1, "undo flight": 1}


async def test_a_failure_beside_a_wait_in_gather_with_return_exceptions_is_remembered_with_the_park(
    app: Fabric,
) -> None:
    @app.task
    async def both(ctx: Context) -> list[Any]:
        failed, message = await asyncio.gather(ctx.step(book, "hotel"), ctx.receive("go", str), return_exceptions=True)
        assert isinstance(failed, Declined)
        return [failed.code, message]

    async with running_worker(app):
        run = await both.submit()
        await replays(app, run, 1)
        assert await run.result(20) == [7, "x"]
    assert calls == {"book hotel": 1}


async def test_a_plain_handler_remembers_failures_too(app: Fabric) -> None:
    def plain_book(what: str) -> str:
        calls[what] += 1
        raise Declined(what, 7)

    @app.task
    def trip(ctx: Context) -> str:
        try:
            return ctx.sync.step(plain_book, "hotel")
        except Declined as why:
            return f"{why} {why.code} {ctx.sync.receive('go', str)}"

    async with running_worker(app):
        run = await trip.submit()
        await replays(app, run, 1)
        assert await run.result(20) == "hotel 7 x"
    assert calls == {"hotel": 1}


async def test_a_failure_that_leaves_a_slow_thread_is_retried_whatever_begins_beside_it(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread begins an operation before the failed one raises, which takes as long as the system lets it."""
    has_failed, begins = threading.Event(), threading.Event()
    run_step = SyncContext.run_step

    def slow_to_raise(context: SyncContext, function: Any, *rest: Any) -> Any:
        try:
            return run_step(context, function, *rest)
        except Declined:
            has_failed.set()
            begins.wait(20)
            time.sleep(0.1)  # the other operation has come meanwhile
            raise

    def decline() -> str:
        calls["decline"] += 1
        if calls["decline"] == 1:
            raise Declined("no room", 7)
        return "booked"

    def beside(ctx: Context) -> str:
        has_failed.wait(20)
        begins.set()
        return ctx.sync.step(str, "noted")

    @app.task(retry=Retry(max=1, base="10ms", jitter=False))
    def trip(ctx: Context) -> list[str]:
        return ctx.sync.gather(lambda: ctx.sync.step(decline), lambda: beside(ctx))

    monkeypatch.setattr(SyncContext, "run_step", slow_to_raise)
    async with running_worker(app):
        assert await (await trip.submit()).result(30) == ["booked", "noted"]
    assert calls == {"decline": 2}


async def test_an_operation_waits_a_limited_time_for_a_thread_that_has_caught_its_failure(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.sdk.durable.attempt.MAX_RAISE_S", 0.05)
    is_caught, has_gone_on = threading.Event(), threading.Event()

    def decline() -> None:
        calls["decline"] += 1
        raise Declined("no room", 7)

    def catch(ctx: Context) -> bool:
        try:
            ctx.sync.step(decline)
        except Declined:
            is_caught.set()
        return has_gone_on.wait(20)  # without another operation

    def beside(ctx: Context) -> str:
        is_caught.wait(20)
        noted = ctx.sync.step(str, "noted")
        has_gone_on.set()
        return noted

    @app.task
    def trip(ctx: Context) -> list[Any]:
        return ctx.sync.gather(lambda: catch(ctx), lambda: beside(ctx))

    async with running_worker(app):
        assert await (await trip.submit()).result(30) == [True, "noted"]
    assert calls == {"decline": 1}


async def test_an_exception_that_cannot_be_made_is_the_same_in_the_first_run_and_later(app: Fabric) -> None:
    class Local(Exception):
        """Nobody finds this class by its name."""

    async def fail(number: int) -> None:
        calls["fail"] += 1
        if number == 0:
            raise Local("here")
        raise FileNotFoundError(2, "no such file", "x.txt")

    seen: list[list[str]] = []

    @app.task
    async def catching(ctx: Context) -> None:
        texts = []
        for number in range(2):
            try:
                await ctx.step(fail, number)
            except (StepFailed, FileNotFoundError) as failure:
                texts.append(f"{type(failure).__name__} {failure}")
        seen.append(texts)
        await ctx.receive("go")

    async with running_worker(app):
        run = await catching.submit()
        await replays(app, run, 1)
        await run.result(20)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][0].startswith("StepFailed")
    assert calls["fail"] == 2


async def test_uncaught_retry_after_and_fatal_are_not_remembered(app: Fabric) -> None:
    async def busy() -> str:
        calls["busy"] += 1
        if calls["busy"] == 1:
            raise RetryAfter(0)
        if calls["busy"] == 2:
            raise Fatal("broken")
        return "done"

    @app.task(retry=RETRY)
    async def trying(ctx: Context) -> str:
        return await ctx.step(busy)

    async with running_worker(app):
        run = await trying.submit()
        with pytest.raises(RunFailed, match="broken"):
            await run.result(20)
        await run.replay()
        assert await run.result(20) == "done"
    assert calls["busy"] == 3


async def test_a_sigterm_between_a_failure_and_the_next_step_runs_the_step_again(app: Fabric) -> None:
    failed = asyncio.Event()

    @app.task
    async def trip(ctx: Context) -> str:
        try:
            await ctx.step(book, "hotel")
        except Declined:
            failed.set()
            if calls["book hotel"] == 1:
                await asyncio.sleep(60)
            await ctx.step(undo, "flight")
        return "done"

    worker = Worker(app, grace="0s")
    working = asyncio.create_task(worker.work())
    run = await trip.submit()
    async with asyncio.timeout(20):
        await failed.wait()
    worker.stop()
    await working
    async with running_worker(app):
        assert await run.result(20) == "done"
    assert calls == {"book hotel": 2, "undo flight": 1}
