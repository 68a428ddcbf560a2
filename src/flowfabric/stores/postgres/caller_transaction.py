"""Within somebody else's transaction: reads and writes on a connection that is not ours, kept or lost with its commit.

The connection is one of asyncpg, of psycopg 3 (async or not), or SQLAlchemy's connection or session (async or not) over
either of them; what the statements of the store need of a driver is a handful of verbs. A savepoint keeps a row that
somebody else inserts at the same moment from spoiling the whole transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from flowfabric.errors import InvalidInput, RetryExhausted
from flowfabric.event_loop import LoopBoundValue
from flowfabric.model.change import Change
from flowfabric.stores.postgres import reads
from flowfabric.stores.postgres.commit.parameters import ParameterShapes
from flowfabric.stores.postgres.commit.plan import CommitPlan, queues_written
from flowfabric.stores.postgres.commit.statement import commit
from flowfabric.stores.postgres.notifier import CHANNEL, encode_payloads
from flowfabric.stores.postgres.queue_ids import PostgresQueueIds, UnknownQueue
from flowfabric.stores.queries import Loaded, Read

UNIQUE_VIOLATION, UNDEFINED_TABLE = "23505", "42P01"
ACCEPTED_CONNECTIONS = "a connection of asyncpg or psycopg 3, or a connection or session of SQLAlchemy over one of them"


class CallerConnection(Protocol):
    """What the statements of this store need of a connection: asyncpg's own verbs."""

    async def fetch(self, words: str, *values: Any) -> list[Any]: ...
    async def fetchrow(self, words: str, *values: Any) -> Any: ...
    async def execute(self, words: str, *values: Any) -> Any: ...
    def is_in_transaction(self) -> bool: ...


class CallerTransaction:
    """The store as seen from inside a caller's transaction."""

    def __init__(self, link: CallerConnection, lines: PostgresQueueIds, clock: Callable[[], int | None]) -> None:
        self._link = link
        self._lines = lines
        self._habits = ParameterShapes(lines.checked_id)
        self._clock = clock

    async def load(self, wants: Sequence[Read]) -> Loaded:
        """The rows asked for, those of this transaction among them."""
        answer = await reads.fetch_rows(self._link, wants, self._clock())
        return await self._lines.decode(lambda line_at: reads.decode_rows(answer, wants, line_at))

    async def commit(self, change: Change) -> int | None:
        """Write a change as part of the transaction; None when a guard does not hold."""
        batch = await self._batch(change)
        await self._link.execute("savepoint ff_submit")
        try:
            # The queues were committed beside this transaction. Its snapshot may not show them, and to add them once
            # more would be a conflict.
            now, [accepted], _ = (await commit(self._link, batch, self._clock(), ensure_queues=False))[0]
        except Exception as error:
            state = getattr(error, "sqlstate", None)
            await self._link.execute("rollback to savepoint ff_submit")
            if state == UNIQUE_VIOLATION:
                await self._refuse_old_snapshot(error)
                return None  # somebody else has just committed such a row
            if state == UNDEFINED_TABLE:
                raise InvalidInput("using: this connection leads to another database than the store") from error
            raise
        await self._link.execute("release savepoint ff_submit")
        return now if accepted else None

    async def _batch(self, change: Change) -> CommitPlan:
        lines = queues_written([change]) | {*change.queues}
        while True:
            await self._lines.register(lines)
            try:
                batch = CommitPlan([change], self._habits)
            except UnknownQueue:  # a connection broke since: every queue is to be checked again
                continue
            batch.queues = self._lines.drain_written(lines)
            return batch

    async def _refuse_old_snapshot(self, collision: Exception) -> None:
        """Raise when the row that was met will never be seen here, so that no other look would tell of it."""
        [isolation] = await self._link.fetchrow("show transaction_isolation")
        if isolation not in ("read committed", "read uncommitted"):
            detail = f"using: somebody has committed the same since this {isolation} transaction began; begin it anew"
            raise RetryExhausted(detail) from collision

    async def notify(self, topics: frozenset[str]) -> None:
        """Hints that are sent when the transaction commits, and not if it does not."""
        for payload in encode_payloads(topics):
            await self._link.execute(f"select pg_notify('{CHANNEL}', $1)", payload)


