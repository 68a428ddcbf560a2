"""The schema: numbered SQL files, applied once each, in order, and never taken back."""

from __future__ import annotations

import re
from importlib.resources import files

import apsw

from flowfabric import errors
from flowfabric.model.execution import LineKey
from flowfabric.stores.base import Schema
from flowfabric.stores.rows import Column, Table

_VERSION = "SELECT max(version) FROM ff_schema_version"
_EXISTS = "SELECT count(*) FROM sqlite_schema WHERE name = 'ff_schema_version'"


def migrations() -> dict[int, str]:
    """The text of each migration by its number."""
    folder = files(__package__) / "migrations"
    named = {re.match(r"(\d{4})_\w+\.sql$", entry.name): entry for entry in folder.iterdir()}
    return {
        int(match[1]): entry.read_text()
        for match, entry in sorted(named.items(), key=lambda item: item[1].name)
        if match
    }


def version(db: apsw.Connection) -> int:
    """The number of the last migration that was applied; 0 for an empty file."""
    ((exists,),) = db.execute(_EXISTS)
    return int(next(iter(db.execute(_VERSION)))[0]) if exists else 0


def prepare(db: apsw.Connection, *, migrate: bool, now: int) -> Schema:
    """Bring the schema up to this code, within a writing transaction; or refuse what does not fit."""
    steps = migrations()
    found, known = version(db), max(steps)
    if found > known:
        raise errors.SchemaTooNew(found=found, known=known)
    if found < known and not migrate:
        raise errors.Unavailable(
            "open", f"the file has schema version {found}, this release needs {known}: migrate first"
        )
    for number in sorted(number for number in steps if number > found):
        for _ in db.execute(steps[number]):  # a text of several statements runs on only while it is read from
            pass
        db.execute("INSERT INTO ff_schema_version (version, applied_at) VALUES (?, ?)", (number, now))
    return Schema(found, known)


def definition(table: Table) -> str:
    """How the catalogue wants a table to be: what a migration has to arrive at."""
    columns = [
        f"    {column.name} {_type(column)}{'' if column.optional else ' NOT NULL'}," for column in table.columns
    ]
    lines = [f"CREATE TABLE {table.name} (", *columns, f"    PRIMARY KEY ({', '.join(table.key)})", ") STRICT;"]
    for index in table.indexes:
        first = index.columns[0]
        lines += [
            f"CREATE INDEX {table.name}_{first} ON {table.name} ({', '.join(index.columns)}) WHERE {first} IS NOT NULL;"
        ]
    return "\n".join(lines)


def _type(column: Column) -> str:
    if column.is_enum or column.kind in (int, bool, LineKey):
        return "INTEGER"
    return {str: "TEXT", bytes: "BLOB", float: "REAL"}[column.kind]
