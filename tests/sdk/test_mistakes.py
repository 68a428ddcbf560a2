"""User mistakes: each raises a typed error where it was made, with what to write instead."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pydantic
import pytest

from flowfabric import (
    AnyOf,
    Budget,
    Context,
    Fabric,
    Limit,
    Quorum,
    Retry,
    RetryAfter,
    RunFailed,
    RunSkipped,
    Settings,
    errors,
)
from flowfabric.engine.engine import Engine
from flowfabric.sdk.worker.worker import Worker
from flowfabric.testing import World
from tests.sdk.conftest import running_worker, wait_until, wait_until_true

ONCE = Retry(max=0)


class Steer(pydantic.BaseModel):
    degrees: int


@dataclass
class Order:
    steer: Steer


def plain(n: int) -> int:
    return n


def yields() -> Iterator[int]:
    yield 1


async def yields_later() -> AsyncIterator[int]:
    yield 1


def gathers(*rest: int) -> None: ...


def by_place(n: int, /) -> None: ...


def two_contexts(one: Context, other: Context) -> None: ...


def unknown_type(n: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda app: app.task("send"), "@app.task\\(name='send'\\)"),
        (lambda app: app.task(functools.partial(plain, 1)), "write a def"),
        (lambda app: app.task(Steer), "write a def"),
        (lambda app: app.task(yields), "it yields"),
        (lambda app: app.task(yields_later), "it yields"),
        (lambda app: app.task(gathers), r"\*rest cannot be stored"),
        (lambda app: app.task(by_place), "drop the /"),
        (lambda app: app.task(two_contexts), "both the context"),
        (lambda app: app.task(unknown_type), "'Nowhere' is not defined"),
        (lambda app: app.task(name=5)(plain), "name: 5"),
        (lambda app: app.task(needs="smtp")(plain), 'write needs={"smtp"}'),
        (lambda app: app.task(needs={"a b"})(plain), "whitespace"),
        (lambda app: app.task(priority="high")(plain), "priority: 'high'"),
        (lambda app: app.task(lane="")(plain), "lane_id: empty"),
        (lambda app: app.task(retry=3)(plain), "write retry=Retry"),
        (lambda app: app.task(timeout=0)(plain), "timeout: 0"),
        (lambda app: app.task(tags=["a"])(plain), "tags: "),
        (lambda app: app.task(budgets=Budget("b", {"n": 1}))(plain), "budgets: .* is not a list"),
        (lambda app: app.task(budgets=["llm"])(plain), "'llm' is no Budget"),
        (lambda app: app.task(limits=Limit(concurrency=1))(plain), "limits: .* is not a list"),
        (lambda app: app.task(fair="n", weight=0)(plain), "weight: at least 1"),
        (lambda app: app.task(plain).options(deadline=timedelta(hours=1)), "no datetime"),
        (lambda app: app.flow(5), "name: 5"),
        (lambda _: Fabric(5), "url: 5"),  # type: ignore[arg-type]
        (lambda _: Retry(max=-1), "max: at least 0"),
        (lambda _: Retry(base="soon"), "base: 'soon'"),
        (lambda _: Retry(only="KeyError"), "only: 'KeyError' is not a list"),  # type: ignore[arg-type]
        (lambda _: Budget("b", {"usd": math.nan}), "usd=nan is no amount"),
        (lambda _: Budget("b", {"usd": 0}), "a limit of 0 would be none"),
        (lambda _: Limit(rate=5), "rate: 5"),  # type: ignore[arg-type]
        (lambda _: Quorum("2"), "quorum: '2'"),  # type: ignore[arg-type]
        (lambda app: Worker(app, lanes="mail"), r'write lanes=\["mail"\]'),
        (lambda app: Worker(app, lanes=["mail"], capabilities="smtp"), 'write capabilities={"smtp"}'),
        (lambda app: Worker(app, lanes=["mail"], slots=0), "slots: at least 1"),
    ],
)
def test_an_invalid_declaration_is_refused_at_the_declaration(declare: Callable[[Fabric], Any], message: str) -> None:
    app = Fabric("memory://")
    with pytest.raises(errors.InvalidInput, match=message):
        declare(app)
    assert list(app.tasks) in ([], [f"{__name__}.plain"])


async def test_an_invalid_node_is_refused_with_what_to_write() -> None:
    app = Fabric("memory://")
    task = app.task(plain)
    flow = app.flow("nightly")
    node = flow.add(task, 1)
    add: Any = flow.add
    for given, ways, message in (
        ((plain, 1), {}, "neither a task nor a call"),
        ((task.s(1), 2), {}, "has its arguments already"),
        ((task, 1), {"after": node}, r"write after=\[node\]"),
        ((task, 1), {"after": ["plain"]}, "'plain' is no node"),
        ((task, 1), {"join": AnyOf}, "no join"),
    ):
        with pytest.raises(errors.InvalidInput, match=message):
            add(*given, **ways)
    assert list(flow.nodes) == ["plain"]


async def test_submit_many_takes_a_list_of_calls_of_one_task_with_a_key_for_each(app: Fabric) -> None:
    task = app.task(plain)
    other = app.task(name="other")(plain)
    for inputs, message in (
        ("abc", "not a list of inputs"),
        ([other.s(1)], "a call of other"),
        ([task.options(key="k").s(1), task.options(key="k").s(2)], "one key is one run"),
        ([1, "two"], "n: Expected `int`"),
    ):
        with pytest.raises(errors.InvalidInput, match=message):
            await task.submit_many(inputs)
    engine = await app.engine()
    assert (await engine.search_executions()).executions == []


def nested(levels: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(levels - 1):
        deep = [deep]
    return deep


async def test_the_same_depth_of_input_is_accepted_on_every_python(app: Fabric) -> None:
    @app.task
    async def keep(value: Any) -> None: ...

    await keep.submit(nested(300))
    await keep.submit(["[" * 5000, '"' + "{" * 5000])
    await keep.submit([[number] for number in range(2000)])
    for levels in (501, 700, 5000):
        with pytest.raises(errors.InvalidInput):
            await keep.submit(nested(levels))


async def test_values_without_a_json_form_are_refused_at_submit(app: Fabric) -> None:
    @app.task
    async def keep(value: Any) -> None: ...

    @app.task
    async def measure(length: float) -> None: ...

    for value in (math.nan, {"a": [1, math.inf]}, "\ud800", nested(5000), object(), 1j):
        with pytest.raises(errors.InvalidInput):
            await keep.submit(value)
    with pytest.raises(errors.InvalidInput, match="not a number, or infinite"):
        await measure.submit(math.inf)
    engine = await app.engine()
    assert (await engine.search_executions()).executions == []


class Posted(pydantic.BaseModel):
    to: str = pydantic.Field(alias="recipient")
    steer: Steer


async def test_a_model_that_became_invalid_is_refused_at_submit(app: Fabric) -> None:
    @app.task
    async def post(posted: Posted) -> Posted:
        return posted

    posted = Posted(recipient="ana", steer=Steer(degrees=1))
    async with running_worker(app):
        assert await (await post.submit(posted)).result(20) == posted, "and one with other names comes back"
    posted.steer.degrees = "left"  # type: ignore[assignment]
    with pytest.raises(errors.InvalidInput, match=r"posted: .*steer.degrees"):
        await post.submit(posted)
    engine = await app.engine()
    assert len((await engine.search_executions()).executions) == 1


async def test_numeric_keys_and_nested_models_are_read_back(app: Fabric) -> None:
    @app.task
    async def turn(names: dict[int, str], order: Order, at: Context | None = None) -> tuple[dict[int, str], Order]:
        assert at is not None
        return names, order

    @app.task
    def untyped(value):  # type: ignore[no-untyped-def]
        return Steer(degrees=value)

    async with running_worker(app):
        run = await turn.submit({7: "seven"}, Order(Steer(degrees=5)))
        assert await run.result("10s") == ({7: "seven"}, Order(Steer(degrees=5)))
        assert await (await untyped.submit(3)).result(10) == {"degrees": 3}


async def test_a_message_may_be_a_model() -> None:
    app = Fabric("memory://")

    @app.task
    async def steered(ctx: Context) -> int:
        return (await ctx.receive("steer", Steer)).degrees

    async with World(app):
        run = await steered.submit()
        await run.signal("steer", Steer(degrees=40))
        assert await run.result() == 40
        with pytest.raises(errors.InvalidInput, match="object has no JSON form"):
            await run.signal("steer", object())


class Mute(Exception):
    def __str__(self) -> NoReturn:
        raise ValueError("no words")


Huge = type("H" * 3000, (Exception,), {})


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_however_a_handler_fails_its_run_fails_at_once_and_its_worker_continues(
    app: Fabric, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the lease expires, the next worker takes the run over and fails in the same way, and so on."""
    raising: dict[str, Callable[[], BaseException]] = {
        "Mute: (its text cannot be made: ValueError)": Mute,
        "StopIteration": StopIteration,
        "SystemExit: 3": lambda: SystemExit(3),
        "CancelledError: not me": lambda: asyncio.CancelledError("not me"),
        "HHHHH": Huge,
        r"ValueError: a\0b\ud800": lambda: ValueError("a\0b\ud800"),
    }

    def named(number: int, make: Callable[[], BaseException]) -> Any:
        def plain_one() -> None:
            raise make()

        async def async_one() -> None:
            raise make()

        return app.task(name=f"bad{number}", retry=ONCE)(async_one if kind == "async" else plain_one)

    tasks = [named(number, make) for number, make in enumerate(raising.values())]

    @app.task(retry=ONCE)
    def too_large() -> str:
        return "x" * (64 * 1024 * 1024)

    async with running_worker(app, lease_ttl="60s"):
        for task, words in zip(tasks, raising, strict=True):
            run = await task.submit()
            with pytest.raises(RunFailed) as failed:
                await run.result(10)
            assert words in str(failed.value)
            assert str(failed.value).startswith(f"{task.name} {run.id} attempt 0: ")
            assert "run.replay()" in failed.value.__notes__[0]
            assert len(await run.attempts()) == 1
            assert f"{run.id}: attempt 0 of {task.name} failed" in caplog.text
        assert caplog.text.encode(), "whatever it says, the log can be written"
        if kind == "plain":
            with pytest.raises(RunFailed, match="payload_too_large"):
                await (await too_large.submit()).result(30)


