"""The connection pool: a few connections that all calls share, opened on demand and closed when their state is unknown.

No call leaves state in a session, so a pooler may send each transaction to another server session. Only prepared
statements would stay there: another session may not have them, or have a different one by the same name. So they are
cached only if sessions are our own, which is proved by settings that took effect, or if the caller says so. Without
the cache each call is wrapped in a transaction: the driver parses and executes in two round trips, and only a
transaction keeps both in one session.

A call that ends with a connection error, a timeout or a cancelled task closes its connection, because the state of the
exchange is unknown. A server error that ended the statement regularly keeps the connection.

A silent connection is closed when a call on it times out. The outcome of that call's writes is unknown. The idle
connections are closed, too: they used the same network path and are probably dead as well.

After a failed connection attempt the next one waits, with a growing backoff, to spare a restarting server.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg

from flowfabric.errors import InvalidInput, StoreUnavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.postgres.errors import (
    BACKEND_FACTS,
    CONNECTION_ERRORS,
    CallProgress,
    TransactionConflict,
    translate_error,
)
from flowfabric.stores.postgres.migrator import SchemaWatch
from flowfabric.stores.verdicts import Unstorable

T = TypeVar("T")
_RANDOM = random.SystemRandom()  # does not disturb the application's seeded generator
Work = Callable[[Any], Awaitable[T]]

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
STATEMENT_CACHE_SIZE = 200  # statements per connection
MAX_SENDS = 8  # attempts of a statement that meets deadlocks

# Statements find their rows by key or by an index, and their plans are cached. A plan that was made while a table was
# almost empty must not scan the whole table later, so other access paths are disabled. If a pooler does not forward
# these settings, plans are cached for a short time only. Statements rely on read committed: after waiting for a lock
# they continue with the current row. If that is not forwarded, each transaction sets it.
SESSION_SETTINGS = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "default_transaction_isolation": "read committed",
}
# One message, so that it needs no transaction. It fails unless the session has our settings.
CHECK_SETTINGS_SQL = "select 1 / (current_setting('plan_cache_mode') = 'force_generic_plan')::int"
PLAN_LIFETIME_S = 30
# Shorter limits that are configured for the role or the database are kept.
LOWER_LIMITS_SQL = """
select set_config(name, least, false) from (values {limits}) as wanted (name, least) join pg_settings using (name)
 where setting::bigint = 0 or setting::bigint > least::bigint
