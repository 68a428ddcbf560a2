"""Two releases on one store: the older one keeps running beside an additive migration and stops at any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

from flowfabric import Context, Fabric, errors
from flowfabric.connector import open_engine
from flowfabric.sdk.worker.worker import Worker
from flowfabric.stores.compatibility import is_compatible
from flowfabric.stores.postgres import migrator as of_postgres
from flowfabric.stores.sqlite import migrator as of_sqlite
from tests.executions import new_execution
from tests.sdk.conftest import wait_until_true
from tests.servers import postgres

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
ADDS = "alter table ff_exec_core add column note text default 'born of an older release'"
ADDITIVE = f"-- A note.\n-- compatible: yes\n{ADDS};\n"
BREAKING = "-- Other keys.\n-- compatible: no\nalter table ff_exec_core rename to ff_exec_core_of_old;\n"
SILENT = "create table ff_other (id integer);\n"


class Database:
    """A store of either kind, and the migrations of a newer release."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    @contextmanager
    def newer_release(self, *texts: str) -> Iterator[None]:
        """Act as a release that has these additional migrations."""
        with pytest.MonkeyPatch.context() as patch:
            if self.kind == "sqlite":
                known = of_sqlite.migrations()
                more = {max(known) + database: text for database, text in enumerate(texts, 1)}
                patch.setattr(of_sqlite, "migrations", lambda: {**known, **more})
            else:
                steps = of_postgres.migrations()
                added = tuple(
                    of_postgres.Migration(steps[-1].version + database, "newer", text)
                    for database, text in enumerate(texts, 1)
                )
                patch.setattr(of_postgres, "migrations", lambda: (*steps, *added))
            yield

    async def migrate(self, *texts: str) -> int:
        """Migrate as a newer release; return the resulting schema version."""
        with self.newer_release(*texts):
            async with await open_engine(self.url) as engine:
                is_new = engine.schema.found == 0
                assert engine.schema.compatible is (is_new or all(map(is_compatible, texts)))
                return engine.schema.current

    async def fetch(self, query: str) -> list[Any]:
        """Run a query on the store."""
        if self.kind == "sqlite":
            db = apsw.Connection(self.url.removeprefix("sqlite:///"))
            try:
                return [tuple(row) for row in db.execute(query)]
            finally:
                db.close()
        connection = await asyncpg.connect(self.url)
        try:
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    if request.param == "sqlite":
        yield Database("sqlite", f"sqlite:///{tmp_path / 'ff.db'}")
        return
    server, name = postgres(), f"ff_releases_{tmp_path.name[-20:]}"
    await asyncio.to_thread(server.drop_database, name)
    yield Database("postgres", await asyncio.to_thread(server.create_database, name))
    await asyncio.to_thread(server.drop_database, name)


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Check the schema version often on stores where that costs a round trip."""
    return lambda seconds: monkeypatch.setattr(of_postgres, "CHECK_INTERVAL_S", seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ADDITIVE, True),
        (BREAKING, False),
        (SILENT, False),
        ("-- compatible: yes\n", True),
        ("-- It is not said that this is compatible: yes\nselect 1;\n", False),
        ("select 1;\n-- compatible: yes\n", False),
    ],
)
def test_the_leading_comment_of_a_migration_declares_its_compatibility(text: str, expected: bool) -> None:
    assert is_compatible(text) is expected


async def test_the_compatibility_of_migrations_is_stored(database: Database) -> None:
    version = await database.migrate(ADDITIVE, SILENT)
    kept = await database.fetch("select version, compatible from ff_schema_version order by version desc limit 2")
    assert [(number, bool(says)) for number, says in kept] == [(version, False), (version - 1, True)]


async def test_a_store_of_a_release_without_compatibility_marks_is_migrated(database: Database) -> None:
    async with await open_engine(database.url):
        pass
    drop = "alter table ff_schema_version drop column compatible"
    await database.fetch(drop)
    async with await open_engine(database.url):
        pass  # There is nothing to migrate and nothing is missing.
    await database.migrate(ADDITIVE)
    async with await open_engine(database.url, migrate=False) as older:
        await older.create_execution(execution_id=older.new_execution_id())


async def test_a_release_runs_beside_a_compatible_newer_one(
    database: Database, frequent_checks: Callable[[float], None]
) -> None:
    frequent_checks(0.0)
    async with await open_engine(database.url) as older:
        before = await new_execution(older)
        newest = await database.migrate(ADDITIVE)
        await database.fetch(
            f"update ff_exec_core set note = 'of the newer' where execution_id = '{before}' returning 1"
        )

        after = await new_execution(older)
        claimed = await older.claim_many("default", 2, lease_ttl_ms=30_000, **WORKER)
        await asyncio.gather(*(older.complete(one.handle, result=b"1") for one in claimed))
        assert {one.execution_id for one in claimed} == {before, after}

    async with await open_engine(database.url, migrate=True) as again:  # The older release starts again.
        assert again.schema.current == newest
        assert await again.read_execution_state(before) == "completed"
    notes = dict(await database.fetch("select execution_id, note from ff_exec_core"))
    assert notes == {before: "of the newer", after: "born of an older release"}, "columns it does not know are kept"
    with database.newer_release(ADDITIVE):
        async with await open_engine(database.url, migrate=False) as newer:
            assert await newer.read_execution_state(after) == "completed"


@pytest.mark.parametrize("texts", [(BREAKING,), (SILENT,), (ADDITIVE, ADDITIVE.replace("note", "other"))])
async def test_a_running_release_refuses_every_call_once_the_schema_is_incompatible(
    database: Database, frequent_checks: Callable[[float], None], texts: tuple[str, ...]
) -> None:
    frequent_checks(0.0)
    async with await open_engine(database.url) as older:
        await older.create_execution(execution_id=older.new_execution_id())
        found = await database.migrate(*texts)
        for _ in range(3):
            with pytest.raises(errors.SchemaTooNew) as newer:
                await older.create_execution(execution_id=older.new_execution_id())
            assert (newer.value.found, newer.value.known) == (found, found - len(texts))
    with pytest.raises(errors.SchemaTooNew):
        await open_engine(database.url)


async def test_a_statement_that_no_longer_fits_reports_that_the_schema_is_newer(
    database: Database, frequent_checks: Callable[[float], None]
) -> None:
    frequent_checks(3600.0)  # Only the failure itself can reveal the new version.
    async with await open_engine(database.url) as older:
        run = await new_execution(older)
        await older.describe_execution(run)
        await database.migrate(BREAKING)
        with pytest.raises(errors.SchemaTooNew):
            await older.search_executions()


async def test_a_worker_reports_that_the_schema_is_newer_and_stops(
    database: Database, frequent_checks: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    frequent_checks(0.0)
    caplog.set_level(logging.INFO)
    app, begun = Fabric(database.url), asyncio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(3600)

    worker = Worker(app, lease_ttl="1s")
    task = asyncio.create_task(worker.work())
    await endless.submit()
    await asyncio.wait_for(begun.wait(), 20)
    await database.migrate(SILENT)

    with pytest.raises(errors.SchemaTooNew):
        await asyncio.wait_for(task, 20)
    assert sum("this worker stops" in one for one in caplog.messages) == 1
    assert not any("is away" in one for one in caplog.messages)
    assert worker.running == 0
    await app.close()


async def test_an_idle_worker_notices_a_newer_schema(
    database: Database, frequent_checks: Callable[[float], None]
) -> None:
    frequent_checks(0.0)
    app = Fabric(database.url)

    @app.task
    async def nothing() -> None: ...

    worker = Worker(app, lease_ttl="1s")
    task = asyncio.create_task(worker.work())
    await wait_until_true(lambda: worker._engine is not None)
    await database.migrate(SILENT)
    with pytest.raises(errors.SchemaTooNew):
        await asyncio.wait_for(task, 20)
    await app.close()