@pytest.mark.parametrize("raising", [KeyboardInterrupt, GeneratorExit])
async def test_a_base_exception_in_a_thread_does_not_end_the_process(app: Fabric, raising: type[BaseException]) -> None:
    """Ctrl-C reaches the main thread only; one raised by a library would end one worker after the other."""

    def breaks() -> None:
        raise raising

    plain = app.task(name="plain", retry=ONCE)(breaks)

    @app.task(retry=ONCE)
    async def stepping(ctx: Context) -> None:
        await ctx.step(breaks)

    async with running_worker(app):
        for task in (plain, stepping):
            with pytest.raises(RunFailed, match=f"{raising.__name__} was raised in a thread"):
                await (await task.submit()).result(10)


async def test_a_step_that_raises_stop_iteration_fails_its_run(app: Fabric) -> None:
    def first(rows: list[int]) -> int:
        return next(row for row in rows if row > 5)

    @app.task(retry=ONCE)
    async def search(ctx: Context) -> int:
        return await ctx.step(first, [1, 2])

    @app.task(retry=ONCE)
    async def called(ctx: Context) -> Any:
        return await ctx.step(first([7]))  # type: ignore[call-overload]

    async with running_worker(app):
        with pytest.raises(RunFailed, match="a next\\(\\) found nothing"):
            await (await search.submit()).result(10)
        with pytest.raises(RunFailed, match="7 is no function; write ctx.step\\(function, argument\\)"):
            await (await called.submit()).result(10)