async def adapt_connection(connection: Any) -> CallerConnection:
    """The verbs of a connection that is in a transaction; `InvalidInput` for anything else."""
    if isinstance(connection, LoopBoundValue):
        return _OtherLoopConnection(await connection.run(adapt_connection(connection.value)), connection)
    driver = await _driver(connection)
    home = type(driver).__module__.partition(".")[0]
    if home == "asyncpg" and hasattr(driver, "is_in_transaction"):
        link: CallerConnection = driver
    elif home == "psycopg" and hasattr(driver, "cursor"):
        link = _PsycopgConnection(driver)
    else:
        raise InvalidInput(f"using: {type(connection).__name__} is not {ACCEPTED_CONNECTIONS}")
    if not link.is_in_transaction():
        raise InvalidInput("using: the connection is not in a transaction; begin one, and commit it afterwards")
    return link


async def _driver(connection: Any) -> Any:
    """The driver's own connection; SQLAlchemy's begins its transaction with the first statement."""
    if not type(connection).__module__.startswith("sqlalchemy."):
        return connection
    of_session = getattr(type(connection), "connection", None)
    if asyncio.iscoroutinefunction(of_session):
        connection = await connection.connection()
    elif callable(of_session):
        connection = await asyncio.to_thread(connection.connection)
    if hasattr(connection, "get_raw_connection"):
        await connection.exec_driver_sql("select 1")
        return (await connection.get_raw_connection()).driver_connection
    if hasattr(connection, "exec_driver_sql"):
        await asyncio.to_thread(connection.exec_driver_sql, "select 1")
        return connection.connection.driver_connection
    raise InvalidInput(f"using: {type(connection).__name__} is not {ACCEPTED_CONNECTIONS}")


class _OtherLoopConnection:
    """A connection of another event loop, on which its statements run."""

    def __init__(self, link: CallerConnection, outside: LoopBoundValue) -> None:
        self._link = link
        self._outside = outside

    async def fetch(self, words: str, *values: Any) -> list[Any]:
        return await self._outside.run(self._link.fetch(words, *values))

    async def fetchrow(self, words: str, *values: Any) -> Any:
        return await self._outside.run(self._link.fetchrow(words, *values))

    async def execute(self, words: str, *values: Any) -> Any:
        return await self._outside.run(self._link.execute(words, *values))

    def is_in_transaction(self) -> bool:
        return self._link.is_in_transaction()


class _Record(tuple[Any, ...]):
    """A row that knows its columns by name, too."""

    names: dict[str, int]

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(self.names[place] if isinstance(place, str) else place)


class _PsycopgConnection:
    """psycopg 3 with the verbs of asyncpg."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        psycopg = import_module("psycopg")
        self._is_async = isinstance(connection, psycopg.AsyncConnection)
        self._cursor = psycopg.AsyncRawCursor if self._is_async else psycopg.RawCursor
        self._idle = psycopg.pq.TransactionStatus.IDLE

    def is_in_transaction(self) -> bool:
        connection = self._connection
        return not connection.autocommit or connection.info.transaction_status != self._idle

    async def fetch(self, words: str, *values: Any) -> list[Any]:
        if not self._is_async:
            return await asyncio.to_thread(self._fetch, words, values)
        async with self._cursor(self._connection, row_factory=_records) as cursor:
            await cursor.execute(words, _arrays(values), binary=True)  # as text, records would have no types
            return list(await cursor.fetchall()) if cursor.description else []

    async def fetchrow(self, words: str, *values: Any) -> Any:
        found = await self.fetch(words, *values)
        return found[0] if found else None

    async def execute(self, words: str, *values: Any) -> Any:
        return await self.fetch(words, *values)

    def _fetch(self, words: str, values: Sequence[Any]) -> list[Any]:
        with self._cursor(self._connection, row_factory=_records) as cursor:
            cursor.execute(words, _arrays(values), binary=True)
            return list(cursor.fetchall()) if cursor.description else []


def _arrays(values: Sequence[Any]) -> list[Any]:
    """asyncpg takes any sequence for an array; psycopg wants lists."""
    return [list(value) if isinstance(value, tuple) else value for value in values]


def _records(cursor: Any) -> Callable[[Sequence[Any]], _Record]:
    names = {column.name: place for place, column in enumerate(cursor.description or ())}
    return type("Record", (_Record,), {"names": names})
