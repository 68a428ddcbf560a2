"""Two releases on one store: the older one goes on beside an additive migration, and stops for any other."""

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
from tests.sdk.conftest import until_so
from tests.servers import postgres

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
ADDS = "alter table ff_exec_core add column note text default 'born of an older release'"
ADDITIVE = f"-- A note.\n-- compatible: yes\n{ADDS};\n"
BREAKING = "-- Other keys.\n-- compatible: no\nalter table ff_exec_core rename to ff_exec_core_of_old;\n"
SILENT = "create table ff_other (id integer);\n"


class Place:
    """A store of either kind, and how a newer release migrates it."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    @contextmanager
    def newer_release(self, *texts: str) -> Iterator[None]:
        """Be a release that has these migrations, too."""
        with pytest.MonkeyPatch.context() as patch:
            if self.kind == "sqlite":
                known = of_sqlite.migrations()
                more = {max(known) + place: text for place, text in enumerate(texts, 1)}
                patch.setattr(of_sqlite, "migrations", lambda: {**known, **more})
            else:
                steps = of_postgres.migrations()
                added = tuple(
                    of_postgres.Migration(steps[-1].version + place, "newer", text)
                    for place, text in enumerate(texts, 1)
                )
                patch.setattr(of_postgres, "migrations", lambda: (*steps, *added))
            yield

    async def migrate(self, *texts: str) -> int:
        """Let a newer release come by; the schema version that it leaves behind."""
        with self.newer_release(*texts):
            async with await open_engine(self.url) as engine:
                is_new = engine.schema.found == 0
                assert engine.schema.compatible is (is_new or all(map(is_compatible, texts)))
                return engine.schema.current

    async def fetch(self, words: str) -> list[Any]:
        """What the store answers to this."""
        if self.kind == "sqlite":
            db = apsw.Connection(self.url.removeprefix("sqlite:///"))
            try:
                return [tuple(row) for row in db.execute(words)]
            finally:
                db.close()
        connection = await asyncpg.connect(self.url)
        try:
            return [tuple(row) for row in await connection.fetch(words)]
        finally:
            await connection.close()


@pytest.fixture(params=["sqlite", "postgres"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "sqlite":
        yield Place("sqlite", f"sqlite:///{tmp_path / 'ff.db'}")
        return
    server, name = postgres(), f"ff_releases_{tmp_path.name[-20:]}"
    await asyncio.to_thread(server.drop_database, name)
    yield Place("postgres", await asyncio.to_thread(server.create_database, name))
    await asyncio.to_thread(server.drop_database, name)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How often the version is looked at on a store where that costs a round trip."""
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
def test_a_migration_says_in_its_leading_comment_whether_it_is_compatible(text: str, expected: bool) -> None:
    assert is_compatible(text) is expected


async def test_what_migrations_say_is_kept_in_the_store(place: Place) -> None:
    version = await place.migrate(ADDITIVE, SILENT)
    kept = await place.fetch("select version, compatible from ff_schema_version order by version desc limit 2")
    assert [(number, bool(says)) for number, says in kept] == [(version, False), (version - 1, True)]


async def test_a_store_of_a_release_that_knew_no_marks_is_migrated(place: Place) -> None:
    async with await open_engine(place.url):
        pass
    drop = "alter table ff_schema_version drop column compatible"
    await place.fetch(drop)
    async with await open_engine(place.url):
        pass  # nothing to migrate, and nothing to miss
    await place.migrate(ADDITIVE)
    async with await open_engine(place.url, migrate=False) as older:
        await older.create_execution(execution_id=older.new_execution_id())


async def test_a_release_runs_beside_the_next_one_when_that_is_compatible(
    place: Place, often: Callable[[float], None]
) -> None:
    often(0.0)
    async with await open_engine(place.url) as older:
        before = older.new_execution_id()
        await older.create_execution(execution_id=before)
        newest = await place.migrate(ADDITIVE)
        await place.fetch(f"update ff_exec_core set note = 'of the newer' where execution_id = '{before}' returning 1")

        after = older.new_execution_id()
        await older.create_execution(execution_id=after)
        claimed = await older.claim_many("default", 2, lease_ttl_ms=30_000, **WORKER)
        await asyncio.gather(*(older.complete(one.handle, result=b"1") for one in claimed))
        assert {one.execution_id for one in claimed} == {before, after}

    async with await open_engine(place.url, migrate=True) as again:  # a start of the older release
        assert again.schema.current == newest
        assert await again.read_execution_state(before) == "completed"
    notes = dict(await place.fetch("select execution_id, note from ff_exec_core"))
    assert notes == {before: "of the newer", after: "born of an older release"}, "columns it does not know are kept"
    with place.newer_release(ADDITIVE):
        async with await open_engine(place.url, migrate=False) as newer:
            assert await newer.read_execution_state(after) == "completed"


@pytest.mark.parametrize("texts", [(BREAKING,), (SILENT,), (ADDITIVE, ADDITIVE.replace("note", "other"))])
async def test_a_running_release_refuses_everything_once_the_schema_is_another(
    place: Place, often: Callable[[float], None], texts: tuple[str, ...]
) -> None:
    often(0.0)
    async with await open_engine(place.url) as older:
        await older.create_execution(execution_id=older.new_execution_id())
        found = await place.migrate(*texts)
        for _ in range(3):
            with pytest.raises(errors.SchemaTooNew) as newer:
                await older.create_execution(execution_id=older.new_execution_id())
            assert (newer.value.found, newer.value.known) == (found, found - len(texts))
    with pytest.raises(errors.SchemaTooNew):
        await open_engine(place.url)


async def test_a_statement_that_no_longer_fits_tells_that_the_schema_is_newer(
    place: Place, often: Callable[[float], None]
) -> None:
    often(3600.0)  # so that only the failure itself can tell
    async with await open_engine(place.url) as older:
        run = older.new_execution_id()
        await older.create_execution(execution_id=run)
        await older.describe_execution(run)
        await place.migrate(BREAKING)
        with pytest.raises(errors.SchemaTooNew):
            await older.search_executions()


async def test_a_worker_says_that_the_schema_is_newer_and_stops(
    place: Place, often: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    often(0.0)
    caplog.set_level(logging.INFO)
    app, begun = Fabric(place.url), asyncio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(3600)

    worker = Worker(app, lease_ttl="1s")
    task = asyncio.create_task(worker.work())
    await endless.submit()
    await asyncio.wait_for(begun.wait(), 20)
    await place.migrate(SILENT)

    with pytest.raises(errors.SchemaTooNew):
        await asyncio.wait_for(task, 20)
    assert sum("this worker stops" in one for one in caplog.messages) == 1
    assert not any("is away" in one for one in caplog.messages)
    assert worker.running == 0
    await app.close()


async def test_an_idle_worker_notices_by_itself(place: Place, often: Callable[[float], None]) -> None:
    often(0.0)
    app = Fabric(place.url)

    @app.task
    async def nothing() -> None: ...

    worker = Worker(app, lease_ttl="1s")
    task = asyncio.create_task(worker.work())
    await until_so(lambda: worker._engine is not None)
    await place.migrate(SILENT)
    with pytest.raises(errors.SchemaTooNew):
        await asyncio.wait_for(task, 20)
    await app.close()