async def test_a_limit_function_receives_defaults_and_only_the_parameters_it_names(app: Fabric) -> None:
    @app.task(limits=[Limit(concurrency=1, key=lambda who: who)])
    async def greet(text: str, who: str = "all") -> str:
        return who

    @app.task(limits=[Limit(concurrency=1, key=lambda one, two: one)])
    async def lone(text: str) -> None: ...

    async with running_worker(app):
        assert await (await greet.submit("hello")).result(10) == "all"
    with pytest.raises(errors.InvalidInput, match=r"wants \(one, two\), the call has text"):
        await lone.submit("hello")

    flow = app.flow("greetings")
    flow.add(greet, "hello", flow.add(greet, "hi", "bo"))
    with pytest.raises(errors.InvalidInput, match=r"wants \(who\), the call has text"):
        await flow.submit()


async def test_every_operation_on_a_missing_run_says_that_it_does_not_exist(app: Fabric) -> None:
    run = app.find("{fp:1}:00000000-0000-4000-8000-000000000000")
    asks = (run.result(1), run.state(), run.describe(), run.attempts(), run.cancel(), run.replay(), run.explain())
    for ask in (*asks, run.signal("steer", 1)):
        with pytest.raises(errors.NotFound, match=run.id):
            await ask
    with pytest.raises(errors.NotFound):
        async for _ in run.stream("answer"):
            pass


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://localhost", "'mysql' is no known store; use memory://"),
        ("sqlite://app.db", "write sqlite:///relative.db"),
        ("sqlite:///app.db?mode=ro", "'mode' is no option of SQLite's"),
        ("postgresql://[broken", "Invalid IPv6"),
    ],
)
async def test_a_wrong_url_is_refused_by_the_first_call_that_needs_the_store(url: str, message: str) -> None:
    app = Fabric(url)
    with pytest.raises(errors.InvalidInput, match=message):
        await app.task(plain).submit(1)


