"""Options of a step: retries of its own, timeouts, and steps that never run twice."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from typing import Any

import pytest

from flowfabric import (
    Context,
    Fabric,
    Fatal,
    InvalidInput,
    Retry,
    RetryAfter,
    RunFailed,
    StepInterrupted,
    StepTimeout,
    step,
)
from flowfabric.model.gate import StepState
from flowfabric.testing import World
from tests.sdk.conftest import running_worker
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

calls: Counter[str] = Counter()
SHORT = Retry(max=3, base="20ms", factor=1, jitter=False)
world_app = Fabric("sqlite:////nowhere/at/all.db")


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


async def flaky(good: int) -> int:
    """Fail until the `good`th call."""
    calls["flaky"] += 1
    if calls["flaky"] < good:
        raise ConnectionError(f"call {calls['flaky']}")
    return calls["flaky"]


@step(retry=SHORT, name="declared")
async def declared(good: int) -> int:
    return await flaky(good)


@world_app.task
async def polling(ctx: Context) -> int:
    endless = Retry(max=None, base="1m", factor=1, within="2d", jitter=False)
    return await ctx.options(retry=endless).step(flaky, 10)


async def test_n_polls_are_n_calls() -> None:
    async with World(world_app) as world:
        began = world.now_ms()
        run = await polling.submit()
        assert await run.result() == 10
        assert calls["flaky"] == 10
        assert world.now_ms() - began == 9 * 60_000
        assert [view for view in await run.attempts() if view.attempt_index] == []
        world.assert_invariants()


@world_app.task
async def caught(ctx: Context) -> None:
    try:
        await ctx.options(retry=Retry(max=1, base="1m", jitter=False)).step(flaky, 99)
    except ConnectionError:
        await ctx.step(str, 1)


@world_app.task(retry=Retry(max=3))
async def limited(ctx: Context) -> int:
    return await ctx.options(retry=Retry(max=None, base="1m", factor=1, within="5m", jitter=False)).step(flaky, 99)


async def test_no_try_begins_after_the_time_of_all_tries() -> None:
    async with World(world_app) as world:
        began = world.now_ms()
        with pytest.raises(RunFailed, match="call 6"):
            await (await limited.submit()).result()
        assert calls["flaky"] == 6
        assert world.now_ms() - began == 5 * 60_000


async def test_tries_survive_a_kill_in_the_pause() -> None:
    async with World(world_app) as world:
        run = await polling.submit()
        await world.advance("150s")
        assert calls["flaky"] == 3
        memos = {memo.name: memo for memo in await world.engine.read_steps(run.id)}
        assert b'"count":3' in memos["tries:flaky"].result
        assert b'"last":"ConnectionError: call 3"' in memos["tries:flaky"].result
        await world.kill(world._workers[0][0])
        world.start_worker()
        assert await run.result() == 10
        assert calls["flaky"] == 10


async def test_a_step_began_with_its_first_try_whatever_happened_since() -> None:
    async with World(world_app) as world:
        began = world.now_ms()
        run = await polling.submit()
        await world.advance("150s")
        await world.kill(world._workers[0][0])
        world.start_worker()
        await run.result()
        [memo] = [memo for memo in await world.engine.read_steps(run.id) if memo.state is StepState.DONE]
        assert (memo.started_at, memo.recorded_at) == (began, world.now_ms())


async def test_a_failure_that_is_remembered_has_the_start_of_its_step() -> None:
    async with World(world_app) as world:
        began = world.now_ms()
        run = await caught.submit()
        await run.result()
        [memo] = [memo for memo in await world.engine.read_steps(run.id) if memo.state is StepState.FAILED]
        assert (memo.started_at, memo.recorded_at) == (began, world.now_ms())
        assert memo.recorded_at - began == 60_000


async def test_a_step_with_retries_owns_them_and_the_task_is_not_asked(app: Fabric) -> None:
    @app.task(retry=Retry(max=3, base="10ms"))
    async def trying(ctx: Context, good: int) -> int:
        return await ctx.step(declared, good)

    async with running_worker(app):
        assert await (await trying.submit(3)).result(20) == 3
        calls.clear()
        run = await trying.submit(99)
        with pytest.raises(RunFailed) as failed:
            await run.result(20)
        assert failed.value.category == "ConnectionError"
        assert calls["flaky"] == 4
        assert len(await run.attempts()) == 1


async def test_a_kill_between_two_tries_loses_no_count(app: Fabric) -> None:
    @app.task
    async def trying(ctx: Context) -> int:
        return await ctx.step(declared, 99)

    crashes = Crashes(app, [("step:declared", "before_effect"), ("step:declared", "before_effect")])
    async with running_worker(app):
        with pytest.raises(RunFailed):
            await (await trying.submit()).result(20)
    assert not crashes.left
    assert calls["flaky"] == 4


async def test_fatal_retry_after_and_other_failures_in_a_step_with_retries(app: Fabric) -> None:
    async def raising(kind: str) -> str:
        calls[kind] += 1
        match kind:
            case "fatal":
                raise Fatal("no")
            case "later" if calls[kind] < 6:
                raise RetryAfter(0.001)
            case "other":
                raise LookupError("not one of them")
        return "done"

    @app.task
    async def trying(ctx: Context, kind: str) -> str:
        only = Retry(max=3, base="10ms", only=(ConnectionError, "OSError"))
        return await ctx.options(retry=only).step(raising, kind)

    async with running_worker(app):
        assert await (await trying.submit("later")).result(20) == "done", "a pause by RetryAfter costs no try"
        for kind in ("fatal", "other"):
            with pytest.raises(RunFailed):
                await (await trying.submit(kind)).result(20)
    assert calls == {"later": 6, "fatal": 1, "other": 1}


async def test_a_try_that_takes_too_long_raises_step_timeout(app: Fabric) -> None:
    async def slow() -> None:
        calls["slow"] += 1
        await asyncio.sleep(30)

    @app.task
    async def hasty(ctx: Context) -> list[Any]:
        try:
            await ctx.options(timeout="50ms", retry=Retry(max=1, base="1ms")).step(slow)
        except StepTimeout as error:
            await ctx.receive("go")
            return [error.step, error.timeout_s, isinstance(error, TimeoutError)]
        return []

    async with running_worker(app):
        run = await hasty.submit()
        await run.signal("go")
        assert await run.result(20) == ["slow", 0.05, True]
    assert calls["slow"] == 2


async def test_a_thread_that_is_late_records_nothing(app: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    release, ended = threading.Event(), threading.Event()
    found: list[BaseException] = []

    @app.task
    async def hasty(ctx: Context) -> str:
        def slow() -> str:
            release.wait(20)
            try:
                ctx.sync.options(name="late").step(lambda: 1)
            except BaseException as error:
                found.append(error)
            ended.set()
            return "late"

        try:
            return await ctx.options(timeout="50ms", name="slow thread").step(slow)
        except StepTimeout:
            await ctx.step(declared, 0)
            release.set()
            await asyncio.to_thread(ended.wait, 20)
            return "timed out"

    async with running_worker(app):
        run = await hasty.submit()
        assert await run.result(20) == "timed out"
        steps = await (await app.engine()).read_steps(run.id)
    assert sorted(memo.name for memo in steps) == ["declared", "failed:slow thread"]
    assert len(found) == 1


async def test_a_plain_handler_has_retries_and_timeouts(app: Fabric) -> None:
    def plain(good: int) -> int:
        calls["plain"] += 1
        if calls["plain"] < good:
            raise ConnectionError("busy")
        return calls["plain"]

    def stuck() -> None:
        threading.Event().wait(0.3)

    @app.task
    def handler(ctx: Context) -> list[Any]:
        tries = ctx.sync.options(retry=SHORT).step(plain, 3)
        try:
            ctx.sync.options(timeout="50ms").step(stuck)
        except StepTimeout as error:
            return [tries, error.step]
        return []

    async with running_worker(app):
        assert await (await handler.submit()).result(20) == [3, "stuck"]


@pytest.mark.parametrize("moment", ["before_effect", "after_effect"])
async def test_a_step_that_may_run_once_is_interrupted_by_a_crash_in_it(app: Fabric, moment: str) -> None:
    async def send() -> str:
        calls["send"] += 1
        return "sent"

    @app.task
    async def texting(ctx: Context) -> str:
        try:
            return await ctx.options(at_most_once=True).step(send)
        except StepInterrupted as error:
            await ctx.receive("go")
            return str(error)

    crashes = Crashes(app, [("step:send", moment)])
    async with running_worker(app):
        run = await texting.submit()
        await run.signal("go")
        text = await run.result(20)
    assert not crashes.left
    assert f"step 'send' of run {run.id} may or may not have happened at 20" in text
    assert calls["send"] == (moment == "after_effect")


async def test_a_raised_failure_of_a_step_that_may_run_once_is_retried_and_remembered(app: Fabric) -> None:
    @app.task(retry=Retry(max=2, base="1ms"))
    async def texting(ctx: Context, good: int) -> int:
        return await ctx.options(at_most_once=True, retry=SHORT).step(flaky, good)

    @app.task(retry=Retry(max=2, base="1ms"))
    async def without_retry(ctx: Context) -> int:
        return await ctx.options(at_most_once=True).step(flaky, 99)

    async with running_worker(app):
        assert await (await texting.submit(3)).result(20) == 3
        calls.clear()
        with pytest.raises(RunFailed, match="call 1"):
            await (await without_retry.submit()).result(20)
    assert calls["flaky"] == 1


async def test_name_and_key_in_the_call_still_work_with_a_warning(app: Fabric) -> None:
    def value() -> int:
        return 7

    @app.task
    async def named(ctx: Context) -> list[Any]:
        legacy: Any = ctx
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = [await legacy.step(value, name="old"), await legacy.step(value, key="k")]
        return [*values, [str(one.category.__name__) for one in caught]]

    async with running_worker(app):
        run = await named.submit()
        assert await run.result(20) == [7, 7, ["DeprecationWarning"] * 2]
        steps = await (await app.engine()).read_steps(run.id)
    assert sorted(memo.name for memo in steps) == ["key:k", "old"]
    assert {memo.state for memo in steps} == {StepState.DONE}


def test_mistakes_in_options_are_found_where_they_are_made() -> None:
    with pytest.raises(InvalidInput, match="retry"):
        step(retry=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="timeout"):
        step(timeout="soon")
    with pytest.raises(InvalidInput, match="only"):
        Retry(only=(7,))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="within"):
        Retry(within="1h").policy()
    assert Retry(max=None, only=(OSError,)).policy()["retryable_categories"] == ["OSError"]


def test_the_backoff_of_a_step_grows_up_to_its_cap() -> None:
    retry = Retry(base="1s", factor=2, cap="5s", jitter=False)
    assert [retry.backoff_ms(n, 0.5) for n in (0, 1, 2, 3, 5000)] == [1000, 2000, 4000, 5000, 5000]
    spread = {Retry(base="1s").backoff_ms(0, chance) for chance in (0, 0.999)}
    assert spread == {1000, 500}
