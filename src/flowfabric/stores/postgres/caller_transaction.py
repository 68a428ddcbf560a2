"""Caller transactions: reads and writes on a caller's connection, committed or rolled back with its transaction.

The connection is one of asyncpg, of psycopg 3 (sync or async), or a connection or session of SQLAlchemy (sync or async)
over one of them. The statements of the store need only a few methods of a driver. A savepoint keeps a concurrent insert
of the same row from aborting the whole transaction.
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
from flowfabric.stores.postgres.errors import VALUE_ERRORS
from flowfabric.stores.postgres.notifier import CHANNEL, encode_payloads
from flowfabric.stores.postgres.queue_ids import PostgresQueueIds, UnknownQueue
from flowfabric.stores.queries import Loaded, Read
from flowfabric.stores.verdicts import Unstorable, Verdict

UNIQUE_VIOLATION, UNDEFINED_TABLE = "23505", "42P01"
ACCEPTED_CONNECTIONS = "a connection of asyncpg or psycopg 3, or a connection or session of SQLAlchemy over one of them"


class CallerConnection(Protocol):
    """The methods that the store needs of a connection, named as in asyncpg."""

    async def fetch(self, statement: str, *values: Any) -> list[Any]: ...
    async def fetchrow(self, statement: str, *values: Any) -> Any: ...
    async def execute(self, statement: str, *values: Any) -> Any: ...
    def is_in_transaction(self) -> bool: ...


class CallerTransaction:
    """The store inside a caller's transaction."""

    def __init__(self, adapted: CallerConnection, queue_ids: PostgresQueueIds, clock: Callable[[], int | None]) -> None:
        self._connection = adapted
        self._queue_ids = queue_ids
        self._shapes = ParameterShapes(queue_ids.checked_id)
        self._clock = clock

    async def load(self, requested: Sequence[Read]) -> Loaded:
        """Load the requested rows, including uncommitted rows of this transaction."""
        result = await reads.fetch_rows(self._connection, requested, self._clock())
        return await self._queue_ids.decode(lambda decode_queue: reads.decode_rows(result, requested, decode_queue))

    async def commit(self, change: Change) -> Verdict:
        """Write a change as part of the transaction, or nothing of it."""
        try:
            plan = await self._plan(change)
        except Unstorable as fault:
            return fault
        await self._connection.execute("savepoint ff_submit")
        try:
            # The queues were committed outside this transaction. Its snapshot may not contain them, and inserting them
            # again would be a conflict.
            now, [accepted], _ = (await commit(self._connection, plan, self._clock(), ensure_queues=False))[0]
        except Exception as error:
            state = getattr(error, "sqlstate", None)
            await self._connection.execute("rollback to savepoint ff_submit")
            if state == UNIQUE_VIOLATION:
                await self._refuse_old_snapshot(error)
                return None  # a concurrent transaction has just committed such a row
            if (state or "").startswith(VALUE_ERRORS) or isinstance(error, OverflowError | UnicodeError):
                return Unstorable(str(error))
            if state == UNDEFINED_TABLE:
                raise InvalidInput("using: this connection is to another database than the store") from error
            raise
        await self._connection.execute("release savepoint ff_submit")
        return now if accepted else None

    async def _plan(self, change: Change) -> CommitPlan:
        queue_ids = queues_written([change]) | {*change.queues}
        while True:
            await self._queue_ids.register(queue_ids)
            try:
                plan = CommitPlan([change], self._shapes)
            except UnknownQueue:  # after a lost connection every queue has to be registered again
                continue
            plan.queues = self._queue_ids.drain_written(queue_ids)
            return plan

    async def _refuse_old_snapshot(self, collision: Exception) -> None:
        """Raise if this transaction's snapshot can never see the conflicting row, so that a reload would not help."""
        [isolation] = await self._connection.fetchrow("show transaction_isolation")
        if isolation not in ("read committed", "read uncommitted"):
            detail = f"using: another one committed the same since this {isolation} transaction began; begin a new one"
            raise RetryExhausted(detail) from collision

    async def notify(self, topics: frozenset[str]) -> None:
        """Notify about topics when the transaction commits."""
        for payload in encode_payloads(topics):
            await self._connection.execute(f"select pg_notify('{CHANNEL}', $1)", payload)