"""


class ConnectionPool:
    """The connections of one store."""

    def __init__(self, dsn: str, *, size: int, statement_cache: bool | None, deadlines: Deadlines) -> None:
        """With `statement_cache=None` the pool detects whether statements can be cached."""
        self.dsn = dsn
        self.deadlines = deadlines
        self.schema_watch: SchemaWatch | None = None  # set once the store is open
        self.caches_statements = statement_cache is not False
        self._free = size
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._backoff_s = 0.0
        self._not_before = 0.0
        self._is_undetected = statement_cache is None
        self._detects = statement_cache is None
        self._tuned = self.caches_statements
        self._closed = False
        self._break_callbacks: list[Callable[[], None]] = []

    @property
    def has_own_sessions(self) -> bool:
        """True if the pool has detected that there is no pooler; False if the caller has set `statement_cache`."""
        return self._detects and not self._is_undetected and self.caches_statements

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        """Call back when a connection is lost: the next one may lead to another server."""
        self._break_callbacks.append(callback)

    def report_connection_lost(self) -> None:
        """Report a lost connection to the callbacks."""
        for callback in self._break_callbacks:
            callback()

    async def read(self, work: Work[T]) -> T:
        """Run idempotent work; after a lost connection it is repeated once on another one."""
        return await self._run_with_retries(work, retry_lost=True)

    async def write(self, work: Work[T], *, own_transaction: bool = False, command_s: float | None = None) -> T:
        """Run work that must not be repeated after a lost connection.

        `own_transaction` says that the work begins and ends its transaction; `command_s` replaces the usual time limit.
        """
        return await self._run_with_retries(work, own_transaction=own_transaction, command_s=command_s)

    async def _run_with_retries(
        self, work: Work[T], *, retry_lost: bool = False, own_transaction: bool = False, command_s: float | None = None
    ) -> T:
        """Run work, and retry it after deadlocks and serialization failures."""
        for sent in range(1, MAX_SENDS):
            try:
                return await self._run(
                    work, retry_lost=retry_lost, own_transaction=own_transaction, command_s=command_s
                )
            except TransactionConflict:
                await asyncio.sleep(_RANDOM.uniform(0, 0.002 * 2**sent))
        return await self._run(work, retry_lost=retry_lost, own_transaction=own_transaction, command_s=command_s)

    def command_timeout(self, command_s: float | None = None) -> asyncio.Timeout:
        """Return a time limit for a call; after it the connection is considered dead."""
        return asyncio.timeout((self.deadlines.command_s if command_s is None else command_s) or None)

    async def _run(
        self, work: Work[T], *, retry_lost: bool, own_transaction: bool, command_s: float | None = None
    ) -> T:
        """Run work on a connection; driver errors are translated to errors of the port."""
        if self.schema_watch is not None:
            self.schema_watch.raise_if_too_new()
        connection = await self._acquire()
        progress = CallProgress()
        try:
            async with self.command_timeout(command_s):
                if self.schema_watch is not None and self.schema_watch.is_due():
                    await self._check_schema(connection)
                if self.caches_statements or own_transaction:
                    progress.sent = True
                    return await work(connection)
                return await in_transaction(connection, work, progress)
        except Exception as error:
            if self.schema_watch is not None and _is_of_schema(error):
                with suppress(*CONNECTION_ERRORS):
                    async with self.command_timeout():
                        await self._check_schema(connection)
            raised = translate_error(error, progress, closed=connection.is_closed())
            if isinstance(raised, Unstorable):
                await self._end_exchange(connection)
            if progress.connection_lost or progress.wrong_server:
                connection.terminate()
                self.report_connection_lost()
            if progress.connection_lost:
                self._close_idle()
            if not (progress.connection_lost and retry_lost):
                if raised is error:
                    raise
                raise raised from error
        except BaseException:
            connection.terminate()  # cancelled: the statement may still be in flight
            raise
        finally:
            self._release(connection)
        return await self._run(work, retry_lost=False, own_transaction=own_transaction, command_s=command_s)

    async def _check_schema(self, connection: Any) -> None:
        assert self.schema_watch is not None
        await (
            self.schema_watch.check(connection)
            if self.caches_statements
            else in_transaction(connection, self.schema_watch.check)
        )

    def _close_idle(self) -> None:
        """Close the connections that were idle when another one was lost."""
        for connection in self._idle:
            connection.terminate()

    async def _end_exchange(self, connection: Any) -> None:
        """End the protocol exchange after the driver refused a value; the server would keep its locks otherwise."""
        try:
            async with self.command_timeout():
                await connection.execute("select 1")
        except BaseException:
            connection.terminate()
            raise

    async def connect(self) -> Any:
        """Open a connection that the caller owns, after the backoff of earlier failures."""
        loop = asyncio.get_running_loop()
        if (wait := self._not_before - loop.time()) > 0:
            await asyncio.sleep(wait)
        try:
            async with asyncio.timeout(self.deadlines.connect_s or None):
                connection = await self._connect()
        except (*CONNECTION_ERRORS, ValueError, OverflowError) as error:
            if isinstance(error, ValueError | OverflowError) and not isinstance(error, OSError):
                raise InvalidInput(f"url: {error}") from error  # the driver cannot parse the URL
            self._backoff_s = min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, self._backoff_s * 2))
            self._not_before = loop.time() + self._backoff_s * _RANDOM.uniform(0.5, 1)
            raise translate_error(error, CallProgress(connecting=True), closed=True) from error
        self._backoff_s = 0.0
        if self.schema_watch is not None:
            self.schema_watch.check_soon()
        return connection

    async def _connect(self) -> Any:
        settings = {"application_name": "flowfabric"}
        options: dict[str, Any] = {"timeout": None, "max_cacheable_statement_size": 0}
        if self._tuned:
            tuned = options | {"statement_cache_size": STATEMENT_CACHE_SIZE, "max_cached_statement_lifetime": 0}
            try:
                all_settings = settings | SESSION_SETTINGS | self.deadlines.server_settings()
                connection = self._with_keep_alive(
                    await asyncpg.connect(self.dsn, server_settings=all_settings, **tuned)
                )
            except (asyncpg.ProtocolViolationError, asyncpg.FeatureNotSupportedError):
                self._mark_pooled()
            else:
                if await self._has_own_session(connection):
                    return await self._with_limits(connection)
        options |= {
            "statement_cache_size": STATEMENT_CACHE_SIZE if self.caches_statements else 0,
            "max_cached_statement_lifetime": PLAN_LIFETIME_S,
        }
        return self._with_keep_alive(await asyncpg.connect(self.dsn, server_settings=settings, **options))

    async def _with_limits(self, connection: Any) -> Any:
        """Set the time limits of the server."""
        if limits := self.deadlines.server_limits():
            try:
                await connection.execute(
                    LOWER_LIMITS_SQL.format(limits=", ".join(f"('{k}', '{v}')" for k, v in limits.items()))
                )
            except BaseException:
                connection.terminate()
                raise
        return connection

    def _with_keep_alive(self, connection: Any) -> Any:
        """Enable TCP keep-alive, so that the kernel detects a dead peer; the driver does not set it."""
        wrapped = connection._transport.get_extra_info("socket")
        if wrapped is not None and wrapped.family != getattr(socket, "AF_UNIX", None):
            with socket.socket(fileno=os.dup(wrapped.fileno())) as same:  # uvloop's object has no setsockopt
                for option in self.deadlines.socket_options():
                    same.setsockopt(*option)
        return connection

    async def _has_own_session(self, connection: Any) -> bool:
        """True if there is no pooler; checked once, before the first statement is prepared."""
        if self._is_undetected:
            try:
                await connection.execute(CHECK_SETTINGS_SQL)
                self._is_undetected = False
            except asyncpg.DivisionByZeroError:
                self._mark_pooled()
            except BaseException:
                connection.terminate()
                raise
        if not self._tuned:  # another connection may have detected a pooler meanwhile
            connection.terminate()
        return self._tuned

    def _mark_pooled(self) -> None:
        """Record that settings did not take effect: there is a pooler, which may switch sessions."""
        self._tuned = False  # the settings are an optimization only
        if self._is_undetected:
            self._is_undetected = self.caches_statements = False

    async def _acquire(self) -> Any:
        while True:
            if self._closed:
                raise StoreUnavailable("the store is closed", **BACKEND_FACTS, source="other", in_doubt=False)
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed():
                    self._busy.add(connection)
                    return connection
                self._free += 1
                self.report_connection_lost()
            if self._free > 0:
                self._free -= 1
                try:
                    connection = await self.connect()
                except BaseException:
                    self._free += 1
                    self._wake_waiter()
                    raise
                self._busy.add(connection)
                return connection
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._wake_waiter()
                raise

    def _release(self, connection: Any) -> None:
        self._busy.discard(connection)
        if connection.is_closed() or self._closed or connection.is_in_transaction():
            connection.terminate()
            self._free += 1
        else:
            self._idle.append(connection)
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def close(self) -> None:
        """Close all connections; calls that are in flight end with `StoreUnavailable`."""
        self._closed = True
        while self._waiting:
            self._wake_waiter()
        for connection in self._busy:
            connection.terminate()
        while self._idle:
            connection = self._idle.pop()
            with suppress(*CONNECTION_ERRORS):
                await connection.close(timeout=1)
            connection.terminate()


def _is_of_schema(error: Exception) -> bool:
    """True if the error may come from a schema that the statement was not written for (class 42, stale plans)."""
    code: str = getattr(error, "sqlstate", None) or ""
    return code.startswith("42") or code == "0A000"


async def in_transaction(connection: Any, work: Work[T], progress: CallProgress | None = None) -> T:
    """Run work in one read committed transaction."""
    if connection.is_in_transaction():
        return await work(connection)
    await connection.execute("begin isolation level read committed")
    try:
        result = await work(connection)
    except Exception:
        if not connection.is_closed():
            await connection.execute("rollback")
        raise
    if progress is not None:
        progress.sent = True
    await connection.execute("commit")
    return result