async def test_running_a_worker_inside_a_loop_is_refused_with_an_explanation() -> None:
    app = Fabric("memory://")
    app.task(plain)
    with pytest.raises(RuntimeError, match="ff worker"):
        app.run()


def test_a_forked_child_submits_on_its_own_loop(tmp_path: Path) -> None:
    app = Fabric(f"sqlite:///{tmp_path / 'app.db'}")
    task = app.task(plain)
    parents = task.sync.submit(1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, task.sync.submit(2).id.encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    childs = app.sync.find(os.read(reading, 1000).decode())
    assert (parents.state(), childs.state()) == ("waiting", "waiting")
    app.sync.close()


async def test_a_handler_that_times_out_is_named_with_its_timeout() -> None:
    app = Fabric("memory://")

    @app.task(timeout="1s", retry=ONCE)
    async def slow() -> None:
        await asyncio.sleep(50)

    @app.task(timeout="1s", retry=ONCE)
    async def impatient() -> None:
        raise TimeoutError("the bank is slow")

    async with World(app):
        with pytest.raises(
            RunFailed, match=r"(?s)slow has not returned after 1 s\n.*await asyncio.sleep\(50\)"
        ) as late:
            await (await slow.submit()).result()
        assert str(late.value).count("TimeoutError") == 1
        with pytest.raises(RunFailed, match="the bank is slow"):
            await (await impatient.submit()).result()


async def test_a_skipped_node_has_a_reason_and_is_found_by_its_name() -> None:
    app = Fabric("memory://")

    @app.task(retry=ONCE)
    async def broken() -> int:
        raise ValueError("no")

    flow = app.flow("nightly")
    flow.add(app.task(plain), flow.add(broken))
    async with World(app):
        run = await flow.submit()
        with pytest.raises(RunSkipped, match="its dependencies did not end as required"):
            await run["plain"].result()
        with pytest.raises(errors.InvalidInput, match="'publish' is not one of broken, plain"):
            run["publish"]


async def test_a_flow_that_times_out_is_named(app: Fabric) -> None:
    flow = app.flow("nightly")
    flow.add(app.task(plain), 1)
    run = await flow.submit()
    with pytest.raises(TimeoutError, match=f"nightly {run.id} has not ended after 0.01 s"):
        await run.result("10ms")


async def test_an_app_whose_key_setup_fails_leaves_no_engine_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(engine: Engine) -> None:
        raise errors.StoreUnavailable("the disk is full")

    app = Fabric(f"sqlite:///{tmp_path / 'app.db'}")
    monkeypatch.setattr(Engine, "list_waitpoint_hmac_kids", away)
    before = set(threading.enumerate())

    with pytest.raises(errors.StoreUnavailable):
        await app.engine()
    await app.close()

    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if not name.startswith("asyncio_")]  # the loop's own helper threads


