"""The schema of the Postgres store: it equals the catalogue after the numbered migrations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from flowfabric import connect, errors
from flowfabric.model.event import Event
from flowfabric.model.execution import QueueKey
from flowfabric.stores.catalog import TABLES, Index
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.commit.fragments import EVENT_TYPES
from flowfabric.stores.postgres.migrator import migrations
from flowfabric.stores.postgres.sql import column_type
from tests.conftest import Rival
from tests.servers import postgres

COLUMNS = """
select column_name, data_type, is_nullable = 'YES' as optional, collation_name
  from information_schema.columns where table_schema = 'public' and table_name = $1
"""
INDEXES = """
select indisprimary as is_key,
       pg_get_expr(indpred, indrelid) as condition,
       array(select attname::text from unnest(indkey) with ordinality as k (number, place)
               join pg_attribute on attrelid = indrelid and attnum = k.number order by place) as columns
  from pg_index where indrelid = to_regclass($1)
"""


TYPE = """
select attname, format_type(atttypid, null), collname from pg_attribute left join pg_collation c on c.oid = attcollation
 where attrelid = 'ff_told'::regclass order by attnum
"""
OWN_COLUMNS = {"ff_exec_core": {"told"}}  # columns that only this store has, besides those of the catalogue


@pytest.fixture
async def empty() -> AsyncIterator[str]:
    """A database without any table."""
    server, name = postgres(), f"ff_bare_{os.getpid()}"
    server.drop_database(name)
    yield server.create_database(name)
    server.drop_database(name)


async def open_outcome(dsn: str, *, migrate: bool) -> Any:
    """Return the outcome of opening a store."""
    store = PostgresStore(dsn)
    try:
        await store.open(migrate=migrate)
    except errors.FabricError as error:
        return error
    finally:
        await store.close()
    return None


def _condition(index: Index) -> str:
    """Return the condition of a partial index; '' if it has every row."""
    if index.whole:
        return ""
    column = "admitted_at" if index.columns[0] == "quota_policy_id" else index.columns[0]
    return f"({column} IS NOT NULL)"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
async def test_each_table_has_the_columns_key_and_indexes_of_the_catalogue(rival: Rival, table: Any) -> None:
    wanted = {column.name: (column_type(column), column.optional) for column in table.columns}
    own = OWN_COLUMNS.get(table.name, set())
    found = [row for row in await rival.fetch(COLUMNS, table.name) if row["column_name"] not in own]
    indexes = await rival.fetch(INDEXES, table.name)

    assert {row["column_name"]: (row["data_type"], row["optional"]) for row in found} == wanted
    assert {row["collation_name"] for row in found if row["data_type"] == "text"} <= {"C"}
    assert [tuple(row["columns"]) for row in indexes if row["is_key"]] == [table.key]
    assert sorted((tuple(row["columns"]), row["condition"] or "") for row in indexes if not row["is_key"]) == sorted(
        (index.columns, _condition(index)) for index in table.indexes
    )


async def test_events_and_queues_have_a_column_for_each_field(rival: Rival) -> None:
    events = await rival.fetch(TYPE)
    lines = {row["column_name"] for row in await rival.fetch(COLUMNS, "ff_line")}

    # A batch holds its events as rows of these, in this order.
    assert [tuple(row)[:2] for row in events] == list(EVENT_TYPES.items())
    assert {row["collname"] for row in events} == {"C", None}
    assert Event.__struct_fields__ == tuple(EVENT_TYPES)
    columns = {"decided" if name == "guarded" else name for name in QueueKey.__struct_fields__}
    assert lines == {"line", "digest", *columns}


async def test_a_database_without_the_schema_is_refused_until_it_is_migrated(empty: str) -> None:
    refused = await open_outcome(empty, migrate=False)
    assert isinstance(refused, errors.Unavailable)
    assert "migrate" in refused.detail

    assert await open_outcome(empty, migrate=True) is None
    assert await open_outcome(empty, migrate=False) is None


async def test_many_processes_may_migrate_concurrently(empty: str) -> None:
    assert await asyncio.gather(*(open_outcome(empty, migrate=True) for _ in range(5))) == [None] * 5

    connection = await asyncpg.connect(empty)
    applied = await connection.fetch("select version, name from ff_schema_version order by version")
    await connection.close()
    assert [tuple(row) for row in applied] == [(step.version, step.name) for step in migrations()]


async def test_a_newer_schema_is_refused(empty: str) -> None:
    await open_outcome(empty, migrate=True)
    newest = migrations()[-1].version
    connection = await asyncpg.connect(empty)
    await connection.execute("insert into ff_schema_version (version, name) values ($1, 'from the future')", newest + 1)
    await connection.close()

    for migrate in (False, True):
        assert await open_outcome(empty, migrate=migrate) == errors.SchemaTooNew(found=newest + 1, known=newest)


async def test_a_refused_connect_leaves_no_session_behind(empty: str) -> None:
    with pytest.raises(errors.Unavailable, match="migrate first"):
        await connect(empty, migrate=False)

    own = await asyncpg.connect(empty)
    others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    async with asyncio.timeout(10):
        while await own.fetchval(others):  # noqa: ASYNC110 - the server sees a moment later that a client has left
            await asyncio.sleep(0.01)
    await own.close()


async def test_a_database_that_cannot_store_every_text_is_refused() -> None:
    server, name = postgres(), f"ff_latin_{os.getpid()}"
    server.drop_database(name)
    server.execute(f"create database {name} encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0")

    refused = await open_outcome(server.dsn(name), migrate=True)

    assert isinstance(refused, errors.InvalidInput)
    assert "LATIN1" in refused.detail
    server.drop_database(name)


@pytest.mark.parametrize("cache", [True, False])
async def test_a_read_only_database_is_left_unchanged(empty: str, cache: bool) -> None:
    server, name = postgres(), empty.rpartition("/")[2]
    server.execute(f'alter database "{name}" set default_transaction_read_only = on')
    store = PostgresStore(empty, statement_cache=cache)
    with pytest.raises(errors.StoreUnavailable, match="default_transaction_read_only is on") as refused:
        await store.open(migrate=True)
    await store.close()
    assert refused.value.source is errors.StoreFault.CLUSTER
    assert server.execute("select count(*) from pg_tables where tablename like 'ff_%'", name) == "0"

    server.execute(f'alter database "{name}" reset default_transaction_read_only')
    assert await open_outcome(empty, migrate=True) is None


async def test_a_failing_migration_changes_nothing(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = migrations()[-1]._replace(version=999, text="create table ff_half (); select 1 / 0;")
    monkeypatch.setattr("flowfabric.stores.postgres.migrator.migrations", lambda: (*migrations(), broken))
    store = PostgresStore(empty)
    with pytest.raises(Exception, match="division by zero"):
        await store.open(migrate=True)
    await store.close()
    monkeypatch.undo()

    assert isinstance(await open_outcome(empty, migrate=False), errors.Unavailable)
    assert await open_outcome(empty, migrate=True) is None


def test_versions_are_numbered_without_gaps() -> None:
    assert [step.version for step in migrations()] == list(range(1, len(migrations()) + 1))
