"""Schema migrations: numbered SQL files, each applied once, in order, forward only."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import apsw

from flowfabric import errors
from flowfabric.stores.compatibility import is_compatible, refuse_newer
from flowfabric.stores.port import SchemaVersion

_VERSION = "SELECT max(version) FROM ff_schema_version"
_EXISTS = "SELECT count(*) FROM sqlite_schema WHERE name = 'ff_schema_version'"
_HAS_COLUMN = "SELECT count(*) FROM pragma_table_info('ff_schema_version') WHERE name = 'compatible'"
_ADD_COLUMN = "ALTER TABLE ff_schema_version ADD COLUMN compatible INTEGER NOT NULL DEFAULT 0"
_COMPATIBLE = "SELECT compatible FROM ff_schema_version WHERE version = ?"
_KEEP = "INSERT INTO ff_schema_version (version, applied_at, compatible) VALUES (?, ?, ?)"


@cache
def migrations() -> dict[int, str]:
    """Return the text of each migration by its number."""
    folder = files(__package__) / "migrations"
    named = {re.match(r"(\d{4})_\w+\.sql$", entry.name): entry for entry in folder.iterdir()}
    return {
        int(match[1]): entry.read_text()
        for match, entry in sorted(named.items(), key=lambda item: item[1].name)
        if match
    }


def schema_version(db: apsw.Connection) -> int:
    """Return the number of the last applied migration; 0 for an empty file."""
    ((exists,),) = db.execute(_EXISTS)
    return int(next(iter(db.execute(_VERSION)))[0]) if exists else 0


def ensure_schema(db: apsw.Connection, *, migrate: bool, now: int) -> SchemaVersion:
    """Apply missing migrations within a write transaction; refuse a newer schema, and an older one unless `migrate`."""
    steps = migrations()
    found, known = schema_version(db), max(steps)
    check_schema_version(db)
    if found < known and not migrate:
        raise errors.Unavailable(
            "open", f"the file has schema version {found}, this release needs {known}: migrate first"
        )
    for number in sorted(number for number in steps if number > found):
        for _ in db.execute(steps[number]):  # the driver executes several statements only while the cursor is read
            pass
        if not _one(db, _HAS_COLUMN):  # the first release did not have this column
            db.execute(_ADD_COLUMN)
        db.execute(_KEEP, (number, now, is_compatible(steps[number])))
    applied = [text for number, text in steps.items() if number > found > 0]
    return SchemaVersion(found, max(found, known), all(map(is_compatible, applied)))


def check_schema_version(db: apsw.Connection) -> None:
    """Raise `SchemaTooNew` if this release cannot run on the file's schema; called in every transaction."""
    try:
        found = _one(db, _VERSION) or 0
    except apsw.SQLError:  # an empty file has no such table
        return
    known = max(migrations())
    if found > known:
        compatible = bool(_one(db, _HAS_COLUMN)) and bool(_one(db, _COMPATIBLE, found))
        refuse_newer(found, known, compatible=compatible)


def _one(db: apsw.Connection, words: str, *values: int) -> int | None:
    found: int | None = next(iter(db.execute(words, values)))[0]
    return found
