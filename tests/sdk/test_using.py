"""Submitting inside the caller's own transaction: committed and rolled back with it, and invisible before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from flowfabric import Fabric, Settings, Task, errors
from tests.sdk.conftest import running_worker, wait_until


@pytest.fixture
async def pg_app(database: str) -> AsyncIterator[Fabric]:
    async with Fabric(database, settings=Settings(poll_ms=60_000)) as app:  # so that only a notification can be quick
        yield app


@pytest.fixture
def greet(pg_app: Fabric) -> Task[[str], str]:
    @pg_app.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    return greet


@asynccontextmanager
async def of_asyncpg(dsn: str, isolation: Any = None) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    transaction = connection.transaction(isolation=isolation)
    await transaction.start()
    try:
        yield connection, transaction.commit, transaction.rollback
    finally:
        connection.terminate()


@asynccontextmanager
async def of_psycopg(dsn: str) -> AsyncIterator[Any]:
    connection = await psycopg.AsyncConnection.connect(dsn)
    try:
        yield connection, connection.commit, connection.rollback
    finally:
        await connection.close()


@asynccontextmanager
async def of_plain_psycopg(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncio.to_thread(lambda: psycopg.connect(dsn))
    try:
        yield (
            connection,
            lambda: asyncio.to_thread(connection.commit),
            lambda: asyncio.to_thread(connection.rollback),
        )
    finally:
        connection.close()


@asynccontextmanager
async def of_sqlalchemy_connection(dsn: str) -> AsyncIterator[Any]:
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    try:
        async with engine.connect() as connection:
            yield connection, connection.commit, connection.rollback
    finally:
        await engine.dispose()


@asynccontextmanager
async def of_sqlalchemy_session(dsn: str) -> AsyncIterator[Any]:
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        async with AsyncSession(engine) as session:
            yield session, session.commit, session.rollback
    finally:
        await engine.dispose()


@asynccontextmanager
async def of_plain_sqlalchemy(dsn: str) -> AsyncIterator[Any]:
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    connection = await asyncio.to_thread(engine.connect)
    try:
        yield (
            connection,
            lambda: asyncio.to_thread(connection.commit),
            lambda: asyncio.to_thread(connection.rollback),
        )
    finally:
        connection.close()
        engine.dispose()


EACH = pytest.mark.parametrize(
    "connecting",
    [
        of_asyncpg,
        of_psycopg,
        of_plain_psycopg,
        of_sqlalchemy_connection,
        of_sqlalchemy_session,
        of_plain_sqlalchemy,
    ],
)


async def seen(app: Fabric) -> list[str]:
    engine = await app.engine()
    return [one.execution_id for one in (await engine.search_executions()).executions]


@EACH
async def test_a_run_exists_once_the_transaction_commits_and_wakes_a_waiting_worker(
    pg_app: Fabric, greet: Task[[str], str], database: str, connecting: Any
) -> None:
    async with running_worker(pg_app), connecting(database) as (connection, commit, _):
        run = await greet.submit("ana", using=connection)
        many = await greet.options(using=connection).submit_many(["bo", "cy"])
        assert await seen(pg_app) == []
        await commit()
        assert await run.result(20) == "hello ana"
        assert [await one.result(20) for one in many] == ["hello bo", "hello cy"]


@EACH
async def test_a_transaction_that_is_rolled_back_leaves_nothing(
    pg_app: Fabric, greet: Task[[str], str], database: str, connecting: Any
) -> None:
    async with connecting(database) as (connection, _, rollback):
        await greet.options(key="once").submit("ana", using=connection)
        await rollback()
    assert await seen(pg_app) == []
    assert (await greet.options(key="once").submit("ana")).created


@EACH
async def test_a_key_holds_within_one_transaction_and_against_committed_runs(
    pg_app: Fabric, greet: Task[[str], str], database: str, connecting: Any
) -> None:
    before = await greet.options(key="old").submit("ana")
    async with connecting(database) as (connection, commit, _):
        first = await greet.options(key="new").submit("bo", using=connection)
        again = await greet.options(key="new").submit("bo", using=connection)
        known = await greet.options(key="old").submit("cy", using=connection)
        await commit()
    assert (first.created, again.created, known.created) == (True, False, False)
    assert (again.id, known.id) == (first.id, before.id)
    assert sorted(await seen(pg_app)) == sorted([first.id, before.id])


async def test_the_second_of_two_transactions_with_one_key_finds_the_first(
    pg_app: Fabric, greet: Task[[str], str], database: str, rival: Any
) -> None:
    async with of_asyncpg(database) as (one, commit_one, _), of_asyncpg(database) as (two, commit_two, _):
        await two.execute("create temporary table own (n int) on commit drop")
        first = await greet.options(key="k").submit("ana", using=one)
        second = asyncio.create_task(greet.options(key="k").submit("bo", using=two))

        async def waits() -> bool:
            pid = one.get_server_pid()
            return bool(await rival.fetch("select 1 from pg_stat_activity where $1 = any(pg_blocking_pids(pid))", pid))

        await wait_until(waits)
        await commit_one()
        run = await second
        await two.execute("insert into own values (1)")  # The transaction continues.
        await commit_two()
    assert (run.id, run.created) == (first.id, False)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_transaction_that_cannot_see_the_run_with_its_key_has_to_be_retried(
    pg_app: Fabric, greet: Task[[str], str], database: str, isolation: Any
) -> None:
    async with of_asyncpg(database, isolation) as (connection, _, rollback):
        # From now on its snapshot is fixed.
        await connection.execute("create temporary table own (n int) on commit drop")
        before = await greet.options(key="k").submit("ana")
        async with asyncio.timeout(10):
            with pytest.raises(errors.RetryExhausted, match="begin a new one"):
                await greet.options(key="k").submit("bo", using=connection)
        await connection.execute("insert into own values (1)")  # The caller may continue without it.
        await rollback()
    async with of_asyncpg(database, isolation) as (connection, commit, _):
        run = await greet.options(key="k").submit("bo", using=connection)
        await commit()
    assert (run.id, run.created) == (before.id, False)


async def test_a_blocking_view_submits_within_its_session(
    pg_app: Fabric, greet: Task[[str], str], database: str
) -> None:
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))

    def view(name: str, *, commits: bool) -> str:
        with Session(engine) as session:
            run = greet.sync.submit(name, using=session)
            if commits:
                session.commit()
            else:
                session.rollback()
            return run.id

    kept = await asyncio.to_thread(view, "ana", commits=True)
    await asyncio.to_thread(view, "bo", commits=False)
    engine.dispose()

    assert await seen(pg_app) == [kept]


async def test_other_objects_are_refused_and_change_nothing(
    pg_app: Fabric, greet: Task[[str], str], database: str
) -> None:
    bare = await asyncpg.connect(database)
    with pytest.raises(errors.InvalidInput, match="not in a transaction"):
        await greet.submit("ana", using=bare)
    with pytest.raises(errors.InvalidInput, match="using: str is not a connection"):
        await greet.submit("ana", using="connection")
    bare.terminate()
    async with asyncpg.create_pool(database, min_size=1) as pool:
        with pytest.raises(errors.InvalidInput, match="using: Pool is not a connection"):
            await greet.submit("ana", using=pool)
    async with of_asyncpg(database.rsplit("/", 1)[0] + "/postgres") as (elsewhere, _, _):
        with pytest.raises(errors.InvalidInput, match="another database"):
            await greet.submit("ana", using=elsewhere)
        assert await elsewhere.fetchval("select 1") == 1, "the caller's transaction is unharmed"
    assert await seen(pg_app) == []


async def test_a_transaction_of_another_store_is_refused(tmp_path: Any, database: str) -> None:
    async with Fabric(f"sqlite:///{tmp_path / 'a.db'}") as app, of_asyncpg(database) as (connection, _, _):

        @app.task
        async def greet(name: str) -> None: ...

        with pytest.raises(errors.InvalidInput, match="only a store in Postgres"):
            await greet.submit("ana", using=connection)
        assert await seen(app) == []
