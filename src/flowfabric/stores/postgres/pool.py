"""Connections: a few that are shared by all calls, made when needed and thrown away when in doubt.

No call leaves anything behind in a session, so a pooler may hand each transaction to another server. Only prepared
statements would stay there: the next one to meet that server may not know them, or know another one by that name. So
they are cached where sessions are our own, as settings show that took effect, or where the caller says so. Without them
each call is wrapped in a transaction of its own: the driver parses and runs in two trips, and only a transaction keeps
both on one server.

A call that ends badly, by an error of the connection, a time limit or a cancelled task, costs its connection: nobody
can tell what is still on its way there. Errors of the server that ended the statement orderly leave it as it was.

A connection that goes silent without an end is given up when a call on it has taken too long. What that call was to
write is in doubt. The idle connections are closed with it: they went the same way and are likely to be as dead.

After a failed attempt to connect the next one waits a little, longer each time, so that a server which is starting
again is not flooded.
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
from flowfabric.stores.port import Unstorable
from flowfabric.stores.postgres.errors import (
    BACKEND_FACTS,
    CONNECTION_ERRORS,
    CallProgress,
    TransactionConflict,
    translate_error,
)
from flowfabric.stores.postgres.migrator import SchemaWatch

T = TypeVar("T")
_RANDOM = random.SystemRandom()  # the application's own generator is left alone
Work = Callable[[Any], Awaitable[T]]

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
STATEMENT_CACHE_SIZE = 200  # statements of a connection
MAX_SENDS = 8  # of a statement that meets deadlocks

# Statements know their rows by key or walk an index, and their plans are kept. A plan that was made while a table was
# almost empty shall not read all of it later on, so other ways are ruled out. Where a pooler does not pass this on,
# plans are not kept for long. A statement that waited for a lock goes on with the row as it is then, whatever isolation
# a role or a database has by default; where that is not passed on, each transaction says it.
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
# One message, so that it needs no transaction: it fails unless this session has our settings.
CHECK_SETTINGS_SQL = "select 1 / (current_setting('plan_cache_mode') = 'force_generic_plan')::int"
PLAN_LIFETIME_S = 30
# A role or a database may have shorter limits of its own, which are somebody's choice.
LOWER_LIMITS_SQL = """
select set_config(name, least, false) from (values {limits}) as wanted (name, least) join pg_settings using (name)
 where setting::bigint = 0 or setting::bigint > least::bigint
