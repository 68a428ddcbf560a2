"""What all tests share: a clock that stands still until it is moved, and each store, empty.

A test that takes `store` runs on every store. The Postgres tests of one process share a database, a copy of a
template that is migrated once for all processes; emptying it costs a tenth of another copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.base import Store
from flowfabric.stores.memory import MemoryStore
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.schema import migrations
from flowfabric.stores.sqlite import SQLiteStore
from tests.servers import postgres

STORES = ("memory", "sqlite", "postgres")

_KEPT = ("ff_schema_version", "ff_feed")


@pytest.fixture
def clock() -> ManualClock:
    """The store's clock."""
    return ManualClock()


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, open and empty."""
    store: Store
    match request.param:
        case "memory":
            store = MemoryStore(clock)
        case "sqlite":
            store = SQLiteStore(tmp_path / "ff.db", clock)
        case _:
            store = PostgresStore(await emptied(request.getfixturevalue("own_database")), clock)
    await store.open(migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def database(own_database: str) -> str:
    """The address of a Postgres database with our schema and no rows."""
    return await emptied(own_database)


@pytest.fixture(scope="session")
def own_database() -> Iterator[str]:
    """A Postgres database of this process."""
    server = postgres()
    schema = hashlib.sha256("".join(step.text for step in migrations()).encode()).hexdigest()[:12]
    template = server.template(f"ff_{schema}", _migrate)
    name = f"ff_{schema}_{os.getpid()}"
    yield server.create_database(name, template)
    server.drop_database(name)


def _migrate(dsn: str) -> None:
    async def migrate() -> None:
        store = PostgresStore(dsn)
        await store.open(migrate=True)
        await store.close()

    with ThreadPoolExecutor() as threads:  # the test that comes first has a running loop in this one
        threads.submit(lambda: asyncio.run(migrate())).result()


async def emptied(dsn: str) -> str:
    """The address of a database, without the rows that were in it."""
    connection = await asyncpg.connect(dsn)
    tables = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
    await connection.execute("".join(f'delete from "{name}";' for (name,) in tables if name not in _KEPT))
    await connection.close()
    return dsn
