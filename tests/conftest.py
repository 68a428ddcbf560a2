"""Fixtures of all tests: a manual clock, and each store, empty.

A test with the fixture `store` runs on every store. The Postgres tests of one process share a database, a copy of a
template that is migrated once for all processes; deleting its rows costs a tenth of another copy.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from flowfabric.clock import ManualClock
from flowfabric.ids import DEFAULT_PARTITIONS
from flowfabric.model.change import Change
from flowfabric.stores.homes import home_of_change
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.migrator import migrations
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.store import ValkeyStore
from tests.servers import postgres
from tests.valkey_servers import redis, system_redis, valkey, valkey_cluster

T = TypeVar("T")

# Timing depends on the machine, so no example fails for being slow.
settings.register_profile("ff", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Other Python versions run few examples: the first version has run all of them.
settings.register_profile("brief", settings.get_profile("ff"), max_examples=5)
settings.load_profile("brief" if "FF_TEST_BRIEF" in os.environ else "ff")

STORES = ("memory", "sqlite", "postgres", "valkey")
STORES_AND_CLUSTER = (*STORES, "valkey-cluster")  # for the contract, the scenarios and chaos
REDIS = ("redis",) if system_redis() else ()  # the oldest supported server, where it is installed

_KEPT = ("ff_schema_version", "ff_feed")
_BUSY_CONNECTIONS = """
    select count(*) from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
       and state <> 'idle'"""


@pytest.fixture(scope="session", autouse=True)
def changes_have_one_home() -> Iterator[None]:
    """Fail every test that commits a change of several partitions."""

    def checked(commit: Callable[..., Any]) -> Callable[..., Any]:
        def commit_checked(store: Store, changes: Sequence[Change], *args: Any, **kwargs: Any) -> Any:
            for change in changes:
                home_of_change(change, DEFAULT_PARTITIONS)
            return commit(store, changes, *args, **kwargs)

        return commit_checked

    with pytest.MonkeyPatch.context() as patch:
        for kind in (MemoryStore, SQLiteStore, PostgresStore, ValkeyStore):
            for name in ("commit", "commit_and_claim"):
                patch.setattr(kind, name, checked(getattr(kind, name)))
        yield


@pytest.fixture
def clock() -> ManualClock:
    """The store's clock."""
    return ManualClock()


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, open and empty."""
    async with open_store(request, clock, tmp_path) as store:
        yield store


@asynccontextmanager
async def open_store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """Open an empty store of the kind that the fixture's parameter names."""
    store: Store
    match request.param:
        case "memory":
            store = MemoryStore(clock)
        case "sqlite":
            store = SQLiteStore(new_sqlite_file(tmp_path), clock)
        case "valkey" | "valkey-cluster" | "redis" as kind:
            store = ValkeyStore(parse_url(request.getfixturevalue(f"{kind.replace('-', '_')}_url")), clock)
        case _:
            store = PostgresStore(await emptied(request.getfixturevalue("own_database")), clock)
    await store.open(migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def database(own_database: str) -> str:
    """The DSN of a Postgres database with the current schema and no rows."""
    return await emptied(own_database)


@pytest.fixture
async def pg(database: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    """The Postgres store, for tests of its internals."""
    store = PostgresStore(database, clock)
    await store.open(migrate=False)
    yield store
    await store.close()


@pytest.fixture
async def rival(database: str) -> AsyncIterator[Rival]:
    """Another session of the same database, to hold locks while the store works."""
    rival = Rival(await asyncpg.connect(database), await asyncpg.connect(database))
    yield rival
    await rival.close()


class Rival:
    """A connection that blocks others, and one that observes them."""

    def __init__(self, connection: Any, watching: Any) -> None:
        self.connection = connection
        self._watching = watching

    async def begin(self, *statements: str) -> None:
        """Start a transaction and run statements that block others."""
        await self.connection.execute("begin")
        for statement in statements:
            await self.connection.execute(statement)

    async def end(self, how: str = "commit") -> None:
        """End the transaction."""
        await self.connection.execute(how)

    async def blocks(self, number: int = 1) -> list[int]:
        """Wait until this transaction blocks `number` others; return their process ids."""
        pid = self.connection.get_server_pid()
        waiting = "select pid from pg_stat_activity where $1 = any(pg_blocking_pids(pid))"
        async with asyncio.timeout(20):
            while len(found := await self.fetch(waiting, pid)) < number:
                await self.fetch("select pg_sleep(0.005)")
        return [row["pid"] for row in found]

    async def start_blocked(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call that this transaction blocks; return its task once it waits."""
        task = asyncio.create_task(call)
        await self.blocks()
        return task

    async def answer_after_commit(self, call: Coroutine[Any, Any, T]) -> T:
        """Let a call wait for this transaction, commit, and return the answer to the call."""
        task = await self.start_blocked(call)
        await self.end()
        return await task

    async def fetch(self, query: str, *values: Any) -> list[Any]:
        """Run a query outside of the transaction."""
        rows: list[Any] = await self._watching.fetch(query, *values)
        return rows

    async def close(self) -> None:
        for connection in (self.connection, self._watching):
            connection.terminate()


@pytest.fixture(scope="session")
def own_database() -> Iterator[str]:
    """The DSN of the Postgres database of this process."""
    server, template = postgres(), migrated_template()
    name = f"{template}_{os.getpid()}"
    yield server.create_database(name, template)
    server.drop_database(name)


def migrated_template() -> str:
    """Return the name of a migrated Postgres database that others are copied from."""
    schema = hashlib.sha256("".join(step.text for step in migrations()).encode()).hexdigest()[:12]
    return postgres().template(f"ff_{schema}", migrate)


@pytest.fixture
def valkey_url() -> str:
    """The URL of an empty database of the Valkey server; functions stay there."""
    return emptied_valkey()


@pytest.fixture
def redis_url() -> str:
    """The URL of an empty database of the system's Redis; functions stay there."""
    servers = redis()
    servers.empty(servers.own_database())
    return servers.url(servers.own_database())


@pytest.fixture
def valkey_cluster_url() -> str:
    """The URL of an empty database of the Valkey cluster; functions stay there."""
    servers = valkey_cluster()
    servers.empty(servers.own_database())
    return servers.url(servers.own_database())


def new_sqlite_file(folder: Path) -> Path:
    """Return a new SQLite file with the current schema and no rows: a copy costs a tenth of all migrations."""
    return Path(shutil.copyfile(_sqlite_template(), folder / "ff.db"))


@cache
def _sqlite_template() -> Path:
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "template.db"
    migrate_store(SQLiteStore(file, ManualClock()))
    return file


def emptied_valkey() -> str:
    """Delete all keys of this process's database of the Valkey server; return its URL."""
    servers = valkey()
    servers.empty(servers.own_database())
    return servers.url(servers.own_database())


def migrate(dsn: str) -> None:
    """Migrate an empty database."""
    migrate_store(PostgresStore(dsn))


def migrate_store(store: Store) -> None:
    """Migrate an empty store, and close it."""

    async def open_once() -> None:
        await store.open(migrate=True)
        await store.close()

    with ThreadPoolExecutor() as threads:  # in this thread, the first test has a running loop
        threads.submit(lambda: asyncio.run(open_once())).result()


async def emptied(dsn: str) -> str:
    """Delete all rows of a database; return its DSN."""
    connection = await asyncpg.connect(dsn)
    async with asyncio.timeout(20):  # the server still executes the last statement of a closed connection
        while await connection.fetchval(_BUSY_CONNECTIONS):
            await connection.execute("select pg_sleep(0.005)")
    tables = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
    await connection.execute("".join(f'delete from "{name}";' for (name,) in tables if name not in _KEPT))
    lost = "lost_lease = 0, lost_outcome = 0, lost_operator = 0, lost_signal = 0"
    await connection.execute(f"update ff_feed set numbered = 0, trimmed = 0, {lost}")
    await connection.close()
    return dsn
