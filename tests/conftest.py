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
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from flowfabric.clock import ManualClock
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.migrator import migrations
from flowfabric.stores.sqlite import SQLiteStore
from tests.servers import postgres

# How long drawing or running an example takes depends on the machine, and must decide nothing.
settings.register_profile("ff", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The other Pythons of a machine run what the first one has run in full: few examples show what the language changes.
settings.register_profile("brief", settings.get_profile("ff"), max_examples=5)
settings.load_profile("brief" if "FF_TEST_BRIEF" in os.environ else "ff")

STORES = ("memory", "sqlite", "postgres")

_KEPT = ("ff_schema_version", "ff_feed")
_STILL_BUSY = """
    select count(*) from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
       and state <> 'idle'"""


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


@pytest.fixture
async def pg(database: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    """The Postgres store, for tests that look behind the port."""
    store = PostgresStore(database, clock)
    await store.open(migrate=False)
    yield store
    await store.close()


@pytest.fixture
async def rival(database: str) -> AsyncIterator[Rival]:
    """Someone else on the same database, to hold locks while the store works."""
    rival = Rival(await asyncpg.connect(database), await asyncpg.connect(database))
    yield rival
    await rival.close()


class Rival:
    """A connection that stops others, and one that watches them wait."""

    def __init__(self, connection: Any, watching: Any) -> None:
        self.connection = connection
        self._watching = watching

    async def begin(self, *statements: str) -> None:
        """Start a transaction and do something in it that others have to wait for."""
        await self.connection.execute("begin")
        for statement in statements:
            await self.connection.execute(statement)

    async def end(self, how: str = "commit") -> None:
        """End the transaction."""
        await self.connection.execute(how)

    async def blocks(self, number: int = 1) -> list[int]:
        """Wait until so many others wait for this transaction; their process ids."""
        pid = self.connection.get_server_pid()
        waiting = "select pid from pg_stat_activity where $1 = any(pg_blocking_pids(pid))"
        async with asyncio.timeout(20):
            while len(found := await self.fetch(waiting, pid)) < number:
                await self.fetch("select pg_sleep(0.005)")
        return [row["pid"] for row in found]

    async def fetch(self, words: str, *values: Any) -> list[Any]:
        """Look at something from outside of the transaction."""
        found: list[Any] = await self._watching.fetch(words, *values)
        return found

    async def close(self) -> None:
        for connection in (self.connection, self._watching):
            connection.terminate()


@pytest.fixture(scope="session")
def own_database() -> Iterator[str]:
    """A Postgres database of this process."""
    server = postgres()
    schema = hashlib.sha256("".join(step.text for step in migrations()).encode()).hexdigest()[:12]
    template = server.template(f"ff_{schema}", migrate)
    name = f"ff_{schema}_{os.getpid()}"
    yield server.create_database(name, template)
    server.drop_database(name)


def migrate(dsn: str) -> None:
    """Bring the schema into an empty database."""

    async def open_once() -> None:
        store = PostgresStore(dsn)
        await store.open(migrate=True)
        await store.close()

    with ThreadPoolExecutor() as threads:  # the test that comes first has a running loop in this one
        threads.submit(lambda: asyncio.run(open_once())).result()


async def emptied(dsn: str) -> str:
    """The address of a database, without the rows that were in it."""
    connection = await asyncpg.connect(dsn)
    async with asyncio.timeout(20):  # a connection that was cut off still ends what it was told to do
        while await connection.fetchval(_STILL_BUSY):
            await connection.execute("select pg_sleep(0.005)")
    tables = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
    await connection.execute("".join(f'delete from "{name}";' for (name,) in tables if name not in _KEPT))
    lost = "lost_lease = 0, lost_outcome = 0, lost_operator = 0, lost_signal = 0"
    await connection.execute(f"update ff_feed set numbered = 0, trimmed = 0, {lost}")
    await connection.close()
    return dsn
