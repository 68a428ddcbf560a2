"""A database as an older release has left it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from flowfabric.stores.postgres import migrator
from flowfabric.stores.postgres.migrator import Migration
from tests.servers import postgres


@asynccontextmanager
async def old_database(name: str, steps: Iterable[Migration]) -> AsyncIterator[tuple[str, Any]]:
    """Create a database with the schema after these migrations; yield its DSN and a connection."""
    server, own = postgres(), f"{name}_{os.getpid()}"
    server.drop_database(own)
    dsn = server.create_database(own)
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(migrator._CREATE_VERSION_TABLE)
        for step in steps:
            await connection.execute(step.text)
            await connection.execute(
                "insert into ff_schema_version (version, name) values ($1, $2)", step.version, step.name
            )
        yield dsn, connection
    finally:
        await connection.close()
        server.drop_database(own)