async def test_a_failure_deep_in_a_library_names_the_line_of_the_handler(
    app: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(retry=ONCE)
    def parse() -> Any:
        return json.loads("oops")  # three functions deep

    async with running_worker(app):
        with pytest.raises(RunFailed) as failed:
            await (await parse.submit()).result(10)
    for message in (str(failed.value), caplog.text):
        assert 'json.loads("oops")' in message
        assert "raise JSONDecodeError" in message
        assert "/flowfabric/sdk/" not in message, "our own pages help nobody"


async def test_an_invalid_return_value_is_reported_to_the_waiter_and_in_the_log(
    app: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(retry=ONCE)
    def wrong() -> Any:
        return object()

    async with running_worker(app):
        run = await wrong.submit()
        with pytest.raises(RunFailed, match="result: object has no JSON form") as failed:
            await run.result(10)
    assert "\n" not in failed.value.reason, "our own pages help nobody"
    assert f"{run.id}: attempt 0 of {wrong.name} failed: InvalidInput" in caplog.text


async def test_a_call_that_was_not_awaited_is_named(app: Fabric) -> None:
    @app.task(retry=ONCE)
    def forgets(ctx: Context) -> Any:
        return ctx.step(plain, 1)

    async with running_worker(app):
        with pytest.raises(RunFailed, match="step was not awaited .a plain function calls it through ctx.sync"):
            await (await forgets.submit()).result(10)


async def test_retry_after_is_no_failure(app: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flowfabric.worker")

    @app.task
    async def busy() -> None:
        raise RetryAfter("1h")

    async with running_worker(app):
        run = await busy.submit()

        async def is_put_away() -> bool:
            return await run.state() == "delayed"

        await wait_until(is_put_away)
    assert "continues later: try again after 1h" in caplog.text
    assert "failed" not in caplog.text


async def test_a_wait_that_timed_out_names_the_page_that_explains_it(app: Fabric) -> None:
    run = await app.task(plain).submit(1)
    with pytest.raises(TimeoutError) as late:
        await run.result("10ms")
    assert f"`ff explain {run.id}`" in late.value.__notes__[0]
    assert "worker" in (await run.explain()).sentence


def test_an_unreachable_store_is_reported_once() -> None:
    """It is not reported a second time when the program ends."""
    program = """
from flowfabric import Fabric
app = Fabric("postgresql://127.0.0.1:1/nowhere")
try:
    app.sync.find("{fp:1}:00000000-0000-4000-8000-000000000000").state()
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["StoreUnavailable"], "", 0)


async def test_spending_without_a_limit_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    app, llm = Fabric("memory://"), Budget("llm", limits={"tokens": 10, "usd": 1})

    @app.task(budgets=[llm])
    async def ask(ctx: Context) -> None:
        await ctx.spend(llm, token=5)
        await ctx.spend(llm, token=5, tokens=5)

    async with World(app):
        await (await ask.submit()).result()
    assert caplog.text.count("budget llm: token has no limit and is only counted; tokens, usd have one") == 1


@pytest.mark.parametrize("shape", [{"ok": bool}, "Order", 5, object, Mute, list[Mute]])
async def test_an_unanswerable_question_is_refused(shape: Any) -> None:
    """Otherwise only the votes of three days would show it."""
    app = Fabric("memory://")

    @app.task(retry=ONCE)
    async def asks(ctx: Context) -> None:
        _ = await ctx.approval("approve", shape)

    @app.task(retry=ONCE)
    async def receives(ctx: Context) -> None:
        await ctx.receive("approve", shape)

    async with World(app):
        for task in (asks, receives):
            run = await task.submit()
            with pytest.raises(RunFailed, match="approve: .* cannot be asked for; pass a type"):
                await run.result("1d")


@pytest.mark.parametrize("key", ["ff.show", "ff.ask.11111111", "ff.traceparent"])
def test_a_reserved_tag_is_refused_at_its_declaration(key: str) -> None:
    app = Fabric("memory://")
    with pytest.raises(errors.InvalidTagKey, match=f"{key}: keys that begin with ff. are reserved"):
        app.task(tags={key: "x"})(plain)
    with pytest.raises(errors.InvalidTagKey, match="reserved"):
        app.task(plain).options(tags={key: "x"})


async def test_the_shown_value_of_an_approval_is_checked_before_the_question() -> None:
    app = Fabric("memory://")

    @app.task(retry=ONCE)
    async def asks(ctx: Context, *, shown: bool) -> None:
        _ = await ctx.approval("approve", Steer, show={"what": Steer(degrees=3) if shown else object()})
        await ctx.sleep("1h")

    async with World(app):
        run = await asks.submit(shown=False)
        with pytest.raises(RunFailed, match="show: object has no JSON form"):
            await run.result("1d")
        run = await asks.submit(shown=True)
        await run.result("1d")
        assert (await run.describe()).tags["ff.show"] == '{"what":{"degrees":3}}'


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_handler_that_occupies_its_slot_while_it_waits_for_another_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("flowfabric.sdk.run.MAX_POLL_MS", 10)
    app = Fabric("memory://", settings=Settings(poll_ms=10))
    inner = app.task(plain)

    @app.task
    async def outer() -> int:
        return await (await inner.submit(1)).result()

    @app.task
    def plain_outer(ctx: Context) -> int:
        return ctx.sync.spawn(inner, 1).result()

    async with running_worker(app, slots=1):
        run = await (outer if kind == "async" else plain_outer).submit()
        message = f"{run.id}: {run.task} holds its slot while it waits for"
        if kind == "plain":
            assert await run.result(10) == 1
            assert message not in caplog.text
        else:
            await wait_until_true(lambda: message in caplog.text)
            await run.cancel()
