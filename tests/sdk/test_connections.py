"""One engine per process: loops that come and go share its connections, and a loop that stays may claim it."""

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
from flowfabric.engine_api import EngineAPI
from flowfabric.errors import StoreUnavailable
from flowfabric.sdk import fabric as fabric_page
from flowfabric.sdk.task import AsyncTask
from tests.sdk.conftest import until_so, working

CALLS = 25


@pytest.fixture
async def loose(url: str) -> AsyncIterator[Fabric]:
    """An app that no loop has claimed."""
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


def in_a_loop_of_its_own(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What a coroutine returns on a loop that ends with it, as in a script or under WSGI."""
    return asyncio.run(call())


async def apart(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await asyncio.to_thread(in_a_loop_of_its_own, call)


async def test_loops_that_come_and_go_share_one_engine(loose: Fabric, opened: list[EngineAPI]) -> None:
    double = doubling(loose)

    runs = [await apart(lambda n=n: double.submit(n)) for n in range(CALLS)]  # type: ignore[misc]
    states = await asyncio.gather(*(apart(run.state) for run in runs))

    assert states == ["waiting"] * CALLS
    assert len(opened) == 1


async def test_a_process_that_calls_from_many_loops_holds_few_connections(own_database: str) -> None:
    loose = Fabric(own_database)
    double = doubling(loose)
    watching = await asyncpg.connect(own_database)
    try:
        before = await _connections(watching)
        await asyncio.gather(*(apart(lambda n=n: double.submit(n)) for n in range(CALLS)))  # type: ignore[misc]
        held = await _connections(watching) - before
        assert held <= 9, "a pool of 8, and one that listens"
    finally:
        await asyncio.to_thread(loose.stop_own_loop)
        await watching.close()


async def _connections(watching: Any) -> int:
    return int(
        await watching.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name = 'flowfabric'"
        )
    )


async def test_threads_and_loops_without_a_claim_share_one_engine(loose: Fabric, opened: list[EngineAPI]) -> None:
    double = doubling(loose)

    run = await asyncio.to_thread(lambda: double.sync.submit(1))
    assert await apart(loose.find(run.id).state) == "waiting"
    assert await loose.find(run.id).state() == "waiting"
    assert len(opened) == 1


async def test_a_loop_that_claims_the_engine_has_it_without_a_hop_and_others_come_to_it(
    loose: Fabric, opened: list[EngineAPI]
) -> None:
    double = doubling(loose)
    async with loose:
        assert await loose.engine() is opened[0]
        run = await apart(lambda: double.submit(1))
        assert await run.state() == "waiting"
    assert len(opened) == 1


async def test_a_worker_claims_its_loop(loose: Fabric, opened: list[EngineAPI]) -> None:
    double = doubling(loose)
    async with working(loose) as worker:
        await until_so(lambda: worker._engine is not None)
        run = await double.submit(4)
        assert await run.result(20) == 8
        assert await loose.engine() in opened
        assert await apart(lambda: run.result(20)) == 8
    await loose.close()


async def test_work_that_was_submitted_before_the_worker_claimed_its_loop_is_done(loose: Fabric) -> None:
    double = doubling(loose)
    run = await double.submit(4)
    async with working(loose):
        assert await run.result(20) == 8
        assert await (await double.submit(5)).result(20) == 10
    await loose.close()


async def test_results_streams_and_refusals_come_back_to_the_loop_that_asked(loose: Fabric) -> None:
    @loose.task
    async def talk(ctx: Context) -> str:
        await ctx.stream("out").write("hello")
        return "done"

    async def talked() -> tuple[str, list[str]]:
        run = await talk.submit()
        said = [piece.text async for piece in run.stream("out")]  # type: ignore[union-attr]
        return await run.result(20), said

    async def asks_for_nothing() -> None:
        with pytest.raises(Exception, match="not_found"):
            await loose.find("{fp:1}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d").state()
        with pytest.raises(TimeoutError):
            await (await talk.options(delay="1h").submit()).result(0.01)

    async with working(loose):
        assert await apart(talked) == ("done", ["hello"])
        await apart(asks_for_nothing)
    await loose.close()


async def test_an_app_that_was_closed_opens_another_engine_when_it_is_used_again(
    loose: Fabric, opened: list[EngineAPI]
) -> None:
    others = set(threading.enumerate())
    double = doubling(loose)
    await double.submit(1)
    await loose.close()
    assert not any(one.name == "flowfabric-engine" for one in set(threading.enumerate()) - others)
    await double.submit(2)
    assert len(opened) == 2


async def test_a_caller_that_is_cancelled_cancels_its_call_on_the_other_loop(
    loose: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def endless(self: Engine, execution_id: str) -> Any:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(type((await loose.engine()).engine), "explain", endless)  # type: ignore[attr-defined]
    call = asyncio.create_task((await loose.engine()).explain("e"))
    await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(cancelled.wait, 10)


async def test_a_call_whose_loop_ends_learns_that_its_outcome_is_unknown(
    loose: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    async def endless(self: Engine, execution_id: str) -> Any:
        begun.set()
        await asyncio.sleep(3600)

    engine = await loose.engine()
    monkeypatch.setattr(type(engine.engine), "explain", endless)  # type: ignore[attr-defined]
    call = asyncio.create_task(engine.explain("e"))
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.to_thread(loose.stop_own_loop)
    with pytest.raises(StoreUnavailable) as ended:
        await call
    assert ended.value.in_doubt


async def test_a_transaction_of_another_loop_carries_a_submit(own_database: str, opened: list[EngineAPI]) -> None:
    loose = Fabric(own_database)
    double = doubling(loose)

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
        await asyncio.to_thread(loose.stop_own_loop)


def test_a_forked_child_opens_an_engine_of_its_own(tmp_path: Path) -> None:
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
