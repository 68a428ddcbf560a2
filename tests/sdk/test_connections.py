"""One engine per process: short-lived loops share its connections, and a long-lived loop may own it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from flowfabric import Context, Fabric
from flowfabric.connector import connect
from flowfabric.engine.engine import Engine
from flowfabric.engine_protocol import EngineAPI
from flowfabric.sdk import fabric as fabric_page
from flowfabric.sdk.task import AsyncTask
from tests.sdk.conftest import running_worker, wait_until_true
from tests.stores.unavailable import unavailable

CALLS = 25


@pytest.fixture
async def unowned_app(url: str) -> AsyncIterator[Fabric]:
    """An app whose engine no loop owns."""
    app = Fabric(url)
    yield app
    await asyncio.to_thread(app.stop_own_loop)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineAPI]:
    """Every engine that is opened."""
    made = list[EngineAPI]()

    async def counted(*given: Any, token: str | None = None, **ways: Any) -> EngineAPI:
        made.append(await connect(*given, token=token, **ways))
        return made[-1]

    monkeypatch.setattr(fabric_page, "connect", counted)
    return made


def doubling(app: Fabric) -> AsyncTask[[int], int]:
    @app.task(name="double")
    async def double(n: int) -> int:
        return n * 2

    return double


def run_in_new_loop(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on a loop that ends with it, as in a script or under WSGI."""
    return asyncio.run(call())


async def apart(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await asyncio.to_thread(run_in_new_loop, call)


async def test_short_lived_loops_share_one_engine(unowned_app: Fabric, opened: list[Engine]) -> None:
    double = doubling(unowned_app)

    runs = [await apart(lambda n=n: double.submit(n)) for n in range(CALLS)]  # type: ignore[misc]
    states = await asyncio.gather(*(apart(run.state) for run in runs))

    assert states == ["waiting"] * CALLS
    assert len(opened) == 1


async def test_a_process_that_calls_from_many_loops_opens_few_connections(own_database: str) -> None:
    unowned_app = Fabric(own_database)
    double = doubling(unowned_app)
    watching = await asyncpg.connect(own_database)
    try:
        before = await _connections(watching)
        await asyncio.gather(*(apart(lambda n=n: double.submit(n)) for n in range(CALLS)))  # type: ignore[misc]
        held = await _connections(watching) - before
        assert held <= 9, "a pool of 8, and one that listens"
    finally:
        await asyncio.to_thread(unowned_app.stop_own_loop)
        await watching.close()


async def _connections(watching: Any) -> int:
    return int(
        await watching.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name = 'flowfabric'"
        )
    )


async def test_threads_and_loops_that_do_not_own_the_engine_share_it(unowned_app: Fabric, opened: list[Engine]) -> None:
    double = doubling(unowned_app)

    run = await asyncio.to_thread(lambda: double.sync.submit(1))
    assert await apart(unowned_app.find(run.id).state) == "waiting"
    assert await unowned_app.find(run.id).state() == "waiting"
    assert len(opened) == 1


async def test_the_loop_that_owns_the_engine_calls_it_directly_and_others_are_forwarded(
    unowned_app: Fabric, opened: list[Engine]
) -> None:
    double = doubling(unowned_app)
    async with unowned_app:
        assert await unowned_app.engine() is opened[0]
        run = await apart(lambda: double.submit(1))
        assert await run.state() == "waiting"
    assert len(opened) == 1


async def test_a_worker_owns_the_engine_on_its_loop(unowned_app: Fabric, opened: list[Engine]) -> None:
    double = doubling(unowned_app)
    async with running_worker(unowned_app) as worker:
        await wait_until_true(lambda: worker._engine is not None)
        run = await double.submit(4)
        assert await run.result(20) == 8
        assert await unowned_app.engine() in opened
        assert await apart(lambda: run.result(20)) == 8
    await unowned_app.close()


async def test_work_that_was_submitted_before_the_worker_owned_the_engine_is_done(unowned_app: Fabric) -> None:
    double = doubling(unowned_app)
    run = await double.submit(4)
    async with running_worker(unowned_app):
        assert await run.result(20) == 8
        assert await (await double.submit(5)).result(20) == 10
    await unowned_app.close()


async def test_results_streams_and_errors_return_to_the_calling_loop(unowned_app: Fabric) -> None:
    @unowned_app.task
    async def talk(ctx: Context) -> str:
        await ctx.stream("out").write("hello")
        return "done"

    async def talked() -> tuple[str, list[str]]:
        run = await talk.submit()
        said = [piece.text async for piece in run.stream("out")]  # type: ignore[union-attr]
        return await run.result(20), said

    async def asks_for_nothing() -> None:
        with pytest.raises(Exception, match="not_found"):
            await unowned_app.find("{fp:1}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d").state()
        with pytest.raises(TimeoutError):
            await (await talk.options(delay="1h").submit()).result(0.01)

    async with running_worker(unowned_app):
        assert await apart(talked) == ("done", ["hello"])
        await apart(asks_for_nothing)
    await unowned_app.close()


async def test_a_closed_app_opens_another_engine_when_it_is_used_again(
    unowned_app: Fabric, opened: list[Engine]
) -> None:
    others = set(threading.enumerate())
    double = doubling(unowned_app)
    await double.submit(1)
    await unowned_app.close()
    assert not any(one.name == "flowfabric-engine" for one in set(threading.enumerate()) - others)
    await double.submit(2)
    assert len(opened) == 2


async def test_a_cancelled_caller_cancels_its_call_on_the_other_loop(
    unowned_app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def endless(self: Engine, execution_id: str) -> Any:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(type((await unowned_app.engine()).engine), "explain", endless)  # type: ignore[attr-defined]
    call = asyncio.create_task((await unowned_app.engine()).explain("e"))
    await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(cancelled.wait, 10)


async def test_a_call_whose_loop_ends_has_an_unknown_outcome(
    unowned_app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    async def endless(self: Engine, execution_id: str) -> Any:
        begun.set()
        await asyncio.sleep(3600)

    engine = await unowned_app.engine()
    monkeypatch.setattr(type(engine.engine), "explain", endless)  # type: ignore[attr-defined]
    call = asyncio.create_task(engine.explain("e"))
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.to_thread(unowned_app.stop_own_loop)
    with unavailable(in_doubt=True):
        await call


async def test_a_transaction_of_another_loop_can_carry_a_submit(own_database: str, opened: list[Engine]) -> None:
    unowned_app = Fabric(own_database)
    double = doubling(unowned_app)

    async def submit(commits: bool) -> Any:
        connection = await asyncpg.connect(own_database)
        try:
            transaction = connection.transaction()
            await transaction.start()
            run = await double.submit(3, using=connection)
            await (transaction.commit() if commits else transaction.rollback())
            return run
        finally:
            await connection.close()

    try:
        kept, lost = await apart(lambda: submit(True)), await apart(lambda: submit(False))
        assert await kept.state() == "waiting"
        with pytest.raises(Exception, match="not_found"):
            await lost.state()
        assert len(opened) == 1
    finally:
        await asyncio.to_thread(unowned_app.stop_own_loop)


def test_a_forked_child_opens_its_own_engine(tmp_path: Path) -> None:
    app = Fabric(f"sqlite:///{tmp_path / 'app.db'}")
    double = doubling(app)
    asyncio.run(double.submit(1))
    if (child := os.fork()) == 0:
        try:
            asyncio.run(double.submit(2))
            app.stop_own_loop()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    async def count() -> int:
        return len((await (await app.engine()).search_executions()).executions)

    assert asyncio.run(count()) == 2
    app.stop_own_loop()
