"""Tasks: submitted input is validated, stored, run, and answered with a typed result."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

import pydantic
import pytest

from flowfabric import Context, Fabric, Fatal, Retry, RetryAfter, RunCancelled, RunExpired, RunFailed, current, errors
from flowfabric.model.states import AttemptRecordState, PublicState
from tests.sdk.conftest import running_worker


@dataclass
class Mail:
    to: str
    copies: int = 1


class Receipt(pydantic.BaseModel):
    id: str
    sent: datetime


class Options(TypedDict):
    loud: bool


async def test_a_result_is_returned_with_its_type(app: Fabric) -> None:
    @app.task
    async def send(ctx: Context, mail: Mail) -> Receipt:
        return Receipt(id=f"{mail.to}x{mail.copies}", sent=datetime(2026, 1, 2, tzinfo=UTC))

    async with running_worker(app):
        run = await send.submit(Mail("a@b", copies=2))
        assert await run.result(10) == Receipt(id="a@bx2", sent=datetime(2026, 1, 2, tzinfo=UTC))
        assert await run.state() is PublicState.COMPLETED


async def test_a_plain_function_runs_in_a_thread(app: Fabric) -> None:
    @app.task
    def where(options: Options) -> str:
        assert current().run_id
        return f"{threading.current_thread() is threading.main_thread()} {options['loud']}"

    async with running_worker(app):
        assert await (await where.submit({"loud": True})).result(10) == "False True"


async def test_a_plain_call_involves_no_engine() -> None:
    app = Fabric("sqlite:////nowhere/at/all.db")

    @app.task
    def double(n: int) -> int:
        return n * 2

    assert double(4) == 8


@pytest.mark.parametrize(
    ("given", "named"),
    [({"mail": {"to": 3}}, "mail"), ({"mail": 7}, "mail"), ({}, "mail"), ({"mail": Mail("a"), "x": 1}, "x")],
)
async def test_invalid_input_fails_at_submit_with_the_field_named(
    app: Fabric, given: dict[str, object], named: str
) -> None:
    @app.task
    async def send(mail: Mail) -> None: ...

    with pytest.raises(errors.InvalidInput, match=named):
        await send.submit(**given)

    engine = await app.engine()
    assert (await engine.search_executions()).executions == []


async def test_a_failure_is_retried_and_then_final(app: Fabric) -> None:
    @app.task(retry=Retry(max=2, base="1ms"))
    async def broken(ctx: Context) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    async with running_worker(app):
        run = await broken.submit()
        with pytest.raises(RunFailed, match="attempt 2"):
            await run.result(20)

    states = [attempt.attempt_state for attempt in await run.attempts()]
    assert states == [AttemptRecordState.ENDED_FAILURE] * 3
    assert {attempt.failure_category for attempt in await run.attempts()} == {"ValueError"}


async def test_fatal_fails_at_once(app: Fabric) -> None:
    @app.task(retry=Retry(max=5, base="1ms"))
    async def hopeless() -> None:
        raise Fatal("bad address")

    async with running_worker(app):
        run = await hopeless.submit()
        with pytest.raises(RunFailed, match="bad address"):
            await run.result(10)
    assert len(await run.attempts()) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_output_written_before_a_failure_is_kept(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    engine = await app.engine()
    append = engine.append_frame

    async def slow(*given: Any, **named: Any) -> Any:
        await asyncio.sleep(0.05)
        return await append(*given, **named)

    monkeypatch.setattr(engine, "append_frame", slow)

    async def hopeless(ctx: Context) -> None:
        await ctx.stream("out").write("last words")
        raise Fatal("bad address")

    def plain(ctx: Context) -> None:
        ctx.sync.stream("out").write("last words")
        raise Fatal("bad address")

    task: Any = app.task(name="hopeless")(hopeless if asynchronous else plain)
    async with running_worker(app):
        run = await task.submit()
        with pytest.raises(RunFailed):
            await run.result(10)
    page = await engine.tail_stream(run.id, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["last words"]


async def test_retry_after_waits_and_costs_no_attempt(app: Fabric) -> None:
    calls = []

    @app.task
    async def polite(ctx: Context) -> int:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            raise RetryAfter(0.01)
        return len(calls)

    async with running_worker(app):
        run = await polite.submit()
        assert await run.result(20) == 3
    assert calls == [0, 0, 0]
    assert len(await run.attempts()) == 1


@pytest.mark.parametrize(
    ("after", "ms"), [("120", 120_000), (1.5, 1500), ("2m", 120_000), (timedelta(hours=1), 3_600_000)]
)
def test_retry_after_accepts_http_and_human_formats(after: Any, ms: int) -> None:
    assert RetryAfter(after).after_ms == ms


async def test_a_timeout_fails_the_attempt_and_is_retried(app: Fabric) -> None:
    @app.task(timeout="50ms", retry=Retry(max=1, base="1ms"))
    async def slow(ctx: Context) -> str:
        if ctx.attempt == 0:
            await asyncio.sleep(60)
        return "second"

    async with running_worker(app):
        run = await slow.submit()
        assert await run.result(20) == "second"
    assert (await run.attempts())[0].failure_category == "timeout"


async def test_a_key_makes_submitting_idempotent(app: Fabric) -> None:
    @app.task
    async def order(n: int) -> int:
        return n

    first = await order.options(key="order-7").submit(1)
    again = await order.options(key="order-7").submit(2)

    assert again.id == first.id
    assert (first.created, again.created) == (True, False)


async def test_a_key_belongs_to_its_task_and_holds_on_every_lane(app: Fabric) -> None:
    @app.task
    async def order(n: int) -> int:
        return n

    @app.task
    async def refund(reason: str) -> str:
        return reason

    first = await order.options(key="order-7").submit(1)
    other = await refund.options(key="order-7").submit("broken")
    again = await order.options(key="order-7", lane="bulk").submit(2)

    assert (other.created, other.id == first.id) == (True, False)
    assert (again.created, again.id == first.id) == (False, True)
    async with running_worker(app):
        assert (await first.result(20), await other.result(20)) == (1, "broken")


@pytest.mark.parametrize("key", ["", 7])
async def test_a_key_that_distinguishes_nothing_is_refused(app: Fabric, key: Any) -> None:
    @app.task
    async def order(n: int) -> int:
        return n

    with pytest.raises(errors.InvalidInput, match=f"key: {key!r} is not a text that identifies"):
        order.options(key=key)


async def test_waiting_for_a_child_occupies_no_slot(app: Fabric) -> None:
    @app.task
    async def leaf(n: int) -> int:
        return n * 2

    @app.task
    async def branch(ctx: Context, n: int) -> int:
        return await (await ctx.spawn(leaf, n)).result() + 1

    @app.task
    def plain(ctx: Context, n: int) -> int:
        return ctx.sync.spawn(branch, n).result() + 1

    async with running_worker(app, slots=1):
        assert await (await plain.submit(3)).result(20) == 8


async def test_many_are_submitted_at_once_and_each_runs_once(app: Fabric) -> None:
    seen: list[int] = []

    @app.task
    async def note(n: int) -> int:
        seen.append(n)
        return n

    runs = await note.submit_many(range(300))
    async with running_worker(app, slots=50):
        results = await asyncio.gather(*(run.result(30) for run in runs))

    assert results == list(range(300))
    assert sorted(seen) == list(range(300))


async def test_a_delayed_run_waits_and_a_deadline_ends_it(app: Fabric) -> None:
    @app.task
    async def later() -> None: ...

    run = await later.options(delay="1h").submit()
    assert await run.state() is PublicState.DELAYED

    gone = await later.options(delay="1h", deadline=datetime.now(UTC) + timedelta(milliseconds=5)).submit()
    async with running_worker(app):  # A worker makes sure that a sweeper runs.
        with pytest.raises(RunExpired):
            await gone.result(20)


async def test_a_cancelled_run_is_reported_and_its_handler_stops(app: Fabric) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    async with running_worker(app, lease_ttl="300ms"):
        run = await endless.submit()
        await asyncio.wait_for(started.wait(), 10)
        await run.cancel("no longer needed")
        with pytest.raises(RunCancelled, match="no longer needed"):
            await run.result(10)
        await asyncio.wait_for(stopped.wait(), 10)


async def test_waiting_for_a_result_times_out_and_the_run_continues(app: Fabric) -> None:
    @app.task
    async def never() -> None: ...

    run = await never.submit()
    with pytest.raises(TimeoutError, match="continues to run"):
        await run.result(0.02)
    assert await run.state() is PublicState.WAITING


async def test_two_tasks_of_one_name_are_refused(app: Fabric) -> None:
    @app.task(name="same")
    async def one() -> None: ...

    with pytest.raises(errors.InvalidInput, match="same"):

        @app.task(name="same")
        async def other() -> None: ...


async def test_a_child_is_cancelled_by_its_parent_and_afterwards_by_any_caller(app: Fabric) -> None:
    kept: list[Any] = []

    @app.task
    async def child(ctx: Context, seconds: float) -> None:
        await ctx.sleep(seconds)

    @app.task
    async def parent(ctx: Context) -> str:
        idle, done = await ctx.spawn(child, 3600), await ctx.spawn(child, 0)
        await idle.cancel("not needed")
        await idle.cancel("again is fine")
        await done.result()
        with pytest.raises(errors.ExecutionNotActive) as ended:
            await done.cancel()
        kept.append(await ctx.spawn(child, 7200))
        return str(ended.value.terminal_outcome)

    async with running_worker(app):
        assert await (await parent.submit()).result(20) == "success"
        [late] = kept
        await late.cancel("its parent has ended")
        assert await late.state() == "cancelled"
