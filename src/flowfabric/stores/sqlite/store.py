"""The SQLite store: one file, one writer thread a process, whole batches in one transaction.

Three threads, each with a connection of its own: one writes, one loads by key, one makes lists, so that a long list
never stands before a claim. A few rows by key are read on the caller's own (`glance`). Processes take turns at a lock
file, ring each other's bell (`wake`) and share one clock (`file_clock`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from flowfabric.clock import Clock
from flowfabric.errors import InvalidInput, StoreFault
from flowfabric.handles import BackendTag
from flowfabric.model.change import Change
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Where
from flowfabric.stores.sqlite import migrator, reads, writes
from flowfabric.stores.sqlite.connection_thread import ConnectionThread, WriterThread
from flowfabric.stores.sqlite.errors import unavailable
from flowfabric.stores.sqlite.file_clock import FileClock, InjectedClock
from flowfabric.stores.sqlite.file_lock import FileIdentity, WriterLock, refuse_network_filesystem
from flowfabric.stores.sqlite.inline_reader import InlineReader
from flowfabric.stores.sqlite.notifier import SQLiteNotifier
from flowfabric.stores.sqlite.permissions import create_database
from flowfabric.stores.sqlite.queue_ids import SQLiteQueueIds, WriterQueueIds

BUSY_TIMEOUT_MS = 5_000  # how long a foreign writer is waited for
CACHE_KIB = 4 * 1024  # small: SQLite walks through the whole cache at the end of a transaction that split a page
STATEMENT_CACHE_SIZE = 400
CHECKPOINT_PAGES = 1000  # a log that is written over costs half as much to sync as one that still grows


class SQLiteStore:
    """Rows in one file; a single writer, so every batch is one short transaction."""

    tag = BackendTag.SQLITE
    concurrent_commits = 2
    batch_limit = 500
    executes_in_order = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock | None = None,
        synchronous: str = "FULL",
    ) -> None:
        """`synchronous=NORMAL` may lose the last commits when the machine loses power, never the file."""
        if str(path) in ("", ":memory:"):
            raise InvalidInput("SQLite needs a file here; for rows in memory there is the memory store")
        if synchronous not in ("NORMAL", "FULL", "EXTRA"):
            raise InvalidInput(f"synchronous: {synchronous!r} is none of NORMAL, FULL, EXTRA")
        self._path = Path(path).absolute()
        self._clock = FileClock() if clock is None else InjectedClock(clock)
        self.clock: Clock | None = clock or self._clock
        self._synchronous = synchronous
        self._lines = SQLiteQueueIds()
        self._lines_of_writer = WriterQueueIds(self._lines)
        self._turn = WriterLock(self._path)
        self._notifier = SQLiteNotifier(self._path)
        self._spot = FileIdentity(self._path)
        self._writer = WriterThread(
            "ff-sqlite-writer",
            self._connect,
            self._spot,
            migrator.check_schema_version,
            self._turn,
            self._lines_of_writer,
        )
        self._loader = ConnectionThread(
            "ff-sqlite-loader", self._connect_reader, self._spot, migrator.check_schema_version
        )
        self._lister = ConnectionThread(
            "ff-sqlite-lister", self._connect_reader, self._spot, migrator.check_schema_version
        )
        self._inline_reader = InlineReader(self._connect_reader, self._spot)
        self._polls: list[asyncio.Task[None]] = []

    async def open(self, *, migrate: bool) -> SchemaVersion:
        refuse_network_filesystem(self._path)
        for desk in (self._writer, self._loader, self._lister):
            desk.bind_to_process()
        self._inline_reader.bind_to_process()
        prepared = await self._writer.run(lambda db: migrator.ensure_schema(db, migrate=migrate, now=self._clock()))
        self._spot.pin()
        self._writer.must_advance_positions = True
        self._writer.before_transaction = self._clock.refresh_anchor
        await self._writer.run(lambda db: None)  # whoever reads before anything is written needs the file's time, too
        return prepared

    async def close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        self._polls.clear()
        self._notifier.close()
        self._inline_reader.close()
        for desk in (self._writer, self._loader, self._lister):
            await desk.close()
        self._turn.close()

    async def ping(self) -> int:
        return await self._loader.run(lambda db: reads.ping(db, self._clock.read(db)))

    async def load(self, wants: Sequence[Read]) -> Loaded:
        return await self._loader.run(lambda db: reads.load(db, self._lines, wants, self._clock.read(db)))

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        if not reads.is_cheap(wants):
            return None
        return self._inline_reader(lambda db: reads.load(db, self._lines, wants, self._clock.read(db)))

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        done = await self._writer.run(lambda db: writes.commit(db, self._lines_of_writer, changes, self._clock()))
        if hint and any(at is not None for at in done):
            self.notify(hint)
        return done

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        return CommitAndClaimResult(await self.commit(changes, hint), [])

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        return await self._writer.run(lambda db: writes.claim_rows(db, self._lines_of_writer, take, self._clock()))

    async def renew(self, leases: Sequence[LeaseRef]) -> list[int | None]:
        return await self._writer.run(lambda db: writes.renew(db, leases, self._clock()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        return await self._loader.run(
            lambda db: reads.due(db, self._lines, row, column, limit, where, self._clock.read(db))
        )

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._lister.run(lambda db: reads.scan(db, self._lines, scan))

    async def count_grouped(self, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
        return await self._lister.run(lambda db: reads.count_grouped(db, self._lines, tally))

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        return await self._loader.run(lambda db: reads.queues(db, lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._lister.run(lambda db: reads.nonempty_queues(db, lane_id))

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._lister.run(lambda db: reads.executions_in_missing_queues(db, limit))

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._lister.run(lambda db: reads.lanes(db, after, limit))

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._lister.run(lambda db: reads.feed(db, topic, after, limit))

    async def feed_end(self) -> int:
        return await self._loader.run(reads.feed_end)

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._writer.run(lambda db: writes.trim_feed(db, before, limit))

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._lister.run(lambda db: reads.history(db, execution_id, topic, limit, without))

    def notify(self, topics: frozenset[str]) -> None:
        self._notifier.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        """There is no server."""

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        if not self._notifier.listen(callback):
            self._polls.append(asyncio.get_running_loop().create_task(self._poll(callback)))

    async def _poll(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Where no socket can be had: look whether the file has changed, ever less often while it has not."""
        seen, pause = await self._loader.run(reads.data_version), 0.005
        while True:
            await asyncio.sleep(pause)
            version = await self._loader.run(reads.data_version)
            pause = 0.005 if version != seen else min(0.05, pause * 1.5)
            if version != seen:
                seen = version
                callback(frozenset())

    def _connect(self) -> apsw.Connection:
        create_database(self._path)
        try:
            db = apsw.Connection(str(self._path), statementcachesize=STATEMENT_CACHE_SIZE)
        except apsw.CantOpenError as shut:
            hint = "" if self._path.parent.is_dir() else ": its folder does not exist"
            raise unavailable(f"{shut} {self._path}{hint}", StoreFault.TRANSPORT) from shut
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        try:
            with self._turn:  # only one may turn a new file into one with a log
                db.pragma("journal_mode", "wal")
        except BaseException:
            db.close()  # the file may be locked for long, or none of ours: whoever tries again opens it again
            raise
        db.pragma("synchronous", self._synchronous)
        db.pragma("cache_size", -CACHE_KIB)
        db.pragma("temp_store", "memory")  # also for what a statement would have to take back
        db.config(
            apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1
        )  # no statement is prepared anew because of the values it is given
        db.wal_autocheckpoint(CHECKPOINT_PAGES)
        db.pragma("journal_size_limit", 64 * 1024 * 1024)
        return db

    def _connect_reader(self) -> apsw.Connection:
        db = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=STATEMENT_CACHE_SIZE)
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        db.pragma("query_only", True)
        db.pragma("cache_size", -CACHE_KIB)
        db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        return db
