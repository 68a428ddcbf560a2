"""Output of a handler: a function that resumes after a wait does not write its earlier output again."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import Context, Fabric, Reset, Retry, RetryAfter, Run, current
from flowfabric.sdk.durable import output
from flowfabric.sdk.run import OutputFrame
from flowfabric.testing import World
from tests.sdk.conftest import running_worker, wait_until_suspended


async def texts(run: Run[Any]) -> list[str]:
    return [frame.text async for frame in run.stream("answer") if isinstance(frame, OutputFrame)]


async def test_output_before_a_wait_is_not_written_again_after_it(app: Fabric) -> None:
    passes: list[int] = []

    @app.task
    async def talk(ctx: Context) -> str:
        passes.append(ctx.attempt)
        out = ctx.stream("answer")
        await out.write("one ")
        await out.write("two ")
        await out.write(await ctx.receive("word", str) or "")
        await out.write(await ctx.receive("word", str) or "")
        return out.text()

    async with running_worker(app):
        run = await talk.submit()
        for word in ("three ", "four"):
            await wait_until_suspended(run)
            await run.signal("word", word)
        assert await run.result(20) == "one two three four"
        assert passes == [0, 0, 0], "from the top after each wait, as the same attempt"
        assert await texts(run) == ["one ", "two ", "three ", "four"]


async def test_a_plain_function_does_not_write_its_output_again(app: Fabric) -> None:
    @app.task
    def talk(ctx: Context) -> str:
        out = ctx.sync.stream("answer")
        out.write("one ")
        out.write(ctx.sync.receive("word", str) or "")
        return out.text()

    async with running_worker(app):
        run = await talk.submit()
        await wait_until_suspended(run)
        await run.signal("word", "two")
        assert await run.result(20) == "one two"
        assert await texts(run) == ["one ", "two"]


async def test_each_branch_and_each_output_is_counted_separately(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PAGE_SIZE", 2)  # so that there is more than one

    @app.task
    async def talk(ctx: Context) -> None:
        out = ctx.stream("answer")

        async def branch(name: str, count: int) -> None:
            for number in range(count):
                await out.write(f"{name}{number}")
                await ctx.stream("log").write("line")

        async def asking() -> None:
            await out.write(await ctx.receive("word", str) or "")

        await ctx.gather(branch("a", 1), branch("b", 3), asking())
        await out.write("end")

    async with running_worker(app):
        run = await talk.submit()
        await wait_until_suspended(run)
        await run.signal("word", "w")
        await run.result(20)
        *before, last_but_one, last = await texts(run)
        assert sorted(before) == ["a0", "b0", "b1", "b2"]
        assert (last_but_one, last) == ("w", "end")
        assert len([frame async for frame in run.stream("log")]) == 4


@pytest.mark.parametrize("style", ["async", "plain"])
async def test_the_output_of_a_step_is_counted_separately(app: Fabric, style: str) -> None:
    async def note(line: str) -> None:
        await current().stream("answer").write(line)

    def note_plainly(line: str) -> None:
        current().sync.stream("answer").write(line)

    if style == "async":

        @app.task
        async def talk(ctx: Context) -> None:
            await ctx.step(note, "step ")
            await ctx.stream("answer").write("function ")
            await ctx.receive("word")
            await ctx.step(note_plainly, "another step ")
            await ctx.stream("answer").write("end")
    else:

        @app.task
        def talk(ctx: Context) -> None:
            ctx.sync.step(note_plainly, "step ")
            ctx.sync.stream("answer").write("function ")
            ctx.sync.receive("word")
            ctx.sync.step(note, "another step ")
            ctx.sync.stream("answer").write("end")

    async with running_worker(app):
        run = await talk.submit()
        await wait_until_suspended(run)
        await run.signal("word", "go on")
        await run.result(20)
        assert await texts(run) == ["step ", "function ", "another step ", "end"]


async def test_a_repeated_step_does_not_write_its_output_again(app: Fabric) -> None:
    passes: list[int] = []

    async def note() -> None:
        await current().stream("answer").write("begun ")
        passes.append(1)
        if len(passes) == 1:
            raise RetryAfter(0)
        await current().stream("answer").write("done")

    @app.task
    async def talk(ctx: Context) -> None:
        await ctx.step(note)

    async with running_worker(app):
        run = await talk.submit()
        await run.result(20)
        assert await texts(run) == ["begun ", "done"]
    assert len(passes) == 2


async def test_a_delayed_attempt_continues_its_output(app: Fabric) -> None:
    passes: list[int] = []

    @app.task
    async def talk(ctx: Context) -> int:
        passes.append(ctx.attempt)
        await ctx.stream("answer").write("one")
        if len(passes) == 1:
            raise RetryAfter(0)
        await ctx.stream("answer").write("two")
        return ctx.attempt

    async with running_worker(app):
        run = await talk.submit()
        assert await run.result(20) == 0
        assert await texts(run) == ["one", "two"]
    assert passes == [0, 0]


async def test_an_attempt_that_replaces_another_starts_its_output_anew(app: Fabric) -> None:
    @app.task
    async def talk(ctx: Context) -> int:
        await ctx.stream("answer").write(f"by {ctx.attempt}")
        if not ctx.attempt:
            engine = await app.engine()
            await ctx.flush()
            await engine.revoke_lease(ctx.run_id, reason="bad node")
        await ctx.stream("answer").write("end")
        return ctx.attempt

    async with running_worker(app):
        run = await talk.submit()
        assert await run.result(20) == 1
        seen = [frame if isinstance(frame, Reset) else frame.text async for frame in run.stream("answer")]
    assert seen == ["by 0", Reset(attempt=1), "by 1", "end"]


async def test_a_reader_continues_with_the_next_attempt(app: Fabric) -> None:
    @app.task(retry=Retry(max=2, base="200ms", jitter=False))
    async def talk(ctx: Context) -> None:
        await ctx.stream("answer").write(f"by {ctx.attempt}")
        if ctx.attempt < 2:
            raise OSError("the provider hung up")

    async with running_worker(app):
        run = await talk.submit()
        seen = [frame if isinstance(frame, Reset) else frame.text async for frame in run.stream("answer")]
    assert seen == ["by 0", Reset(attempt=1), "by 1", Reset(attempt=2), "by 2"]


async def test_a_reader_of_a_run_without_output_is_notified_of_its_end_at_once() -> None:
    mute = Fabric("memory://")

    @mute.task
    async def silent(ctx: Context) -> None:
        await ctx.sleep("2s")

    async with World(mute) as world:
        run, began = await silent.submit(), world.now_ms()
        assert [frame async for frame in run.stream("answer")] == []
        assert world.now_ms() - began < 3000