"""


class ConnectionPool:
    """The connections of one store."""

    def __init__(self, dsn: str, *, size: int, statement_cache: bool | None, deadlines: Deadlines) -> None:
        """Whether statements are cached is found out, unless the caller says it."""
        self.dsn = dsn
        self.deadlines = deadlines
        self.schema_watch: SchemaWatch | None = None  # of the schema, once it is one that this release runs on
        self.caches_statements = statement_cache is not False
        self._free = size
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pause = 0.0
        self._not_before = 0.0
        self._unsure = statement_cache is None
        self._asks = statement_cache is None
        self._tuned = self.caches_statements
        self._closed = False
        self._break_callbacks: list[Callable[[], None]] = []

    @property
    def has_own_sessions(self) -> bool:
        """Whether no pooler stands between, as far as was found out; never where the caller has said what to do."""
        return self._asks and not self._unsure and self.caches_statements

    def on_connection_lost(self, callback: Callable[[], None]) -> None:
        """Call back when a connection turns out to be broken: the next one may lead to another server."""
        self._break_callbacks.append(callback)

    def report_connection_lost(self) -> None:
        """Report a broken connection."""
        for callback in self._break_callbacks:
            callback()

    async def read(self, work: Work[T]) -> T:
        """Do something that may be done twice: a connection that breaks meanwhile is replaced once."""
        return await self._insist(work, twice=True)

    async def write(self, work: Work[T], *, own_transaction: bool = False, command_s: float | None = None) -> T:
        """Do something that is not to be done twice; `alone` says that it brings its own transaction, `command_s` that
        it may take longer than other calls."""
        return await self._insist(work, alone=own_transaction, command_s=command_s)

    async def _insist(
        self, work: Work[T], *, twice: bool = False, alone: bool = False, command_s: float | None = None
    ) -> T:
        """Do it, again and again while the server undoes it for a deadlock or a conflict of snapshots."""
        for sent in range(1, MAX_SENDS):
            try:
                return await self._run(work, twice=twice, alone=alone, command_s=command_s)
            except TransactionConflict:
                await asyncio.sleep(_RANDOM.uniform(0, 0.002 * 2**sent))
        return await self._run(work, twice=twice, alone=alone, command_s=command_s)

    def command_timeout(self, command_s: float | None = None) -> asyncio.Timeout:
        """A limit for what is asked of a connection, after which it counts as dead."""
        return asyncio.timeout((self.deadlines.command_s if command_s is None else command_s) or None)

    async def _run(self, work: Work[T], *, twice: bool, alone: bool, command_s: float | None = None) -> T:
        """Do it on a connection; errors of the driver come out as those of the port."""
        if self.schema_watch is not None:
            self.schema_watch.raise_if_too_new()
        connection = await self._acquire()
        fault = CallProgress()
        try:
            async with self.command_timeout(command_s):
                if self.schema_watch is not None and self.schema_watch.is_due():
                    await self._look_at_schema(connection)
                if self.caches_statements or alone:
                    fault.sent = True
                    return await work(connection)
                return await in_transaction(connection, work, fault)
        except Exception as error:
            if self.schema_watch is not None and _is_of_schema(error):
                with suppress(*CONNECTION_ERRORS):
                    async with self.command_timeout():
                        await self._look_at_schema(connection)
            raised = translate_error(error, fault, closed=connection.is_closed())
            if isinstance(raised, Unstorable):
                await self._end_exchange(connection)
            if fault.connection_lost or fault.wrong_server:
                connection.terminate()
                self.report_connection_lost()
            if fault.connection_lost:
                self._close_idle()
            if not (fault.connection_lost and twice):
                if raised is error:
                    raise
                raise raised from error
        except BaseException:
            connection.terminate()  # cancelled: what was sent is still under way
            raise
        finally:
            self._release(connection)
        return await self._run(work, twice=False, alone=alone, command_s=command_s)

    async def _look_at_schema(self, connection: Any) -> None:
        assert self.schema_watch is not None
        await (
            self.schema_watch.check(connection)
            if self.caches_statements
            else in_transaction(connection, self.schema_watch.check)
        )

    def _close_idle(self) -> None:
        """Use none of the connections again that were idle when another one was lost."""
        for connection in self._idle:
            connection.terminate()

    async def _end_exchange(self, connection: Any) -> None:
        """A value that the driver refuses leaves the server waiting, locks in hand, for the rest of the exchange."""
        try:
            async with self.command_timeout():
                await connection.execute("select 1")
        except BaseException:
            connection.terminate()
            raise

    async def connect(self) -> Any:
        """A new connection, after the pause that earlier failures ask for; the caller owns it."""
        loop = asyncio.get_running_loop()
        if (wait := self._not_before - loop.time()) > 0:
            await asyncio.sleep(wait)
        try:
            async with asyncio.timeout(self.deadlines.connect_s or None):
                connection = await self._connect()
        except (*CONNECTION_ERRORS, ValueError, OverflowError) as error:
            if isinstance(error, ValueError | OverflowError) and not isinstance(error, OSError):
                raise InvalidInput(f"url: {error}") from error  # the driver cannot make sense of it
            self._pause = min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, self._pause * 2))
            self._not_before = loop.time() + self._pause * _RANDOM.uniform(0.5, 1)
            raise translate_error(error, CallProgress(connecting=True), closed=True) from error
        self._pause = 0.0
        if self.schema_watch is not None:
            self.schema_watch.check_soon()
        return connection

    async def _connect(self) -> Any:
        settings = {"application_name": "flowfabric"}
        options: dict[str, Any] = {"timeout": None, "max_cacheable_statement_size": 0}
        if self._tuned:
            tuned = options | {"statement_cache_size": STATEMENT_CACHE_SIZE, "max_cached_statement_lifetime": 0}
            try:
                told = settings | SESSION_SETTINGS | self.deadlines.server_settings()
                connection = self._kept_alive(await asyncpg.connect(self.dsn, server_settings=told, **tuned))
            except (asyncpg.ProtocolViolationError, asyncpg.FeatureNotSupportedError):
                self._pooled()
            else:
                if await self._is_own(connection):
                    return await self._limited(connection)
        options |= {
            "statement_cache_size": STATEMENT_CACHE_SIZE if self.caches_statements else 0,
            "max_cached_statement_lifetime": PLAN_LIFETIME_S,
        }
        return self._kept_alive(await asyncpg.connect(self.dsn, server_settings=settings, **options))

    async def _limited(self, connection: Any) -> Any:
        """Let the server give up on what takes too long, too."""
        if limits := self.deadlines.server_limits():
            try:
                await connection.execute(
                    LOWER_LIMITS_SQL.format(limits=", ".join(f"('{k}', '{v}')" for k, v in limits.items()))
                )
            except BaseException:
                connection.terminate()
                raise
        return connection

    def _kept_alive(self, connection: Any) -> Any:
        """Let the kernel notice when the other side has gone; the driver leaves its sockets as they are."""
        found = connection._transport.get_extra_info("socket")
        if found is not None and found.family != getattr(socket, "AF_UNIX", None):
            with socket.socket(fileno=os.dup(found.fileno())) as same:  # uvloop's own object has no options
                for option in self.deadlines.socket_options():
                    same.setsockopt(*option)
        return connection

    async def _is_own(self, connection: Any) -> bool:
        """Whether this session is ours alone; asked once, before the first statement is prepared."""
        if self._unsure:
            try:
                await connection.execute(CHECK_SETTINGS_SQL)
                self._unsure = False
            except asyncpg.DivisionByZeroError:
                self._pooled()
            except BaseException:
                connection.terminate()
                raise
        if not self._tuned:  # as another connection may have found out meanwhile
            connection.terminate()
        return self._tuned

    def _pooled(self) -> None:
        """Settings did not get through, so there is a pooler in between, and sessions may change under our hands."""
        self._tuned = False  # they are a help, not a need
        if self._unsure:
            self._unsure = self.caches_statements = False

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
                    self._let_one_in()
                    raise
                self._busy.add(connection)
                return connection
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._let_one_in()
                raise

    def _release(self, connection: Any) -> None:
        self._busy.discard(connection)
        if connection.is_closed() or self._closed or connection.is_in_transaction():
            connection.terminate()
            self._free += 1
        else:
            self._idle.append(connection)
        self._let_one_in()

    def _let_one_in(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def close(self) -> None:
        """Let go of all connections; calls that are still under way end with `StoreUnavailable`."""
        self._closed = True
        while self._waiting:
            self._let_one_in()
        for connection in self._busy:
            connection.terminate()
        while self._idle:
            connection = self._idle.pop()
            with suppress(*CONNECTION_ERRORS):
                await connection.close(timeout=1)
            connection.terminate()


def _is_of_schema(error: Exception) -> bool:
    """True if a statement failed as it would on a schema that it was not written for (class 42, and stale plans)."""
    code: str = getattr(error, "sqlstate", None) or ""
    return code.startswith("42") or code == "0A000"


async def in_transaction(connection: Any, work: Work[T], fault: CallProgress | None = None) -> T:
    """Do something in one transaction whose statements each see what is committed when they begin."""
    if connection.is_in_transaction():
        return await work(connection)
    await connection.execute("begin isolation level read committed")
    try:
        done = await work(connection)
    except Exception:
        if not connection.is_closed():
            await connection.execute("rollback")
        raise
    if fault is not None:
        fault.sent = True
    await connection.execute("commit")
    return done
