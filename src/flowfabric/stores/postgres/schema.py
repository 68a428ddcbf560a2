"""The schema and how it grows: numbered files, forward only, each applied once and under one lock."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from flowfabric import errors
from flowfabric.stores.base import Schema

# Whoever migrates holds this lock until its transaction ends, so that two processes that start together do not.
_LOCK = 0x666C6F7766616272

MIGRATION_S = 3600.0  # which the steps may take together; a dead connection is noticed by the kernel
OLDEST = 13  # of the servers whose words our statements use
ENCODINGS = ("UTF8", "SQL_ASCII")  # that keep every text; in others a run could not tell how it failed

_VERSIONS = """
create table if not exists ff_schema_version (
    version    integer primary key,
    name       text not null,
    applied_at timestamptz not null default now()
)
"""


class Migration(NamedTuple):
    """One step of the schema."""

    version: int
    name: str
    text: str


@cache
def migrations() -> tuple[Migration, ...]:
    """All steps, in order."""
    found = []
    for file in resources.files(__package__).joinpath("migrations").iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        if file.name.endswith(".sql"):
            found.append(Migration(int(number), name, file.read_text(encoding="utf-8")))
    return tuple(sorted(found))


async def bring_up(connection: Any, *, migrate: bool) -> Schema:
    """Make the schema the one this code knows, or refuse: a newer one always, an older one unless `migrate`.

    A server that is too old, or a database that cannot keep every text, is refused as well.

    The caller wraps this in a transaction, so that a schema is changed whole or not at all.
    """
    _check(connection)
    known = migrations()[-1].version
    found = first = await _version(connection)
    if found < known and migrate:
        await connection.execute("set local statement_timeout = 0")
        await connection.execute(f"select pg_advisory_xact_lock({_LOCK})")
        await connection.execute(_VERSIONS)
        found = await _version(connection)
        for step in migrations():
            if step.version > found:
                await connection.execute(step.text)
                await connection.execute(
                    "insert into ff_schema_version (version, name) values ($1, $2)", step.version, step.name
                )
        found = max(found, known)
    if found > known:
        raise errors.SchemaTooNew(found=found, known=known)
    if found < known:
        detail = "the database has no FlowFabric schema" if found == 0 else f"the schema is at version {found}"
        raise errors.Unavailable("open", f"{detail}, this release needs version {known}: migrate first")
    return Schema(first, known)


def _check(connection: Any) -> None:
    """Refuse what the store cannot work on, by what a server tells of itself at the start."""
    major, encoding = connection.get_server_version().major, connection.get_settings().server_encoding
    if major < OLDEST:
        raise errors.InvalidInput(f"url: the server is PostgreSQL {major}; the store needs {OLDEST} or newer")
    if encoding not in ENCODINGS:
        raise errors.InvalidInput(
            f"url: the database keeps texts in {encoding}; the store needs one with encoding UTF8"
        )


async def _version(connection: Any) -> int:
    if await connection.fetchval("select to_regclass('ff_schema_version')") is None:
        return 0
    return await connection.fetchval("select coalesce(max(version), 0) from ff_schema_version") or 0
