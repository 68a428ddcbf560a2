"""Dead rows for tests of reads, and a meter of the index entries or pages that are read, as the server counts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec

from flowfabric.model.execution import QueueKey
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.pool import in_transaction
from flowfabric.stores.postgres.sql import column_type

ENTRIES = (
    "select coalesce(sum(pg_stat_get_xact_tuples_returned(i.indexrelid)), 0)::bigint"
    " from pg_index i join pg_class c on c.oid = i.indexrelid where c.relname like 'ff\\_%'"
)
PAGES = (
    "select coalesce(sum(pg_stat_get_xact_blocks_fetched(c.oid)), 0)::bigint"
    " from pg_class c where c.relname like 'ff\\_%'"
)
_ZERO = {"bigint": "0", "smallint": "0", "text": "''", "bytea": "''::bytea", "boolean": "false"}
_ZERO["double precision"] = "0"


class Meter:
    """Counts the index entries, or the pages, that the statements of a store read while it measures."""

    def __init__(self, store: PostgresStore, count: str = ENTRIES) -> None:
        self.total = 0
        self._count = count
        self._measures = False
        links: Any = store._pool
        links.read, links.write = self._metered(links.read), self._metered(links.write)

    def _metered(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def metered(work: Callable[[Any], Awaitable[Any]], **more: Any) -> Any:
            if not self._measures:
                return await send(work, **more)

            async def counted(connection: Any) -> Any:
                before = await connection.fetchval(self._count)
                answer = await work(connection)
                self.total += await connection.fetchval(self._count) - before
                return answer

            return await send(lambda connection: in_transaction(connection, counted), **more)

        return metered

    async def cost(self, work: Awaitable[Any]) -> int:
        """Return how many entries or pages this work reads."""
        self.total, self._measures = 0, True
        await work
        self._measures = False
        return self.total


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection: Any = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def vacuum(dsn: str) -> None:
    """Remove the dead entries of every table, as far as no snapshot can see them."""
    async with connected(dsn) as connection:
        await connection.execute("vacuum (index_cleanup on, truncate off)")


async def insert_rows(dsn: str, row: type[msgspec.Struct], prefix: str, count: int, **values: str) -> None:
    """Insert rows with these SQL expressions as values, in which `n` is the number of the row."""
    table = TABLE[row]
    given = {}
    for column in table.columns:
        if column.name in values:
            given[column.name] = values[column.name]
        elif column.name in table.key and column.kind is str:
            given[column.name] = f"'{prefix}' || lpad(n::text, 8, '0')"
        elif not column.optional:
            given[column.name] = _ZERO[column_type(column)]
    names = ", ".join(f'"{name}"' for name in given)
    async with connected(dsn) as connection:
        await connection.execute(
            f"insert into {table.name} ({names}) select {', '.join(given.values())} from generate_series(1, {count}) n"
        )


async def leave_dead(dsn: str, row: type[msgspec.Struct], count: int, **values: str) -> None:
    """Insert rows and delete them: their index entries stay while a snapshot is held."""
    await insert_rows(dsn, row, "dead-", count, **values)
    texts = (column.name for column in TABLE[row].columns if column.name in TABLE[row].key and column.kind is str)
    key = next(name for name in texts if name not in values)
    async with connected(dsn) as connection:
        await connection.execute(f"delete from {TABLE[row].name} where \"{key}\" like 'dead-%'")


async def update_often(dsn: str, row: type[msgspec.Struct], column: str, count: int) -> None:
    """Update this column of all rows so many times, each time in a transaction of its own."""
    async with connected(dsn) as connection:
        await connection.execute(
            f"do $$ begin for n in 1..{count} loop"
            f" update {TABLE[row].name} set {column} = {column} + 1; commit; end loop; end $$"
        )


def keyed(*names: str) -> list[QueueKey]:
    """Return ready queues of one lane, one for each fairness key."""
    return [QueueKey("mail", fairness_key=name) for name in names]
