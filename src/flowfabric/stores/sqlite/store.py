"""The SQLite store: one file, one writer thread per process, one transaction per batch.

Three threads have a connection each: one writes, one loads rows by key, one scans, so that a long scan never delays a
claim. A few rows by key are read on the caller's thread (`inline_reader`). Processes take turns at a lock file
(`file_lock`), notify each other (`notifier`) and share one clock (`file_clock`).
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
from flowfabric.event_loop import start_task
from flowfabric.handles import BackendTag
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.model.change import Change, RowTemplate
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Search, SearchPage, Where
from flowfabric.stores.sqlite import migrator, reads, writes
from flowfabric.stores.sqlite.connection_thread import ConnectionThread, WriterThread
from flowfabric.stores.sqlite.errors import unavailable
from flowfabric.stores.sqlite.file_clock import FileClock, InjectedClock
from flowfabric.stores.sqlite.file_identity import FileIdentity
from flowfabric.stores.sqlite.file_lock import WriterLock, refuse_network_filesystem
from flowfabric.stores.sqlite.inline_reader import InlineReader
from flowfabric.stores.sqlite.notifier import SQLiteNotifier
from flowfabric.stores.sqlite.permissions import create_database
from flowfabric.stores.sqlite.queue_ids import SQLiteQueueIds, WriterQueueIds
from flowfabric.stores.verdicts import Verdict

BUSY_TIMEOUT_MS = 5_000  # the wait for a writer that is not ours
CACHE_KIB = 4 * 1024  # small: SQLite walks the whole cache at the end of a transaction that split a page
STATEMENT_CACHE_SIZE = 400
CHECKPOINT_PAGES = 1000  # a WAL that is overwritten costs half as much to sync as one that still grows


class SQLiteStore:
    """A store in one file with a single writer; every batch is one short transaction."""

    tag = BackendTag.SQLITE
    concurrent_commits = 2
    batch_limit = 500
    deletes_in_pages = False
    claim_parts = 1
    executes_in_order = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock | None = None,
        synchronous: str = "FULL",
    ) -> None:
        """`synchronous=NORMAL` may lose the last commits after a power failure; it never corrupts the file."""
        if str(path) in ("", ":memory:"):
            raise InvalidInput("SQLite needs a file here; for rows in memory there is the memory store")
        if synchronous not in ("NORMAL", "FULL", "EXTRA"):
            raise InvalidInput(f"synchronous: {synchronous!r} is not one of NORMAL, FULL, EXTRA")
        self._path = Path(path).absolute()
        self._clock = FileClock() if clock is None else InjectedClock(clock)
        self.clock: Clock | None = clock or self._clock
        self._synchronous = synchronous
        self._queue_ids = SQLiteQueueIds()
        self._writer_queue_ids = WriterQueueIds(self._queue_ids)
        self._writer_lock = WriterLock(self._path)
        self._notifier = SQLiteNotifier(self._path)
        self._identity = FileIdentity(self._path)
        self._writer = WriterThread(
            "ff-sqlite-writer",
            self._connect,
            self._identity,
            migrator.check_schema_version,
            self._writer_lock,
            self._writer_queue_ids,
        )
        self._loader = ConnectionThread(
            "ff-sqlite-loader", self._connect_reader, self._identity, migrator.check_schema_version
        )
        self._scanner = ConnectionThread(
            "ff-sqlite-scanner", self._connect_reader, self._identity, migrator.check_schema_version
        )
        self._inline_reader = InlineReader(self._connect_reader, self._identity)
        self._polls: list[asyncio.Task[None]] = []

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        refuse_network_filesystem(self._path)
        for thread in (self._writer, self._loader, self._scanner):
            thread.bind_to_process()
        self._inline_reader.bind_to_process()
        version = await self._writer.run(lambda db: migrator.ensure_schema(db, migrate=migrate, now=self._clock()))
        self._identity.pin()
        self._writer.must_advance_positions = True
        self._writer.before_transaction = self._clock.refresh_anchor
        await self._writer.run(lambda db: None)  # sets the file's clock, for reads that come before the first write
        return version

    async def close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        self._polls.clear()
        self._notifier.close()
        self._inline_reader.close()
        for thread in (self._writer, self._loader, self._scanner):
            await thread.close()
        self._writer_lock.close()

    async def ping(self) -> int:
        return await self._loader.run(lambda db: reads.ping(db, self._clock.read(db)))

    async def load(self, requested: Sequence[Read]) -> Loaded:
        return await self._loader.run(lambda db: reads.load(db, self._queue_ids, requested, self._clock.read(db)))

    def try_load_now(self, requested: Sequence[Read]) -> Loaded | None:
        if not reads.is_cheap(requested):
            return None
        return self._inline_reader(lambda db: reads.load(db, self._queue_ids, requested, self._clock.read(db)))

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        verdicts = await self._writer.run(
            lambda db: writes.commit(db, self._writer_queue_ids, changes, self._clock()),
            lambda db, fault: writes.commit_in_halves(db, self._writer_queue_ids, changes, self._clock(), fault),
        )
        if topics and int in map(type, verdicts):
            self.notify(topics)
        return verdicts

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        return CommitAndClaimResult(await self.commit(changes, topics), [])

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        return await self._writer.run(lambda db: writes.claim_rows(db, self._writer_queue_ids, request, self._clock()))

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        return await self._writer.run(lambda db: writes.renew(db, leases, template, self._clock()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        return await self._loader.run(
            lambda db: reads.due(db, self._queue_ids, row, column, limit, where, self._clock.read(db))
        )

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._scanner.run(lambda db: reads.scan(db, self._queue_ids, scan))

    async def search(self, search: Search) -> SearchPage:
        return await self._scanner.run(lambda db: reads.search(db, self._queue_ids, search))

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        return await self._scanner.run(lambda db: reads.kinds(db, execution_ids))

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        return await self._scanner.run(lambda db: reads.count_grouped(db, self._queue_ids, query))

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        return await self._loader.run(lambda db: reads.queues(db, lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._scanner.run(lambda db: reads.nonempty_queues(db, lane_id))

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._scanner.run(lambda db: reads.executions_in_missing_queues(db, limit))

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._scanner.run(lambda db: reads.lanes(db, after, limit))

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._scanner.run(lambda db: reads.feed(db, topic, after, limit))

    async def feed_end(self) -> int:
        return await self._loader.run(reads.feed_end)

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._writer.run(lambda db: writes.trim_feed(db, before, limit))

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._scanner.run(lambda db: reads.history(db, execution_id, topic, limit, without))

    def notify(self, topics: frozenset[str]) -> None:
        self._notifier.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        """Do nothing: there is no server."""

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        if not self._notifier.listen(callback):
            self._polls.append(start_task(self._poll(callback)))

    async def _poll(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Poll the file for changes, with a backoff, if the notifier has no socket."""
        last, interval_s = await self._loader.run(reads.data_version), 0.005
        while True:
            await asyncio.sleep(interval_s)
            version = await self._loader.run(reads.data_version)
            interval_s = 0.005 if version != last else min(0.05, interval_s * 1.5)
            if version != last:
                last = version
                callback(frozenset())

    def _connect(self) -> apsw.Connection:
        create_database(self._path)
        try:
            db = apsw.Connection(str(self._path), statementcachesize=STATEMENT_CACHE_SIZE)
        except apsw.CantOpenError as error:
            reason = "" if self._path.parent.is_dir() else ": its folder does not exist"
            raise unavailable(f"{error} {self._path}{reason}", StoreFault.TRANSPORT) from error
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        try:
            with self._writer_lock:  # only one process may switch a new file to WAL
                db.pragma("journal_mode", "wal")
        except BaseException:
            db.close()  # the file may stay locked for long, or not be a database: a retry opens it again
            raise
        db.pragma("synchronous", self._synchronous)
        db.pragma("cache_size", -CACHE_KIB)
        db.pragma("temp_store", "memory")  # also for statement journals
        # Plans do not depend on bound values, so no statement is prepared again because of them.
        db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
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
