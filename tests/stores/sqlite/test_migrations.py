"""The schema of the file: it equals the catalogue after the numbered migrations, which are never reverted."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from flowfabric import connect
from flowfabric.clock import ManualClock
from flowfabric.errors import InvalidInput, SchemaTooNew, StoreUnavailable, Unavailable
from flowfabric.model.change import Insert
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.catalog import TABLES, Column, Table
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.sqlite.file_lock import refuse_network_filesystem
from flowfabric.stores.sqlite.migrator import migrations
from tests.stores.sample_rows import claim_request, event, execution, insert_queued, one, queued, write


async def migrated(path: Path) -> apsw.Connection:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    await store.close()
    return apsw.Connection(str(path))


def table_ddl(table: Table) -> str:
    """Return the DDL of a table according to the catalog; migrations have to produce it."""
    columns = [
        f"    {column.name} {sqlite_type(column)}{'' if column.optional else ' NOT NULL'}," for column in table.columns
    ]
    lines = [f"CREATE TABLE {table.name} (", *columns, f"    PRIMARY KEY ({', '.join(table.key)})", ") STRICT;"]
    for index in table.indexes:
        first = index.columns[0]
        where = "" if index.whole else f" WHERE {first} IS NOT NULL"
        lines.append(f"CREATE INDEX {table.name}_{first} ON {table.name} ({', '.join(index.columns)}){where};")
    return "\n".join(lines)


def sqlite_type(column: Column) -> str:
    if column.is_enum or column.kind in (int, bool, QueueKey):
        return "INTEGER"
    return {str: "TEXT", bytes: "BLOB", float: "REAL"}[column.kind]


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def describe(db: apsw.Connection, table: str) -> tuple[object, ...]:
    """Return columns (name, type, not null, position in the key) and indexes of a table."""
    columns = sorted((row[1], row[2], row[3], row[5]) for row in db.execute(f"PRAGMA table_info({table})"))
    indexes = sorted(
        text.removesuffix(";").replace("\n", " ")
        for (text,) in db.execute("SELECT sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ?", (table,))
        if text
    )
    return columns, indexes


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
async def test_a_table_equals_its_catalogue_entry(tmp_path: Path, table: Table) -> None:
    wanted = apsw.Connection(":memory:")
    for statement in table_ddl(table).split(";\n"):
        wanted.execute(statement)

    found = await migrated(tmp_path / "ff.db")
    topics = f"the migrations should arrive at:\n{table_ddl(table)}"
    assert describe(found, table.name) == describe(wanted, table.name), topics
    found.close()


async def test_the_feed_has_a_column_for_each_field_of_an_event(tmp_path: Path) -> None:
    db = await migrated(tmp_path / "ff.db")
    columns = [row[1] for row in db.execute("PRAGMA table_info(ff_event)")]
    db.close()

    assert sorted(columns) == sorted(["position", "at", *Event.__struct_fields__])


async def test_there_is_no_table_beyond_the_catalogue(tmp_path: Path) -> None:
    db = await migrated(tmp_path / "ff.db")
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    db.close()

    own = {"ff_schema_version", "ff_line", "ff_event", "ff_feed_trim", "ff_clock", "sqlite_sequence"}
    assert {name for name in tables if not name.startswith("sqlite_stat")} == {table.name for table in TABLES} | own


def test_migrations_are_numbered_without_a_gap() -> None:
    assert list(migrations()) == list(range(1, len(migrations()) + 1))


async def test_an_unmigrated_file_is_refused_unless_it_may_be_migrated(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    with pytest.raises(Unavailable, match="migrate first"):
        await store.open(migrate=False)

    await store.open(migrate=True)
    await store.open(migrate=False)
    await store.close()


async def test_a_file_of_a_newer_release_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    db = await migrated(tmp_path / "ff.db")
    db.execute("INSERT INTO ff_schema_version (version, applied_at) VALUES (999, 0)")
    db.close()

    store = SQLiteStore(tmp_path / "ff.db")
    with pytest.raises(SchemaTooNew) as refusal:
        await store.open(migrate=True)
    assert (refusal.value.found, refusal.value.known) == (999, len(migrations()))
    await store.close()


async def test_a_refused_connect_leaves_no_thread_and_no_file_behind(tmp_path: Path) -> None:
    db = await migrated(tmp_path / "ff.db")
    db.execute("INSERT INTO ff_schema_version (version, applied_at) VALUES (999, 0)")
    db.close()
    files, threads = names_in(tmp_path), threading.active_count()

    with pytest.raises(SchemaTooNew):
        await connect(f"sqlite:///{tmp_path}/ff.db")

    assert names_in(tmp_path) == files
    assert threading.active_count() == threads


def is_open(file: Path) -> bool:
    """Return True if this process holds the file open."""
    for handle in Path("/dev/fd").iterdir():
        with suppress(OSError):
            if os.path.samestat(os.fstat(int(handle.name)), file.stat()):
                return True
    return False


async def test_a_file_that_is_no_database_is_refused_and_closed(tmp_path: Path) -> None:
    file = tmp_path / "notes.db"
    file.write_bytes(b"to do: " * 500)

    with pytest.raises(StoreUnavailable, match="not a database") as refused:
        await connect(f"sqlite:///{file}")

    assert not refused.value.retryable
    assert not is_open(file)
    assert file.read_bytes() == b"to do: " * 500


async def test_a_reopened_file_continues_where_it_was(tmp_path: Path, clock: ManualClock) -> None:
    first = SQLiteStore(tmp_path / "ff.db", clock)
    await first.open(migrate=True)
    await insert_queued(first, queued("a"), queued("b", line=QueueKey("sms")))
    await write(first, events=[event(lease="x", details="before")])
    before = await first.feed(Topic.LEASE, 0, 10)
    await first.close()

    again = SQLiteStore(tmp_path / "ff.db", clock)
    await again.open(migrate=False)
    assert await again.queues() == [QueueKey("mail"), QueueKey("sms")]
    assert (await one(again, Execution, "b")).line == QueueKey("sms")
    assert await again.feed(Topic.LEASE, 0, 10) == before
    await again.claim_rows(claim_request(1))
    assert (await again.feed(Topic.LEASE, before.position, 10)).events[0].position > before.position
    await again.close()


async def test_a_position_is_not_reused_after_events_were_removed(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    await write(store, events=[event(lease="x")] * 5)
    end = await store.feed_end()
    db = apsw.Connection(str(tmp_path / "ff.db"))
    db.execute("DELETE FROM ff_event")
    db.close()

    assert await store.feed_end() == end
    await write(store, events=[event(lease="x")])
    assert [found.position for found in (await store.feed(Topic.LEASE, 0, 10)).events] == [end + 1]
    await store.close()


async def test_the_file_is_written_with_the_requested_durability(tmp_path: Path) -> None:
    levels = {"NORMAL": 1, "FULL": 2, "EXTRA": 3}
    for name, level in levels.items():
        db = SQLiteStore(tmp_path / "ff.db", synchronous=name)._connect()
        assert (db.pragma("journal_mode"), db.pragma("synchronous")) == ("wal", level)
        db.close()
    with pytest.raises(InvalidInput, match="OFF"):
        SQLiteStore(tmp_path / "ff.db", synchronous="OFF")


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_in_memory_databases_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match="memory store"):
        SQLiteStore(path)


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "server:/x /net\\040drive nfs4 rw 0 0\n"
        "tmpfs /net\\040drive/local tmpfs rw 0 0\n"
        "me@there: /home/me/there fuse.sshfs rw 0 0\n"
    )
    refuse_network_filesystem(Path("/var/lib/ff.db"), mounts)
    refuse_network_filesystem(Path("/net drive/local/ff.db"), mounts)
    refuse_network_filesystem(Path("/home/me/therefore/ff.db"), mounts)
    refuse_network_filesystem(Path("/net drive/ff.db"), tmp_path / "no such file")
    for path in ("/net drive/ff.db", "/net drive/deep/er/ff.db", "/home/me/there/ff.db"):
        with pytest.raises(InvalidInput, match="network file system"):
            refuse_network_filesystem(Path(path), mounts)


async def test_texts_and_numbers_are_not_confused(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    await write(store, Insert(execution("007", namespace="1e3", lane_id="0x10")))

    row = await one(store, Execution, "007")
    assert (row.execution_id, row.namespace, row.lane_id) == ("007", "1e3", "0x10")
    assert await one(store, Execution, "7") is None
    await store.close()