async def adapt_connection(connection: Any) -> CallerConnection:
    """Adapt a connection that is in a transaction; raise `InvalidInput` for anything else."""
    if isinstance(connection, LoopBoundValue):
        return _OtherLoopConnection(await connection.run(adapt_connection(connection.value)), connection)
    driver = await _driver(connection)
    home = type(driver).__module__.partition(".")[0]
    if home == "asyncpg" and hasattr(driver, "is_in_transaction"):
        adapted: CallerConnection = driver
    elif home == "psycopg" and hasattr(driver, "cursor"):
        adapted = _PsycopgConnection(driver)
    else:
        raise InvalidInput(f"using: {type(connection).__name__} is not {ACCEPTED_CONNECTIONS}")
    if not adapted.is_in_transaction():
        raise InvalidInput("using: the connection is not in a transaction; begin one, and commit it afterwards")
    return adapted


async def _driver(connection: Any) -> Any:
    """Return the driver's connection; SQLAlchemy begins its transaction with the first statement."""
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
    """A connection of another event loop; its statements run on that loop."""

    def __init__(self, adapted: CallerConnection, other_loop: LoopBoundValue) -> None:
        self._connection = adapted
        self._other_loop = other_loop

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        return await self._other_loop.run(self._connection.fetch(statement, *values))

    async def fetchrow(self, statement: str, *values: Any) -> Any:
        return await self._other_loop.run(self._connection.fetchrow(statement, *values))

    async def execute(self, statement: str, *values: Any) -> Any:
        return await self._other_loop.run(self._connection.execute(statement, *values))

    def is_in_transaction(self) -> bool:
        return self._connection.is_in_transaction()


class _Record(tuple[Any, ...]):
    """A row whose columns can also be read by name."""

    names: dict[str, int]

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self.names[index] if isinstance(index, str) else index)


class _PsycopgConnection:
    """A psycopg 3 connection with the methods of asyncpg."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        psycopg = import_module("psycopg")
        self._is_async = isinstance(connection, psycopg.AsyncConnection)
        self._cursor = psycopg.AsyncRawCursor if self._is_async else psycopg.RawCursor
        self._idle = psycopg.pq.TransactionStatus.IDLE

    def is_in_transaction(self) -> bool:
        connection = self._connection
        return not connection.autocommit or connection.info.transaction_status != self._idle

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        if not self._is_async:
            return await asyncio.to_thread(self._fetch, statement, values)
        async with self._cursor(self._connection, row_factory=_records) as cursor:
            await cursor.execute(statement, _arrays(values), binary=True)  # in text format, records have no types
            return list(await cursor.fetchall()) if cursor.description else []

    async def fetchrow(self, statement: str, *values: Any) -> Any:
        rows = await self.fetch(statement, *values)
        return rows[0] if rows else None

    async def execute(self, statement: str, *values: Any) -> Any:
        return await self.fetch(statement, *values)

    def _fetch(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._cursor(self._connection, row_factory=_records) as cursor:
            cursor.execute(statement, _arrays(values), binary=True)
            return list(cursor.fetchall()) if cursor.description else []


def _arrays(values: Sequence[Any]) -> list[Any]:
    """Convert tuples to lists: asyncpg accepts any sequence as an array, psycopg only lists."""
    return [list(value) if isinstance(value, tuple) else value for value in values]


def _records(cursor: Any) -> Callable[[Sequence[Any]], _Record]:
    names = {column.name: index for index, column in enumerate(cursor.description or ())}
    return type("Record", (_Record,), {"names": names})
