"""Schema migrations: numbered files, forward only, each applied once and under one lock.

A running process detects a newer schema when it connects, when a statement does not fit the schema, and by a check
every few seconds (`SchemaWatch`).
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from time import monotonic
from typing import Any, NamedTuple

from flowfabric import errors
from flowfabric.stores.compatibility import is_compatible, refuse_newer
from flowfabric.stores.port import SchemaVersion

# An advisory lock that is held until the transaction ends, so that only one of several starting processes migrates.
_LOCK = 0x666C6F7766616272

MIGRATION_TIMEOUT_S = 3600.0  # for all migrations together; the kernel detects a dead connection
MIN_SERVER_VERSION = 13
SUPPORTED_ENCODINGS = ("UTF8", "SQL_ASCII")  # these store every text; in others an error message could be unstorable

_CREATE_VERSION_TABLE = """
create table if not exists ff_schema_version (
    version    integer primary key,
    name       text not null,
    applied_at timestamptz not null default now(),
    compatible boolean not null default false
)
"""
_COMPATIBLE = "alter table ff_schema_version add column if not exists compatible boolean not null default false"
_EXISTS = "select to_regclass('ff_schema_version')"
# The newest version, and whether it is compatible; tables of earlier releases have no such column.
_NEWEST = """
select version, coalesce((to_jsonb(v) ->> 'compatible')::boolean, false)
  from ff_schema_version v order by version desc limit 1
"""
CHECK_INTERVAL_S = 5.0


class Migration(NamedTuple):
    """One migration of the schema."""

    version: int
    name: str
    text: str

    @property
    def compatible(self) -> bool:
        """True if the previous release may run on the schema after this migration."""
        return is_compatible(self.text)


@cache
def migrations() -> tuple[Migration, ...]:
    """Return all migrations, in order."""
    found = []
    for file in resources.files(__package__).joinpath("migrations").iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        if file.name.endswith(".sql"):
            found.append(Migration(int(number), name, file.read_text(encoding="utf-8")))
    return tuple(sorted(found))


async def ensure_schema(connection: Any, *, migrate: bool) -> SchemaVersion:
    """Check the schema, and apply missing migrations if `migrate` is set; otherwise an older schema is refused.

    A newer schema, a server that is too old, and a database that cannot store every text are refused. The caller wraps
    this in a transaction, so that all migrations are applied or none.
    """
    _check_server(connection)
    known = migrations()[-1].version
    found, compatible = await _newest(connection)
    first = found
    if found < known and migrate:
        await connection.execute("set local statement_timeout = 0")
        await connection.execute(f"select pg_advisory_xact_lock({_LOCK})")
        await connection.execute(_CREATE_VERSION_TABLE)
        await connection.execute(_COMPATIBLE)
        found, compatible = await _newest(connection)
        for migration in migrations():
            if migration.version > found:
                await connection.execute(migration.text)
                await connection.execute(
                    "insert into ff_schema_version (version, name, compatible) values ($1, $2, $3)",
                    *(migration.version, migration.name, migration.compatible),
                )
        found = max(found, known)
    refuse_newer(found, known, compatible=compatible)
    if found < known:
        detail = "the database has no FlowFabric schema" if found == 0 else f"the schema is at version {found}"
        raise errors.Unavailable("open", f"{detail}, this release needs version {known}: migrate first")
    applied = [migration for migration in migrations() if migration.version > first > 0]
    return SchemaVersion(first, found, all(migration.compatible for migration in applied))


def _check_server(connection: Any) -> None:
    """Refuse a server version or an encoding that the store cannot work with."""
    major, encoding = connection.get_server_version().major, connection.get_settings().server_encoding
    if major < MIN_SERVER_VERSION:
        raise errors.InvalidInput(
            f"url: the server is PostgreSQL {major}; the store needs {MIN_SERVER_VERSION} or newer"
        )
    if encoding not in SUPPORTED_ENCODINGS:
        raise errors.InvalidInput(
            f"url: the database keeps texts in {encoding}; the store needs one with encoding UTF8"
        )


async def _newest(connection: Any) -> tuple[int, bool]:
    """Return the newest applied version, 0 for none, and whether it is compatible."""
    if await connection.fetchval(_EXISTS) is None:
        return 0, False
    found, compatible = await connection.fetchrow(_NEWEST) or (0, False)
    return found, compatible


class SchemaWatch:
    """Detects that the schema has become too new for this release while it is running."""

    def __init__(self) -> None:
        self._check_at = 0.0
        self._refusal: errors.SchemaTooNew | None = None

    def raise_if_too_new(self) -> None:
        """Raise `SchemaTooNew` if an earlier check has found it."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def is_due(self) -> bool:
        """True if the next call must check the version first."""
        return monotonic() >= self._check_at

    def check_soon(self) -> None:
        """Check with the next call, whenever the last check was."""
        self._check_at = 0.0

    async def check(self, connection: Any) -> None:
        """Raise `SchemaTooNew` if this release can no longer run on the schema."""
        self._check_at = monotonic() + CHECK_INTERVAL_S
        found, compatible = await _newest(connection)
        try:
            refuse_newer(found, migrations()[-1].version, compatible=compatible)
        except errors.SchemaTooNew as refusal:
            self._refusal = refusal
            raise
